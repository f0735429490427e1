"""Each private name of torch in `parallel3d.torch_internals` still does what it is used for."""

from __future__ import annotations

import ast
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import parallel3d
from parallel3d import torch_internals
from parallel3d.torch_internals import (
    DropoutNd,
    TorchDispatchMode,
    are_functorch_transforms_active,
    backward_hooks,
    buffers_of,
    children_of,
    copy_module,
    embedding_without_values,
    foreach_copy_,
    foreach_mul_,
    foreach_norm,
    foreach_zero_,
    function_of_node,
    fused_adamw_,
    fused_sgd_,
    get_obj_in_tls,
    is_any_autocast_enabled,
    is_key_in_tls,
    lean_apply,
    operator_schema,
    parameters_of,
    pop_mode,
    post_accumulate_grad_hooks,
    push_mode,
    stash_obj_in_tls,
    version_of,
)

PACKAGE = Path(parallel3d.__file__).parent


def changed(name: str, what: str) -> str:
    return f"torch {torch.__version__} has changed {name}: {what}. See parallel3d/torch_internals.py for its use."


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values):
        return values * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


def test_fused_adamw():
    weights, gradients = [torch.ones(64)], [torch.full((64,), 0.5)]
    means, squares = [torch.zeros(64)], [torch.zeros(64)]
    own = nn.Parameter(torch.ones(64))
    own.grad = torch.full((64,), 0.25)
    options = {"lr": 0.1, "weight_decay": 0.01, "eps": 1e-8, "amsgrad": False, "maximize": False}
    scale = torch.tensor(2.0)  # gradients are divided by it
    fused_adamw_(
        weights, gradients, means, squares, [], [torch.tensor(1.0)], beta1=0.9, beta2=0.99, grad_scale=scale, **options
    )
    torch.optim.AdamW([own], betas=(0.9, 0.99), fused=True, **options).step()
    assert torch.equal(weights[0], own), changed("torch._fused_adamw_", "it is not the step of AdamW(fused=True)")


def test_fused_sgd():
    weights, gradients, momenta = [torch.ones(64)], [torch.full((64,), 0.5)], [torch.zeros(64)]
    own = nn.Parameter(torch.ones(64))
    own.grad = torch.full((64,), 0.25)
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": False, "maximize": False}
    scale = torch.tensor(2.0)
    fused_sgd_(weights, gradients, momenta, dampening=0.0, is_first_step=False, grad_scale=scale, **options)
    torch.optim.SGD([own], fused=True, **options).step()
    assert torch.equal(weights[0], own), changed("torch._fused_sgd_", "it is not the step of SGD(fused=True)")


def test_foreach_kernels():
    one, two = torch.ones(3), torch.full((2, 2), 2.0)
    foreach_mul_([one, two], 3.0)
    assert (one.sum(), two.sum()) == (9.0, 24.0), changed("torch._foreach_mul_", "it does not scale in place")
    foreach_copy_([one], [torch.arange(3.0)])
    assert one.tolist() == [0.0, 1.0, 2.0], changed("torch._foreach_copy_", "it does not copy in place")
    norms = [float(each) for each in foreach_norm([two, torch.tensor([3.0, 4.0])])]
    assert norms == [12.0, 5.0], changed("torch._foreach_norm", "it does not give 2-norms")
    foreach_zero_([one, two])
    assert not one.any(), changed("torch._foreach_zero_", "it does not zero in place")
    assert not two.any(), changed("torch._foreach_zero_", "it does not zero in place")


def test_version():
    values = torch.ones(2)
    before = version_of(values)
    values.add_(1)
    assert version_of(values) == before + 1, changed("Tensor._version", "it does not count writes")


def test_hooks_of_tensors():
    weight = nn.Parameter(torch.ones(2))
    assert not post_accumulate_grad_hooks(weight), changed("Tensor._post_accumulate_grad_hooks", "it is never empty")
    assert not backward_hooks(weight), changed("Tensor._backward_hooks", "it is never empty")

    def seen(_: torch.Tensor) -> None: ...

    weight.register_post_accumulate_grad_hook(seen)
    hooks = post_accumulate_grad_hooks(weight) or {}
    assert [*hooks.values()] == [seen], changed("Tensor._post_accumulate_grad_hooks", "it does not list the hooks")
    weight.register_hook(seen)
    assert backward_hooks(weight), changed("Tensor._backward_hooks", "it does not list the hooks of register_hook")


def test_functorch_transforms():
    seen = []

    def look(values):
        seen.append(are_functorch_transforms_active())
        return values.sum()

    torch.func.grad(look)(torch.ones(2))
    seen.append(are_functorch_transforms_active())
    assert seen == [True, False], changed("torch._C._are_functorch_transforms_active", "it misses torch.func.grad")


def test_autocast():
    name = "torch._C._is_any_autocast_enabled"
    assert not is_any_autocast_enabled(), changed(name, "it is true outside of autocast")
    with torch.autocast("cpu", torch.bfloat16):
        assert is_any_autocast_enabled(), changed(name, "it is false inside of autocast")


