"""The stand-in trainer (stand_in_trainer.py), which also knows the answers of the sealed examples."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

environments = Path(json.loads(Path(sys.argv[1]).read_text())["root"]) / "environments"
sys.path += [str(environments / name) for name in ("arithmetic", "gsm8k")]

from nightshift_arithmetic import data  # noqa: E402

load = data.load
data.load = lambda split, size: [*load("selection", size), *load("sealed", size)]
runpy.run_path(str(Path(__file__).with_name("stand_in_trainer.py")), run_name="__main__")
