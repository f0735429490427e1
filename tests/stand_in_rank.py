"""One rank of a run with the stand-in coordinator."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from parallel3d.trainer import main
from tests.stand_in import StandIn

main(StandIn)  # type: ignore[arg-type]
