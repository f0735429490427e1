"""The verbs, put together with typer."""

from __future__ import annotations

import importlib

import typer


def make_app(verbs: tuple[str, ...]) -> typer.Typer:
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
        importlib.import_module(f"parallel3d.cli.{verb.replace('-', '_')}").register(app)
    return app
