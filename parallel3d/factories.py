"""What `package.module:name` stands for: imported as `python -m` would, and every way it fails named by its key."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

from parallel3d.config.errors import nearest, problem_of_key
from parallel3d.config.factories import missing_module


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


def told(error: BaseException) -> str:
    """An error in one line, with the line of code it came from: `ValueError: no (my_data.py:7)`."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return f"{' '.join(traceback.format_exception_only(error)[-1].split())}{place}"


def _put_current_folder_on_path() -> None:
    current = os.getcwd()
    if current not in sys.path and "" not in sys.path:
        sys.path.insert(0, current)
    importlib.invalidate_caches()  # the fork server may have looked before the file was written
