"""YAML text as a tree of values that know their line and column, from which errors take their place.

Built from the parser's events: no tag is acted upon, and depth, size and aliases are limited.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from parallel3d.config.errors import ConfigProblems, Place, Problem, dotted, nearest, raise_if_too_many, show
from parallel3d.config.yaml_scalars import resolve_scalar

LARGEST_FILE = 1 << 20
DEEPEST_NESTING = 32
# Nine lines of nested aliases can stand for a billion values.
_MOST_ALIASED_VALUES = 10_000
_CORE_TAG = "tag:yaml.org,2002:"
_CORE_TYPES = {"str": str, "int": int, "float": float, "bool": bool, "null": type(None)}
# As YAML 1.2 defines it; tab, line feed, carriage return and U+0085 are the only control characters.
_UNPRINTABLE = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
# Replaces a value that already has a problem, so that it gets no second one.
_REFUSED = object()
_Parser: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Node:
    """A value with its line and column. `value` is a scalar, a `dict[str, Node]` or a `list[Node]`."""

    value: Any
    place: Place
    key_place: Place | None = None
    written: KeyPath | None = None
    """The path as the user wrote it, if that was an alias (`config.aliases`)."""

    def plain(self) -> Any:
        """The value without places."""
        if isinstance(self.value, dict):
            return {key: child.plain() for key, child in self.value.items()}
        return [child.plain() for child in self.value] if isinstance(self.value, list) else self.value

    def copy(self) -> Node:
        """A deep copy, so that renaming inside one YAML alias does not change the others."""
        if isinstance(self.value, dict):
            return replace(self, value={key: child.copy() for key, child in self.value.items()})
        if isinstance(self.value, list):
            return replace(self, value=[child.copy() for child in self.value])
        return self

    def count(self) -> int:
        """Number of values in the tree."""
        children = self.value.values() if isinstance(self.value, dict) else self.value
        return 1 + sum(child.count() for child in children) if isinstance(self.value, (dict, list)) else 1

    def as_written(self, path: KeyPath) -> KeyPath:
        """The path in the user's spelling."""
        spelled: KeyPath = ()
        for length, part in enumerate(path, 1):
            node = self.find(path[:length])
            spelled = (*spelled, part) if node is None or node.written is None else node.written
        return spelled

    def find(self, path: KeyPath) -> Node | None:
        """The node at that path, or None."""
        node: Node | None = self
        for part in path:
            children = node.value if node is not None else None
            if isinstance(children, dict):
                node = children.get(part)
            elif isinstance(children, list) and isinstance(part, int) and part < len(children):
                node = children[part]
            else:
                return None
        return node

    def place_of(self, path: KeyPath) -> Place:
        """Where the value at that path was given, or the nearest thing around it."""
        while (node := self.find(path)) is None:
            path = path[:-1]
        return node.place

    def key_place_of(self, path: KeyPath) -> Place:
        """Where the key at that path, which the tree has, was given."""
        node = self.find(path)
        assert node is not None, f"{dotted(path)} is not in the tree"
        return node.key_place or node.place


def read_text(path: Path, source: str) -> str:
    """The file's text. Raises ConfigProblems where it cannot be read."""
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST_FILE + 1)
        if len(data) > LARGEST_FILE:
            raise _refusal(source, "is larger than 1 MiB.", "A run's configuration is a page or two; check the path.")
        return data.decode("utf-8-sig")
    except FileNotFoundError:
        raise _refusal(source, "file not found.", _similar_file(path)) from None
    except IsADirectoryError:
        raise _refusal(source, "is a folder, not a file.", "Give the path of a YAML file.") from None
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        message = f"is not UTF-8 text (byte 0x{data[error.start]:02x} on line {line})."
        raise _refusal(source, message, "Save the file as UTF-8.") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise _refusal(source, f"cannot be read: {reason}.", "Check the path and its permissions.") from None


def _refusal(source: str, message: str, remedy: str) -> ConfigProblems:
    return ConfigProblems([Problem(Place(source), "", None, message, remedy)])


def _similar_file(path: Path) -> str:
    folder = path.parent
    names = [entry.name for entry in folder.iterdir() if entry.is_file()] if folder.is_dir() else []
    similar = nearest(path.name, names)
    return f"Did you mean {folder / similar}?" if similar else "Check the path."


def parse_yaml(text: str, source: str, *, located: bool = True) -> tuple[Node, list[Problem]]:
    """The text's tree, and problems that leave the rest readable; raises ConfigProblems after any other.

    located: whether places have line and column; False for an override, whose name is its place.
    """
    return _TreeBuilder(text, source, located).document()


