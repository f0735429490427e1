"""Exit codes of the `parallel3d` command, and of `RunFailed` and `Run.exit_code`."""

from __future__ import annotations

import signal

OK = 0
ERROR = 1
"""Any error without a code of its own."""
USAGE = 2
"""The command line is wrong."""
BAD_CONFIG = 3
"""The configuration is wrong."""
FAILED = 4
"""The run failed."""
REJECTED = 5
"""A gate of `parallel3d verify` rejects the run."""
HUNG = 124
"""A rank missed a deadline, and the run was ended for it; as `timeout` exits."""


def of_signal(number: signal.Signals) -> int:
    """As shells count: 130 for Ctrl-C."""
    return 128 + number
