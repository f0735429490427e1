"""`parallel3d run` in a process that torchrun, SLURM or `parallel3d launch` has made a rank."""

from __future__ import annotations

import os
import shutil
import sys
import traceback
from collections.abc import Mapping
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path

from monitoring.analysis.facts import Status
from monitoring.http.endpoint import Endpoint
from monitoring.messages import RunStep
from parallel3d.cli.run_text import LiveLine, say_summary
from parallel3d.cli.validate import EXIT_BAD_CONFIG
from parallel3d.config import RunConfig, load_config, locate
from parallel3d.planning.preflight import check_before_start
from parallel3d.runs.endpoint import endpoints, open_endpoint, page_to_show
from parallel3d.runs.folder import RunFolder, check_run_dir, new_run_id
from parallel3d.runs.monitor import RunWatch
from parallel3d.runs.record import RunRecord
from runtime.environment import read_environment
from runtime.errors import ConfigError
from runtime.loop import run

EXIT_FAILED, EXIT_HUNG = 4, 124


def run_as_rank(file: Path, overrides: Mapping[str, str], place: str, as_json: bool) -> int:
    """This rank's part of a run, from the file to the exit code."""
    environment = read_environment()
    is_first = environment.rank == 0
    try:
        config = load_config(file, overrides=overrides, world_size=environment.world_size)
        if is_first:  # the others may find what rank 0 has written by now
            check_run_dir(config, place)
        with redirect_stdout(sys.stderr):  # what a factory of the user's prints is not our data
            facts = check_before_start(config, partial(locate, file, overrides), environment.local_world_size)
        folder, endpoint = None, None
        if is_first:
            endpoint = open_endpoint(config, partial(locate, file, overrides))
            folder = _make_folder(config, place, endpoint)
    except ConfigError:
        if environment.local_rank == 0:  # another host may lack what rank 0's has
            raise
        return EXIT_BAD_CONFIG  # the host's first rank says it for all

    from parallel3d.runs.torchrun_rank import RankOwner
    from parallel3d.training.coordinator import Coordinator

    live = LiveLine(sys.stderr, os.environ, shutil.get_terminal_size().columns)
    watch = partial(RunWatch, folder=folder, endpoint=endpoint) if folder and config.monitoring.enabled else None

    def show(record: RunRecord, step: RunStep) -> None:
        live.show(record, step, owner.bubble)

    owner = RankOwner(environment.rank, config, facts, folder, show, watch)
    try:
        with redirect_stdout(sys.stderr):
            run(lambda: owner.work(Coordinator.from_config))
    except Exception:
        traceback.print_exc()
    finally:
        live.close()
        if folder is not None:
            say_summary(owner.record, folder.path, folder.metrics(owner.record), as_json)
        if endpoint is not None:
            endpoint.close()
    match owner.record.status:
        case Status.COMPLETED:
            return 0
        case Status.HUNG:
            return EXIT_HUNG
        case _:
            return EXIT_FAILED


def _make_folder(config: RunConfig, place: str, endpoint: Endpoint | None) -> RunFolder:
    """Rank 0's, with where the run is served; the page is told on stderr."""
    run_id = new_run_id()
    known = endpoints(run_id, endpoint, config.monitoring.per_rank)
    try:
        folder = RunFolder.create(config, run_id, place, known)
    except ConfigError:
        if endpoint is not None:
            endpoint.close()
        raise
    print(f"run {run_id}: {folder.path}/", file=sys.stderr, flush=True)
    if (page := page_to_show(known, config)) is not None:
        print(f"page: {page}", file=sys.stderr, flush=True)
    return folder
