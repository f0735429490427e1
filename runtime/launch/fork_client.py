"""The launcher's side of the fork server: starts it, sends it requests, reads its events."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

# Private, and without a public twin; multiprocessing imports it too.
from subprocess import _args_from_interpreter_flags  # type: ignore[attr-defined]
from typing import Any

from runtime.errors import LaunchError
from runtime.launch.fork_server import MAX_RECORD_BYTES, Job

HOME = str(Path(__file__).resolve().parents[2])

# The current folder must not come before our packages while they are imported: a user's runtime.py there
# would be imported instead of ours. `-P` does this too, but would be visible in the ranks' sys.flags.
_BOOTSTRAP = """\
import sys
if not sys.flags.safe_path: del sys.path[0]
sys.path.insert(0, sys.argv.pop(1))
from runtime.launch.fork_server import main
main()
"""


class ForkClient:
    """One running fork server, which imports `preload` at once. Requests never block: they are few and small."""

    def __init__(self, preload: Sequence[str], environment: Mapping[str, str]) -> None:
        self.connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._job = os.memfd_create("parallel3d-job")  # a script's arguments may be longer than a record
        try:
            self.process = subprocess.Popen(
                _command(theirs.fileno(), self._job, preload),
                stdin=subprocess.DEVNULL,
                stdout=2,  # what an import prints is not the ranks' data
                env=environment,
                pass_fds=(theirs.fileno(), self._job),
                start_new_session=True,  # the terminal's Ctrl-C is for the launcher alone
            )
        except OSError as error:
            self.connection.close()
            os.close(self._job)
            raise LaunchError(f"the fork server could not be started: {error}") from error
        finally:
            theirs.close()
        self.connection.setblocking(False)
        self.is_ready = False

    def give(self, job: Job) -> None:
        """Say what the ranks run; once, before the first fork."""
        os.pwrite(self._job, job.to_json(), 0)
        os.close(self._job)
        self._send({"request": "job"})

    def fork(self, rank: int, environment: Mapping[str, str], fds: Sequence[int]) -> None:
        self._send({"request": "fork", "rank": rank, "environment": dict(environment)}, fds)

    def signal(self, ranks: Sequence[int], number: signal.Signals, whole_group: bool) -> None:
        self._send({"request": "signal", "ranks": list(ranks), "signal": number, "whole_group": whole_group})

    def _send(self, record: Mapping[str, object], fds: Sequence[int] = ()) -> None:
        # A server that is gone is noticed where its events are read.
        with suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(self.connection, [json.dumps(record).encode()], fds)

    def events(self) -> Iterator[dict[str, Any]]:
        """The events that have arrived, without waiting; `lost` when the server has ended."""
        while True:
            try:
                data = self.connection.recv(MAX_RECORD_BYTES)
            except BlockingIOError:
                return
            except ConnectionResetError:  # raised once if it ended without reading everything; its last events follow
                continue
            except OSError:
                data = b""
            event: dict[str, Any] = json.loads(data) if data else {"event": "lost"}
            self.is_ready |= event["event"] == "ready"
            yield event
            if not data:
                return

    def close(self) -> None:
        """Close the connection: the server ends everything it started, then itself."""
        self.connection.close()
        if not self.is_ready:  # still importing: it has started no rank, and would notice the close late
            self.process.kill()

    def wait(self, seconds: float) -> int:
        """The server's exit code; it is killed if it does not end within `seconds`."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait(seconds)


def _command(connection: int, job: int, preload: Sequence[str]) -> list[str]:
    return [
        sys.executable,
        *_args_from_interpreter_flags(),
        "-c",
        _BOOTSTRAP,
        HOME,
        str(os.getpid()),
        str(connection),
        str(job),
        *preload,
    ]
