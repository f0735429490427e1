"""Loads a run's configuration: the file, under `PARALLEL3D_A__B=c` of the environment, under `--set a.b=c`.

The three become trees of values with their places, under our own key names, and are merged into one. That is validated
by the models of `sections` and by `RULES`; all problems are raised together.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from parallel3d.config.aliases import rename
from parallel3d.config.errors import MOST_PROBLEMS, ConfigProblems, Place, Problem, dotted, raise_if_too_many, show
from parallel3d.config.fields import is_finite
from parallel3d.config.findings import Finding
from parallel3d.config.rules import RULES
from parallel3d.config.sections import ARGS, RunConfig
from parallel3d.config.translate import translate
from parallel3d.config.yaml_positions import DEEPEST_NESTING, KeyPath, Node, parse_yaml, read_text
from parallel3d.config.yaml_scalars import resolve_scalar

_PREFIX = "PARALLEL3D_"


def load_config(
    path: str | os.PathLike[str] | None,
    *,
    overrides: Mapping[str, Any] = MappingProxyType({}),
    environ: Mapping[str, str] = os.environ,
    world_size: int | None = None,
    overrides_are: str = "--set",
) -> RunConfig:
    """Read and check a run's configuration. The environment overrides the file, and `overrides` override both.

    path: the YAML file; None for the defaults alone.
    overrides: dotted keys, as with `--set`; text is read as YAML.
    world_size: the number of ranks started; None if not known yet.
    overrides_are: what errors call an override.

    Raises ConfigError, which lists all problems.
    """
    tree, problems = _tree(path, overrides, environ, overrides_are)
    wrong = {problem.path for problem in problems}
    refused = _remove_not_finite(tree)
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
    """The place of a value that `load_config` accepted, for a problem found when it is used.

    key: as in that problem, `model.args.path` or `parallel.tensor_plan["blocks.*"]`; "" for the file.
    """
    tree, _ = _tree(path, overrides, environ, overrides_are)
    names, _, inside = key.partition('["')
    return tree.place_of((*names.split("."), *([inside.removesuffix('"]')] if inside else [])))


def _tree(
    path: str | os.PathLike[str] | None, overrides: Mapping[str, Any], environ: Mapping[str, str], overrides_are: str
) -> tuple[Node, list[Problem]]:
    """Everything given, merged, under our key names, each value with its place."""
    layers, problems = [], []
    for layer, found in (_file(path), _from_environment(environ), _from_settings(overrides, overrides_are)):
        layers.append(layer)
        problems += found
    factories = [node.value for layer in layers if (node := layer.find(("model", "factory"))) is not None]
    args = [args for name, args in ARGS.items() if name == (factories or ["gpt"])[-1]]
    for layer in layers:
        problems += rename(layer, model_args=args[0].model_fields if args else ())
    tree = layers[0]
    for layer in layers[1:]:
        tree, found = _merge(tree, layer)
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


def _from_environment(environ: Mapping[str, str]) -> tuple[Node, list[Problem]]:
    """`PARALLEL3D_PARALLEL__PP=4`; names without a double underscore are not keys."""
    names = sorted(name for name in environ if name.startswith(_PREFIX) and "__" in name.removeprefix(_PREFIX))
    return _layer((Place(name), name.removeprefix(_PREFIX).lower().split("__"), environ[name]) for name in names)


def _from_settings(overrides: Mapping[str, Any], name: str) -> tuple[Node, list[Problem]]:
    """`--set parallel.pp=4`. Text is read as YAML; other values are taken as they are."""
    return _layer((Place(f"{name} {path}"), path.split("."), value) for path, value in overrides.items())


def _merge(under: Node, over: Node, path: tuple[str, ...] = ()) -> tuple[Node, list[Problem]]:
    """`over` on top of `under`: mappings key by key, everything else replaced."""
    if not isinstance(over.value, dict) or under.value is None:
        return over, []
    if not isinstance(under.value, dict):
        message = f"a key cannot be set inside {show(under.plain())}, which {under.place} gives."
        inside = next(iter(over.value), "")
        return under, [Problem(over.place, dotted((*path, inside)), None, message, "Set the whole value instead.")]
    merged, problems = dict(under.value), []
    for key, child in over.value.items():
        if key in merged:
            child, found = _merge(merged[key], child, (*path, key))
            problems += found
        merged[key] = child
    return replace(under, value=merged), problems


def _layer(settings: Iterable[tuple[Place, list[str], Any]]) -> tuple[Node, list[Problem]]:
    tree, problems = Node({}, Place("defaults")), []
    for place, path, value in settings:
        if len(path) > DEEPEST_NESTING:
            problems.append(Problem(place, "", None, "unknown key.", "No key has that many levels."))
            continue
        node, found = _node(value, place, ".".join(path))
        problems += found
        if node is None:
            continue
        for key in reversed(path):
            node = Node({key: replace(node, key_place=place)}, place)
        tree, found = _merge(tree, node)
        problems += found
    return tree, problems


def _node(value: Any, place: Place, path: str) -> tuple[Node | None, list[Problem]]:
    if not isinstance(value, str):
        return _from_python(value, place, path)
    if any("\ud800" <= character <= "\udfff" for character in value):
        return None, [Problem(place, path, show(value), "not UTF-8 text.", "Give it in UTF-8.")]
    if not value.lstrip().startswith(("[", "{", '"', "'")):
        return Node(resolve_scalar(value.strip()), place), []
    try:
        node, problems = parse_yaml(value, place.source, located=False)
    except ConfigProblems as error:
        problems = list(error.problems)
    return None if problems else node, [replace(problem, path=_inside(path, problem.path)) for problem in problems]


def _inside(path: str, rest: str) -> str:
    return f"{path}{'.' if rest and not rest.startswith('[') else ''}{rest}"


def _from_python(value: Any, place: Place, path: str) -> tuple[Node | None, list[Problem]]:
    """A tree of plain Python values, which `overrides=` may hold."""
    if value is None or isinstance(value, (str, bool, int, float)):
        return Node(value, place), []
    children: dict[str, Any] | None = None
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        children = dict(value)
    elif isinstance(value, (list, tuple)):
        children = {str(index): item for index, item in enumerate(value)}
    if children is None:
        message, remedy = (
            "not a plain value.",
            "Give None, a bool, a number, text, a list or a dict with text keys.",
        )
        return None, [Problem(place, path, f"a {type(value).__name__}", message, remedy)]
    nodes, problems = {}, []
    for key, child in children.items():
        node, found = _from_python(child, place, f"{path}.{key}")
        problems += found
        if node is not None:
            nodes[key] = replace(node, key_place=place)
    return Node(nodes if isinstance(value, Mapping) else list(nodes.values()), place), problems


def _remove_not_finite(tree: Node) -> list[tuple[KeyPath, Problem]]:
    """NaN and infinity fit no key, and would slip through comparisons."""
    message, remedy = "must be a finite number.", "NaN and infinity are not accepted."
    refused = [
        (path, Problem(node.place, dotted(tree.as_written(path)), show(node.value), message, remedy))
        for path, node in itertools.islice(_not_finite(tree, ()), MOST_PROBLEMS + 1)
    ]
    raise_if_too_many([problem for _, problem in refused], tree.place.source)
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
    """A config without the invalid values, so that rules can still check the others; and the problems of those."""
    refused: list[tuple[KeyPath, Problem]] = []
    while True:
        try:
            return RunConfig.model_validate(tree.plain()), refused
        except ValidationError as error:
            found = translate(error, tree)
        # Errors of later passes follow from what was removed, not from what the user wrote.
        refused = refused or found
        for path, _ in found:
            _remove(tree, path)
            if path == ("model", "factory"):
                _remove(tree, ("model", "args"))  # keywords of an unknown model


def _remove(tree: Node, path: KeyPath) -> None:
    """Remove a value; for an entry of a list, the whole list."""
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
    """Whether one of the two paths equals or contains the other."""
    path = path.partition("[")[0]
    return path == key or path.startswith(f"{key}.") or key.startswith(f"{path}.")


def _located(finding: Finding, config: RunConfig, tree: Node) -> Problem:
    paths = [tuple(key.split(".")) for key in finding.blame]
    given = [(path, node.place) for path in paths if (node := tree.find(path)) is not None]
    given.sort(key=lambda each: each[1].line is not None)  # an override before the file it changed
    path = given[0][0] if given else paths[0]
    value: Any = config.model_dump(mode="json")
    for part in path:
        value = value[part]
    spelled = dotted(tree.as_written(path))
    return Problem(tree.place_of(path), spelled, show(value), finding.message, finding.remedy)
