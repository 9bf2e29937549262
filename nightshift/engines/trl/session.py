"""One run of the trl engine: commands to the trainer and its events, as JSON lines over its pipes."""

import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from subprocess import PIPE, TimeoutExpired
from typing import Any, Literal, cast

import msgspec

from nightshift.campaign.metrics import Step
from nightshift.campaign.records import (
    Completion,
    Failure,
    Outcome,
    Phase,
    Progress,
    ProgressCallback,
    Training,
    Weights,
)
from nightshift.config.rules import Decoding
from nightshift.engines.base import NoGradient, Session
from nightshift.engines.standstill import Standstill
from nightshift.errors import EngineError
from nightshift.evaluation.environment import Chat
from nightshift.executors.gpus import nvml_session
from nightshift.executors.process import Pipes, ProcessGroup, python_command
from nightshift.files import parse_json

LOG_NAME = "trainer.log"
GRACE_SECONDS = 3.0  # the trainer saves nothing on SIGTERM
LOOK_SECONDS = 1.0  # how often a trainer that sends nothing is looked at


class Event(msgspec.Struct, tag_field="event", tag=str.lower):
    """What the trainer sends, by the `event` of its line, with the fields that are read here."""


class Ready(Event):
    pass


class StepEnded(Event, tag="step"):
    step: int
    time: float  # seconds since training began
    reward_mean: float
    grad_norm: float | None = None
    equal_share: float | None = None


class Trained(Event):
    outcome: Literal["finished", "budget"]
    num_steps: int
    training_seconds: float
    reward_mean: float | None
    peak_memory_gb: float | None
    earlier_steps: tuple[int, ...] = ()


class FinalWeights(Event, tag="weights"):
    step: int
    sha256: str


class Completions(Event):
    completions: list[Completion]  # the next ones, in the order of the prompts


class Completed(Event):
    pass


class Failed(Event, tag="error"):
    cause: str
    is_machinery: bool = False  # an environment that cannot score is no config's fault


_EVENTS = Ready | StepEnded | Trained | FinalWeights | Completions | Completed | Failed


