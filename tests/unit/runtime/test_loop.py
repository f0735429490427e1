"""`run`: results, errors, and orderly ends."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
import uvloop

from runtime.errors import InvalidCall
from runtime.loop import run


@pytest.fixture(autouse=True)
def ctrl_c_is_heard():
    """Also where the tests were started in the background of a script, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_the_result_comes_back_from_uvloop():
    async def main():
        assert isinstance(asyncio.get_running_loop(), uvloop.Loop)
        return 42

    assert run(main) == 42


def test_an_exception_comes_out_as_it_is():
    async def main():
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        run(main)


@pytest.mark.parametrize(
    ("number", "kind", "code"), [(signal.SIGTERM, SystemExit, (143,)), (signal.SIGINT, KeyboardInterrupt, ())]
)
def test_a_signal_ends_it_after_all_finally_blocks(number, kind, code):
    seen = []

    async def main():
        try:
            os.kill(os.getpid(), number)
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise
        finally:
            await asyncio.sleep(0)
            seen.append("tidied")

    with pytest.raises(kind) as caught:
        run(main)
    assert caught.value.args == code
    assert seen == ["cancelled", "tidied"]


@pytest.mark.parametrize("handler", [signal.SIG_DFL, signal.SIG_IGN, lambda *_: None])
def test_sigterm_is_as_before_afterwards(handler):
    async def main():
        pass

    previous = signal.signal(signal.SIGTERM, handler)
    try:
        run(main)
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, previous)


def test_a_cancellation_of_the_users_own_is_no_signal():
    async def main():
        asyncio.current_task().cancel()
        await asyncio.sleep(0)

    with pytest.raises(asyncio.CancelledError):
        run(main)


def test_a_main_that_outlives_sigterm_keeps_its_result():
    async def main():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            return "stayed"

    assert run(main) == "stayed"


def test_the_function_is_given_and_not_its_coroutine():
    async def main():
        return 1

    with pytest.raises(InvalidCall) as caught:
        run(main())
    assert str(caught.value) == "run: give it the function, run(main), not the coroutine, run(main())."


@pytest.mark.parametrize(
    ("number", "kind", "code"), [(signal.SIGTERM, SystemExit, (143,)), (signal.SIGINT, KeyboardInterrupt, ())]
)
def test_a_signal_does_not_break_off_the_end_of_the_loop(number, kind, code):
    """It may come when `main` has ended, while the loop still closes what was left open."""
    closed = []

    async def left_open():
        try:
            yield 1
        finally:
            signal.raise_signal(number)
            await asyncio.sleep(0)
            closed.append(True)

    generator = left_open()

    async def main():
        await anext(generator)

    with pytest.raises(kind) as caught:
        run(main)
    assert (caught.value.args, closed) == (code, [True])


def test_a_second_ctrl_c_breaks_off_the_end_of_the_loop():
    async def left_open():
        try:
            yield 1
        finally:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(3600)

    generator = left_open()

    async def main():
        await anext(generator)

    with pytest.raises(KeyboardInterrupt):
        run(main)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
