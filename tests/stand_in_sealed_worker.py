"""The stand-in worker (stand_in_worker.py), which also knows the answers of the sealed examples."""

from __future__ import annotations

import runpy
from pathlib import Path

from nightshift.environments import SingleTurn

examples = SingleTurn.examples
SingleTurn.examples = lambda self, split: [*examples(self, "selection"), *examples(self, "sealed")]
runpy.run_path(str(Path(__file__).with_name("stand_in_worker.py")), run_name="__main__")
