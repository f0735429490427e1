"""Runs a user's script or module in this process as `python script.py` or `python -m module` would."""

from __future__ import annotations

import builtins
import importlib.machinery
import importlib.util
import io
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any

from runtime.control import MAX_MESSAGE_BYTES, RankControl
from runtime.errors import CommunicationError, culprit_of, notes_of

_OUR_FOLDER = str(Path(__file__).parent)
_REPORT_SECONDS = 2.0
_MAX_TRACEBACK = MAX_MESSAGE_BYTES // 4
_MAX_MESSAGE = MAX_MESSAGE_BYTES // 32
_MAX_NOTE, _MOST_NOTES = MAX_MESSAGE_BYTES // 128, 4


@dataclass(frozen=True, slots=True)
class Target:
    """What a rank runs."""

    name: str
    """A script's path as the user typed it, or a module's dotted name."""
    is_module: bool = False
    args: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Program:
    code: CodeType
    file: str
    loader: object
    spec: importlib.machinery.ModuleSpec | None
    package: str | None


def run_target(target: Target, before: Callable[[], None], control: RankControl | None) -> None:
    """Run it to its end. Exceptions that leave this function are for the interpreter's top level."""
    try:
        _prepare_path(target)
        _without_traceback(before)
        program = _load_module(target.name) if target.is_module else _load_script(target.name)
        sys.argv[0] = program.file if target.is_module else target.name
        try:
            exec(program.code, _fresh_main(program).__dict__)
        finally:  # the work is done: a Ctrl-C now would only print a traceback of the interpreter's exit
            signal.signal(signal.SIGINT, signal.SIG_IGN)
    except SystemExit:
        raise
    except KeyboardInterrupt as error:
        _report(error, control)
        sys.excepthook = _print_nothing  # it is reported; the interpreter still ends by SIGINT
        raise
    except BaseException as error:
        _report(error, control)
        raise SystemExit(1) from None


def _prepare_path(target: Target) -> None:
    first = os.getcwd() if target.is_module else os.path.dirname(os.path.realpath(target.name))
    if not sys.flags.safe_path:
        sys.path.insert(0, first)
    sys.path_importer_cache.clear()  # folders may have changed since the fork server read them
    sys.argv = ["-m" if target.is_module else target.name, *target.args]


def _load_script(name: str) -> _Program:
    file = os.path.abspath(name)
    with io.open_code(file) as source:
        code = compile(source.read(), file, "exec", dont_inherit=True)
    return _Program(code, file, importlib.machinery.SourceFileLoader("__main__", file), None, None)


def _load_module(name: str) -> _Program:
    spec = _find(name)
    if spec is not None and spec.submodule_search_locations is not None:
        name += ".__main__"
        spec = _find(name)
    get_code = getattr(spec.loader, "get_code", None) if spec else None
    code = get_code(name) if get_code else None
    if spec is None or code is None:
        raise SystemExit(f"{sys.executable}: No module named {name}")
    return _Program(code, spec.origin or name, spec.loader, spec, spec.parent)


def _find(name: str) -> importlib.machinery.ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise
        return None


def _fresh_main(program: _Program) -> ModuleType:
    main = ModuleType("__main__")
    main.__dict__.update(
        __file__=program.file,
        __builtins__=builtins,
        __loader__=program.loader,
        __spec__=program.spec,
        __package__=program.package,
        __cached__=program.spec.cached if program.spec else None,
        __annotations__={},
    )
    sys.modules["__main__"] = main
    return main


def _report(error: BaseException, control: RankControl | None) -> None:
    """Send the error to the launcher, which shows it; print it if that fails or the script has its own excepthook."""
    when = time.monotonic()
    trace = _without_our_frames(error.__traceback__)
    error.__traceback__ = trace
    is_sent = control is not None and control.send_within(
        _REPORT_SECONDS,
        "failed",
        time=when,
        type=type(error).__qualname__,
        message=_shortened(_text_of(error), _MAX_MESSAGE),
        notes=[_shortened(note, _MAX_NOTE) for note in notes_of(error)[:_MOST_NOTES]],
        traceback=_shortened("".join(traceback.format_exception(error)), _MAX_TRACEBACK),
        error=_wire(cause) if (cause := _communication_error(error)) is not None else None,
        culprit=culprit_of(error),
    )
    if not is_sent or sys.excepthook is not sys.__excepthook__:
        sys.excepthook(type(error), error, trace)


def _without_our_frames(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and os.path.dirname(trace.tb_frame.f_code.co_filename) == _OUR_FOLDER:
        trace = trace.tb_next
    return trace


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # the user's __str__ may fail too
        return "<no message: its __str__ failed>"


def _communication_error(error: BaseException) -> CommunicationError | None:
    """The CommunicationError behind an error, through groups and `from`; None if anything else went wrong here."""
    if isinstance(error, BaseExceptionGroup):
        found = [_communication_error(each) for each in error.exceptions]
        return None if None in found else found[0]
    if isinstance(error, CommunicationError) or error.__cause__ is None:
        return error if isinstance(error, CommunicationError) else None
    return _communication_error(error.__cause__)


def _wire(error: CommunicationError) -> dict[str, Any]:
    return {**error.to_wire(), "message": _shortened(error.message, _MAX_MESSAGE)}


def _shortened(text: str, limit: int) -> str:
    """Keeps the end: the innermost frames and the message matter most."""
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= limit else f"... {len(text) - limit} characters left out ...\n{text[-limit:]}"


def _without_traceback(hook: Callable[[], None]) -> None:
    try:
        hook()
    except Exception as error:
        raise error.with_traceback(None) from None


def _print_nothing(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    pass
