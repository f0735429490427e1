"""Threads for blocking calls: reused, bounded, in order where asked, and never in the way of the end."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from runtime.threads import DaemonThreads
from tests.support.processes import ROOT, SECONDS


@pytest.fixture
def threads():
    made = DaemonThreads("test-threads")
    yield made
    made.stop()


def test_results_and_errors_come_back(threads):
    assert threads.submit(divmod, 7, 2).result(SECONDS) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        threads.submit(divmod, 7, 0).result(SECONDS)
    with pytest.raises(SystemExit):
        threads.submit(sys.exit, 3).result(SECONDS)
    assert threads.submit(divmod, 7, 2).result(SECONDS) == (3, 1), "the thread has survived that"


def test_calls_run_at_once(threads):
    """Each waits for all others, so that fewer threads than calls would never end."""
    meeting = threading.Barrier(8, timeout=SECONDS)
    for future in [threads.submit(meeting.wait) for _ in range(8)]:
        future.result(SECONDS)


def test_an_idle_thread_is_used_again(threads):
    identities = {threads.submit(threading.get_ident).result(SECONDS) for _ in range(50)}
    assert len(identities) == 1


def test_one_thread_keeps_the_order():
    threads = DaemonThreads("test-order", limit=1)
    seen, release = [], threading.Event()
    first = threads.submit(release.wait, SECONDS)
    futures = [threads.submit(seen.append, number) for number in range(100)]
    assert not futures[0].done()
    release.set()
    assert first.result(SECONDS)
    futures[-1].result(SECONDS)
    assert seen == list(range(100))
    threads.stop()


def test_stopping_lets_what_was_submitted_end():
    threads = DaemonThreads("test-stop", limit=1)
    release = threading.Event()
    threads.submit(release.wait, SECONDS)
    (thread,) = (each for each in threading.enumerate() if each.name == "test-stop")
    last = threads.submit(lambda: "ran")
    threads.stop()
    release.set()
    assert last.result(SECONDS) == "ran"
    thread.join(SECONDS)
    assert not thread.is_alive()


def test_stopping_before_any_call_is_fine():
    DaemonThreads("test-unused").stop()


def test_a_blocked_thread_does_not_keep_the_process():
    source = """if True:
        import threading
        from runtime.threads import DaemonThreads
        started = threading.Event()
        DaemonThreads("stuck").submit(lambda: (started.set(), threading.Event().wait()))
        started.wait()
        print("end of main")
    """
    done = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end of main\n", "")


def test_what_a_call_gave_is_let_go_of_before_the_process_ends():
    """A tensor that a thread lets go of while Python ends would abort the process."""
    source = """if True:
        import time
        from runtime.threads import DaemonThreads
        class Slow:
            def __del__(self):
                time.sleep(0.1)
                print("let go")
        threads = DaemonThreads("giving")
        threads.submit(lambda: Slow())
        threads.submit(Slow).result()
        threads.stop()
    """
    done = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
    assert (done.returncode, done.stdout, done.stderr) == (0, "let go\nlet go\n", "")


def test_a_thread_that_has_told_of_its_end_may_go_on_with_tensors_while_the_process_ends():
    source = """if True:
        import threading, time
        import torch
        from runtime.threads import DaemonThreads
        told = threading.Event()
        def work():
            told.set()
            end = time.monotonic() + 0.2
            while time.monotonic() < end:
                torch.zeros(1000).add_(1)
        DaemonThreads("going-on").submit(work)
        told.wait()
    """
    done = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
