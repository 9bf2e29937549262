"""Proposals of a night: ask the agent, accept or refuse its answers, queue what runs next.

The agent works while runs train. While it is unavailable, TPE proposes for the slots that are free.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from nightshift.agents.agent import complete
from nightshift.agents.availability import AWAY, Availability, Meaning
from nightshift.agents.base import Answer, Context, Proposer, Proposing
from nightshift.agents.direction import read_direction
from nightshift.agents.notebook import store_lessons
from nightshift.campaign.campaign import Campaign
from nightshift.campaign.commits import change_keys
from nightshift.campaign.ledger import PROPOSALS_NAME, ProposalCost, append
from nightshift.campaign.records import Change, Record, Request, Run, Stage
from nightshift.campaign.waits import FILL
from nightshift.config.scope import is_within, scope_of
from nightshift.config.train_toml import parse
from nightshift.engines.base import used_keys
from nightshift.errors import EngineError, UsageError
from nightshift.night.state import Desk, NightState, Stop, decided
from nightshift.report.slices import weakest

MAX_REFUSALS = 8  # refused proposals in a row, after which the night ends


def attempts(answer: Answer, records: Sequence[Record]) -> list[Record]:
    """Return the experiments that test a proposal."""
    keys = answer.change and answer.change.keys
    return [r for r in records if r.number >= answer.number and r.run.new and r.run.new.keys == keys]


def undecided(state: NightState, closed: Sequence[Record]) -> tuple[Answer, ...]:
    """Return the proposals that no closed experiment has decided."""
    return tuple(answer for answer in state.pending if not decided(attempts(answer, closed)))


@dataclass(slots=True)
class _Work:
    """A request for proposals in progress."""

    proposer: Proposer
    context: Context
    proposing: Proposing
    answers: tuple[Answer, ...] | None = None  # None while the agent works


class Proposals(Desk):
    """Asks the proposer, and TPE while the proposer is unavailable. The subclass Night sets `proposer` and `filler`."""

    proposer: Proposer
    filler: Proposer  # TPE
    _work: _Work | None = None
    _refusals: tuple[str, ...] = ()  # of the agent since its last accepted proposal
    _fill_refusals: tuple[str, ...] = ()  # of TPE, whose next draw has another seed each time

    def queue(self) -> list[Answer]:
        """Return the accepted proposals whose runs have not started, without those under another direction."""
        ours = (answer for answer in self.state.pending if answer.direction == self.state.direction)
        return [answer for answer in ours if not attempts(answer, self.controller.in_flight)]

    def propose(self, campaign: Campaign) -> bool:
        """Ask for the next proposals, or process the answers that are ready. Returns True if answers were processed."""
        if campaign.baseline is None:
            return False
        # An agent prepares proposals for slots that are not free yet.
        num_ahead = 0 if self.proposer.is_instant else max(self.executor.num_slots // 2, 1)
        if self._work is None and not self.pauses("agent") and (num := self._num_wanted(num_ahead)):
            self._work = self._open(self.proposer, campaign, num)
            self.note(f"{self.proposer.name} proposes experiment {self._work.context.number:04d}")
            self.advance()
        return self._take_ready(campaign) or self._fill(campaign)

    def advance(self, is_stopping: bool = False) -> bool:
        """Continue the request in progress for a moment. Returns True once its answers are ready."""
        work = self._work
        if work is None or work.answers is not None:
            return work is not None
        try:
            work.proposing.send(is_stopping or None)  # the first value must be None
        except StopIteration as end:
            work.answers = end.value
        except (EngineError, OSError) as error:  # the program did not start, or its files are unreadable
            work.answers = (Answer(None, unavailable=Availability(Meaning.PROGRAM, str(error))),)
        return work.answers is not None

    def stop_agent(self) -> None:
        """Process the answers that are ready, for another night. Stop a working agent."""
        if self.advance(is_stopping=True):
            self._take_ready(self.campaign())
        self.end_agent()

    def end_agent(self) -> None:
        """Stop a working agent."""
        if self._work is not None:
            self._work.proposing.close()
            self._work = None

    def refuse(self, answer: Answer, cause: str) -> None:
        """Drop an accepted proposal that cannot be run."""
        self.update(pending=tuple(other for other in self.state.pending if other.change != answer.change))
        self.note(f"proposal refused: {cause}")
        self._count_refusal(cause, answer.proposal.proposer == FILL)

    def direction(self) -> str:
        """Return the user's current direction. An invalid direction changes nothing."""
        state = self.state
        try:
            direction = read_direction(self.bench.root, state.request.direction, state.request.only)
        except UsageError as error:
            self.note(f"the direction is unchanged: {error}")
            return state.direction
        if direction != state.direction:
            self.note(f"direction: {direction or 'removed'}")
            self.update(directions=(*state.directions, (self.ledger.next_number(), direction)))
        return direction

    def rider(self, campaign: Campaign, new: Change) -> Change | None:
        """Return the discarded change that the run of `new` re-tests."""
        if not self.state.request.riders or campaign.posterior is None:
            return None
        runs, scope = [record.run for record in self.controller.in_flight], scope_of(self.state.direction)
        return campaign.posterior.rider(new, runs, lambda key: is_within(scope, key))

    def _num_wanted(self, num_ahead: int) -> int:
        """Return how many proposals are missing for the free slots and for `num_ahead` more."""
        num_queued, num_slots = len(self.queue()), self.executor.num_slots
        num_missing = min(self.num_free() + num_ahead, self.runs_left()) - num_queued
        most = 0 if self.is_spent() else int(min(max(num_missing, 0), num_slots))
        return sum(self.stage(num_queued + number) is Stage.SEARCH for number in range(most))

    def _fill(self, campaign: Campaign) -> bool:
        """Let TPE propose for a free slot while the agent is unavailable. Returns True if there is a proposal."""
        before = self.state.pending
        if self.state.fills and self.open_waits("agent") and self._num_wanted(0):
            work = self._open(self.filler, campaign, 1)
            work.answers = complete(work.proposing)
            self._take(work, campaign)
        return self.state.pending != before

    def _open(self, proposer: Proposer, campaign: Campaign, num: int) -> _Work:
        """Start a request for `num` changes of the current incumbent."""
        incumbent, queue = campaign.compose(campaign.kept), self.queue()
        run = campaign.incumbent_run or campaign.parent
        # Nobody answers the questions of an agent.
        questions = tuple(wait.cause for wait in self.open_waits("agent") if wait.meaning not in AWAY)
        context = Context(
            number=self.ledger.next_number() + len(queue),
            source=incumbent.source,
            campaign=campaign,
            rules=self.bench.rules,
            ledger=self.ledger,
            used_keys=used_keys(self.bench.engine, incumbent),
            refusals=self._fill_refusals if proposer is self.filler else self._refusals + questions,
            in_flight=self.controller.in_flight,
            waiting=tuple(queue),
            weakest=weakest(run, self.bench.root) if run else "",
            seconds_left=max(self.seconds_left(), 1.0),
            runs_left=max(self.runs_left() - len(queue), 1.0),
            direction=self.direction(),
            num_proposals=num,
        )
        return _Work(proposer, context, proposer.propose(context))

    def _take_ready(self, campaign: Campaign) -> bool:
        work = self._work
        if work is None or work.answers is None:
            return False
        self.require_disk()  # otherwise the answers stay in memory
        self._work = None
        self._take(work, campaign)
        return True

    def _take(self, work: _Work, campaign: Campaign) -> None:
        """Queue valid proposals, refuse the others, and wait for an agent that made none."""
        proposer, is_fill, causes = work.proposer, work.proposer is self.filler, list[str]()
        name = FILL if is_fill else proposer.name
        answers = [a.with_proposal(proposer=name, sandbox=proposer.sandbox) for a in work.answers or ()]
        if not is_fill:
            self._log_cost(answers[0])
        store_lessons(self.ledger, work.context.campaign, answers[0].lessons)
        if answers[0].is_stopped:
            return
        if (unavailable := answers[0].unavailable) is not None:
            meaning, cause = unavailable.meaning, f"{name}: {unavailable.meaning}: {unavailable.text}"
            meanwhile = "TPE fills the free slots meanwhile" if self.state.fills else ""
            at_once = not unavailable.is_away  # an agent that was reached is asked again at once
            self.begin_wait("agent", cause, f"{name} answers", at_once=at_once, meaning=meaning, meanwhile=meanwhile)
            return
        if not is_fill:
            self.end_wait("agent")
        for answer in answers:
            try:
                self._accept(work.context, answer, campaign)
            except UsageError as error:
                causes.append(str(error))
                self.note(f"proposal refused: {error}")
        if len(causes) == len(answers):
            self._count_refusal("; ".join(causes), is_fill)
        elif not is_fill:
            self._refusals = ()

    def _log_cost(self, answer: Answer) -> None:
        """Log the cost, which the first answer has. Warn if --max-cost cannot be enforced."""
        state, cost, most = self.state, answer.proposal.cost, self.state.request.max_cost
        if cost is not None:
            line = ProposalCost(state.branch, state.rules_hash, state.started, cost)
            append(self.ledger.runs_dir / PROPOSALS_NAME, line)
        # An agent that was stopped or is unavailable may report no cost.
        if most is not None and answer.source is not None and not (cost and cost.is_whole("dollars")):
            self.note(f"warning: --max-cost {most:g} is not enforced: {self.proposer.name} did not report all dollars")

    def _accept(self, context: Context, answer: Answer, campaign: Campaign) -> None:
        """Queue a proposal with its change. Raises UsageError if the proposal cannot be run."""
        if answer.source is None or answer.cause is not None:
            raise UsageError(answer.cause or "no edit")
        keys = change_keys(parse(context.source), parse(answer.source))  # against the file that the agent edited
        if not keys:
            raise UsageError("train.toml trains exactly like the incumbent's", "Change a key.")
        change, direction = campaign.known(keys), context.direction
        if any(other.change == change for other in self.queue()):
            raise UsageError("this change is already queued", "Make another change.")
        run = Run(kept=campaign.kept, new=change)
        self.controller.admit(campaign.compose(run.changes), Request(run=run, only=scope_of(direction)), campaign)
        refusals = () if answer.proposal.proposer == FILL else self._refusals
        notes = (f"proposal {number} refused: {cause}" for number, cause in enumerate(refusals, 1))
        answer = answer.with_proposal(notes=(*answer.proposal.notes, *notes))
        answer = replace(answer, number=self.ledger.next_number(), change=change, direction=direction)
        self.update(pending=(*self.state.pending, answer))

    def _count_refusal(self, cause: str, is_fill: bool) -> None:
        """Remember a refusal for the next request. MAX_REFUSALS of the agent in a row end the night."""
        if is_fill:
            self._fill_refusals += (cause,)
            return
        self._refusals += (cause,)
        if len(self._refusals) >= MAX_REFUSALS:
            cause = f"{MAX_REFUSALS} proposals in a row were refused, the last one: {cause}"
            self.over = Stop(cause, is_planned=self.proposer.is_instant)  # a search has tried everything
