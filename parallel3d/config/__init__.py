"""A run's configuration: YAML file, environment and `--set` in, one checked `RunConfig` out. No torch."""

from parallel3d.config.loader import load_config, locate
from parallel3d.config.sections import RunConfig

__all__ = ["RunConfig", "load_config", "locate"]
