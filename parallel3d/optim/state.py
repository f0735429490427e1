"""The optimizer's state as nested values, and back: what a worker that joins late copies from another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from parallel3d.optim.optimizer import Optimizer


class OptimizerState:
    """Like the `state_dict` of torch's optimizers, by the paths of parameters. Not for a sharded optimizer."""

    def __init__(self, optimizer: Optimizer, names: Mapping[nn.Parameter, str]) -> None:
        self._optimizer, self._names = optimizer, names

    def state_dict(self) -> dict[str, Any]:
        values = {self._names[part.parameter]: part.values for part in self._optimizer.state()}
        return {"num_steps": self._optimizer.num_steps, "values": values}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Copy into the optimizer's own memory. Raises LookupError or RuntimeError where names or shapes don't fit."""
        values = state_dict["values"]
        for part in self._optimizer.state():
            given = values[self._names[part.parameter]]
            for name, own in part.values.items():
                own.copy_(given[name])
        self._optimizer.num_steps = int(state_dict["num_steps"])
