"""Proposals of a night: ask the agent, accept or refuse its answers, queue what runs next.

The agent works while runs train. While it is unavailable, TPE proposes for the slots that are free.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from nightshift.agents.agent import complete
from nightshift.agents.availability import AWAY, Availability, Meaning
from nightshift.agents.base import Answer, Context, Proposer, Proposing
from nightshift.agents.direction import read_direction
from nightshift.agents.notebook import store_lessons
from nightshift.campaign.campaign import Campaign
from nightshift.campaign.commits import change_keys
from nightshift.campaign.ledger import log_proposal
from nightshift.campaign.records import Change, Record, Request, Run, Stage
from nightshift.campaign.waits import FILL
from nightshift.config.scope import is_within, scope_of
from nightshift.config.train_toml import parse
from nightshift.engines.base import used_keys
from nightshift.errors import EngineError, UsageError
from nightshift.night.state import Desk, NightState, Stop, decided
from nightshift.report.slices import weakest

MAX_REFUSALS = 8  # of proposals in a row that were made and rejected
_ANSWER_SECONDS = 60.0  # expected of an agent's first answer
_FILL_PAUSE_SECONDS = 30.0  # after MAX_REFUSALS proposals of TPE in a row


def is_of(record: Record, answer: Answer) -> bool:
    """Return True if an experiment's new change is the change of a proposal."""
    return bool(record.run.new and answer.change and record.run.new.keys == answer.change.keys)


def attempts(answer: Answer, own: Sequence[Record]) -> list[Record]:
    """Return the closed experiments that ran a proposal; `own` are the night's."""
    return [record for record in own if record.number >= answer.number and is_of(record, answer)]


def undecided(state: NightState, own: Sequence[Record]) -> tuple[Answer, ...]:
    """Return the proposals that no closed experiment has decided."""
    return tuple(answer for answer in state.pending if not decided(attempts(answer, own)))


@dataclass(slots=True)
class _Work:
    """Proposals under way, and what they were asked about."""

    proposer: Proposer
    context: Context
    proposing: Proposing
    began: float  # on the clock
    answers: tuple[Answer, ...] | None = None  # None while the agent works


