"""Code of the user's that a key names as `package.module:name`: imports it, and tells what goes wrong in it by the key.

The configuration only looks whether the module is there (`config.factories`), without importing anything.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from parallel3d.config.errors import ConfigProblems, Place, Problem, nearest, show
from runtime.errors import ConfigError

_PYTHON = tuple(
    str(Path(sysconfig.get_path(name)).resolve()) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
_OURS = str(Path(__file__).resolve().parent) + os.sep


def load_named(key: str, factory: str) -> Callable[..., Any]:
    """What `package.module:name` names. The current folder is on the import path from then on, as with `python -m`."""
    module_name, _, name = factory.partition(":")
    _add_current_folder()
    importlib.invalidate_caches()  # it may have been written a moment ago
    with telling(key, factory, f"importing {module_name}"):
        found: Any = importlib.import_module(module_name)
    for part in name.split("."):
        if not hasattr(found, part):
            similar = nearest(part, (each for each in dir(found) if not each.startswith("_")))
            remedy = f"Did you mean {similar}?" if similar else f"Define {part} there."
            raise refusal(key, factory, f"{_called(found)} has no {part}.", remedy)
        found = getattr(found, part)
    if not callable(found):
        raise refusal(key, factory, f"{name} is {type(found).__name__}, which cannot be called.", "Name a callable.")
    result: Callable[..., Any] = found
    return result


def _called(found: Any) -> str:
    return str(getattr(found, "__name__", type(found).__name__))


def _add_current_folder() -> None:
    with contextlib.suppress(FileNotFoundError):  # somebody removed it
        current = os.getcwd()
        if current not in sys.path and "" not in sys.path:
            sys.path.insert(0, current)


@contextlib.contextmanager
def telling(key: str, value: Any, doing: str) -> Iterator[None]:
    """Exceptions of the user's code in here become a ConfigError with their type, their text and where they began."""
    try:
        yield
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        text = "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]
        where = _where(error)
        raise refusal(key, value, f"{doing} raised {text}", f"It is from {where}." if where else "") from error


def refusal(key: str, value: Any, message: str, remedy: str = "") -> ConfigProblems:
    """An error that names the key. Its place in the file is not known any more."""
    return ConfigProblems([Problem(Place("configuration"), key, show(value), message, remedy)])


def _where(error: BaseException) -> str | None:
    """File and line of the user's that are nearest to the error."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{error.filename}:{error.lineno}"
    places = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    own = [f"{name}:{line}" for name, line in places if _is_users(name)]
    return own[-1] if own else None


def _is_users(filename: str) -> bool:
    path = str(Path(filename).resolve())
    return not filename.startswith("<") and not path.startswith((*_PYTHON, _OURS))
