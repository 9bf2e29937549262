"""Stand-ins below the engine, for the head and for the workers that it starts.

    install("trl", executor=True)           # in the head's process, before run.py's or the night's own code
    python stand_ins.py KIND ROOT FOLDER   # a worker, as an executor starts it then

KIND: `trl`, the real engine around a trainer that trains nothing; `night`, the same with another scale of learning
rates; `mac`, as `trl` without what only Linux has; `prime-rl:FOLDER`, the real engine around programs that train
nothing; `real`, no stand-in at all.
"""

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from nightshift.config.rules import Rules  # noqa: E402
from nightshift.config.rules_toml import rules_here  # noqa: E402
from nightshift.engines.trl.engine import TrlEngine  # noqa: E402
from tests import stand_in_mac  # noqa: E402
from tests.rules import ARITHMETIC_TRL, GSM8K_PRIME_RL  # noqa: E402
from tests.waiting import HANG_SECONDS  # noqa: E402

NUM_VALIDATION = 400


class StandInTrl(TrlEngine):
    """The real engine around a trainer that trains nothing."""

    trainer = (str(HERE / "stand_in_trainer.py"),)


def small(rules: Rules, num_validation: int = NUM_VALIDATION) -> Rules:
    """The rules with fewer examples than the thousands that every process would draw and answer.

    The stand-in's scores follow the learning rate at a scale of 50, whatever that of the real task is.
    """
    few = replace(rules.environments[0], num_validation=num_validation)
    guards = tuple(replace(guard, num_validation=num_validation) for guard in rules.guards)
    return replace(rules, environments=(few,), guards=guards, learning_rate_scale=50.0)


def quick(rules: Rules) -> Rules:
    """The same with a second of training, and without a limit that a slow machine could reach."""
    limits = {"startup_seconds": HANG_SECONDS, "evaluation_seconds": HANG_SECONDS}
    return replace(small(rules, NUM_VALIDATION), budget_seconds=1.0, **limits)


def fault(folder: Path, name: str, once: bool = True) -> None:
    """Have the stand-in trainer do what it calls so: in its next run below the folder, or in every one."""
    (folder / "stand-in.json").write_text(json.dumps({"fault": name, "once": once}))


def trl_engine(rules: Rules, root: Path, environ: Mapping[str, str], *flags: object) -> TrlEngine:
    rules = replace(rules, startup_seconds=HANG_SECONDS, evaluation_seconds=HANG_SECONDS)
    return StandInTrl(rules, root, environ)


def night_engine(rules: Rules, root: Path, environ: Mapping[str, str], *flags: object) -> TrlEngine:
    """The stand-in's best learning rate is 3e-6, whatever the scale of the real task."""
    return trl_engine(replace(rules, learning_rate_scale=200.0), root, environ)


def prime_rl_rules() -> Rules:
    """prime-rl's own rules on a small validation split, with a base model that has no weights."""
    small_split = replace(ARITHMETIC_TRL.environments[0], num_validation=16, num_train=64)
    base = str(HERE / "fixtures" / "prime_rl" / "base")
    return replace(GSM8K_PRIME_RL, environments=(small_split,), model=base, model_revision=None)


def _put_into(module: ModuleType, kind: str) -> None:
    name, _, folder = kind.partition(":")
    if name == "prime-rl":
        from nightshift.engines.prime_rl import engine, served
        from nightshift.engines.prime_rl.install import Installation, Pins
        from nightshift.engines.prime_rl.session import Timing
        from tests import stand_in_prime_rl

        engine.examine = lambda *arguments: []
        there = Path(folder) / "prime-rl"  # the head has made it, before its workers
        pins = Pins.read(HERE.parent / "pyproject.toml")
        made = Installation(there, pins)
        if not there.exists():
            made = stand_in_prime_rl.installation(Path(folder))
        engine.PrimeRlEngine.timing = Timing(startup_seconds=HANG_SECONDS, grace_seconds=1.0, poll_seconds=0.05)
        engine.PrimeRlEngine.installation, served.READER = made, (str(made.bin_dir / "reader.py"),)

        def open_engine(rules: Rules, root: Path, environ: Mapping[str, str], *flags: object) -> object:
            return engine.PrimeRlEngine(rules, root, environ, "none")

        module.open_engine = open_engine  # type: ignore[attr-defined]
        module.rules_here = lambda *arguments: prime_rl_rules()  # type: ignore[attr-defined]
    else:
        module.rules_here = lambda *arguments: small(rules_here(*arguments))  # type: ignore[attr-defined]
        module.open_engine = {"trl": trl_engine, "mac": trl_engine, "night": night_engine}[name]  # type: ignore[attr-defined]


def save_time(with_page: bool) -> None:
    """Have this process, a controller, survive no power cut, and write no page, or one of few problems."""
    os.fsync = lambda descriptor: None
    if with_page:
        from nightshift.report import slices

        slices.environments_named = lambda *arguments: small(ARITHMETIC_TRL).environments
    else:
        page = sys.modules["nightshift.report.page"] = ModuleType("page")
        page.write_report = lambda *arguments, **options: None  # type: ignore[attr-defined]


def install(kind: str) -> None:
    """Have this process, as the controller, and its workers use the stand-in. It does not wait long for git's locks."""
    from nightshift.campaign import git
    from nightshift.executors import base, process
    from nightshift.experiment import experiment

    git.LOCK_SECONDS = 0.3
    if kind != "real":
        _put_into(experiment, kind)
        base.PROGRAM = (__file__, kind)
    if kind == "mac":
        stand_in_mac.remove_linux()
        process.WATCHDOG = (stand_in_mac.__file__,)


if __name__ == "__main__":
    from nightshift.executors import process
    from nightshift.experiment import worker

    _put_into(worker, sys.argv[1])
    if sys.argv[1] == "mac":
        stand_in_mac.remove_linux()
        process.WATCHDOG = (stand_in_mac.__file__,)
    sys.exit(worker.main(Path(sys.argv[2]), Path(sys.argv[3])))
