"""run.py for another checkout, with stand-ins below the engine.

stand_in_run.py ROOT [--real-worker | --stand-in-prime-rl FOLDER] [flags of run.py]
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import run  # noqa: E402
from nightshift import setup as lab  # noqa: E402
from nightshift.engines.prime_rl import engine as prime_rl  # noqa: E402
from nightshift.engines.prime_rl.engine import PrimeRlEngine  # noqa: E402
from nightshift.engines.prime_rl.session import Timing  # noqa: E402
from nightshift.engines.trl.engine import TrlEngine  # noqa: E402
from nightshift.rules import ARITHMETIC_TRL, GSM8K_PRIME_RL, Rules  # noqa: E402
from tests import stand_in_prime_rl  # noqa: E402


def stand_in_engine(rules: Rules, root: Path, gpus: str | None = None, keep_all: bool = False) -> TrlEngine:
    """The real engine around a worker that trains nothing."""
    rules = replace(rules, startup_seconds=20.0, evaluation_seconds=20.0)
    return TrlEngine(rules, root, dict(os.environ), worker=HERE / "stand_in_worker.py")


def stand_in_prime_rl_engine(folder: Path) -> PrimeRlEngine:
    """The real engine around programs that train nothing (tests/stand_in_prime_rl.py), on a small selection set."""
    environments = (replace(ARITHMETIC_TRL.environments[0], num_selection=16, num_train=64),)
    rules = replace(GSM8K_PRIME_RL, environments=environments)
    prime_rl.problems = lambda *arguments: []
    made = stand_in_prime_rl.installation(folder, rules)
    timing = Timing(startup_seconds=20.0, grace_seconds=1.0, poll_seconds=0.05)
    return PrimeRlEngine(rules, HERE.parent, dict(os.environ), made, gpu_ids=(), timing=timing)


if __name__ == "__main__":
    run.ROOT = Path(sys.argv[1])
    flags = sys.argv[2:]
    if "--real-worker" in flags:
        flags.remove("--real-worker")
    elif "--stand-in-prime-rl" in flags:
        at = flags.index("--stand-in-prime-rl")
        _, folder = flags[at : at + 2]
        del flags[at : at + 2]
        engine = stand_in_prime_rl_engine(Path(folder))
        lab.open_engine = lambda *arguments: engine
        lab.pick_rules = lambda *arguments: engine.rules
    else:
        lab.open_engine = stand_in_engine
    run.main(flags)
