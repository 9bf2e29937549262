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

MAX_REFUSALS = 8  # refused proposals in a row, after which the night ends
_ANSWER_SECONDS = 60.0  # expected time of an agent's first answer
_FILL_PAUSE_SECONDS = 30.0  # after MAX_REFUSALS proposals of TPE in a row


def is_of(record: Record, answer: Answer) -> bool:
    """Return True if an experiment's new change is the change of a proposal."""
    return bool(record.run.new and answer.change and record.run.new.keys == answer.change.keys)


def attempts(answer: Answer, closed: Sequence[Record]) -> list[Record]:
    """Return the closed experiments that tested a proposal. `closed`: the night's experiments."""
    return [record for record in closed if record.number >= answer.number and is_of(record, answer)]


def undecided(state: NightState, closed: Sequence[Record]) -> tuple[Answer, ...]:
    """Return the proposals that no closed experiment has decided."""
    return tuple(answer for answer in state.pending if not decided(attempts(answer, closed)))


@dataclass(slots=True)
class _Work:
    """A request for proposals in progress."""

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
        self._is_unpriced = False  # the missing dollars of --max-cost were reported
        self._answer_seconds = _ANSWER_SECONDS  # time of the agent's last answer
        self._fill_refusals = tuple[str, ...]()  # of TPE, in a row
        self._fills_at = 0.0  # on the clock

    @property
    def is_under_way(self) -> bool:
        return self._work is not None

    def has_something_to_do(self) -> bool:
        """Return True if answers are ready, or proposals are missing."""
        return self._num_wanted(self._num_ahead()) > 0 or (self._work is not None and self._work.answers is not None)

    def queue(self) -> list[Answer]:
        """Return the accepted proposals whose runs have not started."""
        running = self._controller.in_flight
        return [answer for answer in self._desk.state.pending if not any(is_of(record, answer) for record in running)]

    def act(self, campaign: Campaign) -> bool:
        """Ask for the next proposals, or process the answers that are ready. Returns True if answers were processed."""
        if campaign.baseline is None:
            return False
        is_pause = self._desk.seconds_until("agent")
        if self._work is None and not is_pause and (num := self._num_wanted(self._num_ahead())):
            self._work = self._open(self._proposer, campaign, num)
            self._desk.note(f"{self._proposer.name} proposes experiment {self._work.context.number:04d}")
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
        except BaseException:
            self._work = None
            raise
        return work.answers is not None

    def stop(self) -> None:
        """Process the answers that are ready, for another night. Stop a working agent."""
        if self.advance(is_stopping=True):
            self._take_ready(self._desk.campaign())
        self.close()

    def close(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            work.proposing.close()

    def drop(self, answer: Answer, cause: str, is_refused: bool = True) -> None:
        """Drop an accepted proposal. `is_refused`: because of the proposal itself."""
        self._desk.update(pending=tuple(other for other in self._desk.state.pending if other is not answer))
        if is_refused:
            self._refuse(cause, answer.proposal.notes, is_fill=answer.proposal.proposer == FILL)
        else:
            self._desk.note(f"proposal dropped: {cause}")

    def direction(self) -> str:
        """Return the user's current direction. An invalid direction changes nothing."""
        desk, state = self._desk, self._desk.state
        try:
            direction = read_direction(desk.bench.root, state.request.direction, state.request.only)
        except UsageError as error:
            desk.note(f"the direction is unchanged: {error}")
            return state.direction
        if direction != state.direction:
            desk.note(f"direction: {direction or 'removed'}")
            desk.update(directions=(*state.directions, (desk.ledger.next_number(), direction)))
        return direction

    def begin_wait(self, unavailable: Availability) -> None:
        """Wait for the agent. An agent that was reached and made no proposal is asked again at once."""
        name, meaning = self._proposer.name, unavailable.meaning
        self._desk.begin_wait(
            "agent",
            f"{name}: {meaning}: {unavailable.text}",
            f"{name} answers",
            meaning=meaning,
            meanwhile="TPE fills the free slots meanwhile" if self._filler and self._desk.state.fills else "",
            at_once=not unavailable.is_away,
        )

    def _num_ahead(self) -> int:
        """Return how many proposals to prepare for slots that are not free yet: from an agent, for all runs that end
        before it could answer twice; from a search, only with several slots."""
        now, num_slots = self._controller.now(), self._desk.executor.num_slots
        if self._proposer.is_instant:
            return 0 if num_slots == 1 else (num_slots + 1) // 2
        latest = now - timedelta(seconds=self._desk.run_seconds() - 2 * self._answer_seconds)
        running = self._controller.in_flight
        return max(sum(datetime.fromisoformat(record.started) < latest for record in running), 1)

    def _num_wanted(self, num_ahead: int) -> int:
        """Return how many proposals are missing for the free slots and for `num_ahead` more."""
        desk, num_queued, most = self._desk, len(self.queue()), self._desk.state.request.experiments
        num = min(desk.num_free() + num_ahead - num_queued, desk.executor.num_slots)
        if most is not None:
            num = min(num, most - len(desk.runs()) - num_queued)
        if num <= 0 or desk.is_spent():
            return 0
        return sum(desk.stage(num_queued + index) is Stage.SEARCH for index in range(num))

    def _fill(self, campaign: Campaign) -> bool:
        """Let TPE propose for a free slot while the agent is unavailable. Returns True if TPE was asked."""
        is_unavailable, is_pause = self._desk.open_wait("agent"), self._controller.clock() < self._fills_at
        if self._filler is None or not self._desk.state.fills or not is_unavailable or is_pause:
            return False
        if not self._num_wanted(0):
            return False
        work = self._open(self._filler, campaign, 1)
        work.answers = complete(work.proposing)
        self._take(work, campaign)
        return True

    def _open(self, proposer: Proposer, campaign: Campaign, num: int) -> _Work:
        """Start a request for `num` changes of the current incumbent."""
        controller, desk, state, queue = self._controller, self._desk, self._desk.state, self.queue()
        incumbent, committed = campaign.compose(campaign.kept), controller.repo.config_at("HEAD")
        if committed is not None and parse(committed).hash == incumbent.hash:
            incumbent = parse(committed)  # with the user's comments
        controller.admit(incumbent, Request(again=True), campaign)  # a problem here is not the proposal's
        run, left, deadline = campaign.incumbent_run or campaign.parent, desk.runs_left(), state.deadline
        refusals, wait = state.refusals, desk.open_wait("agent")
        if wait is not None and wait.meaning not in AWAY:
            refusals = (*refusals, wait.cause)  # nobody answers an agent's questions
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
        """Return the discarded change that the next run after `queue` re-tests."""
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
            raise EngineError(problem)  # the answers stay in memory
        work, self._work = self._work, None
        self._take(work, campaign)
        return True

    def _take(self, work: _Work, campaign: Campaign) -> None:
        """Queue valid proposals, refuse the others, and wait for an agent that made none."""
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
        """Log the cost, which the first answer has. Report once if --max-cost cannot be enforced."""
        desk, cost, most = self._desk, answer.proposal.cost, self._desk.state.request.max_cost
        if cost is not None:
            log_proposal(desk.ledger.runs_dir, desk.state.branch, desk.state.rules_hash, desk.state.started, cost)
        is_priced = cost is not None and cost.is_whole("dollars")
        # An agent that was stopped or is unavailable may report no cost.
        if most is not None and answer.source is not None and not is_priced and not self._is_unpriced:
            self._is_unpriced = True
            num = "no" if cost is None or cost.dollars is None else "not all"
            name = self._proposer.name
            desk.note(f"warning: --max-cost {most:g} cannot be enforced: {name} reported {num} dollars")

    def _accept(self, work: _Work, answer: Answer, queue: Sequence[Answer], campaign: Campaign) -> Answer:
        """Return the proposal with its change and re-test. Raises UsageError if the proposal cannot be run."""
        if answer.source is None or answer.cause is not None:
            raise UsageError(answer.cause or "no edit")
        context, direction = work.context, work.context.direction
        keys = change_keys(parse(context.source), parse(answer.source))  # against the file that the agent edited
        if not keys:
            raise UsageError("train.toml trains exactly like the incumbent's", "Change a key.")
        change = campaign.known(keys)
        run = Run(kept=campaign.kept, new=change)
        request = Request(run=run, only=scope_of(direction))
        self._controller.admit(campaign.compose(run.changes), request, campaign)
        if any(change.keys == other.change.keys for other in queue if other.change):
            raise UsageError("this change is already queued", "Make another change.")
        rider = context.rider if list(queue) == self.queue() else self._rider(campaign, queue)
        if rider is not None and rider.keys.keys() & change.keys.keys():
            rider = None
        return replace(answer, number=self._desk.ledger.next_number(), change=change, rider=rider, direction=direction)

    def _refuse(self, cause: str, notes: Sequence[str], *, is_fill: bool) -> None:
        """Record a refused proposal. MAX_REFUSALS in a row end the night."""
        desk = self._desk
        if not is_fill or cause not in self._fill_refusals[-1:]:
            desk.note(f"proposal refused: {cause}")
        if is_fill:
            self._fill_refusals = (*self._fill_refusals, cause)
            if len(self._fill_refusals) % MAX_REFUSALS == 0:  # each refusal changes the seed of the next draw
                self._fills_at = self._controller.clock() + _FILL_PAUSE_SECONDS
            return
        refusals = (*desk.state.refusals, cause)
        notes = (*desk.state.notes, *notes, f"proposal {len(refusals)} refused: {cause}")
        desk.update(refusals=refusals, notes=notes)
        if len(refusals) >= MAX_REFUSALS:
            cause = f"{len(refusals)} proposals in a row were refused, the last one: {cause}"
            desk.over = Stop(cause, is_planned=self._proposer.is_instant)  # a search has tried everything
