"""One prime-rl run: its processes from start-up to the last completion.

The processes form three groups, which are stopped in this order: first the trainer, because it deletes published
weights (broadcasts), then the processes that make rollouts, and after the evaluation the inference server. Logs are
read for the cause of a failure, and for two start-up states that prime-rl writes nowhere else.
"""

import math
import re
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

from nightshift.campaign.metrics import METRICS_NAME, SAMPLES_NAME, write_steps
from nightshift.campaign.records import (
    WEIGHTS_NAME,
    Completion,
    Outcome,
    Phase,
    Progress,
    ProgressCallback,
    Training,
    Weights,
)
from nightshift.config.rules import Decoding
from nightshift.engines.base import Environ, NoGradient, Session, training_progress
from nightshift.engines.prime_rl.config import NUM_ENV_WORKERS, ORCHESTRATOR_METRICS, TRAINER_METRICS
from nightshift.engines.prime_rl.diagnose import diagnose, is_fatal, no_step
from nightshift.engines.prime_rl.launch import Launch
from nightshift.engines.prime_rl.metrics import MetricsTail, keep_rollouts, num_rollouts, rollout_files
from nightshift.engines.prime_rl.remains import remove_heavy
from nightshift.engines.prime_rl.served import Witness
from nightshift.engines.prime_rl.server import Server
from nightshift.engines.prime_rl.validator import Verdict, explain
from nightshift.engines.prime_rl.weights import build_model_folder, latest_stable
from nightshift.engines.standstill import STILL_SECONDS, Standstill
from nightshift.errors import EngineError, Failure
from nightshift.evaluation.environment import Endpoint, Message
from nightshift.executors.gpus import PeakMemory, nvml_session
from nightshift.executors.process import Child, ProcessGroup, engine_environment, tail
from nightshift.files import parse_json, read_file
from nightshift.waiting import look

SETTLE_SECONDS = 1.0  # how long to wait for other processes to die after a death, and for the last step's metrics
# How much of a log is read to find why a process failed: 512 requests may each log a traceback after the cause.
LOG_BYTES, LOG_LINES, LOG_LINE_LENGTH = 4 << 20, 30_000, 1_000
# A text in a log and how often it occurs: P/orchestrator/orchestrator.py:463, V/serve/server.py:154 (paths: config.py).
LOOP_STARTED = ("orchestrator", b"Starting orchestrator loop", 1)
WORKERS_UP = (b"EnvServer up:", NUM_ENV_WORKERS)
# torchrun's line for the worker that failed first (torch/distributed/elastic/multiprocessing/api.py)
_FAILED_RANK = re.compile(r"failed \(exitcode: -?\d+\) local_rank: (\d+)")


class Timing(NamedTuple):
    """The limits of a run, in seconds of `clock`."""

    startup_seconds: float
    hang_seconds: float = 300.0  # without step and rollout; not measured on GPUs, which compile code in the first step
    still_seconds: float = STILL_SECONDS  # without step, CPU time and GPU time
    grace_seconds: float = 5.0  # between SIGTERM and SIGKILL; 0 for the trainer, whose files are valid at any time
    poll_seconds: float = 0.5
    clock: Callable[[], float] = time.monotonic


