"""What `package.module:name` stands for: imported as `python -m` would, and every way it fails named by its key."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from parallel3d.config.errors import nearest, problem_of_key
from parallel3d.config.factories import missing_module

refusal = problem_of_key
# Some of torch's errors fill a screen.
_LONGEST_TEXT = 500
_OURS = (Path(__file__).resolve().parent,)
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


def call_factory(key: str, name: str, **keywords: Any) -> Any:
    """What the callable that the key names returns."""
    factory = load_factory(key, name)
    try:
        return factory(**keywords)
    except (Exception, SystemExit) as error:
        given = ", ".join(keywords) or "no arguments"
        message = f"it was called with {given}, and raised {told(error)}."
        raise problem_of_key(key, name, message, "Mend it, or name another.") from error


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
    if not text.isprintable():
        text = text.encode("ascii", "backslashreplace").decode()
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
