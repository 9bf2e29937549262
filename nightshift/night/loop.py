"""The overnight loop: propose, run_experiment, record; stoppable at any time, resumable after any end.

One `_step` does one thing and leaves its result on disk, so a night that was killed between or within
steps goes on with the same command: a proposal waits in night.json until the ledger has decided it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from nightshift.campaign import campaign as campaigns
from nightshift.campaign.campaign import Campaign
from nightshift.engines import used_keys
from nightshift.errors import ConfigError, EngineError, Interrupted, NightshiftError, UsageError
from nightshift.experiment import Request, admit, run_experiment
from nightshift.files import write_atomically
from nightshift.git.repo import CONFIG_NAME
from nightshift.git.settlement import finish_earlier
from nightshift.night import interrupt as brake
from nightshift.night import state as states
from nightshift.night import text as night_text
from nightshift.night.interrupt import Brake
from nightshift.night.state import NightState, Pending, Stop
from nightshift.proposers.proposers import Context, Proposal, Proposer
from nightshift.records import Failure, Record
from nightshift.setup import Lab
from nightshift.train_toml import config as configs
from nightshift.train_toml import text as toml_text

MAX_RETURNS = 3  # of a refused proposal to its proposer
MAX_TRIES = 3  # of one config that ends in failures of machinery
PROPOSAL_NAME = "proposal.json"  # beside record.json: who proposed what, and what it did besides
_NAP_SECONDS = 0.2
_BUSY_SECONDS = 5.0  # between two looks whether somebody's own run.py has ended
_BY_HAND = Stop("stopped by Ctrl-C")


@dataclass(frozen=True, slots=True)
class Pauses:
    """Seconds to wait after failures in a row; when they are used up, the night stops with the cause.

    `machinery`: engine, disk or git broke. `agent`: no edit came, which may be a rate limit that passes.
    """

    machinery: tuple[float, ...] = (30.0, 120.0, 600.0)
    agent: tuple[float, ...] = (60.0, 600.0)


class Night:
    """A night under way."""

    def __init__(
        self,
        state: NightState,
        lab: Lab,
        proposer: Proposer,
        tell: Callable[[str], None],
        pauses: Pauses | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`tell` gets the summary after every experiment and at the end; news goes to the lab's reporter."""
        self.state = state
        self._lab = lab
        self._proposer = proposer
        self._tell = tell
        self._pauses = pauses or Pauses()
        self._sleep = sleep
        self._num_failures = 0  # of machinery, in a row
        self._brake = Brake()

    def run(self) -> Stop:
        """Until a stop rule holds; why. Interrupted and UsageError end it too, with the same traces on disk."""
        with self._brake.installed():
            try:
                stop = None
                while stop is None:
                    stop = self._step_or_pause()
                self._close(stop)
                return stop
            except Interrupted as error:
                # A second Ctrl-C is a person's word. After a SIGTERM (a reboot) the same command goes on.
                self._close(Stop(error.cause) if self._brake.asked else None)
                raise
            except UsageError as error:
                self._close(Stop(str(error), is_planned=False))
                raise

    def _step_or_pause(self) -> Stop | None:
        try:
            stop = self._step()
            self._num_failures = 0
            return stop
        except UsageError:
            if self._lab.ledger.is_locked():  # somebody's own run.py was quicker
                return None
            raise
        except (EngineError, OSError) as error:
            if self._num_failures == len(self._pauses.machinery):
                return Stop(f"the machinery failed {self._num_failures + 1} times in a row: {error}", is_planned=False)
            pause = self._pauses.machinery[self._num_failures]
            self._num_failures += 1
            self._lab.reporter.note(f"{error} -- once more in {pause:g} s")
            self._wait(pause)
            return None

    def _step(self) -> Stop | None:
        """One thing: settle what is left over, or propose, or run."""
        if self._lab.ledger.is_locked():
            self._do("waiting for another experiment in this checkout")
            self._wait(_BUSY_SECONDS)
            return _BY_HAND if self._brake.asked else None
        self._tidy()
        stop = self._why_stop()
        if stop is not None:
            return stop
        if self.state.pending is not None:
            return self._run_pending(self.state.pending)
        campaign = self._campaign()
        return self._propose(campaign, campaign.incumbent) if campaign.incumbent else self._propose_baseline()

    def _why_stop(self) -> Stop | None:
        if self._brake.asked:
            return _BY_HAND
        if (self._lab.root / states.STOP_NAME).exists():
            return Stop(f"file {states.STOP_NAME} found")
        branch = self._lab.repo.head().branch
        if branch != self.state.branch:
            return Stop(f"the checkout moved from {self.state.branch} to {branch or 'a detached HEAD'}", False)
        own = self._own()
        runs = [run.total_seconds for r in own for run in r.runs if run.evaluation is not None]
        # The next run takes as long as the last one; before there is one, its budget at least.
        run_seconds = runs[-1] if runs else self._lab.rules.budget_seconds
        return states.stop_rule(self.state, own, self._lab.now(), run_seconds)

    def _tidy(self, is_end: bool = False) -> None:
        """Close what was cut off; complete the records with what was said about them; forget what is decided."""
        with self._lab.ledger.lock():
            finish_earlier(self._lab)
            pending = self.state.pending
            attempts = self._attempts(pending) if pending else []
            for record in attempts:
                self._complete(record)
            # The last one waits for the lesson that the agent's next brief asks for.
            own = states.decided(self._own())
            for record in own if is_end else own[:-1]:
                if record.lesson is None:
                    self._lab.ledger.write(replace(record, lesson=states.lesson_of(record)))
        if states.decided(attempts):
            self._update(pending=None, num_given_up=0)

    def _attempts(self, pending: Pending) -> list[Record]:
        """Experiments that ran this very proposal."""
        source = pending.source.encode()
        return [r for r in self._own() if r.number >= pending.number and self._lab.ledger.source(r.number) == source]

    def _complete(self, record: Record) -> None:
        """Store beside the record who proposed it, and what was named of that."""
        path = self._lab.ledger.run_dir(record.number) / PROPOSAL_NAME
        if not path.exists():
            said = {"agent": self.state.order.agent, **asdict(self.state)["pending"]}
            write_atomically(path, json.dumps(said, indent=1).encode())

    # -- proposing

    def _propose_baseline(self) -> Stop | None:
        failed = [r for r in self._own() if r.failure is not Failure.INTERRUPTED and r.judgement is not None]
        if failed:
            assert failed[-1].judgement is not None
            return Stop(f"the baseline crashed: {failed[-1].judgement.why}", is_planned=False)
        config = configs.load(self._lab.root / CONFIG_NAME)
        admit(config, Request(), self._lab)
        self._update(pending=Pending(self._next_number(), config.source.decode(), "baseline"))
        return None

    def _propose(self, campaign: Campaign, incumbent: Record) -> Stop | None:
        """Ask for the next train.toml until it would run; it waits in the state then."""
        source = self._lab.ledger.source(incumbent.number)
        admit(configs.parse(source), Request(again=True), self._lab)  # no proposal is to blame for the set-up
        number, refusals, notes = self._next_number(), list[str](), list[str]()
        while len(refusals) <= MAX_RETURNS:
            self._do(f"{self._proposer.name} proposes experiment {number:04d}")
            self._lab.reporter.note(self.state.doing)
            context = self._context(campaign, incumbent, source, tuple(refusals))
            proposal = self._proposer.propose(context, lambda: self._brake.asked)
            if self._brake.asked:
                return _BY_HAND
            notes += proposal.notes
            if proposal.lesson and campaign.decided[-1].lesson is None:
                self._lab.ledger.write(replace(campaign.decided[-1], lesson=proposal.lesson))
            reason = self._refusal(proposal)
            if reason is None:
                assert proposal.source is not None
                text = proposal.source.decode()
                pending = Pending(number, text, proposal.hypothesis, proposal.prediction, tuple(notes))
                self._update(pending=pending, num_without_edit=0)
                return None
            self._lab.reporter.note(f"proposal refused: {reason}")
            refusals.append(reason)
            notes.append(f"proposal {len(refusals)} refused: {reason}")
            num_without = self.state.num_without_edit + 1 if proposal.source is None else 0
            self._update(num_without_edit=num_without)
            if num_without == states.MAX_WITHOUT_EDIT:
                return Stop(f"{num_without} proposals in a row without an edit, the last one: {reason}", False)
            if num_without:
                self._wait(self._pauses.agent[num_without - 1])
        self._update(num_given_up=self.state.num_given_up + 1)
        if self.state.num_given_up == states.MAX_GIVEN_UP:
            return Stop(f"no valid proposal for {states.MAX_GIVEN_UP} experiments in a row: {refusals[-1]}", False)
        return None

    def _context(self, campaign: Campaign, incumbent: Record, source: bytes, refusals: tuple[str, ...]) -> Context:
        lab, deadline, plateau = self._lab, self.state.deadline, self.state.order.plateau
        return Context(
            number=self._next_number(),
            incumbent=incumbent,
            source=source,
            records=campaign.decided,
            rules=lab.rules,
            ledger=lab.ledger,
            used_keys=used_keys(lab.engine, configs.parse(source)),
            refusals=refusals,
            new_direction=plateau is not None and states.num_since_keep(self._own()) == plateau,
            seconds_left=None if deadline is None else max((deadline - lab.now()).total_seconds(), 1.0),
        )

    def _refusal(self, proposal: Proposal) -> str | None:
        """Why this proposal cannot run, in one line; None if it can."""
        if proposal.source is None or proposal.cause is not None:
            return proposal.cause or "no edit"
        try:
            admit(configs.parse(proposal.source), Request(), self._lab)
        except UsageError as error:
            return str(error)
        return None

    # -- running

    def _run_pending(self, pending: Pending) -> Stop | None:
        lab = self._lab
        self._place(pending.source.encode())
        self._do(f"experiment {self._next_number():04d}: {pending.hypothesis}")
        max_runs, until = self.state.order.max_runs, self.state.deadline or brake.FAR
        request = Request(
            pending.hypothesis,
            max_runs=max_runs,
            until=until,
            prediction=pending.prediction,
            notes=tuple(pending.notes),
        )
        try:
            run_experiment(request, self._brake.applied_to(lab))
        except UsageError as error:
            if lab.ledger.is_locked():
                raise
            lab.reporter.note(f"the proposal is dropped: {error}")
            self._update(pending=None, num_given_up=self.state.num_given_up + 1)
            return Stop(str(error), False) if self.state.num_given_up == states.MAX_GIVEN_UP else None
        self._tidy()
        self._tell(self._summary())
        if self.state.pending is not None:  # the machinery failed, not the config: once more, then without it
            num_tries = len([r for r in self._attempts(pending) if r.failure is Failure.MACHINERY])
            if num_tries >= MAX_TRIES:
                self._update(pending=None)
            else:
                self._wait(self._pauses.machinery[num_tries - 1])
        return None

    def _place(self, source: bytes) -> None:
        """Write train.toml for the next experiment; what somebody else wrote there is kept aside."""
        path = self._lab.root / CONFIG_NAME
        try:
            present = toml_text.read(path)
        except ConfigError:
            present = None
        if present == source:
            return
        known = {self._lab.ledger.source(r.number) for r in self._lab.ledger.records()}
        known.add(self._lab.repo.config_at("HEAD") or b"")
        if present is not None and present not in known:
            aside = self._lab.ledger.runs_dir / f"edited-{self._lab.now():%Y%m%dT%H%M%S}.toml"
            write_atomically(aside, present)
            self._lab.reporter.note(f"train.toml was edited by somebody else: kept as {aside}")
        write_atomically(path, source)

    # -- remembering

    def _campaign(self) -> Campaign:
        ours = [r for r in self._lab.ledger.records() if r.branch == self.state.branch]
        ours = [r for r in ours if r.rules_hash == self._lab.rules_hash]
        return campaigns.replay(ours, self._lab.rules)

    def _own(self) -> list[Record]:
        return self.state.own(self._lab.ledger.records())

    def _next_number(self) -> int:
        return max(self._lab.ledger.numbers(), default=0) + 1

    def _update(self, **changes: Any) -> None:
        self.state = replace(self.state, **changes)
        states.save(self._lab.ledger, self.state)

    def _do(self, what: str) -> None:
        self._update(doing=what, doing_since=self._lab.now().isoformat(timespec="seconds"))

    def _wait(self, seconds: float) -> None:
        """Sleep, unless a stop is asked for."""
        until = self._lab.clock() + seconds
        while self._lab.clock() < until and not self._brake.asked:
            if (self._lab.root / states.STOP_NAME).exists():
                return
            self._sleep(min(_NAP_SECONDS, max(until - self._lab.clock(), 0.0)))

    def _summary(self) -> str:
        text = night_text.summary(self.state, self._own(), self._campaign(), self._lab.now())
        write_atomically(self._lab.ledger.runs_dir / night_text.SUMMARY_NAME, text.encode() + b"\n")
        self._write_page()
        return text

    def _write_page(self) -> None:
        from nightshift.report.page import write_report  # jinja2 and matplotlib load with the first page

        try:
            write_report(self._lab.root, self._lab.now(), branch=self.state.branch)
        except Interrupted:
            raise
        except Exception as error:  # whatever it is, a page that cannot be written does not end the night
            self._lab.reporter.note(f"the page cannot be written: {type(error).__name__}: {error}")

    def _close(self, stop: Stop | None) -> None:
        """The last traces of the night; it can be gone on with where `stop` is None."""
        try:
            if stop is not None:
                self._update(cause=stop.cause, ended=self._lab.now().isoformat(timespec="seconds"))
            self._tidy(is_end=stop is not None)
            self._tell(self._summary())
        except (NightshiftError, OSError) as error:
            self._lab.reporter.note(f"the night's summary cannot be written: {error}")
