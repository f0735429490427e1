"""The seam to torch.distributed: what each call becomes, for gloo and NCCL, without network or GPU."""

from __future__ import annotations

import os
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from process_groups import torch_internals
from process_groups.call import Call
from process_groups.torch_backend.backends import choose_backend, device_of, open_backend, open_store
from process_groups.torch_backend.connections import Connections
from process_groups.torch_backend.transport import translate
from process_groups.torch_internals import issue
from runtime.environment import Nowhere, PrivateFile, RankEnvironment
from runtime.errors import CommunicationError, DeadlineExceeded, LaunchError, PeerLost

LIMIT = timedelta(seconds=3.0 + torch_internals.BACKSTOP)


class Recorder:
    """A backend that notes which method was called, and returns its name as the Work."""

    def __init__(self) -> None:
        self.calls = []

    def __getattr__(self, name):
        def record(*args):
            self.calls.append((name, args))
            return name

        return record


def issued(call: Call, tag: int = 14):
    backend = Recorder()
    work = issue(backend, call, tag)
    ((name, args),) = backend.calls
    assert work == name
    return name, args


@pytest.mark.parametrize(
    ("op", "torchs"),
    [
        ("sum", dist.ReduceOp.SUM),
        ("mean", dist.ReduceOp.AVG),
        ("min", dist.ReduceOp.MIN),
        ("max", dist.ReduceOp.MAX),
    ],
)
def test_reductions(op, torchs):
    source, target = torch.ones(4, 2), torch.ones(2, 2)
    name, (tensors, options) = issued(Call("all_reduce", target, target, op=op, timeout=3.0))
    assert (name, options.timeout) == ("allreduce", LIMIT)
    assert tensors[0] is target
    assert options.reduceOp == torchs
    name, (into, out_of, options) = issued(Call("reduce_scatter", source, target, op=op, timeout=3.0))
    assert (name, options.timeout) == ("_reduce_scatter_base", LIMIT)
    assert into is target
    assert out_of is source
    assert options.reduceOp == torchs


def same_bytes(moved: torch.Tensor, tensor: torch.Tensor) -> bool:
    return moved.dtype == torch.uint8 and moved.dim() == 1 and moved.data_ptr() == tensor.data_ptr() and (
        moved.numel() == tensor.numel() * tensor.element_size()
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex64])
def test_what_only_moves_is_moved_as_bytes_in_place(dtype):
    source, target = torch.ones(2, 3, dtype=dtype), torch.ones(4, 3, dtype=dtype)
    name, (into, out_of, options) = issued(Call("all_gather", source, target, timeout=3.0))
    assert (name, options.timeout) == ("_allgather_base", LIMIT)
    assert same_bytes(into, target)
    assert same_bytes(out_of, source)
    name, (tensors, options) = issued(Call("broadcast", target, target, peer=2, timeout=3.0))
    assert (name, options.timeout, options.rootRank, options.rootTensor) == ("broadcast", LIMIT, 2, 0)
    assert same_bytes(tensors[0], target)
    name, (into, out_of, sizes_in, sizes_out, options) = issued(Call("all_to_all", target, target, timeout=3.0))
    assert (name, sizes_in, sizes_out, options.timeout) == ("alltoall_base", [], [], LIMIT)
    assert same_bytes(into, target)
    assert same_bytes(out_of, target)
    for kind, tensors in (("send", {"source": source}), ("recv", {"target": source})):
        name, (moved, peer, tag) = issued(Call(kind, peer=1, timeout=3.0, **tensors))
        assert (name, peer, tag) == (kind, 1, 14)
        assert same_bytes(moved[0], source)


def test_a_barrier():
    name, (options,) = issued(Call("barrier", timeout=3.0))
    assert (name, options.timeout) == ("barrier", LIMIT)


def test_options_of_equal_calls_are_made_once_and_others_apart():
    target = torch.ones(1)

    def options(**changed):
        return issued(Call("all_reduce", target, target, **{"op": "sum", "timeout": 3.0, **changed}))[1][1]

    assert options() is options()
    assert options(op="max").reduceOp == dist.ReduceOp.MAX
    assert options(timeout=1.0).timeout == timedelta(seconds=1.0 + torch_internals.BACKSTOP)
    assert options().timeout == LIMIT


