"""The command `parallel3d`, whose runs have the stand-in coordinator and no model."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import parallel3d.runs.supervised
from parallel3d.cli.main import main
from parallel3d.planning.preflight import ModelFacts
from runtime.launch.script import Target
from tests.support.stand_in import SCRIPT

parallel3d.runs.supervised._RANK = Target(SCRIPT)
parallel3d.runs.supervised.check_before_start = lambda config, locate: ModelFacts(parameters=12)
main()