class TrlSession(Session):
    """One trainer process, from start-up to its last completion."""

    def __init__(
        self,
        trainer: Sequence[str],
        spec_path: Path,
        run_dir: Path,
        environment: Mapping[str, str],
        deadline: float,
        gpu_ids: Sequence[int] = (),
    ) -> None:
        """`deadline` is on the clock of time.monotonic. `gpu_ids`: NVML's, of the GPU that trains."""
        self._run_dir, self._deadline = run_dir, deadline
        self._num_steps = 0
        self._group = ProcessGroup(f"{run_dir.parent.name}-{uuid.uuid4().hex}", GRACE_SECONDS)
        argv = python_command(*trainer, str(spec_path))
        self._trainer = self._group.start(
            "trainer", argv, log_path=run_dir / LOG_NAME, env=environment, cwd=run_dir, stdin=PIPE, stdout=PIPE
        )
        self._pipes = Pipes(self._group, self._trainer)
        self._resources = ExitStack()
        nvml = self._resources.enter_context(nvml_session()) if gpu_ids else None
        self._standstill = Standstill(lambda: [self._trainer.pid], gpu_ids, nvml)
        self._show: Callable[[str], None] = lambda note: None  # in the live line

    def wait_until_ready(self, startup_seconds: float) -> None:
        """Raise EngineError with the trainer's last words if it does not come up in time."""
        event = self._next_event(min(self._deadline, time.monotonic() + startup_seconds))
        if not isinstance(event, Ready):
            cause = event.cause if isinstance(event, Failed) else f"it was not ready after {startup_seconds:g} s"
            raise EngineError(f"the trainer failed to start: {cause}{self._last_words()}", log=LOG_NAME)

    def train(self, budget_seconds: float, progress: ProgressCallback) -> Training:
        """Train until the budget ends, or until `progress` raises NoGradient. The trainer keeps the budget's clock,
        this process the deadline."""
        num_with = num_without = 0  # steps with a gradient, and those without since then
        is_ended = False  # by NoGradient: the trainer was asked to stop, as at the end of the budget
        try:
            self._send({"command": "train", "budget_seconds": budget_seconds})
            while (event := self._next_event(self._deadline)) is not None:
                match event:
                    case Trained():
                        self.earlier = {step: partial(self._load_step, step) for step in event.earlier_steps}
                        is_early = is_ended and event.outcome == "budget"
                        outcome = Outcome.NO_GRADIENT if is_early else Outcome(event.outcome)
                        measured = (event.training_seconds, event.reward_mean, event.peak_memory_gb)
                        return Training(outcome, event.num_steps, *measured)
                    case Failed():
                        failure = Failure.MACHINERY if event.is_machinery else Failure.TRAINING
                        return self._failed(Outcome.CRASHED, event.cause, failure, LOG_NAME)
                    case StepEnded():
                        self._num_steps = event.step
                        step = Step(event.step, grad_norm=event.grad_norm, equal_share=event.equal_share)
                        num_with += step.has_gradient is True
                        num_without = num_without + 1 if step.has_gradient is False else 0
                        reading = Progress(Phase.TRAINING, event.step, budget_seconds - event.time, event.reward_mean)
                        self._show = partial(_show, progress, reading)
                        try:
                            progress(replace(reading, num_with_gradient=num_with, num_without_gradient=num_without))
                        except NoGradient:
                            if not is_ended:
                                self._send({"command": "stop"})
                            is_ended = True
        except EngineError as error:
            return self._failed(Outcome.CRASHED, str(error), Failure.MACHINERY, error.log)
        cause = f"no end of training before the deadline of the run, after step {self._num_steps}"
        return self._failed(Outcome.DEADLINE, cause, Failure.TRAINING)

    def load_final_weights(self) -> Weights:
        """Have the trainer write its final policy and load what completes from that very file."""
        events = self._events({"command": "load_final_weights"})
        return next(Weights(event.step, event.sha256) for event in events if isinstance(event, FinalWeights))

    def complete(self, prompts: Sequence[Chat], decoding: Decoding, progress: ProgressCallback) -> list[Completion]:
        """Return completions in the order of the prompts. EngineError if the trainer fails or the deadline passes.

        Prompts and answers go through the pipes only: those of a test split must not lie anywhere below runs/.
        """
        completions: list[Completion] = []
        self._show = partial(_show, progress, Progress(Phase.EVALUATING, self._num_steps))
        for event in self._events({"command": "complete", "prompts": prompts, **msgspec.to_builtins(decoding)}):
            if isinstance(event, Completed):
                break
            if isinstance(event, Completions):
                completions += event.completions
                progress(Progress(Phase.EVALUATING, self._num_steps, num_done=len(completions)))
        return completions

    def close(self) -> None:
        """Stop the trainer and whatever it started. EngineError if something survives SIGKILL."""
        self._resources.close()
        if left := self._group.stop():
            raise EngineError(f"processes of {self._run_dir.name} could not be killed: {', '.join(left)}")

    def _load_step(self, step: int) -> None:
        next(event for event in self._events({"command": "load_step", "step": step}) if isinstance(event, Completed))

    def _events(self, command: Mapping[str, Any]) -> Iterator[Event]:
        """Send a command. Yield what the trainer sends from then on, until it fails or the deadline passes."""
        self._send(command)
        while (event := self._next_event(self._deadline)) is not None:
            if isinstance(event, Failed):
                raise EngineError(f"{command['command']} failed: {event.cause}", log=LOG_NAME)
            yield event
        raise EngineError(f"no answer to {command['command']} before the deadline of the run")

    def _send(self, command: Mapping[str, Any]) -> None:
        try:
            self._pipes.send(msgspec.json.encode(command), self._deadline)
        except TimeoutError:
            cause = f"the trainer did not take {command['command']} before the deadline of the run"
            raise EngineError(cause) from None
        except BrokenPipeError:
            raise self._death() from None

    def _next_event(self, deadline: float) -> Event | None:
        """Return the trainer's next event; None once the deadline has passed. EngineError for a line that is no event,
        and if the trainer is gone."""
        try:
            while True:
                with suppress(TimeoutError):
                    line = self._pipes.receive(min(deadline, time.monotonic() + LOOK_SECONDS))
                    break
                if time.monotonic() >= deadline:
                    return None
                if note := self._standstill.look(self._num_steps):
                    self._show(note)
            return cast(Event, parse_json(line, _EVENTS))  # type: ignore[arg-type]  # a union
        except BrokenPipeError:
            raise self._death() from None
        except ValueError as error:
            raise EngineError(f"the trainer said {line[:200]!r}: {error}") from None

    def _death(self) -> EngineError:
        with suppress(TimeoutExpired):  # it closed a pipe and lives on: close() ends it
            self._trainer.wait(GRACE_SECONDS)
        return EngineError(f"the trainer is gone: {self._trainer.exit_cause()}{self._last_words()}", log=LOG_NAME)

    def _failed(self, outcome: Outcome, cause: str, failure: Failure, log: str | None = None) -> Training:
        return Training(outcome, self._num_steps, cause=cause, failure=failure, log=log)

    def _last_words(self) -> str:
        lines = self._trainer.tail(3)
        return f"; last in {self._trainer.log_path.name}: {' | '.join(lines)}" if lines else ""


def _show(progress: ProgressCallback, reading: Progress, note: str) -> None:
    with suppress(NoGradient):  # raised at the step already
        progress(replace(reading, note=note))
