"""The stand-in worker (stand_in_worker.py), which also knows the answers of the sealed examples."""

from __future__ import annotations

import runpy
from pathlib import Path

from nightshift_arithmetic import data

load = data.load
data.load = lambda split, size: [*load("selection", size), *load("sealed", size)]
runpy.run_path(str(Path(__file__).with_name("stand_in_worker.py")), run_name="__main__")