class PrimeRlSession(Session):
    """The processes of one run. Call `open` first. You may call `close` at any moment, and twice."""

    def __init__(self, launch: Launch, base_model: Path, environment: Environ, timing: Timing, deadline: float) -> None:
        """`base_model`: the snapshot whose config and tokenizer are added to the final weights. `deadline`: the end of
        the run on the clock of `timing`."""
        self._launch, self._run_dir, self._base_model = launch, launch.run_dir, base_model
        self._environment, self._timing, self._clock = environment, timing, timing.clock
        self._broadcasts_dir, self._rollouts_dir = launch.prime_dir / "broadcasts", launch.prime_dir / "rollouts"
        self._startup_ends = min(deadline, self._clock() + timing.startup_seconds)
        # In the order in which the groups are stopped.
        grace_seconds = {"trainer": 0.0, "rollouts": timing.grace_seconds, "inference": timing.grace_seconds}
        self._groups = {name: ProcessGroup(name, seconds) for name, seconds in grace_seconds.items()}
        self._children: dict[str, Child] = {}
        self._server = Server(launch.port, deadline, timing.clock)
        self._witness = Witness(self._server, launch)
        algo = launch.tree["orchestrator"].get("algo", {})
        is_group_relative = algo.get("type", "grpo") in ("grpo", "max_rl") and not algo.get("length_penalty")
        files = launch.prime_dir / TRAINER_METRICS, launch.prime_dir / ORCHESTRATOR_METRICS
        self._tail = MetricsTail(*files, is_group_relative=is_group_relative, seats=launch.seats)
        self._final_step = 0  # the step whose weights are evaluated; 0: training did not succeed
        # Processes that may end with exit code 0 before `train` stops them.
        self._may_finish = ("trainer", "orchestrator") if launch.tree.get("max_steps") else ()
        self._resources = ExitStack()
        self._resources.callback(self._server.close)
        nvml = self._resources.enter_context(nvml_session())
        self._memory = PeakMemory(launch.gpu_ids, nvml)
        self._standstill = Standstill(
            lambda: [child.pid for child in self._children.values()],
            launch.gpu_ids,
            nvml,
            timing.still_seconds,
            timing.clock,
        )

    def open(self, source: str) -> None:
        """Validate the config, start every process, and wait until training can begin. EngineError if this fails.
        `source`: the text of train.toml, for the line numbers in errors."""
        self._launch.write()
        self._validate(source)
        for name in ("inference", *self._launch.env_servers, "orchestrator"):
            self._start(name)
        if not self._launch.is_shared:  # otherwise the server must allocate its memory first
            self._start("trainer")
        self._wait_for("the inference server was not ready", "inference", self._server.is_healthy)
        if self._launch.is_shared:
            self._start("trainer")
        # The weights of any step will do, because a fast trainer may have deleted those of step 0 already.
        self._wait_for(
            "the first broadcast of weights was not ready",
            "trainer",
            lambda: latest_stable(self._broadcasts_dir) is not None,
        )
        self._wait_for("the orchestrator's loop was not ready", "orchestrator", lambda: self._in_log(*LOOP_STARTED))
        # prime-rl reports an environment as ready when its workers are spawned, before they import anything.
        for name in self._launch.env_servers:
            self._wait_for("the environment's workers were not ready", name, partial(self._in_log, name, *WORKERS_UP))

    def train(self, budget_seconds: float, progress: ProgressCallback) -> Training:
        """Train until the budget ends or max_steps is reached. Then stop every process except the server."""
        began, began_unix, error = self._clock(), time.time(), None
        try:
            outcome = self._watch(began, budget_seconds, progress)
        except EngineError as caught:
            outcome, error = Outcome.NO_GRADIENT if isinstance(caught, NoGradient) else Outcome.CRASHED, caught
        seconds = self._clock() - began
        self._stop("trainer")
        self._settle()
        self._stop("rollouts")
        self._tail.poll()
        if outcome is not Outcome.CRASHED:
            self._final_step = latest_stable(self._broadcasts_dir) or 0
            if self._final_step:
                error = None
            else:
                outcome, error = Outcome.CRASHED, error or no_step(seconds, num_rollouts(self._rollouts_dir))
        self._tail.last_step = self._final_step or math.inf
        write_steps(self._run_dir / METRICS_NAME, self._tail.steps(began_unix))
        return Training(
            outcome,
            num_steps=self._final_step or self._tail.num_steps,
            training_seconds=seconds,
            reward_mean=self._tail.reward_mean(),
            peak_memory_gb=self._memory.peak_gb,
            cause=str(error) if error else None,
            failure=error.failure if error else None,
            log=error.log if error else None,
        )

    def load_final_weights(self) -> Weights:
        """Copy the last published weights to the run's folder, and load them from there into the server."""
        folder, step = self._run_dir / WEIGHTS_NAME, self._final_step
        sha256 = build_model_folder(self._broadcasts_dir / f"step_{step}", self._base_model, folder)
        self._server.load_weights(folder, self._launch.served_model)
        return Weights(step, sha256, self._witness.at_end())

    def confirm(self) -> None:
        """Check after the scoring that the server still has the final weights. EngineError if the weights differ."""
        self._witness.confirm()

    def complete(
        self, prompts: Sequence[Sequence[Message]], decoding: Decoding, progress: ProgressCallback
    ) -> list[Completion]:
        """Return one completion per prompt, in order."""
        return self._server.complete(prompts, decoding, self._launch.served_model, partial(self._tick, progress))

    def endpoint(self, progress: ProgressCallback) -> Endpoint:
        """Return the endpoint of the run's server. Its `tick` reports episodes and enforces the run's deadline."""
        tick = partial(self._tick, progress)
        return Endpoint(f"{self._server.base_url}/v1", self._launch.served_model, tick)

    def _tick(self, progress: ProgressCallback, num_done: int) -> None:
        self._server.raise_if_late(num_done)
        progress(Progress(Phase.EVALUATING, self._final_step, num_done=num_done))

    def close(self) -> None:
        """Stop every process, copy some rollouts, and delete large files. EngineError if a process survives SIGKILL."""
        try:
            self._stop(*self._groups)
        finally:
            self._resources.close()
            keep_rollouts(self._rollouts_dir, self._run_dir / SAMPLES_NAME)
            remove_heavy(self._launch.prime_dir)

    def _start(self, name: str) -> None:
        command = self._launch.commands[name]
        group = self._groups.get(name, self._groups["rollouts"])
        self._children[name] = group.start(
            name,
            command.argv,
            log_path=self._run_dir / f"{name}.log",
            env=engine_environment(self._environment, command.env),
            cwd=self._run_dir,
        )

    def _validate(self, source: str) -> None:
        """Validate the config with prime-rl's own classes, and write the configs of the programs."""
        self._start("validator")
        child = self._children["validator"]
        self._wait_for("prime-rl's validation did not end", "validator", lambda: child.poll() is not None)
        try:
            refusals = parse_json(read_file(self._launch.verdict), Verdict).errors
        except (OSError, ValueError):
            raise self._failure_of(child) from None
        if refusals:
            raise explain(refusals, source)

    def _wait_for(self, problem: str, name: str, is_ready: Callable[[], bool]) -> None:
        """Wait until the process `name` is ready. EngineError if a process dies, or at the end of the start-up time."""
        while not is_ready():
            look()
            self._raise_if_dead()
            if self._clock() >= self._startup_ends:
                self._raise_if_dead(include_fatal=True)
                lines = " | ".join(tail(self._children[name].log_path, 3)) or "nothing"
                cause = f"{problem} after {self._timing.startup_seconds:g} s; last in its log: {lines}"
                fix = "If the machine is slow, raise startup_seconds in [limits] of machine.toml (docs/gpus.md)."
                raise EngineError(cause, fix, log=self._children[name].log_path.name)
            time.sleep(self._timing.poll_seconds)

    def _watch(self, began: float, budget_seconds: float, progress: ProgressCallback) -> Outcome:
        """Watch the training until it ends, and return FINISHED or BUDGET. Raises NoGradient if `progress` does, and
        EngineError if a process dies, the loss is not finite or the run hangs."""
        last_counts, active_at, max_steps = (0, 0), began, self._launch.tree.get("max_steps")
        note = ""
        while True:
            now = self._clock()
            self._tail.poll()
            if max_steps and (self._tail.is_whole(max_steps) or self._children["trainer"].poll() == 0):
                return Outcome.FINISHED
            self._raise_if_dead()
            if step := self._tail.not_finite_step():
                cause, fix = f"the loss was NaN or infinite at step {step}", "Lower trainer.optim.lr or its max_norm."
                raise EngineError(cause, fix, failure=Failure.CONFIG)
            left = began + budget_seconds - now
            progress(training_progress(self._tail.steps(0.0), max(0.0, left), note))
            if left <= 0:
                self._raise_if_dead(include_fatal=True)
                return Outcome.BUDGET
            counts = self._tail.num_steps, sum(p.stat().st_size for p in rollout_files(self._rollouts_dir))
            if counts != last_counts:
                last_counts, active_at = counts, now
            try:
                note = self._standstill.look(counts)
                if (idle := now - active_at) >= self._timing.hang_seconds:
                    cause = f"the run hangs: no step and no rollout for {idle:.0f} s after step {counts[0]}"
                    fix = "Run it again; on a slow GPU raise no_step_seconds in [limits] of machine.toml."
                    raise EngineError(cause, fix)
            except EngineError as error:
                self._raise_if_dead(include_fatal=True)
                error.log = self._children["trainer"].log_path.name
                raise
            self._memory.sample()
            time.sleep(min(self._timing.poll_seconds, max(0.0, left)))

    def _settle(self) -> None:
        """Wait for the orchestrator's metrics of the last step, which it may write half a second after the trainer."""
        until = time.monotonic() + SETTLE_SECONDS
        self._tail.poll()
        while time.monotonic() < until and not self._tail.is_whole(self._tail.num_steps):
            time.sleep(self._timing.poll_seconds / 10)
            self._tail.poll()

    def _in_log(self, name: str, text: bytes, times: int) -> bool:
        return read_file(self._children[name].log_path).count(text) >= times

    def _raise_if_dead(self, *, include_fatal: bool = False) -> None:
        """Raise EngineError if processes have ended too early, with the first cause for which a fix is known.
        `include_fatal`: also for running processes that logged a fatal exception, because their exit may hang."""
        if self._dead(include_fatal):
            time.sleep(SETTLE_SECONDS)  # the process that failed first may be the last one to exit
            problems = [self._failure_of(child) for child in self._dead(include_fatal)]
            raise next((problem for problem in problems if problem.fix), problems[0])

    def _dead(self, include_fatal: bool) -> list[Child]:
        """Return the processes that have ended too early. The server is first: no other death makes it end."""
        ended = [child for group in reversed(self._groups.values()) for child in group.check()]
        dead = [c for c in ended if c.name != "validator" and (c.poll() or c.name not in self._may_finish)]
        return dead or [c for c in self._children.values() if include_fatal and is_fatal(_log_lines(c))]

    def _failure_of(self, child: Child) -> EngineError:
        ending, lines = "fatal error" if child.poll() is None else child.exit_cause(), _log_lines(child)
        if failed := next(filter(None, map(_FAILED_RANK.search, lines)), None):  # without the lines of other ranks
            lines = [line for line in lines if not re.match(rf"\[trainer(?!{failed[1]}\])", line)]
        problem = diagnose(child.name, ending, lines, is_shared=self._launch.is_shared)
        problem.log = child.log_path.name
        return problem

    def _stop(self, *groups: str) -> None:
        """Stop these groups in order. EngineError if a process survives SIGKILL."""
        survivors: list[str] = []
        for name in groups:
            for env_server in self._children.keys() & self._launch.env_servers if name == "rollouts" else ():
                # The workers of an environment would use the whole grace period to finish their rollouts.
                self._groups[name].kill_below(self._children[env_server])
            survivors += self._groups[name].stop()
        if survivors:
            raise EngineError(f"processes of {self._run_dir.name} could not be killed: {', '.join(survivors)}")


def _log_lines(child: Child) -> list[str]:
    return tail(child.log_path, LOG_LINES, LOG_LINE_LENGTH, LOG_BYTES)
