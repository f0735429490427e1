"""The `parallel3d` command: collects the verbs and turns errors into exit codes."""

from __future__ import annotations

import importlib
import sys

import typer

from runtime.errors import ConfigError, Parallel3DError

EXIT_ERROR, EXIT_BAD_CONFIG, EXIT_INTERRUPTED = 1, 3, 130
VERBS = ("launch", "validate", "schema")


def make_app(verbs: tuple[str, ...] = VERBS) -> typer.Typer:
    """The command with these verbs. A verb may take long to import, and only one of them is called."""
    app = typer.Typer(
        name="parallel3d",
        help="3D-parallel training on torch, explained while it runs.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback()(lambda: None)  # keeps the verb's name necessary when there is only one
    for verb in verbs:
        importlib.import_module(f"parallel3d.cli.{verb}").register(app)
    return app


def main() -> None:
    """Run one verb. Data on stdout, everything else on stderr."""
    try:
        asked = sys.argv[1:2]
        make_app((asked[0],) if asked and asked[0] in VERBS else VERBS)()
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(EXIT_BAD_CONFIG)
    except Parallel3DError as error:
        print(f"parallel3d: {error}", file=sys.stderr)
        sys.exit(EXIT_ERROR)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
