"""An asyncio runtime for 3D-parallel training on torch: the public names.

They are loaded on first use, so that commands like `parallel3d validate` don't load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from parallel3d.shadows import refuse_shadows

refuse_shadows()

if TYPE_CHECKING:
    from parallel3d.config import RunConfig as RunConfig
    from parallel3d.gradient_worker.worker import GradientWorker as GradientWorker
    from parallel3d.rank_mesh import Mesh as Mesh
    from parallel3d.rank_mesh import in_process as in_process
    from parallel3d.rank_mesh import mesh as mesh
    from parallel3d.runs.supervised import Run as Run
    from parallel3d.runs.supervised import start as start
    from parallel3d.training.coordinator import Coordinator as Coordinator
    from process_groups.group import Group as Group
    from runtime.errors import CommunicationError as CommunicationError
    from runtime.errors import ConfigError as ConfigError
    from runtime.errors import DataError as DataError
    from runtime.errors import DeadlineExceeded as DeadlineExceeded
    from runtime.errors import GroupClosed as GroupClosed
    from runtime.errors import InvalidCall as InvalidCall
    from runtime.errors import LaunchError as LaunchError
    from runtime.errors import Mismatch as Mismatch
    from runtime.errors import NonFiniteGradient as NonFiniteGradient
    from runtime.errors import Parallel3DError as Parallel3DError
    from runtime.errors import PeerLost as PeerLost
    from runtime.errors import RunFailed as RunFailed
    from runtime.gradient_server.client.protocol import ServerRefused as ServerRefused
    from runtime.gradient_server.client.protocol import ShareChanged as ShareChanged
    from runtime.logs import logger as logger
    from runtime.loop import run as run

__version__ = "0.1.0"

_HOME = {
    "RunConfig": "parallel3d.config",
    "Coordinator": "parallel3d.training.coordinator",
    "GradientWorker": "parallel3d.gradient_worker.worker",
    "Mesh": "parallel3d.rank_mesh",
    "mesh": "parallel3d.rank_mesh",
    "in_process": "parallel3d.rank_mesh",
    "Run": "parallel3d.runs.supervised",
    "start": "parallel3d.runs.supervised",
    "Group": "process_groups.group",
    "ServerRefused": "runtime.gradient_server.client.protocol",
    "ShareChanged": "runtime.gradient_server.client.protocol",
    "logger": "runtime.logs",
    "run": "runtime.loop",
    **dict.fromkeys(
        (
            "Parallel3DError",
            "ConfigError",
            "LaunchError",
            "RunFailed",
            "InvalidCall",
            "DataError",
            "NonFiniteGradient",
            "CommunicationError",
            "Mismatch",
            "PeerLost",
            "GroupClosed",
            "DeadlineExceeded",
        ),
        "runtime.errors",
    ),
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'parallel3d' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value  # later accesses skip this function
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
