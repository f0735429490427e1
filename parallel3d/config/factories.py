"""A `package.module:name` of the user's: found without importing anything, imported, called; errors name its key."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import pkgutil
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any, NamedTuple

from monitoring.text import escaped
from parallel3d.config.errors import enumerate_words, nearest, problem_of_key

_KEYWORDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_UNEXPECTED = re.compile(r"got an unexpected keyword argument '([^']+)'")
# Some of torch's errors fill a screen.
_LONGEST_TEXT = 500
_OURS = (Path(__file__).resolve().parents[1],)
_INSTALLED = tuple(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib"))


class Missing(NamedTuple):
    """Which part of a module's name does not exist, and what to do."""

    message: str
    remedy: str


def missing_module(factory: str) -> Missing | None:
    """Why the factory's module cannot be found, or None when it can. Imports nothing, not even its packages."""
    name = factory.partition(":")[0]
    top, *rest = name.split(".")
    # `python -m` looks in the current folder first; an installed command does not have it on its path.
    current = _current_folder()
    path = [*current, *sys.path]
    spec = PathFinder.find_spec(top, path) or _from_other_finders(top)
    if spec is None:
        return Missing(f"no module named {top} in the current folder or installed.", _similar(top, current, ""))
    return _missing_below(top, spec, rest)


def _current_folder() -> list[str]:
    try:
        return [os.getcwd()]
    except FileNotFoundError:  # it was removed
        return []


def _missing_below(parent: str, spec: ModuleSpec, rest: Sequence[str]) -> Missing | None:
    for part in rest:
        if spec.submodule_search_locations is None:
            return Missing(
                f"{parent} is a module, not a package.",
                f"Remove .{part} and what follows it, up to the colon.",
            )
        locations = list(spec.submodule_search_locations)
        # The last part alone: with the full name, a folder without __init__ would ask for its
        # parent in sys.modules, which only an import puts there.
        found = PathFinder.find_spec(part, locations)
        if found is None:
            return Missing(f"no module named {part} in the package {parent}.", _similar(part, locations, f"{parent}."))
        parent, spec = f"{parent}.{part}", found
    return None


def _from_other_finders(name: str) -> ModuleSpec | None:
    """Built-in modules, and packages installed as editable, which have import finders of their own."""
    specs = (finder.find_spec(name, None) for finder in sys.meta_path)
    return next((spec for spec in specs if spec is not None), None)


def _similar(name: str, locations: list[str], prefix: str) -> str:
    similar = nearest(name, (module.name for module in pkgutil.iter_modules(locations)))
    return f"Did you mean {prefix}{similar}?" if similar else "Check the name, or install the package it is in."


def load_factory(key: str, name: str) -> Callable[..., Any]:
    """Import the callable that a key names, with the current folder on the path as under `python -m`."""
    if (missing := missing_module(name)) is not None:
        raise problem_of_key(key, name, *missing)
    module_name, _, path = name.partition(":")
    _put_current_folder_on_path()
    try:
        found: Any = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise problem_of_key(
            key,
            name,
            f"{module_name} cannot be imported: {describe(error)}.",
            f"Try: python -c 'import {module_name}'.",
        ) from error
    for part in path.split("."):
        if not hasattr(found, part):
            close = nearest(part, [word for word in dir(found) if not word.startswith("__")])
            remedy = f"Did you mean {close}?" if close else "Check the name after the colon."
            raise problem_of_key(key, name, f"{module_name} has no {path}.", remedy)
        found = getattr(found, part)
    if not callable(found):
        message = f"{path} is a value of type {type(found).__name__}, which cannot be called."
        raise problem_of_key(key, name, message, "Name a function or a class.")
    return found  # type: ignore[no-any-return]


def call_factory(key: str, name: str, args_key: str = "", /, **keywords: Any) -> Any:
    """Call what the key names, and return its result.

    args_key: the key that holds the keywords, so that an error about one of them names it; "" where we choose them.
    """
    factory = load_factory(key, name)
    try:
        return factory(**keywords)
    except (Exception, SystemExit) as error:
        if args_key and isinstance(error, TypeError):
            _blame_keywords(args_key, name, factory, keywords, error)
        given = ", ".join(keywords) or "no arguments"
        message = f"it was called with {given}, and raised {describe(error)}."
        raise problem_of_key(key, name, message, "Mend it, or name another.") from error


def _blame_keywords(
    key: str, name: str, factory: Callable[..., Any], keywords: Mapping[str, Any], error: TypeError
) -> None:
    """Raise a problem of `key` when the factory, or what it passes keywords to, rejects one or lacks one."""
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # some C functions have none
        return
    named = [each.name for each in signature.parameters.values() if each.kind in _KEYWORDS]
    refused = _UNEXPECTED.search(str(error))
    if refused is not None and (word := refused[1]) in keywords and word not in named:
        close = nearest(word, [each for each in named if each not in keywords])
        remedy = f"Did you mean {close}?" if close else "Remove it, or name another factory."
        message = f"{name} was called with it, and raised {describe(error)}."
        raise problem_of_key(f"{key}.{word}", keywords[word], message, remedy) from error
    missing = [
        each for each in named if each not in keywords and signature.parameters[each].default is inspect.Parameter.empty
    ]
    if missing:
        message = f"{name} needs {enumerate_words(missing, 'and')}."
        raise problem_of_key(
            key, dict(keywords), message, "Give them there." if missing[1:] else "Give it there."
        ) from error


@contextlib.contextmanager
def blaming(key: str, value: Any, doing: str) -> Iterator[None]:
    """What the user's code inside raises becomes a problem of `key`."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise problem_of_key(key, value, f"{doing} raised {describe(error)}.") from error


def describe(error: BaseException) -> str:
    """An error in one line, with the line of the user's code that raised it: `ValueError: no (my_data.py:7)`."""
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    text = escaped(" ".join(str(error.msg if isinstance(error, SyntaxError) else error).split()))
    text = text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}…"
    place = _user_line(error)
    return f"{name}{f': {text}' if text else ''}{f' ({place})' if place else ''}"


def _user_line(error: BaseException) -> str | None:
    """`file:line` of the innermost frame that is neither ours nor, if possible, installed."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{_short(error.filename)}:{error.lineno}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_below(frame.filename, _OURS)]
    frames = [frame for frame in frames if not _is_below(frame.filename, _INSTALLED)] or frames
    return f"{_short(frames[-1].filename)}:{frames[-1].lineno}" if frames else None


def _is_below(filename: str, folders: Sequence[Path]) -> bool:
    """Python's frozen modules count as installed."""
    path = Path(filename).resolve()
    return filename.startswith("<") or any(folder in path.parents for folder in folders)


def _short(filename: str) -> str:
    """Relative to the current folder if it is inside."""
    try:
        inside = os.path.relpath(os.path.realpath(filename), os.path.realpath(os.getcwd()))
    except (FileNotFoundError, ValueError):  # the folder was removed; or another drive
        return filename
    return filename if inside.startswith(os.pardir) else inside


def _put_current_folder_on_path() -> None:
    with contextlib.suppress(FileNotFoundError):  # it was removed
        current = os.getcwd()
        if current not in sys.path and "" not in sys.path:
            sys.path.insert(0, current)
    importlib.invalidate_caches()  # the fork server may have looked before the file existed
