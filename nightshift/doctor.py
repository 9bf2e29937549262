"""All checks of both engines, without changing anything: what `uv run nightshift doctor` shows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nightshift.engines.prime_rl import installation as prime_rl
from nightshift.engines.prime_rl.installation import Installation, Pins
from nightshift.engines.trl.engine import TrlEngine
from nightshift.errors import NightshiftError
from nightshift.git.repo import CONFIG_NAME
from nightshift.processes.gpus import Gpu, GpuIds, choose_pair, list_gpus, pair_problems
from nightshift.rules import GSM8K_PRIME_RL, GSM8K_TRL, Rules
from nightshift.train_toml.config import load

BOTH = "both"


@dataclass(frozen=True, slots=True)
class Check:
    """One thing looked at. `engine`: whose readiness it decides, or BOTH. `fix` is imperative, "" when it is ok."""

    engine: str
    name: str
    ok: bool
    detail: str
    fix: str = ""


def checks(
    root: Path,
    rules: Rules,
    environ: Mapping[str, str],
    gpu_ids: GpuIds | None = None,
    prime_rl_dir: Path | None = None,
    nvml: Any = None,
) -> list[Check]:
    """Everything that prepare.py would repair and run.py would refuse, for both engines.

    `rules` are those that this machine would use; the other engine is checked for GSM8K.
    """
    trl_rules = rules if rules.engine == "trl" else GSM8K_TRL
    return [
        *_config_checks(root),
        *_trl_checks(root, trl_rules, environ),
        *_prime_rl_checks(root, environ, gpu_ids, prime_rl_dir, nvml),
    ]


def is_ready(found: Sequence[Check], engine: str) -> bool:
    """True if nothing is in the way of an experiment on this engine."""
    return all(check.ok for check in found if check.engine in (engine, BOTH))


def table(found: Sequence[Check], rules: Rules) -> str:
    """Plain aligned lines, and last which engine this machine would use and whether it is ready."""
    lines = []
    for check in found:
        text = f"{check.detail}. {check.fix}" if check.fix else check.detail
        lines.append(f"{check.engine:10}{check.name:14}{'ok' if check.ok else 'PROBLEM':9}{text}".rstrip())
    verdict = "ready" if is_ready(found, rules.engine) else "not ready"
    return "\n".join([*lines, f"{verdict}: --engine {rules.engine} ({rules.name}), which this machine would use"])


def _config_checks(root: Path) -> Iterator[Check]:
    try:
        num_keys = len(load(root / CONFIG_NAME).values)
    except NightshiftError as error:
        yield _failed(BOTH, CONFIG_NAME, error)
    else:
        yield Check(BOTH, CONFIG_NAME, True, f"{num_keys} keys, all known")


def _trl_checks(root: Path, rules: Rules, environ: Mapping[str, str]) -> Iterator[Check]:
    problems = TrlEngine(rules, root, environ).check()
    for problem in problems:
        yield Check("trl", "installation", False, problem)
    if not problems:
        yield Check("trl", "installation", True, f"{rules.name}: packages, base model, disk")
    yield _found("trl", "data", prime_rl.data_problem(rules), ", ".join(e.package for e in rules.environments))


def _prime_rl_checks(
    root: Path, environ: Mapping[str, str], gpu_ids: GpuIds | None, prime_rl_dir: Path | None, nvml: Any
) -> Iterator[Check]:
    pair: Sequence[Gpu] = ()
    if gpu_ids != ():
        try:
            pair = choose_pair(list_gpus(nvml), gpu_ids or None, environ)
        except NightshiftError as error:
            yield _failed("prime-rl", "GPUs", error)
        else:
            problems = pair_problems(pair, nvml)
            for problem in problems:
                yield _failed("prime-rl", "GPUs", problem)
            if not problems:
                yield Check("prime-rl", "GPUs", True, "; ".join(_describe(gpu) for gpu in pair))
    installation = Installation.find(Pins.read(root / "pyproject.toml"), environ, prime_rl_dir)
    for name, finding in prime_rl.examine(installation, GSM8K_PRIME_RL, root, pair):
        yield _found("prime-rl", name, finding, str(installation.root) if name == "checkout" else "")


def _describe(gpu: Gpu) -> str:
    major, minor = gpu.compute_capability
    memory = "" if gpu.memory_gb is None else f", {gpu.memory_gb:.1f} GB"
    return f"{gpu}{memory}, compute capability {major}.{minor}, driver {gpu.driver}"


def _found(engine: str, name: str, problem: NightshiftError | None, detail: str) -> Check:
    return Check(engine, name, True, detail) if problem is None else _failed(engine, name, problem)


def _failed(engine: str, name: str, error: NightshiftError) -> Check:
    return Check(engine, name, False, error.cause.rstrip("."), error.fix)
