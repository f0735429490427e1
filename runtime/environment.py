"""Which rank this process is and where ranks meet, from the environment of launch, torchrun or SLURM."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace

from runtime.errors import LaunchError


@dataclass(frozen=True, slots=True)
class InheritedFile:
    """A memory file inherited from the launcher."""

    fd: int


@dataclass(frozen=True, slots=True)
class PrivateFile:
    """A file in a folder that only this user may open."""

    path: str


@dataclass(frozen=True, slots=True)
class StoreServer:
    """A torch TCPStore; rank 0 serves it unless an agent such as torchrun's already does."""

    host: str
    port: int
    served_by_agent: bool


@dataclass(frozen=True, slots=True)
class Nowhere:
    """For a single rank, which needs no rendezvous."""


MeetingPlace = InheritedFile | PrivateFile | StoreServer | Nowhere


@dataclass(frozen=True, slots=True)
class RankEnvironment:
    """What the environment says about this process."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    meeting_place: MeetingPlace = Nowhere()
    attempt: str = "0"
    """torchrun's restart count: its store outlives a restart, and keeps keys of earlier attempts."""

    host: str | None = None
    """PARALLEL3D_HOST: overrides the detection of ranks on the same host."""


def read_environment(environ: Mapping[str, str] = os.environ) -> RankEnvironment:
    """Tried in this order: launch, torchrun (or anything that sets MASTER_ADDR), SLURM, a single rank."""
    if "PARALLEL3D_STORE_FD" in environ:
        if environ.get("PARALLEL3D_RANK_PID", str(os.getpid())) != str(os.getpid()):
            raise LaunchError(
                f"this process was started by rank {environ.get('RANK')} and is no rank itself: only the processes "
                "that `parallel3d launch` started can form its mesh."
            )
        return _from_torch_names(environ, InheritedFile(_number(environ, "PARALLEL3D_STORE_FD")))
    if "MASTER_ADDR" in environ and "RANK" in environ:
        by_agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        port = _number(environ, "MASTER_PORT")
        return _from_torch_names(environ, StoreServer(environ["MASTER_ADDR"], port, by_agent))
    if "SLURM_PROCID" in environ:
        return _from_slurm(environ)
    if "RANK" in environ and environ.get("WORLD_SIZE", "1") != "1":
        raise LaunchError(
            f"RANK={environ['RANK']} is set, but neither MASTER_ADDR and MASTER_PORT nor a launcher: "
            "start the script with `parallel3d launch -n N` or torchrun."
        )
    return RankEnvironment(host=environ.get("PARALLEL3D_HOST"))


def is_rank(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this process was started as a rank. In SLURM, a batch script is not a rank; its steps are."""
    if "PARALLEL3D_STORE_FD" in environ:
        return environ.get("PARALLEL3D_RANK_PID") == str(os.getpid())
    return ("MASTER_ADDR" in environ and "RANK" in environ) or {"SLURM_PROCID", "SLURM_STEP_ID"} <= set(environ)


def _number(environ: Mapping[str, str], name: str, otherwise: int | None = None) -> int:
    text = environ.get(name)
    if text is None and otherwise is not None:
        return otherwise
    if text is None or not text.isdecimal():
        raise LaunchError(f"{name}={text!r} in the environment: a whole number is needed there.")
    return int(text)


def _from_torch_names(environ: Mapping[str, str], meeting_place: MeetingPlace) -> RankEnvironment:
    rank, world_size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    has_local = "LOCAL_RANK" in environ
    local_world_size = _number(environ, "LOCAL_WORLD_SIZE") if has_local else world_size
    on_one_host = has_local and local_world_size == world_size
    if on_one_host and isinstance(meeting_place, StoreServer) and not meeting_place.served_by_agent:
        meeting_place = replace(meeting_place, host="127.0.0.1")  # other hosts need not reach it
    found = RankEnvironment(
        rank=rank,
        world_size=world_size,
        local_rank=_number(environ, "LOCAL_RANK") if has_local else rank,
        local_world_size=local_world_size,
        meeting_place=meeting_place if world_size > 1 else Nowhere(),
        attempt=environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
        host=environ.get("PARALLEL3D_HOST"),
    )
    return _checked(found)


def _from_slurm(environ: Mapping[str, str]) -> RankEnvironment:
    rank, world_size = _number(environ, "SLURM_PROCID"), _number(environ, "SLURM_NTASKS")
    num_nodes = _number(environ, "SLURM_STEP_NUM_NODES", _number(environ, "SLURM_NNODES", 1))
    step = "-".join(environ.get(n, "0") for n in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"))
    place: MeetingPlace
    if world_size == 1:
        place = Nowhere()
    elif num_nodes == 1:  # torch's TCPStore would listen on every interface
        folder = f"parallel3d-{os.getuid()}-slurm-{step}"  # one per step, so that it can be removed with the file
        place = PrivateFile(os.path.join(tempfile.gettempdir(), folder, "meeting"))
    else:
        host = first_host(environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or "")
        # Steps of a job may run at the same time, and jobs share nodes: spread them over the unprivileged ports.
        job, number = _number(environ, "SLURM_JOB_ID", 0), _number(environ, "SLURM_STEP_ID", 0)
        port = _number(environ, "MASTER_PORT", 20000 + (job * 17 + number) % 20000)
        place = StoreServer(host, port, served_by_agent=False)
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or ""
    found = RankEnvironment(
        rank=rank,
        world_size=world_size,
        local_rank=_number(environ, "SLURM_LOCALID", 0),
        local_world_size=_tasks_of_node(tasks, _number(environ, "SLURM_NODEID", 0), world_size // num_nodes),
        meeting_place=place,
        host=environ.get("PARALLEL3D_HOST"),
    )
    return _checked(found)


def _checked(found: RankEnvironment) -> RankEnvironment:
    if not 0 <= found.rank < found.world_size:
        raise LaunchError(f"rank {found.rank} of {found.world_size}: the environment contradicts itself.")
    return found


def first_host(nodelist: str) -> str:
    """The first host of SLURM's shorthand: `node[03-07,9],login` → `node03`."""
    match = re.match(r"([^\[,]+)(?:\[(\w+)[^\]]*\]([^\[,]*))?", nodelist)
    if match is None:
        raise LaunchError(f"SLURM_JOB_NODELIST={nodelist!r}: no host name found in it.")
    return "".join(part or "" for part in match.groups())


def _tasks_of_node(counts: str, node: int, otherwise: int) -> int:
    """SLURM's run-length shorthand: `4(x2),3` means 4, 4, 3."""
    each = [int(n) for n, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", counts) for _ in range(int(times or 1))]
    return each[node] if node < len(each) else otherwise
