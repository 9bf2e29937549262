"""The engine for GPUs: prime-rl, with vLLM and the GRPO trainer on different GPUs, or both on one.

prime-rl has its own Python environment, so nothing here imports torch or prime_rl.
"""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from nightshift.campaign.git import CONFIG_NAME
from nightshift.campaign.records import Weights
from nightshift.config.train_toml import Config, load
from nightshift.engines.base import (
    Check,
    Effective,
    Engine,
    Note,
    Plan,
    PrepareFlags,
    Settings,
    network_problem,
)
from nightshift.engines.downloads import model_folder, model_problem, prepare_data, prepare_model
from nightshift.engines.prime_rl import remains
from nightshift.engines.prime_rl.config import effective
from nightshift.engines.prime_rl.install import ENGINE, ENV_VAR, Installation, examine, install
from nightshift.engines.prime_rl.launch import Launch, free_ports
from nightshift.engines.prime_rl.served import ServedProof
from nightshift.engines.prime_rl.session import PrimeRlSession, Timing
from nightshift.engines.rehearsal import rehearse, smoke, warm_up_rules
from nightshift.evaluation.environment import load as load_environments
from nightshift.executors import network
from nightshift.executors.gpus import Gpu
from nightshift.files import cache_dir, read_file
from nightshift.waiting import mark