class Proposals:
    """Asks the proposer, and TPE while the proposer is unavailable."""

    def __init__(self, desk: Desk, proposer: Proposer, filler: Proposer | None) -> None:
        self._desk, self._controller = desk, desk.controller
        self._proposer, self._filler = proposer, filler
        self._work: _Work | None = None
        self._is_unpriced = False  # the user was notified that --max-cost lacks dollars
        self._answer_seconds = _ANSWER_SECONDS  # that the agent took last
        self._fill_refusals = tuple[str, ...]()  # in a row
        self._fills_at = 0.0  # on the clock

    @property
    def is_under_way(self) -> bool:
        return self._work is not None

    def has_something_to_do(self) -> bool:
        """Return True if answers wait to be taken, or proposals are missing."""
        return self._num_wanted(self._num_ahead()) > 0 or (self._work is not None and self._work.answers is not None)

    def queue(self) -> list[Answer]:
        """Return the accepted proposals that no run tests yet."""
        running = self._controller.in_flight
        return [answer for answer in self._desk.state.pending if not any(is_of(record, answer) for record in running)]

    def act(self, campaign: Campaign) -> bool:
        """Ask for the next proposals, or take those that are ready. Returns True if some were taken."""
        if campaign.baseline is None:
            return False
        is_pause = self._desk.seconds_until("agent")
        if self._work is None and not is_pause and (num := self._num_wanted(self._num_ahead())):
            self._work = self._open(self._proposer, campaign, num)
            self._desk.note(f"{self._proposer.name} proposes experiment {self._work.context.number:04d}")
            self.advance()
        return self._take_ready(campaign) or self._fill(campaign)

    def advance(self, is_stopping: bool = False) -> bool:
        """Let the work on proposals go on for a moment. Returns True once its answers are there."""
        work = self._work
        if work is None or work.answers is not None:
            return work is not None
        try:
            work.proposing.send(is_stopping or None)  # the first value must be None
        except StopIteration as end:
            work.answers = end.value
        except (EngineError, OSError) as error:  # the program was not started, or what it left cannot be read
            work.answers = (Answer(None, unavailable=Availability(Meaning.PROGRAM, str(error))),)
        except BaseException:
            self._work = None
            raise
        return work.answers is not None

    def stop(self) -> None:
        """Take the answers that are ready, for another night; stop an agent that works."""
        if self.advance(is_stopping=True):
            self._take_ready(self._desk.campaign())
        self.close()

    def close(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            work.proposing.close()

    def drop(self, answer: Answer, cause: str, is_refused: bool = True) -> None:
        """Forget a proposal that was accepted. `is_refused`: the proposal is to blame."""
        self._desk.update(pending=tuple(other for other in self._desk.state.pending if other is not answer))
        if is_refused:
            self._refuse(cause, answer.proposal.notes, is_fill=answer.proposal.proposer == FILL)
        else:
            self._desk.note(f"proposal dropped: {cause}")

    def direction(self) -> str:
        """Return the user's direction as it is now. One that cannot be read changes nothing."""
        desk, state = self._desk, self._desk.state
        try:
            direction = read_direction(desk.bench.root, state.request.direction, state.request.only)
        except UsageError as error:
            desk.note(f"the direction stays as it was: {error}")
            return state.direction
        if direction != state.direction:
            desk.note(f"direction: {direction or 'none any more'}")
            desk.update(directions=(*state.directions, (desk.ledger.next_number(), direction)))
        return direction

    def begin_wait(self, unavailable: Availability) -> None:
        """Wait for the agent. If the model was reached and proposed nothing, the agent is asked again at once."""
        name, meaning = self._proposer.name, unavailable.meaning
        self._desk.begin_wait(
            "agent",
            f"{name}: {meaning}: {unavailable.text}",
            f"{name} answers",
            meaning=meaning,
            meanwhile="TPE fills the free slots meanwhile" if self._fills else "",
            at_once=not unavailable.is_away,
        )

    @property
    def _fills(self) -> bool:
        return self._filler is not None and self._desk.state.fills

    def _num_ahead(self) -> int:
        """Return how many proposals to hold ready for slots that are not free yet. An agent works while runs train: for
        all runs that end before it could answer twice. A search is asked ahead at several slots only."""
        now, num_slots = self._controller.now(), self._desk.executor.num_slots
        if self._proposer.is_instant:
            return 0 if num_slots == 1 else (num_slots + 1) // 2
        latest = now - timedelta(seconds=self._desk.run_seconds() - 2 * self._answer_seconds)
        running = self._controller.in_flight
        return max(sum(datetime.fromisoformat(record.started) < latest for record in running), 1)

    def _num_wanted(self, num_ahead: int) -> int:
        """Return how many proposals are missing for the free slots, and for the `num_ahead` that are free next."""
        desk, num_queued, most = self._desk, len(self.queue()), self._desk.state.request.experiments
        num = min(desk.num_free() + num_ahead - num_queued, desk.executor.num_slots)
        if most is not None:
            num = min(num, most - len(desk.runs()) - num_queued)
        if num <= 0 or desk.is_spent():
            return 0
        return sum(desk.stage(num_queued + index) is Stage.SEARCH for index in range(num))

    def _fill(self, campaign: Campaign) -> bool:
        """Have TPE propose for a free slot while the agent is unavailable. Returns True if it was asked."""
        is_unavailable, is_pause = self._desk.open_wait("agent"), self._controller.clock() < self._fills_at
        if self._filler is None or not self._fills or not is_unavailable or is_pause or not self._num_wanted(0):
            return False
        work = self._open(self._filler, campaign, 1)
        work.answers = complete(work.proposing)
        self._take(work, campaign)
        return True

    def _open(self, proposer: Proposer, campaign: Campaign, num: int) -> _Work:
        """Prepare the next `num` proposals, which are changes of the incumbent of this moment."""
        controller, desk, state, queue = self._controller, self._desk, self._desk.state, self.queue()
        incumbent, committed = campaign.compose(campaign.kept), controller.repo.config_at("HEAD")
        if committed is not None and parse(committed).hash == incumbent.hash:
            incumbent = parse(committed)  # with the user's comments
        controller.admit(incumbent, Request(again=True), campaign)  # no proposal is to blame for the set-up
        run, left, deadline = campaign.incumbent_run or campaign.parent, desk.runs_left(), state.deadline
        refusals, wait = state.refusals, desk.open_wait("agent")
        if wait is not None and wait.meaning not in AWAY:
            refusals = (*refusals, wait.cause)  # nobody answers what an agent asks
        context = Context(
            number=desk.ledger.next_number() + len(queue),
            source=incumbent.source,
            campaign=campaign,
            rules=desk.bench.rules,
            ledger=desk.ledger,
            rider=self._rider(campaign, queue),
            used_keys=used_keys(desk.bench.engine, incumbent),
            refusals=self._fill_refusals if proposer is self._filler else refusals,
            in_flight=controller.in_flight,
            waiting=tuple(queue),
            weakest=weakest(run, desk.bench.root) if run else "",
            seconds_left=None if deadline is None else max((deadline - controller.now()).total_seconds(), 1.0),
            runs_left=None if math.isinf(left) else max(int(left) - len(queue), 1),
            direction=self.direction(),
            num_proposals=num,
        )
        return _Work(proposer, context, proposer.propose(context), controller.clock())

    def _rider(self, campaign: Campaign, queue: Sequence[Answer]) -> Change | None:
        """Return the discarded change that the next run measures again; `queue` runs before it."""
        if not self._desk.state.request.riders or campaign.posterior is None:
            return None
        runs = [record.run for record in self._controller.in_flight]
        runs += [Run(kept=campaign.kept, rider=answer.rider, new=answer.change) for answer in queue]
        scope = scope_of(self._desk.state.direction)
        return campaign.posterior.rider(Change(), runs, lambda key: is_within(scope, key))

    def _take_ready(self, campaign: Campaign) -> bool:
        if self._work is None or self._work.answers is None:
            return False
        if problem := self._desk.disk_problem():
            raise EngineError(problem)  # answers that wait in memory are not lost
        work, self._work = self._work, None
        self._take(work, campaign)
        return True

    def _take(self, work: _Work, campaign: Campaign) -> None:
        """Queue the proposals that can be run; refuse the others; wait for an agent that made none."""
        desk, proposer, is_fill = self._desk, work.proposer, work.proposer is self._filler
        name, accepted, causes = FILL if is_fill else proposer.name, list[Answer](), list[str]()
        answers = [a.with_proposal(proposer=name, sandbox=proposer.sandbox) for a in work.answers or ()]
        if not is_fill:
            self._log_cost(answers[0])
        store_lessons(desk.ledger, work.context.campaign, answers[0].lessons)
        if answers[0].is_stopped:
            return
        if (unavailable := answers[0].unavailable) is not None:
            self.begin_wait(unavailable)
            return
        if not is_fill:
            self._answer_seconds = self._controller.clock() - work.began
            if desk.open_wait("agent") is not None:
                desk.note(f"{name} answers again")
                desk.end_wait("agent")
        for answer in answers:
            try:
                accepted.append(self._accept(work, answer, [*self.queue(), *accepted], campaign))
            except UsageError as error:
                causes.append(str(error))
        if not accepted:
            notes = [note for answer in answers for note in answer.proposal.notes]
            self._refuse("; ".join(causes), notes, is_fill=is_fill)
            return
        lines = [f"proposal refused: {cause}" for cause in causes]
        for line in lines:
            desk.note(line)
        accepted[0] = accepted[0].with_proposal(notes=(*desk.state.notes, *accepted[0].proposal.notes, *lines))
        refusals, pending = desk.state.refusals if is_fill else (), (*desk.state.pending, *accepted)
        self._fill_refusals = () if is_fill else self._fill_refusals
        desk.update(pending=pending, refusals=refusals, notes=())

    def _log_cost(self, answer: Answer) -> None:
        """Log what the answers cost, of which this is the first. Note once that --max-cost lacks dollars."""
        desk, cost, most = self._desk, answer.proposal.cost, self._desk.state.request.max_cost
        if cost is not None:
            log_proposal(desk.ledger.runs_dir, desk.state.branch, desk.state.rules_hash, desk.state.started, cost)
        is_priced = cost is not None and cost.is_whole("dollars")
        # An agent that was stopped, or is unavailable, may report nothing.
        if most is not None and answer.source is not None and not is_priced and not self._is_unpriced:
            self._is_unpriced = True
            num = "no" if cost is None or cost.dollars is None else "not all"
            name = self._proposer.name
            desk.note(f"--max-cost {most:g}: {name} reported {num} dollars, so this rule cannot hold; others stop it")

    def _accept(self, work: _Work, answer: Answer, queue: Sequence[Answer], campaign: Campaign) -> Answer:
        """Return a proposal as a change of the incumbent, with its rider. UsageError if it cannot be run."""
        if answer.source is None or answer.cause is not None:
            raise UsageError(answer.cause or "no edit")
        context, direction = work.context, work.context.direction
        keys = change_keys(parse(context.source), parse(answer.source))  # against what the agent was given
        if not keys:
            raise UsageError("no key of train.toml trains otherwise than the incumbent's", "Change one.")
        change = campaign.known(keys)
        run = Run(kept=campaign.kept, new=change)
        request = Request(run=run, only=scope_of(direction))
        self._controller.admit(campaign.compose(run.changes), request, campaign)
        if any(change.keys == other.change.keys for other in queue if other.change):
            raise UsageError("this change waits for its turn already", "Change train.toml.")
        rider = context.rider if list(queue) == self.queue() else self._rider(campaign, queue)
        if rider is not None and rider.keys.keys() & change.keys.keys():
            rider = None
        return replace(answer, number=self._desk.ledger.next_number(), change=change, rider=rider, direction=direction)

    def _refuse(self, cause: str, notes: Sequence[str], *, is_fill: bool) -> None:
        """Go on without a proposal. Too many refusals in a row end the night with `cause`."""
        desk = self._desk
        if not is_fill or cause not in self._fill_refusals[-1:]:
            desk.note(f"proposal refused: {cause}")
        if is_fill:
            self._fill_refusals = (*self._fill_refusals, cause)
            if len(self._fill_refusals) % MAX_REFUSALS == 0:  # their number is part of the next draw's seed
                self._fills_at = self._controller.clock() + _FILL_PAUSE_SECONDS
            return
        refusals = (*desk.state.refusals, cause)
        notes = (*desk.state.notes, *notes, f"proposal {len(refusals)} refused: {cause}")
        desk.update(refusals=refusals, notes=notes)
        if len(refusals) >= MAX_REFUSALS:
            cause = f"{len(refusals)} proposals in a row were refused, the last one: {cause}"
            desk.over = Stop(cause, is_planned=self._proposer.is_instant)  # a search has nothing left to try
