"""Stands between the bench process and mpirun, so that MPI's ranks leave in order whatever becomes of the former.

Its ranks leave by themselves once the bench process has hung up, and then remove their shared memory. An mpirun that
gets SIGTERM meanwhile may leave it in /dev/shm, so it gets one only when they take too long.
"""

from __future__ import annotations

import signal
import subprocess
import sys

from runtime.launch.processes import die_with_parent

LEAVE_SECONDS = 5.0


def main(parent: int, command: list[str]) -> int:
    """Run it to its end. SIGTERM, sent or because `parent` has ended, means that it shall end now."""
    process = subprocess.Popen(command)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        die_with_parent(parent, signal.SIGTERM)
        return process.wait()
    except KeyboardInterrupt:
        try:
            return process.wait(LEAVE_SECONDS)
        except subprocess.TimeoutExpired:
            process.terminate()
            return process.wait()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
