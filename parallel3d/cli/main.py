"""The `parallel3d` command: collects the verbs and turns errors into exit codes."""

from __future__ import annotations

import sys

import typer

from parallel3d.cli import launch, schema, validate
from runtime.errors import ConfigError, Parallel3DError

EXIT_ERROR, EXIT_BAD_CONFIG, EXIT_INTERRUPTED = 1, 3, 130

app = typer.Typer(
    name="parallel3d",
    help="3D-parallel training on torch, explained while it runs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for verb in (launch, validate, schema):
    verb.register(app)


def main() -> None:
    """Run one verb. Data on stdout, everything else on stderr."""
    try:
        app()
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(EXIT_BAD_CONFIG)
    except Parallel3DError as error:
        print(f"parallel3d: {error}", file=sys.stderr)
        sys.exit(EXIT_ERROR)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
