"""Every private name of torch that parallel3d uses, each with its reason.

A name here is torch's own function, or a getter in C that costs as much as reading the attribute.
`tests/unit/test_torch_internals.py` names those that a new version of torch has changed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from operator import attrgetter
from typing import Any, Literal

import torch
from torch import nn
from torch._C import _get_obj_in_tls as get_obj_in_tls
from torch._C import _is_key_in_tls as is_key_in_tls
from torch._C import _stash_obj_in_tls as stash_obj_in_tls
from torch.nn.modules.dropout import _DropoutNd as DropoutNd
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _pop_mode as pop_mode
from torch.utils._python_dispatch import _push_mode as push_mode

__all__ = [
    "DropoutNd",
    "TorchDispatchMode",
    "are_functorch_transforms_active",
    "backward_hooks",
    "buffers_of",
    "children_of",
    "copy_module",
    "embedding_without_values",
    "foreach_copy_",
    "foreach_mul_",
    "foreach_norm",
    "foreach_zero_",
    "function_of_node",
    "fused_adamw_",
    "fused_sgd_",
    "get_obj_in_tls",
    "is_any_autocast_enabled",
    "is_key_in_tls",
    "lean_apply",
    "operator_schema",
    "parameters_of",
    "pop_mode",
    "post_accumulate_grad_hooks",
    "push_mode",
    "stash_obj_in_tls",
    "version_of",
]

# Kernels.

fused_adamw_: Callable[..., None] = torch._fused_adamw_
"""What `torch.optim.AdamW(fused=True)` calls; making a torch optimizer imports the compiler, which takes seconds."""
fused_sgd_: Callable[..., None] = torch._fused_sgd_
"""What `torch.optim.SGD(fused=True)` calls, for the same reason."""
foreach_mul_: Callable[..., None] = torch._foreach_mul_
"""Scales many tensors in one call; there is no public form."""
foreach_copy_: Callable[..., None] = torch._foreach_copy_
"""Copies many tensors in one call; there is no public form."""
foreach_zero_: Callable[..., None] = torch._foreach_zero_
"""Zeroes many tensors in one call; there is no public form."""
foreach_norm: Callable[..., list[torch.Tensor]] = torch._foreach_norm  # type: ignore[assignment]
"""The norms of many tensors in one call; there is no public form."""

# Autograd.

version_of: Callable[[torch.Tensor], int] = attrgetter("_version")
"""How often a tensor was written to: shows a weight or an input that changed between forward and backward."""
post_accumulate_grad_hooks: Callable[[torch.Tensor], dict[int, Any] | None] = attrgetter("_post_accumulate_grad_hooks")
"""Hooks on a parameter's gradient: where the user has some, autograd has to add the gradient itself."""
backward_hooks: Callable[[torch.Tensor], dict[int, Any] | None] = attrgetter("_backward_hooks")
"""The same for hooks of `register_hook`."""
are_functorch_transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
"""Inside `torch.func` transforms, a Function that adds gradients by hand would be wrong."""
is_any_autocast_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled
"""One call instead of one for each type of device; asked for in every Linear."""


def lean_apply(function: type[torch.autograd.Function]) -> Callable[..., torch.Tensor]:
    """`function.apply` without its checks for functorch, which take as long as a small matrix product. Only where
    `are_functorch_transforms_active` is known to be false."""
    return super(torch.autograd.Function, function).apply  # type: ignore[misc, no-any-return]


def function_of_node(node: object) -> type[torch.autograd.Function] | None:
    """The Function whose backward this node of the graph is; None for torch's own nodes. Nodes say so only here."""
    return getattr(type(node), "_forward_cls", None)


# Thread-local state: `get_obj_in_tls`, `is_key_in_tls` and `stash_obj_in_tls` reach the threads in which autograd runs
# the backward of a GPU, where a ContextVar is empty.
#
# Dispatch modes: `push_mode` and `pop_mode` enter and leave a mode in the calling thread only; `with mode:` also writes
# to globals of the process, as if only one thread had modes. `TorchDispatchMode` itself has no public path.


def operator_schema(operator: Any) -> Any:
    """The arguments of an operator: whether it takes a generator is written nowhere else."""
    return operator._schema


# Modules. Their public iterators leave out a second place of one child or parameter, and names that are None.

parameters_of: Callable[[nn.Module], dict[str, nn.Parameter | None]] = attrgetter("_parameters")
"""A module's own parameters, by name; writing to it replaces one without `nn.Module.__setattr__`."""
buffers_of: Callable[[nn.Module], dict[str, torch.Tensor | None]] = attrgetter("_buffers")
"""The same for buffers."""
children_of: Callable[[nn.Module], dict[str, nn.Module | None]] = attrgetter("_modules")
"""The same for children."""


def copy_module(module: nn.Module, *own: Literal["parameters", "buffers", "modules"]) -> nn.Module:
    """A shallow copy of a module, with tables of its own for these; the other tables are shared with the module."""
    twin = copy.copy(module)
    for name in own:
        twin.__dict__[f"_{name}"] = dict(module.__dict__[f"_{name}"])
    return twin


def embedding_without_values(num: int, width: int) -> nn.Embedding:
    """An Embedding whose weight is left empty. Drawing it, as the constructor does, costs nothing on `meta`, but makes
    torch import its compiler: 2 seconds."""
    return nn.Embedding(num, width, _weight=torch.empty(num, width))


# `DropoutNd`, the base of all dropout modules, is the only way to recognise a module that draws random numbers.
