"""What `package.module:name` stands for: imported as `python -m` would, and every way it fails named by its key."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from monitoring.text import escaped
from parallel3d.config.errors import enumerate_words, nearest, problem_of_key
from parallel3d.config.factories import missing_module

refusal = problem_of_key
_KEYWORDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_UNEXPECTED = re.compile(r"got an unexpected keyword argument '([^']+)'")
# Some of torch's errors fill a screen.
_LONGEST_TEXT = 500
_OURS = (Path(__file__).resolve().parents[1],)
_INSTALLED = tuple(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def load_factory(key: str, name: str) -> Callable[..., Any]:
    """The callable that the configuration's key names."""
    if (missing := missing_module(name)) is not None:
        raise problem_of_key(key, name, *missing)
    module_name, _, path = name.partition(":")
    _put_current_folder_on_path()
    try:
        found: Any = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise problem_of_key(
            key, name, f"{module_name} cannot be imported: {told(error)}.", f"Try: python -c 'import {module_name}'."
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
    """What the callable that the key names returns. args_key: where the keywords are from, if the user gives them."""
    factory = load_factory(key, name)
    try:
        return factory(**keywords)
    except (Exception, SystemExit) as error:
        if args_key and isinstance(error, TypeError):
            _blame_keywords(args_key, name, factory, keywords, error)
        given = ", ".join(keywords) or "no arguments"
        message = f"it was called with {given}, and raised {told(error)}."
        raise problem_of_key(key, name, message, "Mend it, or name another.") from error


def _blame_keywords(
    key: str, name: str, factory: Callable[..., Any], keywords: Mapping[str, Any], error: TypeError
) -> None:
    """Raise where the factory, or what it hands its keywords on to, refuses one, or where one is missing."""
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # some of C have none
        return
    named = [each.name for each in signature.parameters.values() if each.kind in _KEYWORDS]
    refused = _UNEXPECTED.search(str(error))
    if refused is not None and (word := refused[1]) in keywords and word not in named:
        close = nearest(word, [each for each in named if each not in keywords])
        remedy = f"Did you mean {close}?" if close else "Remove it, or name another factory."
        message = f"{name} was called with it, and raised {told(error)}."
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
def telling(key: str, value: Any, doing: str) -> Iterator[None]:
    """What the user's code in here raises is told by its key."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise problem_of_key(key, value, f"{doing} raised {told(error)}.") from error


def told(error: BaseException) -> str:
    """An error in one line, with the line of the user's code it came from: `ValueError: no (my_data.py:7)`."""
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    text = " ".join(str(error.msg if isinstance(error, SyntaxError) else error).split())
    text = escaped(text)
    text = text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}…"
    place = _place(error)
    return f"{name}{f': {text}' if text else ''}{f' ({place})' if place else ''}"


def _place(error: BaseException) -> str | None:
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{_short(error.filename)}:{error.lineno}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_below(frame.filename, _OURS)]
    # Not torch's own line, if there is one of the user's that led there.
    frames = [frame for frame in frames if not _is_below(frame.filename, _INSTALLED)] or frames
    return f"{_short(frames[-1].filename)}:{frames[-1].lineno}" if frames else None


def _is_below(filename: str, folders: Sequence[Path]) -> bool:
    """Frozen modules of Python's count as installed."""
    path = Path(filename).resolve()
    return filename.startswith("<") or any(folder in path.parents for folder in folders)


def _short(filename: str) -> str:
    """From the current folder, where it is in there."""
    try:
        inside = os.path.relpath(os.path.realpath(filename), os.path.realpath(os.getcwd()))
    except (FileNotFoundError, ValueError):  # somebody removed that folder; another drive
        return filename
    return filename if inside.startswith(os.pardir) else inside


def _put_current_folder_on_path() -> None:
    with contextlib.suppress(FileNotFoundError):  # somebody removed it
        current = os.getcwd()
        if current not in sys.path and "" not in sys.path:
            sys.path.insert(0, current)
    importlib.invalidate_caches()  # the fork server may have looked before the file was written
