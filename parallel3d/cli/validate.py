"""`parallel3d validate`: checks a run's configuration, before anything starts. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from parallel3d import exit_codes
from parallel3d.config import RunConfig, load_config
from parallel3d.config.errors import ConfigProblems
from parallel3d.config.sections import GptModel, LlamaModel


def validate(
    file: Annotated[Path, typer.Argument(help="The run's YAML file.", show_default=False)],
    world: Annotated[int | None, typer.Option(min=1, help="Ranks that will be started.", show_default=False)] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a key, such as parallel.pp=4. Repeatable."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the resolved configuration, or the errors, as JSON.")
    ] = False,
) -> None:
    """Check a run's configuration: everything that is wrong at once, with its place and remedy.

    What it names is not imported or opened: `parallel3d shards` also builds the model, and `parallel3d run` looks at
    model, loss and data before it starts a rank.
    """
    with errors_as_json(as_json):
        config = load_config(file, overrides=parse_settings(settings or []), world_size=world)
    print(json.dumps(config.model_dump(mode="json"), indent=2) if as_json else f"{file} is valid.\n{summary(config)}")


@contextmanager
def errors_as_json(as_json: bool) -> Iterator[None]:
    """Print problems of the configuration as JSON and exit, if asked for; else they pass."""
    try:
        yield
    except ConfigProblems as error:
        if not as_json:
            raise
        print(json.dumps({"errors": [problem.to_json() for problem in error.problems]}, indent=2))
        raise typer.Exit(exit_codes.BAD_CONFIG) from None


def parse_settings(settings: list[str]) -> dict[str, str]:
    """`["a.b=c"]` as `{"a.b": "c"}`; the last value of a key counts."""
    parsed = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not key.strip() or not equals:
            raise typer.BadParameter(f"{setting!r} is not KEY=VALUE.", param_hint="--set")
        parsed[key.strip()] = value
    return parsed


def summary(config: RunConfig) -> str:
    """The run in four lines."""
    mesh, microbatches = config.parallel, config.pipeline.microbatches
    order = mesh.order if isinstance(mesh.order, str) else "as in the table"
    samples = config.batch_size // mesh.dp // microbatches
    layers = f", {config.model.args.layers} layers" if isinstance(config.model, GptModel | LlamaModel) else ""
    schedule = config.pipeline.schedule
    stages = "a file that is not read here" if schedule.startswith("csv:") else _count(config.num_stages, "stage")
    parts = (_count(mesh.dp, "replica"), _count(microbatches, "microbatch"), _count(samples, "sample"))
    return "\n".join(
        (
            f"ranks     {config.world_size} = dp {mesh.dp} x tp {mesh.tp} x pp {mesh.pp}, order {order}",
            f"model     {config.model.factory}{layers}",
            f"schedule  {schedule}, {stages}",
            f"batch     {_count(config.batch_size, 'sample')} a step = {' x '.join(parts)}",
        )
    )


def _count(number: int, noun: str) -> str:
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("validate")(validate)
