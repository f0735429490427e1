"""The command `parallel3d`, whose runs have the stand-in coordinator and no model."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import parallel3d.before_start
import parallel3d.training_run
from parallel3d.cli.main import main
from parallel3d.run_record import ModelFacts
from runtime.script import Target
from tests.stand_in import SCRIPT

parallel3d.training_run._RANK = Target(SCRIPT)
parallel3d.before_start.check_before_start = lambda config, locate: ModelFacts(parameters=12)
main()
