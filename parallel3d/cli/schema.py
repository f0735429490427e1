"""`parallel3d schema`: the keys of the YAML file, for editors and for readers."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from parallel3d.config.reference import json_schema, markdown


def schema(
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print the key reference instead.")] = False,
) -> None:
    """Print the JSON Schema of the YAML file, so that editors complete and check its keys."""
    print(markdown() if as_markdown else json.dumps(json_schema(), indent=2), end="" if as_markdown else "\n")


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("schema")(schema)
