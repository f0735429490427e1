"""One rank of the contract suite: runs the scenarios named on its command line, writes each one's outcome as JSON.

contract_rank.py FOLDER SCENARIO…
"""

import json
import os
import sys
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

import parallel3d
from tests.support.contract import SCENARIOS

rank = os.environ["RANK"]
if os.environ.get("APART"):  # a host of its own for each rank: nothing is shared but the network
    os.environ["PARALLEL3D_HOST"] = f"host-{rank}"


async def main():
    outcomes = {}
    for name in sys.argv[2:]:
        try:
            await SCENARIOS[name]()
            outcomes[name] = None
        except BaseException:
            outcomes[name] = traceback.format_exc()
    return outcomes


outcomes = parallel3d.run(main)
Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(outcomes))