class PrimeRlEngine(Engine):
    """prime-rl on GPUs of this machine, under the given rules."""

    name = ENGINE

    def __init__(self, *arguments: Any) -> None:
        """`arguments`: of Engine."""
        super().__init__(*arguments)
        self._locks: dict[str, FileLock] = {}  # by the GPU's uuid

    @cached_property
    def installation(self) -> Installation:
        """The pinned version of prime-rl on this machine."""
        return Installation.find(self.root, self._environ)

    @property
    def timing(self) -> Timing:
        """The limits of a run, of the rules and of machine.toml."""
        timing = Timing(self.startup_seconds)
        if seconds := self.machine.limits.no_step_seconds:
            timing = timing._replace(hang_seconds=seconds, still_seconds=max(timing.still_seconds, seconds))
        return timing

    def prepare(self, flags: PrepareFlags, note: Note) -> None:
        """Install prime-rl, fetch model and data, and fill the compile caches with a run that is not scored.

        With `smoke`, run the whole chain with the tiny model instead. Without GPUs, fetch model and data, then raise
        EngineError.
        """
        installation, rules = self.installation, self.rules
        if flags.smoke is None:
            prepare_model(self.root, rules, note)
            prepare_data(self.root, rules, flags.sources, note)
            note("model and data are complete")
        gpus = self.free_gpus()
        mark("install")
        installation.root.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{installation.root}.lock"):  # another prepare.py may run
            install(installation, self._environ, note, has_gpus=bool(gpus))
        mark("install", f"prime-rl {installation.pins.commit[:9]}, torch {installation.version('torch')}")
        runs_dir = installation.state_dir / "runs"
        if flags.smoke is not None:
            smoke(self, flags.smoke, runs_dir, note)
        elif gpus:
            note("filling the compile caches with a run that is not scored: up to 20 minutes to start, 5 to train")
            mark("compile caches")
            cold, config = warm_up_rules(rules), load(self.root / CONFIG_NAME)
            mark("compile caches", rehearse(self.under(cold), config, runs_dir / cold.name, note))
        if flags.prime_rl is not None:
            note(f"before you use run.py: export {ENV_VAR}={installation.root}")

    def prepare_at_start(self, note: Note) -> None:
        """Delete weights and rollouts of killed workers, and note if runs share the network of the machine."""
        remains.sweep(self.root / "runs")
        for check in self._network():
            note(f"{check.name}: {check.problem}")

    def parts(self, gpus: Sequence[Gpu]) -> list[Check]:
        """Check the network and each part of the installation."""
        return [*self._network(), *examine(self.installation, self.rules, self.root, gpus)]

    def _network(self) -> list[Check]:
        """Return a warning if other processes of this machine can reach the server of a run."""
        cause = "any process of this machine can load weights into the server of a run (SECURITY.md)"
        why = network_problem(self.root)
        return [Check(ENGINE, "network", f"{cause}: {why}", is_warning=True)] if why else []

    def check(self) -> list[str]:
        """As the base class. Also lock the GPUs for this process; a GPU that is locked already is a problem."""
        problems = super().check()
        folder = cache_dir(self._environ) / "locks"
        folder.mkdir(parents=True, exist_ok=True)
        for gpu in () if problems else self.gpus():
            # Kept until this process ends. Two locks of this process would exclude each other.
            new = FileLock(folder / f"{gpu.uuid}.lock", timeout=0, thread_local=False)
            try:
                self._locks.setdefault(gpu.uuid, new).acquire()
            except Timeout:
                wait = "Wait for it, or choose other GPUs: --gpus"
                problems.append(f"another experiment of yours uses GPU {gpu.index}. {wait}")
        return problems

    def versions(self) -> dict[str, str]:
        """Return prime-rl's commit, the versions of its packages and the driver, and the network of runs."""
        versions = {"network": "namespace of its own" if network.is_own else "shared"}
        for gpu in self.gpus_here()[:1]:
            versions["driver"] = gpu.driver
        return self.installation.versions() | versions

    def validate(self, config: Config) -> Effective:
        """Return prime-rl's config without values that depend on the run. prime-rl's classes validate it in `open`."""
        environments = load_environments(self.root, self.rules.scored)
        settings = effective(config, self.rules, max(environment.prompt_tokens for environment in environments))
        return Effective(settings)

    def plan(self, settings: Settings, seed: int, run_dir: Path) -> Plan:
        """Return the command line of each process, and the complete config."""
        launch = self.launch(settings, seed, run_dir)
        return {name: command.argv for name, command in launch.commands.items()}, launch.tree

    def open(self, settings: Settings, seed: int, run_dir: Path, deadline_seconds: float) -> PrimeRlSession:
        """Validate the config, start all processes, and wait until the first weights are published."""
        deadline = self.timing.clock() + deadline_seconds
        if self.rules.model_revision and (problem := model_problem(self.rules, self.root)):
            raise problem  # the cache of a node may differ from the controller's
        self.installation.copy_environments(self.root, self.rules)
        launch = self.launch(settings, seed, run_dir)
        source = run_dir / CONFIG_NAME  # an experiment's, for the line numbers in errors
        session = PrimeRlSession(launch, self._base, self._environ, self.timing, deadline)
        try:
            session.open(read_file(source).decode() if source.exists() else "")
        except BaseException:
            session.close()
            raise
        return session

    def start_proof(self, run_dir: Path, weights: Weights, note: Note) -> ServedProof:
        """Compare the server's log-probabilities with those of the file of weights (served.py)."""
        note("comparing the served weights with their file, on the CPU: under a minute on an idle machine")
        return ServedProof(run_dir, weights, self._base, self._environ)

    @property
    def _base(self) -> Path:
        """The folder of the start weights."""
        return model_folder(self.rules, self.root)

    def launch(self, settings: Settings, seed: int, run_dir: Path) -> Launch:
        """Return the processes that `open` would start, with ports that are free now."""
        return Launch(
            settings={**settings, "model": {"name": str(self._base)}},  # prime-rl has no key for a revision
            seed=seed,
            run_dir=run_dir,
            port=free_ports(len(self.rules.environments)),
            gpu_ids=tuple(gpu.index for gpu in self.gpus_here()),  # none in a dry run on a machine without GPUs
            bin_dir=self.installation.bin_dir,
            environment=self.installation.environment(self.root, self.rules, self._environ.get("PATH", "")),
            variables=self.machine.environment,
            seats={e.name: (e.taskset and e.taskset.seat) or "agent" for e in self.rules.environments},
        )
