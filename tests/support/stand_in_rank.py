"""One rank of a run with the stand-in coordinator."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from parallel3d.runs.rank_loop import main
from tests.support.stand_in import StandIn

main(StandIn)  # type: ignore[arg-type]
