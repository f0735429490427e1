"""Each starter's variables give one whole value, and what contradicts itself is refused."""

from __future__ import annotations

import os

import pytest

from runtime.environment import (
    InheritedFile,
    Nowhere,
    PrivateFile,
    RankEnvironment,
    StoreServer,
    first_host,
    is_rank,
    read_environment,
)
from runtime.errors import LaunchError

TORCH = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
MASTER = {"MASTER_ADDR": "node3", "MASTER_PORT": "29500"}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "3",
}
NODES = {"SLURM_NNODES": "2", "SLURM_NODEID": "1", "SLURM_JOB_NODELIST": "gpu[07-08]"}


@pytest.fixture(autouse=True)
def temporary_folder(monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", "/temporary")


def meeting_file(step: str) -> PrivateFile:
    return PrivateFile(f"/temporary/parallel3d-{os.getuid()}-slurm-{step}/meeting")


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, RankEnvironment(0, 1, 0, 1, Nowhere(), "0", None)),
        ({"PARALLEL3D_HOST": "a"}, RankEnvironment(host="a")),
        ({"RANK": "0", "WORLD_SIZE": "1"}, RankEnvironment()),
        ({"RANK": "0"}, RankEnvironment()),
        ({"MASTER_ADDR": "left over"}, RankEnvironment()),
        ({**TORCH, "PARALLEL3D_STORE_FD": "9"}, RankEnvironment(5, 8, 1, 4, InheritedFile(9))),
        (
            {**TORCH, **MASTER, **SLURM, "PARALLEL3D_STORE_FD": "9", "PARALLEL3D_HOST": "b"},
            RankEnvironment(5, 8, 1, 4, InheritedFile(9), host="b"),
        ),
        ({**TORCH, **MASTER}, RankEnvironment(5, 8, 1, 4, StoreServer("node3", 29500, False))),
        ({**TORCH, **MASTER, **SLURM}, RankEnvironment(5, 8, 1, 4, StoreServer("node3", 29500, False))),
        (
            {**TORCH, **MASTER, "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2"},
            RankEnvironment(5, 8, 1, 4, StoreServer("node3", 29500, True), attempt="2"),
        ),
        (  # all on this host: nobody else needs to reach the store
            {**TORCH, **MASTER, "LOCAL_WORLD_SIZE": "8"},
            RankEnvironment(5, 8, 1, 8, StoreServer("127.0.0.1", 29500, False)),
        ),
        (
            {**TORCH, **MASTER, "LOCAL_WORLD_SIZE": "8", "TORCHELASTIC_USE_AGENT_STORE": "True"},
            RankEnvironment(5, 8, 1, 8, StoreServer("node3", 29500, True)),
        ),
        (
            {"RANK": "5", "WORLD_SIZE": "8", **MASTER},
            RankEnvironment(5, 8, 5, 8, StoreServer("node3", 29500, False)),
        ),
        ({"RANK": "0", "WORLD_SIZE": "1", **MASTER}, RankEnvironment(0, 1, 0, 1, Nowhere())),
        (SLURM, RankEnvironment(5, 8, 1, 8, meeting_file("77-3-0"))),
        (
            {**SLURM, "SLURM_RESTART_COUNT": "2", "SLURM_STEP_TASKS_PER_NODE": "8"},
            RankEnvironment(5, 8, 1, 8, meeting_file("77-3-2")),
        ),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, RankEnvironment()),
        (
            {**SLURM, **NODES},
            RankEnvironment(5, 8, 1, 4, StoreServer("gpu07", 20000 + 77 * 17 + 3, False)),
        ),
        (
            {**SLURM, **NODES, "SLURM_TASKS_PER_NODE": "5,3", "MASTER_PORT": "1234"},
            RankEnvironment(5, 8, 1, 3, StoreServer("gpu07", 1234, False)),
        ),
        (
            {**SLURM, **NODES, "SLURM_STEP_NODELIST": "other", "SLURM_STEP_NUM_NODES": "2"},
            RankEnvironment(5, 8, 1, 4, StoreServer("other", 21312, False)),
        ),
        (
            {**SLURM, **NODES, "SLURM_STEP_NUM_NODES": "1"},
            RankEnvironment(5, 8, 1, 8, meeting_file("77-3-0")),
        ),
    ],
)
def test_a_starters_variables(variables, expected):
    assert read_environment(variables) == expected


