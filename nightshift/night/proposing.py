"""Getting the next proposal: ask, check, hand back what would not run, and give up after a few times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from nightshift.campaign.campaign import Campaign
from nightshift.engines import used_keys
from nightshift.errors import UsageError
from nightshift.experiment import admit
from nightshift.git.repo import CONFIG_NAME
from nightshift.night.interrupt import Interrupt
from nightshift.night.memory import Memory
from nightshift.night.state import BY_HAND, MAX_GIVEN_UP, MAX_WITHOUT_EDIT, Pending, Stop, num_since_keep
from nightshift.proposers import Context, Proposal, Proposer
from nightshift.records import Failure, Record, Request
from nightshift.setup import Setup
from nightshift.train_toml.config import load, parse

MAX_RETURNS = 3  # of a refused proposal to its proposer


@dataclass(frozen=True, slots=True)
class Proposing:
    """One night's way to its next proposal, which waits in the state then. `pauses`: seconds after each proposal in a
    row without an edit, which may be a rate limit that passes."""

    memory: Memory
    setup: Setup
    proposer: Proposer
    interrupt: Interrupt
    wait: Callable[[float], None]
    pauses: tuple[float, ...]

    def next(self) -> Stop | None:
        """The next proposal, or why there is none to come."""
        campaign = self.memory.campaign()
        return self._propose(campaign, campaign.incumbent) if campaign.incumbent else self._baseline()

    def _baseline(self) -> Stop | None:
        failed = [r for r in self.memory.own() if r.failure is not Failure.INTERRUPTED]
        if failed and failed[-1].judgement:
            return Stop(f"the baseline crashed: {failed[-1].judgement.why}", is_planned=False)
        config = load(self.setup.root / CONFIG_NAME)
        admit(config, Request(), self.setup)
        number = self.setup.ledger.next_number()
        self.memory.update(pending=Pending(number, config.source.decode(), "baseline"))
        return None

    def _propose(self, campaign: Campaign, incumbent: Record) -> Stop | None:
        """Ask for the next train.toml until it would run."""
        setup, memory = self.setup, self.memory
        source = setup.ledger.source(incumbent.number)
        admit(parse(source), Request(again=True), setup)  # no proposal is to blame for the set-up
        number, refusals, notes = setup.ledger.next_number(), list[str](), list[str]()
        while len(refusals) <= MAX_RETURNS:
            memory.do(f"{self.proposer.name} proposes experiment {number:04d}")
            setup.reporter.note(memory.state.doing)
            context = self._context(campaign, incumbent, source, tuple(refusals))
            proposal = self.proposer.propose(context, lambda: self.interrupt.asked)
            if self.interrupt.asked:
                return BY_HAND
            notes += proposal.notes
            if proposal.lesson and campaign.decided[-1].lesson is None:
                setup.ledger.write(replace(campaign.decided[-1], lesson=proposal.lesson))
            reason = self._refusal(proposal)
            if reason is None and proposal.source is not None:
                text = proposal.source.decode()
                pending = Pending(number, text, proposal.hypothesis, proposal.prediction, tuple(notes))
                memory.update(pending=pending, num_without_edit=0)
                return None
            refusals.append(reason or "no edit")
            setup.reporter.note(f"proposal refused: {refusals[-1]}")
            notes.append(f"proposal {len(refusals)} refused: {refusals[-1]}")
            if stop := self._count_without_edit(proposal, refusals[-1]):
                return stop
        return self.give_up(f"no valid proposal for {MAX_GIVEN_UP} experiments in a row: {refusals[-1]}")

    def _count_without_edit(self, proposal: Proposal, reason: str) -> Stop | None:
        num_without = self.memory.state.num_without_edit + 1 if proposal.source is None else 0
        self.memory.update(num_without_edit=num_without)
        if num_without == MAX_WITHOUT_EDIT:
            return Stop(f"{num_without} proposals in a row without an edit, the last one: {reason}", False)
        if num_without:
            self.wait(self.pauses[num_without - 1])
        return None

    def give_up(self, cause: str) -> Stop | None:
        """Go on without this proposal; the night is over with `cause` when that happens too often in a row."""
        self.memory.update(pending=None, num_given_up=self.memory.state.num_given_up + 1)
        return Stop(cause, False) if self.memory.state.num_given_up == MAX_GIVEN_UP else None

    def _context(self, campaign: Campaign, incumbent: Record, source: bytes, refusals: tuple[str, ...]) -> Context:
        setup, state = self.setup, self.memory.state
        deadline, plateau = state.deadline, state.request.plateau
        return Context(
            number=setup.ledger.next_number(),
            incumbent=incumbent,
            source=source,
            campaign=campaign,
            rules=setup.rules,
            ledger=setup.ledger,
            used_keys=used_keys(setup.engine, parse(source)),
            refusals=refusals,
            new_direction=plateau is not None and num_since_keep(self.memory.own()) == plateau,
            seconds_left=None if deadline is None else max((deadline - setup.now()).total_seconds(), 1.0),
        )

    def _refusal(self, proposal: Proposal) -> str | None:
        """Why this proposal cannot run, in one line; None if it can."""
        if proposal.source is None or proposal.cause is not None:
            return proposal.cause or "no edit"
        try:
            admit(parse(proposal.source), Request(), self.setup)
        except UsageError as error:
            return str(error)
        return None
