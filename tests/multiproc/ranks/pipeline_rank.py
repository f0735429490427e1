"""One rank of a pipeline that runs every schedule and compares with one process."""

import os
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

import parallel3d
from tests.support.pipelines import check_every_schedule

if os.environ.get("APART"):  # a host of its own for each rank: nothing is shared but the network
    os.environ["PARALLEL3D_HOST"] = f"host-{os.environ['RANK']}"

parallel3d.run(partial(check_every_schedule, int(os.environ["WORLD_SIZE"])))
