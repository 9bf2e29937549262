"""The overnight loop: propose, run_experiment, record; stoppable at any time, resumable after any end.

One `_step` does one thing and leaves its result on disk, so a night that was killed between or within
steps goes on with the same command: a proposal waits in night.json until the ledger has decided it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from nightshift.campaign.busy import BUSY, to_repeat
from nightshift.campaign.campaign import Campaign
from nightshift.campaign.closing import resume
from nightshift.campaign.recombine import base_of, next_base
from nightshift.engines import used_keys
from nightshift.errors import ConfigError, EngineError, Interrupted, NightshiftError, UsageError
from nightshift.experiment import admit, run_experiment
from nightshift.files import write_atomically
from nightshift.git.repo import CONFIG_NAME
from nightshift.night.interrupt import Interrupt
from nightshift.night.state import STOP_NAME, NightState, Stop, decided, num_since_keep, save, stop_rule, used
from nightshift.night.text import write_summary
from nightshift.processes.load import taken_now
from nightshift.proposers import Context, Proposal, Proposer
from nightshift.proposers.agent import AgentProposer
from nightshift.records import Failure, Load, Record
from nightshift.request import Request
from nightshift.setup import Setup
from nightshift.train_toml.config import load, parse
from nightshift.train_toml.text import read_source

MAX_TRIES = 3  # of one config that ends in failures of machinery
MAX_REFUSALS = 8  # of proposals in a row
# Seconds to wait after failures of machinery in a row, and after proposals without an edit: a rate limit may pass.
PAUSES = (60.0, 600.0, 600.0)
_NAP_SECONDS = 0.2


class Night:
    """A night under way. Run it as the head (Ledger.head). `state`: what it remembers beside the ledger."""

    def __init__(
        self,
        state: NightState,
        setup: Setup,
        proposer: Proposer,
        tell: Callable[[str], None],
        pauses: tuple[float, ...] = PAUSES,
        look: Callable[[], Load] = taken_now,
    ) -> None:
        """`tell` gets the summary after every experiment and at the end; news goes to the setup's reporter. `look`
        tells what others take of the machine now."""
        self.state = state
        self._interrupt = Interrupt(setup.reporter.note)
        self._setup = replace(setup, is_stopping=self._interrupt.tell)
        self._proposer = proposer
        self._tell = tell
        self._pauses = pauses
        self._look = look
        self._num_failures = 0  # of machinery, in a row
        self._is_stop_new = False  # the file came while an agent was at work

    def run(self) -> Stop:
        """Until a stop rule holds; why. Interrupted and UsageError end it too, with the same traces on disk."""
        with self._interrupt.installed():
            try:
                self._update()  # for `status`, and for the same command after a kill
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
            self._num_failures += 1
            if self._num_failures > len(self._pauses):
                return Stop(f"the machinery failed {self._num_failures} times in a row: {error}", is_planned=False)
            self._setup.reporter.note(f"{error} -- once more in {self._pauses[self._num_failures - 1]:g} s")
            self._pause(self._num_failures)
            return None

    def _step(self) -> Stop | None:
        """One thing: settle what is left over, or propose, or repeat, or run."""
        self._tidy()
        if stop := self._why_stop():
            return stop
        if self.state.pending:
            return self._run(self.state.pending)
        campaign = self._setup.campaign(self.state.branch)
        if campaign.incumbent is None:
            return self._baseline()
        if (busy := to_repeat(self._own(), campaign.incumbent.number)) and self._is_calm():
            self._repeat(busy, campaign)
            return None
        return self._propose(campaign, campaign.incumbent)

    def _tidy(self) -> None:
        """Close what was cut off; forget what is decided."""
        with self._setup.ledger.lock():
            resume(self._setup.ledger, self._setup.repo, self._setup.reporter.note)
        if decided(self._attempts()):
            self._update(pending=None, refusals=(), notes=())

    def _why_stop(self) -> Stop | None:
        if self._interrupt.asked:
            return Stop("stopped by Ctrl-C")
        if self._is_stop_found():
            by = (
                f"appeared while {self._proposer.name} was at work, and may be its own"
                if self._is_stop_new
                else "found"
            )
            return Stop(f"file {STOP_NAME} {by}", is_planned=not self._is_stop_new)
        branch = self._setup.repo.head().branch
        if branch != self.state.branch:
            return Stop(f"the checkout moved from {self.state.branch} to {branch or 'a detached HEAD'}", False)
        own = self._own()
        runs = [run.total_seconds for r in own for run in r.runs if run.evaluation is not None]
        # The next run takes as long as the last one; before there is one, its budget at least.
        run_seconds = runs[-1] if runs else self._setup.rules.budget_seconds
        return stop_rule(self.state, own, self._setup.now(), run_seconds)

    def _baseline(self) -> Stop | None:
        failed = [r for r in self._own() if r.failure is not Failure.INTERRUPTED]
        if failed and failed[-1].judgement:
            return Stop(f"the baseline crashed: {failed[-1].judgement.why}", is_planned=False)
        config = load(self._setup.root / CONFIG_NAME)
        admit(config, Request(), self._setup)
        self._update(pending=Proposal(config.source, "baseline"))
        return None

    def _propose(self, campaign: Campaign, incumbent: Record) -> Stop | None:
        """Ask once for the next train.toml; it waits in the state then, or why it was refused does."""
        setup, last = self._setup, campaign.decided[-1]
        over = used(self.state, self._own(), setup.now())
        base, config = next_base(campaign, over, setup.ledger.stored_config, setup.engine.validate)
        admit(config, Request(again=True, base=base), setup)  # no proposal is to blame for the set-up
        context = self._context(campaign, incumbent, config.source, base)
        setup.reporter.note(f"{self._proposer.name} proposes experiment {context.number:04d}")
        proposal = self._proposer.propose(context, lambda: self._interrupt.asked)
        unwalled = isinstance(self._proposer, AgentProposer) and self._proposer.agent.wall is None
        self._is_stop_new = unwalled and self._is_stop_found()
        if self._interrupt.asked:
            return None
        if proposal.lesson and last.lesson is None:
            with setup.ledger.lock():
                setup.ledger.write(replace(last, lesson=proposal.lesson))
        proposal = replace(proposal, notes=(*self.state.notes, *proposal.notes), base=base)
        if proposal.source is None or proposal.cause is not None:
            return self._refuse(proposal, proposal.cause or "no edit")
        try:
            admit(parse(proposal.source), Request(base=base), setup)
        except UsageError as error:
            return self._refuse(proposal, str(error))
        self._update(pending=proposal)
        return None

    def _is_calm(self) -> bool:
        return self._look().taken < BUSY

    def _repeat(self, record: Record, campaign: Campaign) -> None:
        """Run a busy experiment's train.toml once more, with another seed."""
        self._setup.reporter.note(f"experiment {record.number:04d} was run on a busy machine: once more, it is calm")
        what = f"{record.number:04d} again, which was run on a busy machine: {record.description}"
        source = self._setup.ledger.source(record.number)
        base = base_of(campaign, record, self._setup.ledger.stored_config)
        self._update(pending=Proposal(source, what, record.prediction, repeats=record.number, base=base))

    def _context(self, campaign: Campaign, incumbent: Record, source: bytes, base: tuple[int, ...]) -> Context:
        setup, deadline, plateau = self._setup, self.state.deadline, self.state.request.plateau
        return Context(
            number=setup.ledger.next_number(),
            incumbent=incumbent,
            source=source,
            base=base,
            campaign=campaign,
            rules=setup.rules,
            ledger=setup.ledger,
            used_keys=used_keys(setup.engine, parse(source)),
            refusals=self.state.refusals,
            new_direction=plateau is not None and num_since_keep(self._own()) == plateau,
            seconds_left=None if deadline is None else max((deadline - setup.now()).total_seconds(), 1.0),
        )

    def _refuse(self, proposal: Proposal, cause: str) -> Stop | None:
        """Go on without this proposal; the night is over with `cause` when that happens too often in a row."""
        refusals = (*self.state.refusals, cause)
        notes = (*proposal.notes, f"proposal {len(refusals)} refused: {cause}")
        self._update(pending=None, refusals=refusals, notes=notes)
        self._setup.reporter.note(f"proposal refused: {cause}")
        if len(refusals) >= MAX_REFUSALS:
            return Stop(f"{len(refusals)} proposals in a row were refused, the last one: {cause}", is_planned=False)
        if proposal.source is None:
            self._pause(len(refusals))
        return None

    def _run(self, pending: Proposal) -> Stop | None:
        setup = self._setup
        self._place(pending.source or b"")
        request = Request(
            pending.hypothesis,
            until=self.state.deadline,
            again=pending.repeats is not None,
            prediction=pending.prediction,
            notes=pending.notes,
            base=pending.base,
        )
        try:
            record = run_experiment(request, setup)
        except UsageError as error:
            return self._refuse(pending, str(error))
        self._tidy()
        self._tell(write_summary(self.state, setup))
        if self.state.pending is None:
            return None
        num_tries = sum(r.failure is Failure.MACHINERY for r in self._attempts())
        if num_tries >= MAX_TRIES and record.judgement:
            return self._refuse(pending, f"the machinery lost its run {num_tries} times: {record.judgement.why}")
        self._pause(num_tries)  # the machinery failed, not the config: once more
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
        known = {setup.ledger.source(record.number) for record in setup.ledger.records()}
        if present is not None and present not in known | {setup.repo.config_at("HEAD")}:
            aside = setup.ledger.runs_dir / f"edited-{setup.now():%Y%m%dT%H%M%S}.toml"
            write_atomically(aside, present)
            setup.reporter.note(f"train.toml was edited by somebody else: kept as {aside}")
        write_atomically(path, source)

    def _pause(self, num_failures: int) -> None:
        """Sleep after so many failures in a row, unless a stop is asked for."""
        until = self._setup.clock() + self._pauses[min(num_failures, len(self._pauses)) - 1]
        while (left := until - self._setup.clock()) > 0 and not self._interrupt.asked:
            if self._is_stop_found():
                return
            time.sleep(min(_NAP_SECONDS, left))

    def _is_stop_found(self) -> bool:
        return (self._setup.root / STOP_NAME).exists()

    def _close(self, stop: Stop | None) -> None:
        """The last traces of the night; it can be gone on with where `stop` is None."""
        try:
            if stop is not None:
                self._update(cause=stop.cause)
            self._tidy()
            self._tell(write_summary(self.state, self._setup))
        except (NightshiftError, OSError) as error:
            self._setup.reporter.note(f"the night's summary cannot be written: {error}")

    def _update(self, **changes: Any) -> None:
        """Change the state, on disk too."""
        self.state = replace(self.state, **changes)
        save(self._setup.ledger, self.state)

    def _own(self) -> list[Record]:
        """The closed experiments of this night."""
        return self.state.own(self._setup.ledger.records())

    def _attempts(self) -> list[Record]:
        """Those that ran the proposal which waits."""
        pending = self.state.pending
        if pending is None or pending.source is None:
            return []
        tried, after = parse(pending.source).hash, -1 if pending.repeats is None else pending.repeats
        return [record for record in self._own() if record.config_hash == tried and record.number > after]
