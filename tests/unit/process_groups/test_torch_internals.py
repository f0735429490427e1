"""Whether torch still has the undocumented parts that `torch_internals` uses, and whether they still work."""

from __future__ import annotations

from functools import reduce

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from process_groups.call import Call
from process_groups.torch_internals import (
    BACKENDS,
    NCCL_BACKENDS,
    TENSORS,
    TorchBackend,
    gloo_backend,
    gloo_device,
    issue,
)

WHERE = "process_groups/torch_internals.py"


@pytest.fixture(scope="module")
def backend() -> TorchBackend:
    """Of a group of one."""
    return gloo_backend(dist.HashStore(), 0, 1, gloo_device(address="127.0.0.1"), timeout=10.0)


@pytest.mark.parametrize(
    ("owner", "path", "purpose"),
    [
        *((c10d, path, purpose) for path, purpose in BACKENDS.items()),
        *((c10d, path, purpose) for path, purpose in NCCL_BACKENDS.items() if dist.is_nccl_available()),
        *((torch.Tensor, path, purpose) for path, purpose in TENSORS.items()),
    ],
)
def test_torch_has_the_name(owner, path, purpose):
    try:
        reduce(getattr, path.split("."), owner)
    except AttributeError:
        pytest.fail(
            f"torch {torch.__version__} has no {owner.__name__}.{path}. {WHERE} uses it for: {purpose}. "
            "Find what replaces it, or lower the upper bound on torch in pyproject.toml."
        )


@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "barrier"])
def test_gloo_takes_the_call(backend, kind):
    source, target = torch.tensor([1.0, 2.0]), torch.zeros(2)
    if kind in ("all_reduce", "broadcast"):
        target.copy_(source)
    op = "sum" if kind in ("all_reduce", "reduce_scatter") else None
    call = Call(kind, op=op, timeout=10.0) if kind == "barrier" else Call(kind, source, target, op, 0, 10.0)
    try:
        assert issue(backend, call, tag=0).wait()
    except TypeError as error:
        pytest.fail(f"torch {torch.__version__} takes other arguments for {kind} than {WHERE} gives: {error}")
    if kind != "barrier":
        assert target.tolist() == [1.0, 2.0]


def test_a_stores_server_can_be_given_its_socket():
    """`open_store` does, so that it does not listen on every interface."""
    assert "master_listen_fd" in (dist.TCPStore.__init__.__doc__ or ""), "TCPStore has no parameter master_listen_fd"
