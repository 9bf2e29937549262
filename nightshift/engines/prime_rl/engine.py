"""The two-GPU engine: prime-rl, with vLLM on the first GPU and the GRPO trainer on the second.

This module checks, resolves and starts; session.py is one run. Neither torch nor prime_rl is ever
imported here: prime-rl lives in an environment of its own.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from nightshift.engines import Effective
from nightshift.engines.prime_rl import launch as launches
from nightshift.engines.prime_rl.effective import effective
from nightshift.engines.prime_rl.installation import Installation, model_folder, problems
from nightshift.engines.prime_rl.session import PrimeRlSession, Timing
from nightshift.errors import ConfigError, EngineError
from nightshift.processes.gpus import Gpu, GpuIds, choose_pair, list_gpus, pair_problems
from nightshift.rules import Rules
from nightshift.train_toml.config import Config, load

NO_GPU = "no GPU (--gpus none): not comparable"


class PrimeRlEngine:
    """prime-rl on two GPUs of this machine, under the given rules."""

    name = "prime-rl"

    def __init__(
        self,
        rules: Rules,
        root: Path,
        environment: Mapping[str, str],
        installation: Installation,
        gpu_ids: GpuIds | None = None,
        timing: Timing | None = None,
        keep_all: bool = False,
    ) -> None:
        """`gpu_ids`: None takes the first two visible; () runs without GPUs, which compares with nothing."""
        self.rules, self.root, self.installation = rules, root, installation
        self._environment, self._gpu_ids, self._keep_all = environment, gpu_ids, keep_all
        self._timing = timing or Timing(rules.startup_seconds)
        self._locks: list[FileLock] = []

    def check(self) -> list[str]:
        """GPUs, installation, model, data, disk: each problem with its fix. Takes the GPUs for this process."""
        try:
            pair = self._pair()
        except EngineError as error:
            return [str(error)]
        found = [str(problem) for problem in pair_problems(pair)]
        found += problems(self.installation, self.rules, self.root, pair)
        return found or [problem for gpu in pair if (problem := self._lock(gpu))]

    def hardware(self) -> str:
        """`2 x NVIDIA H100 80GB HBM3`; both names where they differ."""
        if self._gpu_ids == ():
            return NO_GPU
        try:
            pair = self._pair()
        except EngineError:
            return "no two GPUs"  # `check` says so before anything runs
        names = [gpu.name for gpu in pair]
        return f"2 x {names[0]}" if len(set(names)) == 1 else " + ".join(names)

    def validate(self, config: Config) -> Effective:
        """prime-rl's config tree as far as it does not depend on the run; prime-rl's own classes check it in `open`."""
        return Effective(effective(config, self.rules), unused=())

    def describe(self, settings: Mapping[str, Any], seed: int, run_dir: Path) -> list[str]:
        """Every process's command line, the complete config, ports and GPUs; and what is missing here."""
        try:
            missing = problems(self.installation, self.rules, self.root, self._pair())
        except EngineError as error:
            missing = [str(error), *problems(self.installation, self.rules, self.root, ())]
        return [*launches.describe(self._plan(settings, seed, run_dir)), *(f"missing:  {line}" for line in missing)]

    def open(self, settings: Mapping[str, Any], seed: int, run_dir: Path, deadline_seconds: float) -> PrimeRlSession:
        """Start inference, env server, orchestrator and trainer, and wait until the first weights are published."""
        deadline = time.monotonic() + deadline_seconds
        base = self.root / self.rules.model
        if self.rules.model_revision is not None:
            base = model_folder(self.installation, self.rules) / "snapshots" / self.rules.model_revision
        plan = self._plan(settings, seed, run_dir)
        session = PrimeRlSession(plan, run_dir, base, self._environment, self._timing, deadline, self._keep_all)
        try:
            session.open(_submitted(run_dir))
        except BaseException:
            session.close()
            raise
        return session

    def _plan(self, settings: Mapping[str, Any], seed: int, run_dir: Path) -> launches.Launch:
        gpu_ids: GpuIds = ()
        with suppress(EngineError, ValueError):  # a dry run on a machine without GPUs
            inference, trainer = self._pair()
            gpu_ids = inference.index, trainer.index
        return launches.plan(
            settings,
            seed=seed,
            run_dir=run_dir,
            ports=launches.free_ports(),
            gpu_ids=gpu_ids,
            bin_dir=self.installation.bin_dir,
            environment=self.installation.environment(self.root, self._environment.get("PATH", "")),
        )

    def _pair(self) -> Sequence[Gpu]:
        """The GPUs for inference and trainer; none by --gpus none. EngineError where there are no two."""
        return () if self._gpu_ids == () else choose_pair(list_gpus(), self._gpu_ids or None, self._environment)

    def _lock(self, gpu: Gpu) -> str | None:
        """Hold the GPU until this process ends; the problem if another experiment holds it."""
        cache = Path(self._environment.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = cache / "nightshift" / "locks"
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / f"{gpu.uuid}.lock", timeout=0)
        try:
            lock.acquire()
        except Timeout:
            return f"GPU {gpu.index} is taken by another experiment of yours. Wait for it, or choose others: --gpus"
        self._locks.append(lock)
        return None


def _submitted(run_dir: Path) -> Config | None:
    """The train.toml of the run's experiment, which puts prime-rl's complaints into its lines."""
    try:
        return load(run_dir.parent / "train.toml")
    except (ConfigError, OSError):
        return None
