"""One run of the trl engine: commands to the trainer process and its events, as JSON lines through pipes."""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from subprocess import PIPE, TimeoutExpired
from typing import Any, Literal

import msgspec

from nightshift.campaign.metrics import Step
from nightshift.campaign.records import Completion, Outcome, Phase, Progress, ProgressCallback, Training, Weights
from nightshift.config.rules import Decoding
from nightshift.engines.base import Environ, NoGradient, Session, training_progress
from nightshift.engines.standstill import Standstill
from nightshift.errors import EngineError, Failure
from nightshift.evaluation.environment import Chat
from nightshift.executors.gpus import nvml_session
from nightshift.executors.process import Pipes, ProcessGroup, python_command, tail
from nightshift.files import parse_json

LOG_NAME = "trainer.log"
GRACE_SECONDS = 3.0  # the trainer saves nothing on SIGTERM
LOOK_SECONDS = 1.0  # interval at which a silent trainer is checked for a standstill
Kind = Literal["ready", "step", "trained", "weights", "completions", "completed", "error"]


class Event(msgspec.Struct):
    """A line of the trainer: its kind, and the fields of that kind."""

    event: Kind
    row: Step | None = None  # step: as in metrics.jsonl
    training: Training | None = None
    weights: Weights | None = None
    completions: list[Completion] = []  # the next ones, in the order of the prompts
    cause: str = ""  # error
    is_infrastructure: bool = False  # error: an environment that cannot score is not a failure of the config


class TrlSession(Session):
    """One trainer process, from start-up to its last completion."""

    def __init__(
        self,
        trainer: Sequence[str],
        run_dir: Path,
        environ: Environ,
        deadline: float,
        startup_seconds: float,
        gpu_ids: Sequence[int] = (),
    ) -> None:
        """Start the trainer, which reads run_dir/spec.json, and wait until it is ready. EngineError if that fails.

        `deadline`: on the clock of time.monotonic. `gpu_ids`: NVML's number of the GPU that trains.
        """
        self._run_dir, self._deadline = run_dir, min(deadline, time.monotonic() + startup_seconds)
        self._steps = list[Step]()
        self._group = ProcessGroup(run_dir.parent.name, GRACE_SECONDS)
        command, log = python_command(*trainer, str(run_dir / "spec.json")), run_dir / LOG_NAME
        self._trainer = self._group.start(
            "trainer", command, log_path=log, env=environ, cwd=run_dir, stdin=PIPE, stdout=PIPE
        )
        self._pipes, self._resources = Pipes(self._group, self._trainer), ExitStack()
        nvml = self._resources.enter_context(nvml_session())
        self._standstill: Standstill | None = None  # not during the start, when a slow disk may use no CPU time
        try:
            [*self._ask("start", "ready")]
        except BaseException:
            self.close()
            raise
        self._standstill = Standstill(lambda: [self._trainer.pid], gpu_ids, nvml)
        self._deadline = deadline

    def train(self, budget_seconds: float, progress: ProgressCallback) -> Training:
        """Train until the budget ends, or until `progress` raises NoGradient. The trainer measures the budget, this
        process the deadline."""
        is_ended, training = False, None  # is_ended: by NoGradient
        self._progress, self._reading = progress, training_progress([], budget_seconds)
        try:
            for event in self._ask("train", "trained", budget_seconds=budget_seconds):
                training = event.training
                if event.row is None:
                    continue
                self._steps.append(event.row)
                try:
                    self._show(training_progress(self._steps, budget_seconds - (event.row.time or 0.0)))
                except NoGradient:
                    is_ended = True
                    with suppress(OSError):  # the next event names the cause
                        self._pipes.send(b'{"command": "stop"}', self._deadline)
        except EngineError as error:
            outcome, cause, failure = Outcome.CRASHED, str(error), error.failure
            if time.monotonic() >= self._deadline:
                outcome, failure = Outcome.DEADLINE, Failure.CONFIG
                cause = f"the training had not ended at the deadline of the run, after step {len(self._steps)}"
            return Training(outcome, len(self._steps), cause=cause, failure=failure, log=error.log)
        assert training is not None
        if is_ended and training.outcome is Outcome.BUDGET:
            return replace(training, outcome=Outcome.NO_GRADIENT)
        return training

    def load_final_weights(self) -> Weights:
        """Have the trainer save its final policy, and load the saved file for completions."""
        (event,) = self._ask("load_final_weights", "weights")
        assert event.weights is not None
        return event.weights

    def complete(self, prompts: Sequence[Chat], decoding: Decoding, progress: ProgressCallback) -> list[Completion]:
        """Return completions in the order of the prompts. EngineError if the trainer fails or the deadline passes.

        Prompts and answers are only in the pipes, because those of a test split must not be in a file below runs/.
        """
        completions: list[Completion] = []
        self._progress, self._reading = progress, Progress(Phase.EVALUATING, len(self._steps))
        for event in self._ask("complete", "completed", prompts=prompts, **msgspec.to_builtins(decoding)):
            if event.completions:
                completions += event.completions
                self._show(Progress(Phase.EVALUATING, len(self._steps), num_done=len(completions)))
        return completions

    def close(self) -> None:
        """Stop the trainer and its processes. EngineError if a process survives SIGKILL."""
        self._resources.close()
        if left := self._group.stop():
            raise EngineError(f"processes of {self._run_dir.name} could not be killed: {', '.join(left)}")

    def _show(self, reading: Progress) -> None:
        self._reading = reading
        self._progress(reading)

    def _receive(self) -> bytes:
        """Return the trainer's next line. TimeoutError at the deadline, EngineError if the trainer hangs."""
        while True:
            now = time.monotonic()
            try:
                return self._pipes.receive(min(self._deadline, now + LOOK_SECONDS))
            except TimeoutError:
                if now + LOOK_SECONDS >= self._deadline:
                    raise
                if self._standstill and (note := self._standstill.look(len(self._steps))):
                    with suppress(NoGradient):  # raised at the step already
                        self._progress(replace(self._reading, note=note))

    def _ask(self, command: str, kind: Kind, **fields: Any) -> Iterator[Event]:
        """Send a command ("start" sends nothing) and yield its events, the last of which is of this kind.

        EngineError if the trainer fails, ends, writes an invalid line, or does not answer before the deadline.
        """
        line, began = b"", time.monotonic()
        try:
            if command != "start":
                self._pipes.send(msgspec.json.encode({"command": command, **fields}), self._deadline)
            while True:
                event = parse_json(line := self._receive(), Event)
                if event.event == "error":
                    is_of_config = command == "train" and not event.is_infrastructure
                    failure = Failure.CONFIG if is_of_config else Failure.INFRASTRUCTURE
                    raise EngineError(event.cause, failure=failure, log=LOG_NAME)
                yield event
                if event.event == kind:
                    return
        except TimeoutError:
            what = "start" if command == "start" else f"finish `{command}`"
            load = f"load of the machine: {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores"
            raise EngineError(f"the trainer did not {what} within {time.monotonic() - began:.0f} s ({load})") from None
        except BrokenPipeError:
            with suppress(TimeoutExpired):  # the trainer may have closed the pipe without ending
                self._trainer.wait(GRACE_SECONDS)
            cause = f"the connection to the trainer broke: {self._trainer.exit_cause()}"
            cause = "; last in its log: ".join([cause, *tail(self._trainer.log_path, 1)])
            raise EngineError(cause, log=LOG_NAME) from None
        except ValueError as error:
            raise EngineError(f"the trainer sent {line[:200]!r}: {error}") from None
