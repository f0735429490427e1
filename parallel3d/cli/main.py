"""The `parallel3d` command: runs a verb and turns errors into exit codes."""

from __future__ import annotations

import importlib
import signal
import sys
from typing import TYPE_CHECKING

from parallel3d import exit_codes
from parallel3d.cli.process import head_start
from runtime.errors import ConfigError, Parallel3DError

if TYPE_CHECKING:
    import typer

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
    """Run one verb. Data goes to stdout, everything else to stderr."""
    warm = None
    try:
        warm = head_start(sys.argv[1:])
        asked = sys.argv[1:2]
        make_app((asked[0],) if asked and asked[0] in VERBS else VERBS)(obj=warm)
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(exit_codes.BAD_CONFIG)
    except Parallel3DError as error:
        print(f"parallel3d: {error}", file=sys.stderr)
        sys.exit(exit_codes.ERROR)
    except KeyboardInterrupt:
        sys.exit(exit_codes.of_signal(signal.SIGINT))
    finally:
        if warm is not None:
            warm.discard()


def make_app(verbs: tuple[str, ...]) -> typer.Typer:
    """The command with these verbs. Imports only them, because some take long to import."""
    import typer  # not before the head start

    app = typer.Typer(
        name="parallel3d",
        help="3D-parallel training on torch, explained while it runs.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback()(lambda: None)  # otherwise typer drops the name of a single verb
    for verb in verbs:
        importlib.import_module(f"parallel3d.cli.{verb.replace('-', '_')}").register(app)
    return app
