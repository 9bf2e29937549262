"""The engine for two GPUs: prime-rl, with vLLM on the first and the GRPO trainer on the second, or both on one.

This module checks, resolves and starts; session.py is one run. Neither torch nor prime_rl is ever
imported here: prime-rl lives in an environment of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from nightshift.campaign.records import Weights
from nightshift.config.rules import Rules
from nightshift.config.train_toml import Config, load
from nightshift.engines.base import Check, Effective, Note, PrepareFlags
from nightshift.engines.downloads import changes
from nightshift.engines.prime_rl.config import effective
from nightshift.engines.prime_rl.diagnose import PortTaken
from nightshift.engines.prime_rl.install import Installer
from nightshift.engines.prime_rl.installation import (
    ENGINE,
    ENV_VAR,
    MIN_DRIVER,
    Installation,
    Pins,
    cache_dir,
    examine,
    installed_versions,
    machine_warnings,
    model_folder,
    problems,
)
from nightshift.engines.prime_rl.launch import Launch, describe, free_ports
from nightshift.engines.prime_rl.prepare import prepare
from nightshift.engines.prime_rl.served import READER, prove
from nightshift.engines.prime_rl.session import PrimeRlSession, Timing
from nightshift.errors import ConfigError, EngineError
from nightshift.evaluation.environment import load as load_environments
from nightshift.executors.gpus import (
    Gpu,
    GpuIds,
    choose_gpus,
    gpu_problems,
    gpu_warnings,
    list_gpus,
    parse_gpus,
)

PORT_RETRIES = 3
NO_GPU = "no GPU (--gpus none): not comparable"


class PrimeRlEngine:
    """prime-rl on two GPUs of this machine, under the given rules."""

    name = ENGINE

    def __init__(
        self,
        rules: Rules,
        root: Path,
        environ: Mapping[str, str],
        gpus: str | None = None,
        keep_all: bool = False,
        *,
        installation: Installation | None = None,
        timing: Timing | None = None,
        reader: Sequence[str] = READER,
    ) -> None:
        """`gpus`: None takes the first two visible; `none` runs without GPUs, which compares with nothing.

        `installation`: by default that of pyproject.toml's pins, where `environ` says. UsageError for other `gpus`.
        """
        self.rules, self.root = rules, root
        self.installation = installation or Installation.find(Pins.read(root / "pyproject.toml"), environ)
        self._environ, self._gpus, self._keep_all = environ, gpus, keep_all
        self._gpu_ids = None if gpus is None else parse_gpus(gpus, 2)
        self._timing, self._reader = timing or Timing(rules.startup_seconds), reader
        self._locks: dict[str, FileLock] = {}  # by the GPU's uuid

    def prepare(self, flags: PrepareFlags, note: Note) -> None:
        """Install what is missing, fill the compile caches by an unscored run."""
        it = self._asked(flags)
        config = load(it.root / "train.toml")
        installer = Installer(it.installation, it.root, it.rules, it._pair(), it._environ, note)
        prepare(it.under, it.rules, installer, config, sources=flags.sources, smoke=flags.smoke)
        if it.installation != self.installation:
            note(f"for run.py: export {ENV_VAR}={it.installation.root}")

    def prepare_at_start(self, note: Note) -> None:
        """Copy environments that prepare.py has not copied yet; install nothing."""
        copy = self.installation.environments_dir(self.root, self.rules)
        if self.installation.state_dir.is_dir() and not copy.exists():
            with suppress(OSError):  # `check` says what is not there
                self.installation.copy_environments(self.root, self.rules)

    def doctor(self, flags: PrepareFlags) -> list[Check]:
        """The GPUs and their state, then each part of the installation."""
        it = self._asked(flags)
        pair: Sequence[Gpu] = ()
        try:
            pair = it._pair()
            busy: list[EngineError | None] = [*gpu_problems(pair)]
        except EngineError as error:
            busy = [error]
        gpus = "; ".join(map(_describe, pair))
        found = [Check(ENGINE, "GPUs", problem, gpus) for problem in busy or [None] * bool(pair)]
        found += [Check(ENGINE, "memory", detail=f"preset {it.rules.memory}")] * bool(pair)
        return found + it.warnings() + examine(it.installation, it.rules, it.root, pair)

    def warnings(self) -> list[Check]:
        """The kind of the GPUs, and the machine's part in what prime-rl needs."""
        pair: Sequence[Gpu] = ()
        with suppress(EngineError):
            pair = self._pair()
        unfit = [Check(ENGINE, "GPUs", each, is_warning=True) for each in gpu_warnings(pair, MIN_DRIVER)]
        return unfit + machine_warnings(self.root, self.rules)

    def check(self) -> list[str]:
        """GPUs, installation, model, data: each problem with its fix. Takes the GPUs for this process."""
        try:
            pair = self._pair()
        except EngineError as error:
            return [str(error)]
        found = [str(problem) for problem in gpu_problems(pair)]
        found += problems(self.installation, self.rules, self.root, pair)
        return found or [problem for gpu in pair if (problem := self._lock(gpu))]

    def hardware(self) -> str:
        """`2 x NVIDIA H100 80GB HBM3`, `1 x` where both share it; both names where they differ."""
        if self._gpu_ids == ():
            return NO_GPU
        try:
            pair = self._pair()
        except EngineError:
            return "no two GPUs"  # `check` says so before anything runs
        names = [gpu.name for gpu in dict.fromkeys(pair)]
        return f"{len(names)} x {names[0]}" if len(set(names)) == 1 else " + ".join(names)

    def gpu_ids(self) -> tuple[int, ...]:
        """Of inference and trainer."""
        return tuple(gpu.index for gpu in self._pair())

    def capacity(self) -> None:
        """GPUs decide."""

    def versions(self) -> dict[str, str]:
        """prime-rl's commit, the packages of its own environment, the driver."""
        found = installed_versions(self.installation)
        with suppress(EngineError):
            for gpu in self._pair()[:1]:
                found["driver"] = gpu.driver
        return found

    def validate(self, config: Config) -> Effective:
        """prime-rl's config tree as far as it does not depend on the run; prime-rl's own classes check it in `open`."""
        loaded = load_environments(self.root, self.rules.environments)
        prompt_tokens = max(environment.prompt_tokens for environment in loaded)
        found = effective(config, self.rules, prompt_tokens)
        if self.rules.model_revision is None:
            found["model"]["name"] = str(self._base)
        return Effective(found)

    def describe(self, settings: Mapping[str, Any], seed: int, run_dir: Path) -> list[str]:
        """Every process's command line, the complete config, ports and GPUs; and what is missing here."""
        try:
            missing = problems(self.installation, self.rules, self.root, self._pair())
        except EngineError as error:
            missing = [str(error), *problems(self.installation, self.rules, self.root, ())]
        lines = [*describe(self.launch(settings, seed, run_dir)), *changes(self.rules, self._base)]
        return [*lines, *(f"missing:  {line}" for line in missing)]

    def open(self, settings: Mapping[str, Any], seed: int, run_dir: Path, deadline_seconds: float) -> PrimeRlSession:
        """Start inference, env server, orchestrator and trainer, and wait until the first weights are published.

        A start that loses a port is made again on others; what it wrote goes to `port-taken-N` in `run_dir`.
        """
        deadline = self._timing.clock() + deadline_seconds
        there, num_tries = {*run_dir.iterdir()}, 0
        while True:
            launch = self.launch(settings, seed, run_dir)
            session = PrimeRlSession(launch, self._base, self._environ, self._timing, deadline, self._keep_all)
            try:
                session.open(_submitted(run_dir))
                return session
            except BaseException as error:
                session.close()
                num_tries += 1
                if num_tries > PORT_RETRIES or not isinstance(error, PortTaken):
                    raise
            aside = run_dir / f"port-taken-{num_tries}"
            for path in {*run_dir.iterdir()} - there:
                aside.mkdir(exist_ok=True)
                path.rename(aside / path.name)
            there.add(aside)

    def prove(self, run_dir: Path, weights: Weights, note: Note) -> str:
        """As served.py says."""
        note("comparing what was served with the file of its weights, on the CPU: under a minute if it is free")
        return prove(run_dir, weights, self._base, self._reader, self._environ)

    @property
    def _base(self) -> Path:
        """The folder of the start weights."""
        if self.rules.model_revision is None:
            return self.root / self.rules.model
        return model_folder(self.installation, self.rules) / "snapshots" / self.rules.model_revision

    def _asked(self, flags: PrepareFlags) -> PrimeRlEngine:
        """This engine, with the GPUs and the folder that the flags name."""
        environ = dict(self._environ) | ({ENV_VAR: str(flags.prime_rl)} if flags.prime_rl else {})
        return PrimeRlEngine(self.rules, self.root, environ, flags.gpus)

    def under(self, rules: Rules) -> PrimeRlEngine:
        """The same machine and installation under other rules."""
        return PrimeRlEngine(
            rules, self.root, self._environ, self._gpus, installation=self.installation, reader=self._reader
        )

    def launch(self, settings: Mapping[str, Any], seed: int, run_dir: Path) -> Launch:
        """All that `open` would start, with ports that are free now."""
        gpu_ids: GpuIds = ()
        with suppress(EngineError, ValueError):  # a dry run on a machine without GPUs
            inference, trainer = self._pair()
            gpu_ids = inference.index, trainer.index
        return Launch(
            settings=settings,
            seed=seed,
            run_dir=run_dir,
            ports=free_ports(len(self.rules.environments)),
            gpu_ids=gpu_ids,
            memory=self.rules.memory,
            bin_dir=self.installation.bin_dir,
            environment=self.installation.environment(self.root, self.rules, self._environ.get("PATH", "")),
        )

    def _pair(self) -> Sequence[Gpu]:
        """The GPUs for inference and trainer; none by --gpus none. Twice the same where they share one.

        EngineError where there are not so many.
        """
        return () if self._gpu_ids == () else choose_gpus(list_gpus(), self._gpu_ids, 2, self._environ)

    def _lock(self, gpu: Gpu) -> str | None:
        """Hold the GPU until this process ends; the problem if another experiment holds it."""
        if gpu.uuid in self._locks:  # of an earlier check: a second lock of ours would exclude the first
            return None
        folder = cache_dir(self._environ) / "locks"
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / f"{gpu.uuid}.lock", timeout=0)
        try:
            lock.acquire()
        except Timeout:
            return f"GPU {gpu.index} is taken by another experiment of yours. Wait for it, or choose others: --gpus"
        self._locks[gpu.uuid] = lock
        return None


def _describe(gpu: Gpu) -> str:
    major, minor = gpu.compute_capability
    memory = "" if gpu.memory_gb is None else f", {gpu.memory_gb:.1f} GB"
    return f"{gpu}{memory}, compute capability {major}.{minor}, driver {gpu.driver}"


def _submitted(run_dir: Path) -> Config | None:
    """The train.toml of the run's experiment, which puts prime-rl's complaints into its lines.

    One folder up at most: the checkout's train.toml is of another moment.
    """
    folders = (run_dir, run_dir.parent)
    path = next((path for folder in folders if (path := folder / "train.toml").is_file()), None)
    try:
        return None if path is None else load(path)
    except (ConfigError, OSError):
        return None
