"""What dashboards and rules are made for."""

from __future__ import annotations

from dataclasses import dataclass, field

from monitoring.dashboards.target import Target

MOST_ROWS = 64
"""Of a panel with a row a rank: more can't be read."""
_LEAST_WINDOW = 60
"""Seconds that rates are taken over: steps of up to some seconds shall not show as teeth."""


@dataclass(frozen=True, slots=True)
class Setup:
    """A mesh, and the Prometheus that watches it."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    datasource: str = "Prometheus"
    """Its name in Grafana: the one that dashboards show at first, and that is provisioned."""
    target: Target = field(default_factory=Target)
    per_rank: bool = False
    """Whether each rank has an endpoint of its own, too."""
    interval: int = 5
    """Seconds between two scrapes. Runs may be short, so this is less than Prometheus' usual 15."""
    runbooks: str = "docs/runbooks"
    """Folder or URL that alerts point to."""
    settings: tuple[str, ...] = ()
    """KEY=VALUE that `parallel3d run` is given in the compose file."""

    @property
    def world_size(self) -> int:
        return self.dp * self.tp * self.pp

    @property
    def runs_here(self) -> bool:
        """Whether the compose file starts the run, too: one that asks for nothing but to be on its loopback."""
        return self.target.is_local and not self.target.tls and self.target.token_file is None

    @property
    def mesh(self) -> str:
        return f"dp {self.dp} x tp {self.tp} x pp {self.pp}"

    @property
    def window(self) -> str:
        """That rules take rates over: at least four scrapes, so that one may fail."""
        return f"{max(_LEAST_WINDOW, 4 * self.interval)}s"
