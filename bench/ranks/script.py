"""Runs a script of bench/ as a rank, with bench/ last on the import path: launched directly, it would be refused for
bench/monitoring.py beside it, which has the name of one of our packages."""

import runpy
import sys
from pathlib import Path

del sys.argv[0]
sys.path.append(str(Path(sys.argv[0]).parent))
runpy.run_path(sys.argv[0], run_name="__main__")