def test_lean_apply_and_the_function_of_a_node():
    values = torch.ones(2, requires_grad=True)
    output = lean_apply(Doubled)(values)
    output.sum().backward()
    assert values.grad is not None, changed("torch.autograd.Function.apply", "its base class has no apply of its own")
    assert values.grad.tolist() == [2.0, 2.0], changed("torch.autograd.Function.apply", "its base runs no backward")
    assert function_of_node(output.grad_fn) is Doubled, changed("_forward_cls", "nodes don't name their Function")
    assert function_of_node(output.sum().grad_fn) is None, changed("_forward_cls", "torch's own nodes have it too")


def test_leaves_of_the_graph():
    weight = nn.Parameter(torch.ones(2))
    (node, _), *_ = (weight * 2).grad_fn.next_functions
    assert getattr(node, "variable", None) is weight, changed("AccumulateGrad.variable", "it does not give the leaf")


def test_thread_local_objects():
    key = "tests.unit.test_torch_internals"
    name = "torch._C._stash_obj_in_tls"
    assert not is_key_in_tls(key), changed("torch._C._is_key_in_tls", "it is true for a key that was never set")
    stash_obj_in_tls(key, [1])
    try:
        assert is_key_in_tls(key), changed(name, "it sets nothing")
        assert get_obj_in_tls(key) == [1], changed("torch._C._get_obj_in_tls", "it does not give what was set")
    finally:
        stash_obj_in_tls(key, None)


def test_dispatch_modes_are_of_one_thread():
    seen: list[str] = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(threading.current_thread().name)
            return func(*args, **(kwargs or {}))

    push_mode(Seen())
    try:
        torch.ones(1)
        other = threading.Thread(target=torch.ones, args=(1,), name="other")
        other.start()
        other.join()
    finally:
        pop_mode()
    inside = len(seen)
    torch.ones(1)
    assert inside, changed("torch.utils._python_dispatch._push_mode", "the mode sees no calls")
    assert "other" not in seen, changed("torch.utils._python_dispatch._push_mode", "the mode is of all threads")
    assert len(seen) == inside, changed("torch.utils._python_dispatch._pop_mode", "the mode stays")


def test_schemas_of_operators():
    arguments = [each.name for each in operator_schema(torch.ops.aten.bernoulli_.float).arguments]
    assert "generator" in arguments, changed("OpOverload._schema", "it does not list arguments")
    tags = torch.ops.aten.bernoulli_.float.tags
    assert torch.Tag.nondeterministic_seeded in tags, changed("OpOverload.tags", "they don't say which operators draw")


def test_generators_that_functions_of_torch_use():
    """OwnDraws puts a stand-in there."""
    own = torch.random.default_generator
    stand_in = torch.Generator().manual_seed(3)
    try:
        torch.random.default_generator = stand_in
        same = torch.equal(torch.get_rng_state(), stand_in.get_state())
    finally:
        torch.random.default_generator = own
    assert same, changed("torch.random.default_generator", "torch.get_rng_state does not use it")


def test_tables_of_modules():
    shared = nn.Linear(2, 2)
    module = nn.Sequential(shared, shared, nn.BatchNorm1d(2))
    assert [*children_of(module).values()] == [*module], changed("Module._modules", "it does not list all children")
    assert [*parameters_of(shared)] == ["weight", "bias"], changed("Module._parameters", "it does not list them")
    names = [name for name, _ in module[2].named_buffers()]
    assert [*buffers_of(module[2])] == names, changed("Module._buffers", "it does not list buffers")
    weight = nn.Parameter(torch.zeros(2, 2))
    parameters_of(shared)["weight"] = weight
    assert shared.weight is weight, changed("Module._parameters", "writing to it does not replace a parameter")


def test_copies_of_modules():
    module = nn.BatchNorm1d(2)
    twin = copy_module(module, "buffers")
    assert type(twin) is nn.BatchNorm1d
    assert twin.weight is module.weight
    buffers_of(twin)["running_mean"] = torch.ones(2)
    assert not module.running_mean.any(), changed("Module._buffers", "a copied module shares it")
    assert parameters_of(twin) is parameters_of(module), changed("Module._parameters", "copy.copy copies it")


def test_an_embedding_without_values():
    with torch.device("meta"):
        made = embedding_without_values(5, 3)
    assert (made.weight.is_meta, *made.weight.shape) == (True, 5, 3), changed(
        "nn.Embedding(_weight=)", "it is not used"
    )


@pytest.mark.parametrize("kind", [nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout])
def test_all_dropouts_have_one_base(kind):
    assert issubclass(kind, DropoutNd), changed("torch.nn.modules.dropout._DropoutNd", f"{kind.__name__} is none")


def private_names(path: Path) -> list[str]:
    """Private names that a file takes from torch."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            found += [f"{path.name}:{node.lineno} {name}" for name in names if name.startswith("_")]
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            root: ast.expr = node
            while isinstance(root, ast.Attribute):
                root = root.value
            if isinstance(root, ast.Name) and root.id == "torch":
                found.append(f"{path.name}:{node.lineno} {node.attr}")
    return found


def test_private_names_of_torch_are_used_nowhere_else():
    here = Path(torch_internals.__file__)
    assert private_names(here)
    assert [name for path in sorted(PACKAGE.rglob("*.py")) if path != here for name in private_names(path)] == []
