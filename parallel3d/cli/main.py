"""The `parallel3d` command: runs a verb and turns errors into exit codes."""

from __future__ import annotations

import sys

from parallel3d.cli.early import head_start
from runtime.errors import ConfigError, Parallel3DError
from runtime.launch.spec import WarmServer

EXIT_ERROR, EXIT_BAD_CONFIG, EXIT_INTERRUPTED = 1, 3, 130
VERBS = (
    "run",
    "launch",
    "join",
    "serve-gradients",
    "validate",
    "schema",
    "schedule",
    "simulate",
    "shards",
    "bench",
    "report",
    "verify",
    "view",
    "dashboards",
)


def main() -> None:
    """Run one verb. Data on stdout, everything else on stderr."""
    warm = None
    try:
        warm = head_start(sys.argv[1:])
        _run_verb(warm)
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(EXIT_BAD_CONFIG)
    except Parallel3DError as error:
        print(f"parallel3d: {error}", file=sys.stderr)
        sys.exit(EXIT_ERROR)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    finally:
        if warm is not None:
            warm.discard()


def _run_verb(warm: WarmServer | None) -> None:
    from parallel3d.cli.app import make_app

    asked = sys.argv[1:2]
    make_app((asked[0],) if asked and asked[0] in VERBS else VERBS)(obj=warm)