class FakeDist:
    """torch.distributed as on a machine with CUDA; everything else is the real one."""

    class ProcessGroupNCCL:
        Options = SimpleNamespace

        def __init__(self, *args) -> None:
            self.args, self.aborted = args, False

        def abort(self) -> None:
            self.aborted = True

    def __getattr__(self, name):
        return getattr(dist, name)


def test_an_nccl_backend_gets_store_rank_size_and_timeout(monkeypatch):
    monkeypatch.setattr(torch_internals, "dist", FakeDist())
    store = dist.HashStore()
    opened = open_backend("nccl", store, 1, 4, loopback="127.7.7.7", timeout=12.5)
    given_store, rank, size, options = opened.backend.args
    assert given_store is store
    assert (rank, size, options._timeout) == (1, 4, timedelta(seconds=12.5))
    opened.cut()
    assert opened.backend.aborted, "NCCL's sockets are its own"


def test_a_gloo_backend_of_one_host_listens_on_the_groups_address():
    opened = open_backend("gloo", dist.HashStore(), 0, 1, loopback="127.7.7.7", timeout=5.0)
    assert opened.cut.__self__ == Connections("127.7.7.7")
    tensor = torch.ones(2)
    issue(opened.backend, Call("all_reduce", tensor, tensor, op="sum"), 2).wait()
    assert tensor.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("has_cuda", "has_nccl", "chosen"),
    [(True, True, "nccl"), (True, False, "gloo"), (False, True, "gloo"), (False, False, "gloo")],
)
def test_the_backend_is_chosen_by_device(monkeypatch, has_cuda, has_nccl, chosen):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: has_nccl)
    assert choose_backend("auto") == chosen
    assert choose_backend("gloo") == "gloo"
    if chosen == "nccl":
        assert choose_backend("nccl") == "nccl"
    else:
        with pytest.raises(LaunchError) as caught:
            choose_backend("nccl")
        assert str(caught.value) == (
            "backend nccl: this process has no CUDA device, or its torch no NCCL. Use gloo, or auto."
        )


def test_the_device_follows_the_backend():
    assert device_of("nccl", 3) == torch.device("cuda", 3)
    assert device_of("gloo", 3) == torch.device("cpu")


def test_one_rank_alone_needs_no_store_of_others():
    assert isinstance(open_store(RankEnvironment(meeting_place=Nowhere()), 1.0), dist.HashStore)


def test_a_private_meeting_file_is_in_a_private_folder(tmp_path):
    folder = tmp_path / "deep" / "private"
    environment = RankEnvironment(0, 2, meeting_place=PrivateFile(str(folder / "meeting")))
    before = os.umask(0)
    try:
        store = open_store(environment, 1.0)
    finally:
        os.umask(before)
    store.set("key", "value")
    assert (folder / "meeting").exists()
    assert folder.stat().st_mode & 0o777 == 0o700
    open_store(environment, 1.0)


def test_a_folder_that_others_can_open_is_refused(tmp_path):
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o755)
    with pytest.raises(LaunchError) as caught:
        open_store(RankEnvironment(0, 2, meeting_place=PrivateFile(str(folder / "meeting"))), 1.0)
    assert str(caught.value) == (f"{folder} must be a folder that only you can open (chmod 700); ranks meet there.")
    assert list(folder.iterdir()) == []


def test_a_link_in_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("elsewhere")
    with pytest.raises(LaunchError, match="only you can open"):
        open_store(RankEnvironment(0, 2, meeting_place=PrivateFile(str(tmp_path / "link" / "meeting"))), 1.0)


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("Timed out waiting 100ms\nat a", DeadlineExceeded, "Timed out waiting 100ms"),
        ("wait timeout after 5ms", DeadlineExceeded, "wait timeout after 5ms"),
        (
            "x Connection closed by peer [y]",
            PeerLost,
            "a peer's connection is gone: x Connection closed by peer [y]",
        ),
        ("Read error: Connection reset by peer", PeerLost, None),
        ("Write error: Broken pipe", PeerLost, None),
        ("something else\nat b", CommunicationError, "something else"),
    ],
)
def test_torchs_errors_become_ours(text, kind, message):
    found = translate(RuntimeError(text))
    assert type(found) is kind
    assert str(found) == (message or f"a peer's connection is gone: {text}")


def test_our_own_errors_stay():
    error = PeerLost("why", rank=1)
    assert translate(error) is error
