"""Modules of which a tensor-parallel rank has a part, and what is known of a parameter that is cut or seen in part."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class Cut:
    """The part of a parameter that a rank has: from `start` to `stop` along a dimension of `whole_size`."""

    dim: int
    start: int
    stop: int
    whole_size: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    @classmethod
    def of_rank(cls, dim: int, whole_size: int, rank: int, num_ranks: int) -> Cut:
        """Sizes differ by at most one; the first ranks have more."""
        each, over = divmod(whole_size, num_ranks)
        start = rank * each + min(rank, over)
        return cls(dim, start, start + each + (rank < over), whole_size)

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """A view of the part."""
        return whole.narrow(self.dim, self.start, self.size)


def cut_of(parameter: torch.Tensor) -> Cut | None:
    """Which part of the whole one this is; None where it is all of it."""
    cut: Cut | None = getattr(parameter, "tensor_cut", None)
    return cut


class Sharded(nn.Module):
    """Has parts of another module's parameters, under the same names."""

    def __init__(
        self, whole: nn.Module, cuts: Mapping[str, Cut], known: dict[int, nn.Parameter] | None = None, path: str = ""
    ) -> None:
        """known: by the `id` of whole parameters, their parts that are made already; tied ones stay tied."""
        super().__init__()
        self.cuts, self.path = dict(cuts), path
        known = {} if known is None else known
        for name, parameter in whole._parameters.items():
            cut = self.cuts.get(name)
            if parameter is not None and cut is not None:
                if id(parameter) not in known:
                    known[id(parameter)] = _part(parameter, cut)
                parameter = known[id(parameter)]
            self.register_parameter(name, parameter)
        self._whole = (_twin(whole),)  # in a tuple, or it would be a child

    def whole_module(self) -> nn.Module:
        """The other module: on `meta`, to be given its values; or real, as long as `take` was not called."""
        return _twin(self._whole[0])

    @torch.no_grad()
    def take(self, whole: nn.Module) -> None:
        """Copy this rank's parts."""
        for name, parameter in self._parameters.items():
            given = whole._parameters[name]
            if parameter is not None and given is not None and given is not parameter:
                parameter.copy_(self.cuts[name].of(given) if name in self.cuts else given)
        self._whole = (_twin(self._whole[0], is_blank=True),)

    def extra_repr(self) -> str:
        whole = self._whole[0]._parameters
        return ", ".join(
            f"{name}={tuple(each.shape)} of {tuple(of.shape)}"
            for name, each in self._parameters.items()
            if each is not None and (of := whole[name]) is not None
        )


def _part(parameter: nn.Parameter, cut: Cut) -> nn.Parameter:
    made = nn.Parameter(cut.of(parameter.detach()).clone(), requires_grad=parameter.requires_grad)
    made.__dict__.update(parameter.__dict__)
    made.tensor_cut = cut  # type: ignore[attr-defined]
    return made


def _twin(module: nn.Module, *, is_blank: bool = False) -> nn.Module:
    """A module of the same type and settings, with parameters of its own where they are on `meta` or shall be."""
    twin = copy.copy(module)
    twin._parameters = {
        name: each if each is None or not (is_blank or each.is_meta) else _blank(each)
        for name, each in module._parameters.items()
    }
    twin._buffers = dict(module._buffers)
    return twin


def _blank(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
