"""AdamW and SGD on flat weights, by torch's fused kernels: what `torch.optim` calls with `fused=True`.

The kernels treat every element alike, so a slice gets the same bits as the whole, as long as its length is a multiple
of a vector register's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from parallel3d.config.sections import Optimizer as OptimizerConfig
from parallel3d.torch_internals import foreach_mul_, fused_adamw_, fused_sgd_


def update_of(config: OptimizerConfig) -> Update:
    """The update that `optimizer.name` says, without weights yet."""
    return _AdamW(config) if config.name == "adamw" else _Sgd(config)


class Update:
    """Updates weights of one dtype."""

    def __init__(self, config: OptimizerConfig) -> None:
        self.config = config
        self.weights: list[torch.Tensor] = []

    def add(self, weights: Sequence[torch.Tensor]) -> None:
        """Add weights. Their state begins at zero."""
        self.weights += weights

    @torch.no_grad()
    def __call__(self, gradients: list[torch.Tensor], number: int, lr: float, factor: float) -> None:
        """Take a step, the `number`-th, with gradients that are multiplied by `factor` first."""
        scale = None
        if factor != 1.0 and gradients[0].dtype is torch.float64:  # the kernels' own scale is a float32
            foreach_mul_(gradients, factor)
        elif factor != 1.0:
            scale = torch.tensor(1.0 / factor, dtype=torch.float32, device=gradients[0].device)
        self.update(gradients, number, lr, scale)

    def update(self, gradients: list[torch.Tensor], number: int, lr: float, scale: torch.Tensor | None) -> None:
        raise NotImplementedError

    def state(self, index: int) -> dict[str, torch.Tensor]:
        """The state of the weights at this index, by name."""
        raise NotImplementedError


class _AdamW(Update):
    def __init__(self, config: OptimizerConfig) -> None:
        super().__init__(config)
        self._means: list[torch.Tensor] = []
        self._squares: list[torch.Tensor] = []
        self._number = torch.zeros(())

    def add(self, weights: Sequence[torch.Tensor]) -> None:
        super().add(weights)
        self._means += map(torch.zeros_like, weights)
        self._squares += map(torch.zeros_like, weights)
        self._number = self._number.to(self.weights[0].device)

    def update(self, gradients: list[torch.Tensor], number: int, lr: float, scale: torch.Tensor | None) -> None:
        config, decay = self.config, self.config.weight_decay
        self._number.fill_(number)
        fused_adamw_(
            self.weights,
            gradients,
            self._means,
            self._squares,
            [],
            [self._number] * len(self.weights),
            lr=lr,
            beta1=config.betas[0],
            beta2=config.betas[1],
            weight_decay=0.01 if decay is None else decay,
            eps=config.eps,
            amsgrad=False,
            maximize=False,
            grad_scale=scale,
        )

    def state(self, index: int) -> dict[str, torch.Tensor]:
        return {"exp_avg": self._means[index], "exp_avg_sq": self._squares[index]}


class _Sgd(Update):
    def __init__(self, config: OptimizerConfig) -> None:
        super().__init__(config)
        self._momenta: list[torch.Tensor] = []

    def add(self, weights: Sequence[torch.Tensor]) -> None:
        super().add(weights)
        if self.config.momentum:
            self._momenta += map(torch.zeros_like, weights)

    def update(self, gradients: list[torch.Tensor], number: int, lr: float, scale: torch.Tensor | None) -> None:
        fused_sgd_(
            self.weights,
            gradients,
            self._momenta,
            weight_decay=self.config.weight_decay or 0.0,
            momentum=self.config.momentum,
            lr=lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,  # the momentum begins at zero, which gives the same
            grad_scale=scale,
        )

    def state(self, index: int) -> dict[str, torch.Tensor]:
        return {"momentum_buffer": self._momenta[index]} if self._momenta else {}
