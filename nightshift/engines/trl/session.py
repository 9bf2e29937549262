"""One run of the trl engine: commands to the trainer process and its events, as JSON lines through pipes."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from subprocess import PIPE, TimeoutExpired
from typing import Any, TypeVar, cast

import msgspec

from nightshift.campaign.metrics import Step
from nightshift.campaign.records import Completion, Outcome, Phase, Progress, ProgressCallback, Training, Weights
from nightshift.config.rules import Decoding
from nightshift.engines.base import NoGradient, Session, training_progress
from nightshift.engines.standstill import Standstill
from nightshift.errors import EngineError, Failure
from nightshift.evaluation.environment import Chat
from nightshift.executors.gpus import nvml_session
from nightshift.executors.process import Pipes, ProcessGroup, python_command, tail
from nightshift.files import parse_json

LOG_NAME = "trainer.log"
GRACE_SECONDS = 3.0  # the trainer saves nothing on SIGTERM
LOOK_SECONDS = 1.0  # interval at which a silent trainer is checked for a standstill


class Event(msgspec.Struct, tag_field="event", tag=str.lower):
    """An event of the trainer, with the fields that are read here."""


class Ready(Event):
    pass


class Completed(Event):
    pass


class StepEnded(Event, tag="step"):
    row: Step  # as in metrics.jsonl


class Trained(Event):
    training: Training
    earlier_steps: tuple[int, ...] = ()


class FinalWeights(Event, tag="weights"):
    weights: Weights


class Completions(Event):
    completions: list[Completion]  # the next ones, in the order of the prompts


class Failed(Event, tag="error"):
    cause: str
    is_infrastructure: bool = False  # an environment that cannot score is not a failure of the config


E = TypeVar("E", bound=Event)
_EVENTS = Ready | Completed | StepEnded | Trained | FinalWeights | Completions | Failed


class _Late(EngineError):
    """The deadline of the run passed."""


class TrlSession(Session):
    """One trainer process, from start-up to its last completion."""

    def __init__(
        self,
        trainer: Sequence[str],
        run_dir: Path,
        environ: Mapping[str, str],
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
        nvml = self._resources.enter_context(nvml_session()) if gpu_ids else None
        self._standstill: Standstill | None = None  # not during the start, when a slow disk may use no CPU time
        self._show: Callable[[str], None] = lambda note: None  # shows a note in the live line
        try:
            self._ask("start", Ready)
        except BaseException:
            self.close()
            raise
        self._standstill = Standstill(lambda: [self._trainer.pid], gpu_ids, nvml)
        self._deadline = deadline

    def train(self, budget_seconds: float, progress: ProgressCallback) -> Training:
        """Train until the budget ends, or until `progress` raises NoGradient. The trainer measures the budget, this
        process the deadline."""
        is_ended = False  # by NoGradient

        def see(event: Event) -> None:
            nonlocal is_ended
            if not isinstance(event, StepEnded):
                return
            self._steps.append(event.row)
            reading = training_progress(self._steps, budget_seconds - (event.row.time or 0.0))
            self._show = partial(_show, progress, reading)
            try:
                progress(reading)
            except NoGradient:
                if not is_ended:
                    self._pipes.send(b'{"command": "stop"}', self._deadline)
                is_ended = True

        try:
            trained = self._ask("train", Trained, see, budget_seconds=budget_seconds)
        except _Late:
            cause = f"the training had not ended at the deadline of the run, after step {len(self._steps)}"
            return Training(Outcome.DEADLINE, len(self._steps), cause=cause, failure=Failure.CONFIG)
        except EngineError as error:
            return Training(Outcome.CRASHED, len(self._steps), cause=str(error), failure=error.failure, log=error.log)
        self.earlier = {step: partial(self._load_step, step) for step in trained.earlier_steps}
        if is_ended and trained.training.outcome is Outcome.BUDGET:
            return replace(trained.training, outcome=Outcome.NO_GRADIENT)
        return trained.training

    def load_final_weights(self) -> Weights:
        """Have the trainer save its final policy, and load the saved file for completions."""
        return self._ask("load_final_weights", FinalWeights).weights

    def complete(self, prompts: Sequence[Chat], decoding: Decoding, progress: ProgressCallback) -> list[Completion]:
        """Return completions in the order of the prompts. EngineError if the trainer fails or the deadline passes.

        Prompts and answers are only in the pipes, because those of a test split must not be in a file below runs/.
        """
        completions: list[Completion] = []
        self._show = partial(_show, progress, Progress(Phase.EVALUATING, len(self._steps)))

        def see(event: Event) -> None:
            if isinstance(event, Completions):
                completions.extend(event.completions)
                progress(Progress(Phase.EVALUATING, len(self._steps), num_done=len(completions)))

        self._ask("complete", Completed, see, prompts=prompts, **msgspec.to_builtins(decoding))
        return completions

    def close(self) -> None:
        """Stop the trainer and its processes. EngineError if a process survives SIGKILL."""
        self._resources.close()
        if left := self._group.stop():
            raise EngineError(f"processes of {self._run_dir.name} could not be killed: {', '.join(left)}")

    def _load_step(self, step: int) -> None:
        self._ask("load_step", Completed, step=step)

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
                    self._show(note)

    def _ask(self, command: str, kind: type[E], see: Callable[[Event], None] = lambda event: None, **fields: Any) -> E:
        """Send a command ("start" sends nothing) and return its last event, of type `kind`; `see` gets other events.

        EngineError if the trainer fails, ends, writes an invalid line, or does not answer before the deadline.
        """
        try:
            if command != "start":
                self._pipes.send(msgspec.json.encode({"command": command, **fields}), self._deadline)
            while True:
                line = self._receive()
                event = cast(Event, parse_json(line, _EVENTS))  # type: ignore[arg-type]  # a union
                if isinstance(event, kind):
                    return event
                if isinstance(event, Failed):
                    is_of_config = command == "train" and not event.is_infrastructure
                    failure = Failure.CONFIG if is_of_config else Failure.INFRASTRUCTURE
                    raise EngineError(event.cause, failure=failure, log=LOG_NAME)
                see(event)
        except TimeoutError:
            raise _Late(f"the trainer's answer to `{command}` was not complete at the deadline of the run") from None
        except BrokenPipeError:
            with suppress(TimeoutExpired):  # the trainer may have closed the pipe without ending
                self._trainer.wait(GRACE_SECONDS)
            cause = f"the connection to the trainer broke: {self._trainer.exit_cause()}"
            cause = "; last in its log: ".join([cause, *tail(self._trainer.log_path, 1)])
            raise EngineError(cause, log=LOG_NAME) from None
        except ValueError as error:
            raise EngineError(f"the trainer sent {line[:200]!r}: {error}") from None


def _show(progress: ProgressCallback, reading: Progress, note: str) -> None:
    with suppress(NoGradient):  # raised at the step already
        progress(replace(reading, note=note))
