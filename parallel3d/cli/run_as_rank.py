"""`parallel3d run` as one of the ranks that torchrun, SLURM or `parallel3d launch` has started: rank 0 writes the folder."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path

from parallel3d.cli.run import say_summary
from parallel3d.cli.run_text import LiveLine
from parallel3d.cli.validate import EXIT_BAD_CONFIG
from parallel3d.config import RunConfig, load_config
from parallel3d.run_folder import RunFolder, check_run_dir, new_run_id
from parallel3d.run_record import RunError, RunRecord, Status
from runtime.environment import read_environment
from runtime.errors import CommunicationError, ConfigError, DeadlineExceeded

EXIT_FAILED, EXIT_HUNG = 4, 124


def run_as_rank(file: Path, overrides: Mapping[str, str], place: str, as_json: bool) -> int:
    """This rank's part, from the file to the exit code."""
    environment = read_environment()
    try:
        config = load_config(file, overrides=overrides, world_size=environment.world_size)
        check_run_dir(config, place)
        facts = check_before_start(config)
    except ConfigError:
        if environment.rank == 0:
            raise
        return EXIT_BAD_CONFIG  # rank 0 says it for all