def number(name: str, text: object) -> str:
    return f"{name}={text!r} in the environment: a whole number is needed there."


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (
            {"RANK": "1", "WORLD_SIZE": "2"},
            "RANK=1 is set, but neither MASTER_ADDR and MASTER_PORT nor a launcher: "
            "start the script with `parallel3d launch -n N` or torchrun.",
        ),
        ({**TORCH, "MASTER_ADDR": "node3"}, number("MASTER_PORT", None)),
        ({**TORCH, "MASTER_ADDR": "node3", "MASTER_PORT": "x"}, number("MASTER_PORT", "x")),
        ({**TORCH, **MASTER, "RANK": "-1"}, number("RANK", "-1")),
        ({"RANK": "1", **MASTER}, number("WORLD_SIZE", None)),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", **MASTER}, number("LOCAL_WORLD_SIZE", None)),
        ({**TORCH, "PARALLEL3D_STORE_FD": ""}, number("PARALLEL3D_STORE_FD", "")),
        ({**TORCH, **MASTER, "RANK": "8"}, "rank 8 of 8: the environment contradicts itself."),
        ({**SLURM, "SLURM_PROCID": "9"}, "rank 9 of 8: the environment contradicts itself."),
        ({"SLURM_PROCID": "0"}, number("SLURM_NTASKS", None)),
        ({**SLURM, "SLURM_LOCALID": "first"}, number("SLURM_LOCALID", "first")),
        ({**SLURM, **NODES, "SLURM_NNODES": "two"}, number("SLURM_NNODES", "two")),
        ({**SLURM, **NODES, "MASTER_PORT": "http"}, number("MASTER_PORT", "http")),
        ({**SLURM, "SLURM_NNODES": "2"}, "SLURM_JOB_NODELIST='': no host name found in it."),
    ],
)
def test_a_refusal(variables, message):
    with pytest.raises(LaunchError) as caught:
        read_environment(variables)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("node", "node"),
        ("node1,node2", "node1"),
        ("node[03-07,9],login", "node03"),
        ("node[1,4]", "node1"),
        ("rack-a[12]-ib,other[1-2]", "rack-a12-ib"),
        ("n.example.org", "n.example.org"),
        ("login,node[1-3]", "login"),
    ],
)
def test_the_first_host_of_the_shorthand(nodelist, host):
    assert first_host(nodelist) == host


@pytest.mark.parametrize(
    ("counts", "each"),
    [("4(x2),3", [4, 4, 3]), ("3,4(x2)", [3, 4, 4]), ("5,5,1", [5, 5, 1]), ("", [3, 3, 3])],
)
def test_the_tasks_of_each_node(counts, each):
    """Where nothing is said, the tasks are spread evenly."""
    for node, expected in enumerate(each):
        variables = {
            "SLURM_PROCID": "0",
            "SLURM_NTASKS": str(sum(each)),
            "SLURM_NNODES": "3",
            "SLURM_NODEID": str(node),
            "SLURM_JOB_NODELIST": "a,b,c",
            "SLURM_STEP_TASKS_PER_NODE": counts,
        }
        assert read_environment(variables).local_world_size == expected


@pytest.mark.parametrize(
    ("variables", "is_one"),
    [
        ({}, False),
        ({"RANK": "0", "WORLD_SIZE": "8"}, False),
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}, True),
        ({"SLURM_PROCID": "0", "SLURM_STEP_ID": "0"}, True),
        ({"SLURM_PROCID": "0", "SLURM_JOB_ID": "7"}, False),
        ({"PARALLEL3D_STORE_FD": "7", "PARALLEL3D_RANK_PID": str(os.getpid())}, True),
        ({"PARALLEL3D_STORE_FD": "7", "PARALLEL3D_RANK_PID": "1", "RANK": "0", "MASTER_ADDR": "localhost"}, False),
    ],
    ids=["alone", "leftovers", "torchrun", "srun", "batch script", "launch", "started by a rank"],
)
def test_whether_this_process_is_a_rank(variables, is_one):
    assert is_rank(variables) is is_one
