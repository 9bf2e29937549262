"""run.py for another checkout, with the stand-in worker: `stand_in_run.py ROOT [--real-worker] [flags]`."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import run  # noqa: E402
from nightshift import lab  # noqa: E402
from nightshift.engines.trl import TrlEngine  # noqa: E402
from nightshift.rules import Rules  # noqa: E402


def stand_in_engine(rules: Rules, root: Path, gpus: str | None = None, keep_all: bool = False) -> TrlEngine:
    """The real engine around a worker that trains nothing."""
    rules = replace(rules, startup_seconds=20.0, evaluation_seconds=20.0)
    return TrlEngine(rules, root, dict(os.environ), worker=HERE / "stand_in_worker.py")


if __name__ == "__main__":
    run.ROOT = Path(sys.argv[1])
    flags = [flag for flag in sys.argv[2:] if flag != "--real-worker"]
    if "--real-worker" not in sys.argv:
        lab.open_engine = stand_in_engine
    run.main(flags)
