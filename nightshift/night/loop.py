"""The overnight loop: propose, run_experiment, record; stoppable at any time, resumable after any end.

One `_step` does one thing and leaves its result on disk, so a night that was killed between or within
steps goes on with the same command: a proposal waits in night.json until the ledger has decided it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from nightshift.errors import ConfigError, EngineError, Interrupted, NightshiftError, UsageError
from nightshift.experiment import run_experiment
from nightshift.files import write_atomically
from nightshift.git.repo import CONFIG_NAME
from nightshift.night.interrupt import Interrupt
from nightshift.night.memory import Memory
from nightshift.night.proposing import Proposing
from nightshift.night.state import BY_HAND, STOP_NAME, NightState, Pending, Stop, ended, stop_rule
from nightshift.proposers import Proposer
from nightshift.records import Failure, Request
from nightshift.setup import Setup
from nightshift.train_toml.text import read_source

MAX_TRIES = 3  # of one config that ends in failures of machinery
_NAP_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Pauses:
    """Seconds to wait after failures in a row; when they are used up, the night stops with the cause.

    `machinery`: engine, disk or git broke. `agent`: no edit came, which may be a rate limit that passes.
    """

    machinery: tuple[float, ...] = (30.0, 120.0, 600.0)
    agent: tuple[float, ...] = (60.0, 600.0)


class Night:
    """A night under way. Run it as the head (Ledger.head)."""

    def __init__(
        self,
        state: NightState,
        setup: Setup,
        proposer: Proposer,
        tell: Callable[[str], None],
        pauses: Pauses | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`tell` gets the summary after every experiment and at the end; news goes to the setup's reporter."""
        self._interrupt = Interrupt(setup.reporter.note)
        self._setup = replace(setup, is_stopping=self._interrupt.tell)
        self._memory = Memory(state, self._setup)
        self._tell = tell
        self._pauses = pauses or Pauses()
        self._sleep = sleep
        self._num_failures = 0  # of machinery, in a row
        parts = (self._memory, self._setup, proposer, self._interrupt)
        self._proposing = Proposing(*parts, self._wait, self._pauses.agent)

    @property
    def state(self) -> NightState:
        """What the night remembers beside the ledger."""
        return self._memory.state

    def run(self) -> Stop:
        """Until a stop rule holds; why. Interrupted and UsageError end it too, with the same traces on disk."""
        with self._interrupt.installed():
            try:
                stop = None
                while stop is None:
                    stop = self._step_or_pause()
                self._close(stop)
                return stop
            except Interrupted as error:
                # A second Ctrl-C is a person's word. After a SIGTERM (a reboot) the same command goes on.
                self._close(Stop(error.cause) if self._interrupt.asked else None)
                raise
            except UsageError as error:
                self._close(Stop(str(error), is_planned=False))
                raise

    def _step_or_pause(self) -> Stop | None:
        try:
            stop = self._step()
            self._num_failures = 0
            return stop
        except (EngineError, OSError) as error:
            if self._num_failures == len(self._pauses.machinery):
                return Stop(f"the machinery failed {self._num_failures + 1} times in a row: {error}", is_planned=False)
            pause = self._pauses.machinery[self._num_failures]
            self._num_failures += 1
            self._setup.reporter.note(f"{error} -- once more in {pause:g} s")
            self._wait(pause)
            return None

    def _step(self) -> Stop | None:
        """One thing: settle what is left over, or propose, or run."""
        self._memory.tidy()
        stop = self._why_stop()
        if stop is not None:
            return stop
        pending = self.state.pending
        return self._proposing.next() if pending is None else self._run_pending(pending)

    def _why_stop(self) -> Stop | None:
        if self._interrupt.asked:
            return BY_HAND
        if (self._setup.root / STOP_NAME).exists():
            return Stop(f"file {STOP_NAME} found")
        branch = self._setup.repo.head().branch
        if branch != self.state.branch:
            return Stop(f"the checkout moved from {self.state.branch} to {branch or 'a detached HEAD'}", False)
        own = self._memory.own()
        runs = [run.total_seconds for r in own for run in r.runs if run.evaluation is not None]
        # The next run takes as long as the last one; before there is one, its budget at least.
        run_seconds = runs[-1] if runs else self._setup.rules.budget_seconds
        return stop_rule(self.state, own, self._setup.now(), run_seconds)

    def _run_pending(self, pending: Pending) -> Stop | None:
        setup, memory = self._setup, self._memory
        self._place(pending.source.encode())
        memory.do(f"experiment {setup.ledger.next_number():04d}: {pending.hypothesis}")
        request = Request(
            pending.hypothesis, until=self.state.deadline, prediction=pending.prediction, notes=pending.notes
        )
        try:
            run_experiment(request, setup)
        except UsageError as error:
            setup.reporter.note(f"the proposal is dropped: {error}")
            return self._proposing.give_up(str(error))
        memory.tidy()
        self._tell(memory.summarise())
        if self.state.pending is not None:  # the machinery failed, not the config: once more, then without it
            num_tries = len([r for r in memory.attempts(pending) if r.failure is Failure.MACHINERY])
            if num_tries >= MAX_TRIES:
                memory.update(pending=None)
            else:
                self._wait(self._pauses.machinery[num_tries - 1])
        return None

    def _place(self, source: bytes) -> None:
        """Write train.toml for the next experiment; what somebody else wrote there is kept aside."""
        setup, path = self._setup, self._setup.root / CONFIG_NAME
        try:
            present = read_source(path)
        except ConfigError:
            present = None
        if present == source:
            return
        known = {setup.ledger.source(number) for number in setup.ledger.numbers() if setup.ledger.read(number)}
        known.add(setup.repo.config_at("HEAD") or b"")
        if present is not None and present not in known:
            aside = setup.ledger.runs_dir / f"edited-{setup.now():%Y%m%dT%H%M%S}.toml"
            write_atomically(aside, present)
            setup.reporter.note(f"train.toml was edited by somebody else: kept as {aside}")
        write_atomically(path, source)

    def _wait(self, seconds: float) -> None:
        """Sleep, unless a stop is asked for."""
        until = self._setup.clock() + seconds
        while self._setup.clock() < until and not self._interrupt.asked:
            if (self._setup.root / STOP_NAME).exists():
                return
            self._sleep(min(_NAP_SECONDS, max(until - self._setup.clock(), 0.0)))

    def _close(self, stop: Stop | None) -> None:
        """The last traces of the night; it can be gone on with where `stop` is None."""
        memory, setup = self._memory, self._setup
        try:
            if stop is not None:
                memory.state = ended(self.state, stop.cause, setup.now())
                memory.update()
            memory.tidy(is_end=stop is not None)
            self._tell(memory.summarise())
        except (NightshiftError, OSError) as error:
            setup.reporter.note(f"the night's summary cannot be written: {error}")