class _TreeBuilder:
    """Builds the tree from the parser's events."""

    def __init__(self, text: str, source: str, located: bool) -> None:
        self.text, self.source, self.located = text, source, located
        self.problems: list[Problem] = []
        self.anchors: dict[str, Node] = {}
        self.num_aliased = 0
        self.events: Iterator[Any] = iter(())

    def document(self) -> tuple[Node, list[Problem]]:
        if bad := _UNPRINTABLE.search(self.text):
            line = self.text.count("\n", 0, bad.start()) + 1
            column = bad.start() - self.text.rfind("\n", 0, bad.start())
            message = f"the character U+{ord(bad[0]):04X} is not allowed in YAML."
            raise self.stop(self.place(line, column), (), message, "Remove it.")
        self.events = yaml.parse(self.text, Loader=_Parser)
        try:
            return self.only_document(), self.problems
        except yaml.MarkedYAMLError as error:
            said = f"{error.context}: {error.problem}" if error.context else f"{error.problem}"
            place = self.place_of_mark(error.problem_mark or error.context_mark)
        except (yaml.YAMLError, ValueError) as error:
            said, place = str(error).splitlines()[0], self.place(1, 1)
        raise self.stop(place, (), f"not valid YAML: {said}.", "Check indentation, brackets and quotes near here.")

    def only_document(self) -> Node:
        root = Node(None, self.place(1, 1))
        seen = False
        for event in self.events:
            if isinstance(event, yaml.DocumentStartEvent) and seen:
                place = self.place_of_mark(event.start_mark)
                raise self.stop(place, (), "a second YAML document begins.", "Keep one document in a file.")
            if isinstance(event, yaml.NodeEvent):
                root, seen = self.node(event, ()), True
        return replace(root, value=None) if root.value is _REFUSED else root

    def node(self, event: Any, path: KeyPath) -> Node:
        place = self.place_of_mark(event.start_mark)
        if isinstance(event, yaml.AliasEvent):
            return self.alias(str(event.anchor), place, path)
        if len(path) > DEEPEST_NESTING:
            message = f"nested more than {DEEPEST_NESTING} levels deep."
            raise self.stop(place, path[:3], message, "Flatten it.")
        if isinstance(event, yaml.MappingStartEvent):
            value: Any = self.mapping(path)
        elif isinstance(event, yaml.SequenceStartEvent):
            value = self.sequence(path)
        else:
            value = resolve_scalar(event.value) if event.implicit[0] and event.tag is None else event.value
        node = Node(self.tagged(event, value, place, path), place)
        if event.anchor is not None:
            self.anchors[event.anchor] = node
        return node

    def mapping(self, path: KeyPath) -> dict[str, Node] | object:
        children: dict[str, Node] = {}
        seen: dict[str, Place] = {}
        was_empty = True
        while not isinstance(event := next(self.events), yaml.MappingEndEvent):
            was_empty = False
            place = self.place_of_mark(event.start_mark)
            key_node = self.node(event, (*path, "?"))
            key = key_node.value
            here = (*path, key if isinstance(key, str) else show(key_node.plain()))
            child = replace(self.node(next(self.events), here), key_place=place)
            if not isinstance(key, str):
                if key is not _REFUSED:
                    example = "" if isinstance(key, (dict, list)) else f': "{show(key)}"'
                    self.refuse(place, here, "a key must be text.", f"Put it in quotes{example}.")
            elif key == "<<" and getattr(event, "implicit", (True,))[0]:  # in quotes it is plain text
                self.refuse(place, here, "merge keys are not read.", "Write the keys out.")
            elif key in seen:
                self.refuse(place, here, f"given twice, first at {seen[key]}.", "Remove one of the two.")
            else:
                seen[key] = place
                children |= {} if child.value is _REFUSED else {key: child}
        return children if children or was_empty else _REFUSED  # an empty one would be a second problem

    def sequence(self, path: KeyPath) -> list[Node] | object:
        children: list[Node] = []
        while not isinstance(event := next(self.events), yaml.SequenceEndEvent):
            children.append(self.node(event, (*path, len(children))))
        return _REFUSED if any(child.value is _REFUSED for child in children) else children

    def alias(self, name: str, place: Place, path: KeyPath) -> Node:
        target = self.anchors.get(name)
        if target is None:
            self.refuse(
                place,
                path,
                f"the alias *{name} stands before or inside its own anchor.",
                "Write the value out.",
            )
            return Node(_REFUSED, place)
        self.num_aliased += target.count()
        if self.num_aliased > _MOST_ALIASED_VALUES:
            message = f"aliases stand for more than {_MOST_ALIASED_VALUES} values."
            raise self.stop(place, path, message, "Write the values out instead of using aliases.")
        return replace(target.copy(), place=place)

    def tagged(self, event: Any, value: Any, place: Place, path: KeyPath) -> Any:
        """The value, if it has no tag, or one of YAML's own that fits."""
        if event.tag is None or value is _REFUSED:
            return value
        name = event.tag.removeprefix(_CORE_TAG)
        shown = f"!!{name}" if event.tag.startswith(_CORE_TAG) else event.tag
        if isinstance(value, str) and shown == f"!!{name}" and name in _CORE_TYPES:
            value = value if name == "str" else resolve_scalar(value)
            if type(value) is _CORE_TYPES[name]:
                return value
        elif shown == ("!!map" if isinstance(value, dict) else "!!seq" if isinstance(value, list) else None):
            return value
        self.refuse(
            place,
            path,
            f"the tag {show(shown)[1:-1]} is not accepted.",
            "Remove the tag; a plain value is enough.",
        )
        return _REFUSED

    def refuse(self, place: Place, path: KeyPath, message: str, remedy: str) -> None:
        self.problems.append(Problem(place, dotted(path), None, message, remedy))
        raise_if_too_many(self.problems, self.source)

    def stop(self, place: Place, path: KeyPath, message: str, remedy: str) -> ConfigProblems:
        self.refuse(place, path, message, remedy)
        return ConfigProblems(self.problems)

    def place_of_mark(self, mark: Any) -> Place:
        return self.place(mark.line + 1, mark.column + 1)

    def place(self, line: int, column: int) -> Place:
        return Place(self.source, line, column) if self.located else Place(self.source)
