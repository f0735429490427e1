"""Reads a run's configuration: gathers, renames, merges and checks, and tells everything that is wrong."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from parallel3d.config.aliases import rename
from parallel3d.config.errors import MOST_PROBLEMS, ConfigProblems, Place, Problem, dotted, show, stop_a_flood
from parallel3d.config.fields import is_finite
from parallel3d.config.file import KeyPath, Node, parse_yaml, read_text
from parallel3d.config.findings import Finding
from parallel3d.config.overrides import from_environment, from_settings, merge
from parallel3d.config.rules import RULES
from parallel3d.config.sections import ARGS, RunConfig
from parallel3d.config.translate import place_of, translate


def load_config(
    path: str | os.PathLike[str] | None,
    *,
    overrides: Mapping[str, Any] = MappingProxyType({}),
    environ: Mapping[str, str] = os.environ,
    world_size: int | None = None,
    overrides_are: str = "--set",
) -> RunConfig:
    """Read and check a run's configuration. The file gives way to the environment, and that to overrides.

    path: the YAML file; None for the defaults alone.
    overrides: dotted keys, as with `--set`; text is read as YAML would read it.
    world_size: the ranks that are started; None when that is not known yet.
    overrides_are: how messages name an override's place.

    Raises ConfigError, whose text lists everything that is wrong.
    """
    tree, problems = _tree(path, overrides, environ, overrides_are)
    wrong = {problem.path for problem in problems}
    refused = _take_out_not_finite(tree)
    config, found = _validated(tree)
    refused += found
    wrong |= {dotted(path) for path, _ in refused}
    problems += [problem for _, problem in refused]
    problems += _broken_rules(config, world_size, tree, wrong)
    if problems:
        raise ConfigProblems(problems)
    train = config.train.model_copy(update={"batch_size": config.batch_size})
    return config.model_copy(update={"train": train})


def locate(
    path: str | os.PathLike[str] | None,
    overrides: Mapping[str, Any],
    key: str,
    *,
    environ: Mapping[str, str] = os.environ,
    overrides_are: str = "--set",
) -> Place:
    """Where a value stands that `load_config` took, for a problem that shows only when it is used.

    key: as in such a problem, `model.args.path` or `parallel.tensor_plan["blocks.*"]`; "" is the file.
    """
    tree, _ = _tree(path, overrides, environ, overrides_are)
    names, _, inside = key.partition('["')
    return place_of((*names.split("."), *([inside.removesuffix('"]')] if inside else [])), tree)


def _tree(
    path: str | os.PathLike[str] | None, overrides: Mapping[str, Any], environ: Mapping[str, str], overrides_are: str
) -> tuple[Node, list[Problem]]:
    """All that was given, under our own names, each value with its place."""
    layers, problems = [], []
    for layer, found in (_file(path), from_environment(environ), from_settings(overrides, overrides_are)):
        layers.append(layer)
        problems += found
    factories = [node.value for layer in layers if (node := layer.find(("model", "factory"))) is not None]
    args = [args for name, args in ARGS.items() if name == (factories or ["gpt"])[-1]]
    for layer in layers:
        problems += rename(layer, model_args=args[0].model_fields if args else ())
    tree = layers[0]
    for layer in layers[1:]:
        tree, found = merge(tree, layer)
        problems += found
    _drop_empty_sections(tree)
    return tree, problems


def _file(path: str | os.PathLike[str] | None) -> tuple[Node, list[Problem]]:
    if path is None:
        return Node({}, Place("defaults")), []
    source = os.fspath(path)
    root, problems = parse_yaml(read_text(Path(source), source), source)
    if root.value is None:
        return Node({}, Place(source)), problems
    if not isinstance(root.value, dict):
        message = f"the file must be a mapping of sections, not {show(root.plain())}."
        remedy = f"Begin with a section, such as {next(iter(RunConfig.model_fields))}."
        raise ConfigProblems([*problems, Problem(root.place, "", None, message, remedy)])
    return Node(root.value, Place(source)), problems


def _take_out_not_finite(tree: Node) -> list[tuple[KeyPath, Problem]]:
    """NaN and infinity fit no key, and would slip through comparisons."""
    message, remedy = "must be a finite number.", "NaN and infinity are not accepted."
    refused = [
        (path, Problem(node.place, dotted(tree.as_written(path)), show(node.value), message, remedy))
        for path, node in itertools.islice(_not_finite(tree, ()), MOST_PROBLEMS + 1)
    ]
    stop_a_flood([problem for _, problem in refused], tree.place.source)
    for path, _ in refused:
        _remove(tree, path)
    return refused


def _not_finite(node: Node, path: KeyPath) -> Iterator[tuple[KeyPath, Node]]:
    if isinstance(node.value, (dict, list)):
        items = node.value.items() if isinstance(node.value, dict) else enumerate(node.value)
        for key, child in items:
            yield from _not_finite(child, (*path, key))
    elif not is_finite(node.value):
        yield path, node


def _drop_empty_sections(tree: Node) -> None:
    """`parallel:` with nothing under it means its defaults."""
    sections = [(name,) for name in RunConfig.model_fields]
    for path in (*sections, ("model", "args")):
        node = tree.find(path)
        if node is not None and node.value is None:
            _remove(tree, path)


def _validated(tree: Node) -> tuple[RunConfig, list[tuple[KeyPath, Problem]]]:
    """A config without the values that were refused, so that rules can still be tried on the others."""
    refused: list[tuple[KeyPath, Problem]] = []
    while True:
        try:
            return RunConfig.model_validate(tree.plain()), refused
        except ValidationError as error:
            found = translate(error, tree)
        # What comes up later follows from values taken out, not from what the user wrote.
        refused = refused or found
        for path, _ in found:
            _remove(tree, path)
            if path == ("model", "factory"):
                _remove(tree, ("model", "args"))  # nobody knows whose keywords these are


def _remove(tree: Node, path: KeyPath) -> None:
    """Take a value out; with an entry of a list goes the whole list, which means nothing without it."""
    keys = tuple(itertools.takewhile(lambda part: isinstance(part, str), path))
    parent = tree.find(keys[:-1])
    if keys and parent is not None and isinstance(parent.value, dict):
        parent.value.pop(keys[-1], None)


def _broken_rules(config: RunConfig, world_size: int | None, tree: Node, wrong: set[str]) -> list[Problem]:
    return [
        _located(finding, config, tree)
        for rule in RULES
        if not any(_overlap(path, key) for path in wrong for key in rule.reads)
        for finding in rule.check(config, world_size)
    ]


def _overlap(path: str, key: str) -> bool:
    """Whether one of the two is, or holds, the other."""
    path = path.partition("[")[0]
    return path == key or path.startswith(f"{key}.") or key.startswith(f"{path}.")


def _located(finding: Finding, config: RunConfig, tree: Node) -> Problem:
    paths = [tuple(key.split(".")) for key in finding.blame]
    given = [(path, node.place) for path in paths if (node := tree.find(path)) is not None]
    given.sort(key=lambda each: each[1].line is not None)  # what was set just now, over a file that was right before
    path = given[0][0] if given else paths[0]
    value: Any = config.model_dump(mode="json")
    for part in path:
        value = value[part]
    spelled = dotted(tree.as_written(path))
    return Problem(place_of(path, tree), spelled, show(value), finding.message, finding.remedy)
