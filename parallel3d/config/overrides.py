"""Values from `--set a.b=c` and `PARALLEL3D_A__B=c`, as trees that are laid over the file's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from parallel3d.config.errors import ConfigProblems, Place, Problem, dotted, show
from parallel3d.config.file import DEEPEST_NESTING, Node, parse_yaml
from parallel3d.config.scalars import resolve_scalar

_PREFIX = "PARALLEL3D_"


def from_environment(environ: Mapping[str, str]) -> tuple[Node, list[Problem]]:
    """`PARALLEL3D_PARALLEL__PP=4`; names without a double underscore are not about the configuration."""
    names = sorted(name for name in environ if name.startswith(_PREFIX) and "__" in name.removeprefix(_PREFIX))
    return _layer((Place(name), name.removeprefix(_PREFIX).lower().split("__"), environ[name]) for name in names)


def from_settings(overrides: Mapping[str, Any], name: str = "--set") -> tuple[Node, list[Problem]]:
    """`--set parallel.pp=4`. Text is read as YAML would read it; other values are taken as they are."""
    return _layer((Place(f"{name} {path}"), path.split("."), value) for path, value in overrides.items())


def merge(under: Node, over: Node, path: tuple[str, ...] = ()) -> tuple[Node, list[Problem]]:
    """`over` laid on `under`: mappings key by key, everything else replaced."""
    if not isinstance(over.value, dict) or under.value is None:
        return over, []
    if not isinstance(under.value, dict):
        message = f"a key cannot be set inside {show(under.plain())}, which {under.place} gives."
        inside = next(iter(over.value), "")
        return under, [Problem(over.place, dotted((*path, inside)), None, message, "Set the whole value instead.")]
    merged, problems = dict(under.value), []
    for key, child in over.value.items():
        if key in merged:
            child, found = merge(merged[key], child, (*path, key))
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
        tree, found = merge(tree, node)
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
    """Plain Python values, as `overrides=` may hold them."""
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
