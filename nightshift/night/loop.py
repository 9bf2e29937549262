"""The overnight loop: propose, run, record; stoppable at any time, resumable after any end.

One `_step` does one thing and leaves its result on disk: a proposal waits in night.json until it is decided. Runs are
side by side, one in each slot, and are decided as they end; meanwhile the agent works on the next proposals.
train.toml is the incumbent's all the time. A run is the incumbent with one new change and at most one rider; the
night's last runs measure baseline and incumbent only. While the agent cannot be asked, the slots run proposals of tpe.
"""

import math
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from msgspec import structs

from nightshift.agents.agent import STOPPED, complete
from nightshift.agents.base import Answer, Context, Proposer, Proposing
from nightshift.agents.direction import read_direction
from nightshift.agents.notebook import store_lessons
from nightshift.campaign.campaign import Campaign
from nightshift.campaign.commits import change_keys
from nightshift.campaign.cost import log_proposal
from nightshift.campaign.finish import crash, resume
from nightshift.campaign.git import CONFIG_NAME, Head
from nightshift.campaign.ledger import STARTED, baseline_of, read_progress
from nightshift.campaign.posterior import measuring_run, next_stage
from nightshift.campaign.records import DIRECTION_NAME, Change, Cost, Failure, Record, Request, Run, Stage
from nightshift.config.scope import scope_of
from nightshift.config.train_toml import Config, load, parse, read_source
from nightshift.engines.base import used_keys
from nightshift.engines.prime_rl import remains
from nightshift.errors import ConfigError, EngineError, Interrupted, NightshiftError, UsageError
from nightshift.executors.process import interruptible
from nightshift.experiment import certify
from nightshift.experiment.experiment import Controller
from nightshift.experiment.integrity import IntegrityError, require_branch
from nightshift.files import read_file, write_atomically
from nightshift.night.notify import AGENT, END, REPEATED_CRASH, Notifier, event_of, is_second
from nightshift.night.state import (
    FILL,
    STOP_NAME,
    NightState,
    Stop,
    by_end,
    decided,
    is_spent,
    night_cost,
    num_crashes,
    num_since_keep,
    parse_time,
    run_seconds,
    runs_left,
    save,
    stop_rule,
    unavailable_after,
)
from nightshift.night.summary import certified_line, message, write_summary
from nightshift.report.slices import weakest


def attempts(pending: Answer, own: Sequence[Record]) -> list[Record]:
    """Return the closed experiments that ran a proposal; `own` are the night's."""
    return [record for record in own if record.number >= pending.number and _is_of(record, pending)]


def _is_of(record: Record, pending: Answer) -> bool:
    """Return True if an experiment's new change is the change of a proposal."""
    return bool(record.run.new and pending.change and record.run.new.keys == pending.change.keys)


def undecided(state: NightState, own: Sequence[Record]) -> tuple[Answer, ...]:
    """Return the proposals that no closed experiment has decided."""
    return tuple(pending for pending in state.pending if not decided(attempts(pending, own)))


MAX_TRIES = 3  # of one config whose runs infrastructure ends
_BASELINE_HOLDS = timedelta(hours=1)  # a night begins with a run of the baseline unless the last one is younger
MAX_REFUSALS = 8  # of proposals in a row
PAUSES = (60.0, 600.0, 600.0)  # seconds, after failures of infrastructure in a row, or proposals without an edit
_ANSWER_SECONDS = 60.0  # expected of an agent's first answer
_LOOK_SECONDS = 30.0  # between two looks at what a night has to do
_FILL_PAUSE_SECONDS = 60.0  # after MAX_REFUSALS proposals of tpe in a row


@dataclass(slots=True)
class _Work:
    """Proposals under way, and what they were asked about."""

    proposing: Proposing
    proposer: Proposer
    context: Context
    began: float  # on the clock
    answers: tuple[Answer, ...] | None = None  # None while the agent works


class Night:
    """A night under way. Run it as the controller (Ledger.lock). `state`: what the ledger does not hold."""

    def __init__(
        self,
        state: NightState,
        controller: Controller,
        proposer: Proposer,
        tell: Callable[[str], None],
        pauses: tuple[float, ...] = PAUSES,
        notifier: Notifier | None = None,
        filler: Proposer | None = None,
    ) -> None:
        """`tell` gets the summaries; news goes to the reporter. `filler` proposes while `proposer` cannot."""
        self.state = state
        self._controller = replace(controller, is_stopping=lambda: any(self._signs))
        self._bench, self._executor = controller.bench, controller.bench.executor
        self._ledger, self._note = controller.ledger, controller.reporter.note
        self._proposer, self._filler, self._pauses = proposer, filler, pauses
        self._tell, self._notifier = tell, notifier or Notifier(None, self._note)
        self._work: _Work | None = None
        self._interrupted_by = ""  # the first Ctrl-C, so nothing new is to be begun
        self._is_interrupt_noted = False
        self._has_news = self._is_end_sent = False  # since the last summary; of the notification
        self._failures = list[str]()  # causes of infrastructure failures in a row
        self._begins_at = self._proposes_at = self._fills_at = 0.0  # on the clock: nothing of the kind before that
        self._fill_refusals = tuple[str, ...]()  # in a row
        self._answer_seconds = _ANSWER_SECONDS  # that the agent took last
        self._over: Stop | None = None  # set when the night cannot go on
        self._is_price_note_made = False  # that an agent does not report all dollars
        self._is_given_up = False  # infrastructure lost all runs of a proposal

    def run(self) -> Stop:
        """Run until a stop rule holds, or a measuring file changed. Returns why. Interrupted and UsageError end the
        night too, with the same traces on disk."""
        with interruptible(is_noted=self._is_first_interrupt):
            try:
                self._update()  # for `status`, and for the same command after a kill
                if self.state.unavailable is not None:  # since before the night
                    self._send(AGENT, self.state.unavailable.describe(self._proposer.name, self._fills))
                while (stop := self._step_or_pause()) is None:
                    pass
                cut_off = stop.cause if self._executor.in_flight() else None
                is_asked = self.state.request.certify is not None and self.state.certificate is None
                if is_asked and stop.is_planned and not stop.by_user:
                    self._update(certificate=self._certify())
                self._close(stop, cut_off)
                return stop
            except Interrupted as error:
                # A second Ctrl-C is the user's word. After a SIGTERM (a reboot) the same command goes on.
                self._close(Stop(error.cause) if self._interrupted_by else None, cut_off=error.cause)
                raise
            except IntegrityError as error:
                self._note(str(error))
                self._close(stop := Stop(str(error), is_planned=False), cut_off=error.cause)
                return stop
            except UsageError as error:
                self._controller.cancel()  # what is damaged may not be read again: the next start closes the records
                self._close(Stop(str(error), is_planned=False))
                raise
            except Exception as error:  # a disk that is full from the start, or a bug: notify the user
                self._send_end(f"{type(error).__name__}: {error}")
                raise
            finally:
                try:
                    if self._work is not None:
                        self._work.proposing.close()
                finally:
                    self._controller.cancel()

    def _certify(self) -> str:
        """Train baseline and incumbent afresh, as `nightshift certify` does. Returns the line with the result."""
        controller, deadline = self._controller, self.state.deadline
        try:
            [task] = certify.tasks(controller, self.state.request.certify, night=self.state.started)
            num_runs = task.num_waves() - 0.5  # the last run of the night may have been slow
            needed = num_runs * run_seconds(self._own(), self._bench.rules.budget_seconds)
            if deadline is not None and controller.now() + timedelta(seconds=needed) > deadline:
                return f"not certified: the hours left are too few for its {2 * task.plan.num_seeds} runs"
            [comparison] = certify.certify([task])
        except (UsageError, EngineError) as error:
            return f"not certified: {error}"
        except Interrupted:
            if not any(self._signs):  # a reboot: the same command goes on
                raise
            return "not certified: stopped"
        return certified_line(comparison)

    def _is_first_interrupt(self, number: int) -> bool:
        """Remember the first SIGINT; the second, or the first of the other signals that stop, raises Interrupted."""
        is_first = number == signal.SIGINT and not self._interrupted_by
        if is_first:
            self._interrupted_by = signal.Signals(number).name
        return is_first

    @property
    def _signs(self) -> tuple[str, bool]:
        """Whether the user wants to stop: the first Ctrl-C, and the file STOP. A wait ends when this changes."""
        return self._interrupted_by, (self._bench.root / STOP_NAME).exists()

    def _step_or_pause(self) -> Stop | None:
        if self._interrupted_by and not self._is_interrupt_noted:
            self._is_interrupt_noted = True
            self._note("Ctrl-C: nothing new is begun, and what is in flight is finished; once more to stop now")
        try:
            return self._step()
        except (EngineError, OSError) as error:
            self._failures.append(str(error))
            num_failures = len(self._failures)
            if is_second(self._failures):
                self._send(REPEATED_CRASH, str(error))
            if num_failures > len(self._pauses):
                return Stop(f"{num_failures} infrastructure failures in a row: {error}", is_planned=False)
            self._pause(num_failures)
            self._note(f"{error} -- once more in {self._pause_seconds(num_failures):g} s")
        before = self._signs
        while self._controller.clock() < self._begins_at and self._signs == before:
            try:
                self._advance()  # its time is bounded all the same
            except (EngineError, OSError) as error:
                self._note(str(error))
            # A result that waits in its folder is safer than one whose record cannot be written.
            self._controller.wait()
        return None

    def _step(self) -> Stop | None:
        """Do one thing: decide a run that has ended, start one that waits, or propose; then wait. Returns why the night
        is over, None to go on."""
        controller, executor = self._controller, self._executor
        require_branch(controller.repo, self.state.branch)
        self._tidy()  # first: a verdict that was cut off is settled only as long as it is the last
        for number in self._bench.in_flight:
            if (record := controller.collect(number)) is not None:
                self._conclude(record)
                return None
        if stop := self._why_stop():
            work, self._work = self._work, None
            if work is not None and work.answers is not None:  # they wait for another night
                self._take(work, work.answers, controller.campaign())
            elif work is not None:
                try:
                    work.proposing.send(True)
                    work.proposing.close()
                except StopIteration as end:
                    self._pay(end.value[0])
            if not executor.in_flight():
                return stop
            for record in controller.in_flight:  # a job that waits on a cluster would begin when the night is over
                if not executor.has_begun(self._ledger.run_dir(record.number)):
                    controller.cancel(record.number)
                    cause = f"its job still waited when the night ended: {stop.cause}"
                    controller.conclude(crash(record, Failure.INTERRUPTED, cause))
        elif controller.clock() >= self._begins_at and self._has_something_to_do():
            campaign = controller.campaign()
            if self._begin(campaign) or self._propose(campaign):
                self._failures.clear()
                return None
        self._wait(is_stopping=stop is not None)
        return None

    def _wait(self, is_stopping: bool) -> None:
        """Wait until a run has ended, a pause is over, the user wants to stop, or a job still waits while the night
        stops. Only for a moment while an agent works."""
        controller, executor, before, began = self._controller, self._executor, self._signs, self._controller.clock()
        if self._has_news:  # a page takes a second: not before a run was started, and an agent asked
            self._write_summary()
        due = [self._ledger.run_dir(number) for number in self._bench.in_flight]
        look_at = controller.clock() + _LOOK_SECONDS  # whether a run ends soon, so that a proposal is due
        pauses = (self._begins_at, self._proposes_at, self._fills_at, self._asks_at(), look_at)
        until = min(time for time in pauses if time > began)  # also one that passed while the page was written
        while self._signs == before:
            controller.wait()
            is_queued = is_stopping and not all(map(executor.has_begun, executor.in_flight()))
            is_over = controller.clock() >= until or any(map(executor.is_over, due))
            if self._advance() or is_queued or is_over or not (due or self._work or self.state.unavailable):
                return

    def _has_something_to_do(self) -> bool:
        """Return True if a slot is free, answers are there, or proposals are missing: then git is read."""
        has_answers = self._work is not None and self._work.answers is not None
        return has_answers or self._num_free() > 0 or self._num_wanted(self._num_ahead()) > 0

    def _begin(self, campaign: Campaign) -> bool:
        """Start a run in the next free slot. Returns False if no slot is free or nothing waits."""
        queued = self._not_started()
        if campaign.baseline is None:
            failed = [record for record in self._own() if record.failure is not Failure.INTERRUPTED]
            num_lost = sum(record.failure is Failure.MACHINERY for record in failed)
            if self._executor.in_flight():
                return False
            if failed and (num_lost < len(failed) or num_lost >= MAX_TRIES):
                self._over = Stop(f"the baseline crashed: {failed[-1].why}", is_planned=False)
                return False
            self._launch(Request(), load(self._bench.root / CONFIG_NAME), campaign)
            return True
        most = self.state.request.experiments
        if (most is not None and len(self._runs()) >= most) or not self._num_free():
            return False
        stage, last = self._stage(), campaign.last_baseline()
        # Once a night, if the last run of the baseline was long before: the machine may drift.
        is_old = last is not None and datetime.fromisoformat(self.state.started) - last > _BASELINE_HOLDS
        needs_baseline = is_old and not any(record.run.is_baseline for record in self._runs())
        if needs_baseline or stage is not Stage.SEARCH:  # nothing is proposed
            run = Run() if needs_baseline else measuring_run(campaign.kept, stage)
            self._launch(Request(run=run), campaign.compose(run.changes), campaign)
        elif queued and queued[0].direction != self._direction():
            self._note(f"proposed again: the direction changed after {queued[0].proposal.description!r}")
            self._forget(queued[0])
        elif queued:
            self._start(queued[0], campaign)
        else:
            return False
        return True

    def _num_free(self) -> int:
        return max(self._executor.num_slots - len(self._executor.in_flight()), 0)

    def _num_ahead(self) -> int:
        """Return how many proposals to hold ready for slots that are not free yet. An agent works while runs train: for
        all runs that end before it could answer twice. A search is asked ahead at several slots only."""
        controller, now, num_slots = self._controller, self._controller.now(), self._executor.num_slots
        if self._proposer.is_instant:
            return 0 if num_slots == 1 else (num_slots + 1) // 2
        seconds = run_seconds(self._own(), self._bench.rules.budget_seconds)
        ages = [(now - datetime.fromisoformat(record.started)).total_seconds() for record in controller.in_flight]
        return max(sum(seconds - age < 2 * self._answer_seconds for age in ages), 1)

    def _num_wanted(self, num_ahead: int) -> int:
        """Return how many proposals are missing for the free slots, and for the `num_ahead` that are free next."""
        num_queued, num_slots, most = len(self._not_started()), self._executor.num_slots, self.state.request.experiments
        num = min(self._num_free() + num_ahead - num_queued, num_slots)
        if most is not None:
            num = min(num, most - len(self._runs()) - num_queued)
        if is_spent(self.state, self._cost()):
            return 0
        return sum(self._stage(num_queued + index) is Stage.SEARCH for index in range(num))

    def _propose(self, campaign: Campaign) -> bool:
        """Begin the next proposals, or take those that are ready. Returns True if some were taken."""
        controller, proposer = self._controller, self._proposer
        if campaign.baseline is None:
            return False
        is_due = self._work is None and controller.clock() >= max(self._proposes_at, self._asks_at())
        if is_due and (num := self._num_wanted(self._num_ahead())):
            self._work = self._open(proposer, campaign, num)
            self._note(f"{proposer.name} proposes experiment {self._work.context.number:04d}")
            self._advance(is_first=True)
        if self._work is not None and self._work.answers is not None:
            work, self._work = self._work, None
            self._take(work, work.answers or (), campaign)
            return True
        filler, now = self._filler, controller.clock()
        if self.state.unavailable and filler and self._fills and now >= self._fills_at and self._num_wanted(0):
            work = self._open(filler, campaign, 1)
            self._take(work, complete(work.proposing), campaign)
            return True
        return False

    @property
    def _fills(self) -> bool:
        return self._filler is not None and self.state.fills

    def _advance(self, *, is_first: bool = False) -> bool:
        """Let the work on proposals go on for a moment. Returns True once its answers are there."""
        work = self._work
        if work is None or work.answers is not None:
            return work is not None
        try:
            work.proposing.send(True if self._interrupted_by and not is_first else None)  # the first value must be None
        except StopIteration as end:
            work.answers = end.value
        except BaseException:
            self._work = None
            raise
        return work.answers is not None

    def _runs(self) -> list[Record]:
        """Return the night's experiments that are decided or in flight."""
        return [*decided(self._own()), *self._controller.in_flight]

    def _stage(self, num_queued: int = 0) -> Stage:
        """Return the stage of the night's next run, after `num_queued` others."""
        runs = self._runs()
        num_last = sum(record.run.stage is not Stage.SEARCH for record in runs)
        num_left = runs_left(self.state, self._own(), len(runs), self._controller) - num_queued
        return next_stage(len(runs) + num_queued, num_last, num_left, self._executor.num_slots)

    def _launch(self, request: Request, config: Config, campaign: Campaign) -> None:
        """Start an experiment, and conclude it if it ended at once."""
        record = self._controller.start(request, config, campaign)
        if record.status != STARTED:
            self._conclude(record)

    def _tidy(self) -> None:
        """Close experiments that were cut off; forget decided proposals; write the incumbent's train.toml on its own
        branch. Text that the user wrote there is kept in a file of its own."""
        controller, ledger = self._controller, self._ledger
        resume(ledger, controller.repo, self._note, self._bench.in_flight)
        if (pending := undecided(self.state, self._own())) != self.state.pending:
            self._update(pending=pending, refusals=() if self._is_given_up else self.state.refusals)
            self._is_given_up = False
        first = baseline_of(ledger.records(), self.state.branch)
        if first is None or controller.repo.head().branch != self.state.branch:
            return
        path, source, present = self._bench.root / CONFIG_NAME, controller.repo.config_at("HEAD"), None
        with suppress(ConfigError):
            present = read_source(path)
        if present == source or source is None:
            return
        history = controller.repo.config_history(Head(self.state.branch, first.commit))
        earlier = {text for entry in history for text in (entry.before, entry.after)}
        if present is not None and present not in earlier:
            aside = ledger.runs_dir / f"edited-{controller.now():%Y%m%dT%H%M%S}.toml"
            write_atomically(aside, present)
            self._note(f"train.toml was edited by somebody else: kept as {aside}")
        write_atomically(path, source)

    def _not_started(self) -> list[Answer]:
        """Return the pending answers that no run tests yet."""
        running, waiting_answers = list(self._controller.in_flight), list[Answer]()
        for pending in self.state.pending:
            record = next((record for record in running if _is_of(record, pending)), None)
            if record is None:
                waiting_answers.append(pending)
            else:
                running.remove(record)
        return waiting_answers

    def _why_stop(self) -> Stop | None:
        """Return why nothing new begins, None to go on. Runs in flight are waited for."""
        interrupted_by, has_file = self._signs
        if self._over or interrupted_by:
            return self._over or Stop(f"stopped by {interrupted_by}", by_user=True)
        if has_file:
            return Stop(f"file {STOP_NAME} found", by_user=True)
        own = self._own()
        seconds = run_seconds(own, self._bench.rules.budget_seconds)
        return stop_rule(self.state, own, self._controller.now(), seconds, self._cost(), self._executor.num_slots)

    def _open(self, proposer: Proposer, campaign: Campaign, num: int) -> _Work:
        """Prepare the next `num` proposals, which are changes of the incumbent of this moment."""
        controller, state, queued = self._controller, self.state, self._not_started()
        now, in_flight, plateau = controller.now(), controller.in_flight, state.request.plateau
        incumbent, rider = campaign.compose(campaign.kept), self._rider(campaign, queued)
        committed = controller.repo.config_at("HEAD")
        if committed is not None and parse(committed).hash == incumbent.hash:
            incumbent = parse(committed)  # with the user's comments
        controller.admit(incumbent, Request(again=True), campaign)  # no proposal is to blame for the set-up
        run = campaign.incumbent_run or campaign.parent
        left = runs_left(state, self._own(), len(self._runs()) + len(queued), controller)
        context = Context(
            number=self._ledger.next_number() + len(queued),
            source=incumbent.source,
            campaign=campaign,
            rules=self._bench.rules,
            ledger=self._ledger,
            rider=rider,
            used_keys=used_keys(self._bench.engine, incumbent),
            refusals=self._fill_refusals if proposer is self._filler else state.refusals,
            in_flight=in_flight,
            waiting=tuple(queued),
            weakest=weakest(run, self._bench.root) if run else "",
            new_direction=plateau is not None and num_since_keep(self._own()) >= plateau,
            seconds_left=None if state.deadline is None else max((state.deadline - now).total_seconds(), 1.0),
            runs_left=None if math.isinf(left) else max(int(left), 1),
            direction=self._direction(),
            num_proposals=num,
        )
        return _Work(proposer.propose(context), proposer, context, controller.clock())

    def _rider(self, campaign: Campaign, queued: Sequence[Answer]) -> Change | None:
        """Return the discarded change that the next run measures again; `queued` run before it."""
        if not self.state.request.riders or campaign.posterior is None:
            return None
        runs = [record.run for record in self._controller.in_flight]
        runs += [Run(kept=campaign.kept, rider=answer.rider, new=answer.change) for answer in queued]
        return campaign.posterior.rider(Change(), runs)

    def _direction(self) -> str:
        """Return the user's direction as it is now. One that cannot be read changes nothing."""
        try:
            direction = read_direction(self._bench.root, self.state.request.direction, self.state.request.only)
        except UsageError as error:
            self._note(f"the direction stays as it was: {error}")
            return self.state.direction
        path = self._ledger.runs_dir / DIRECTION_NAME
        known = read_file(path).decode(errors="replace") if path.is_file() else ""
        if direction != known:
            write_atomically(path, direction.encode())
            self._ledger.log("direction", path)
            self._note(f"direction: {direction or 'none any more'}")
        if direction != self.state.direction:
            self._update(direction=direction)
        return direction

    def _take(self, work: _Work, answers: Sequence[Answer], campaign: Campaign) -> None:
        """Add the proposals that can be run to the state; refuse the others."""
        proposer = work.proposer
        is_fill = proposer is self._filler
        name = FILL if is_fill else proposer.name
        answers = [answer.with_proposal(proposer=name, sandbox=proposer.sandbox) for answer in answers]
        if not is_fill:
            self._pay(answers[0])
        store_lessons(self._ledger, work.context.campaign, answers[0].lessons)
        if STOPPED in (answers[0].cause or ""):
            return
        if answers[0].unavailable is not None:  # the user is notified; nothing is refused
            before = self.state.unavailable
            unavailable = unavailable_after(answers[0].unavailable, before, self._controller.now())
            self._update(unavailable=unavailable)
            text = unavailable.describe(self._proposer.name, self._fills)
            self._note(text)
            if before is None or before.meaning != unavailable.meaning:
                self._send(AGENT, text)
            return
        if not is_fill:
            self._answer_seconds = self._controller.clock() - work.began
        if self.state.unavailable is not None and not is_fill:
            self._note(f"{proposer.name} answers again")
            self._update(unavailable=None)
        taken, causes = list[Answer](), list[str]()
        for answer in answers:
            try:
                taken.append(self._accept(work, answer, [*self._not_started(), *taken], campaign))
            except UsageError as error:
                causes.append(str(error))
        if not taken:
            notes = tuple(note for answer in answers for note in answer.proposal.notes)
            self._refuse("; ".join(causes), notes, is_fill=is_fill, is_edited=answers[0].source is not None)
            return
        self._fill_refusals = () if is_fill else self._fill_refusals
        for cause in causes:
            self._note(f"proposal refused: {cause}")
        notes = (*self.state.notes, *taken[0].proposal.notes, *(f"proposal refused: {cause}" for cause in causes))
        taken[0] = taken[0].with_proposal(notes=notes)
        refusals = self.state.refusals if self._is_given_up or is_fill else ()  # else what is lost again has no end
        self._update(pending=(*self.state.pending, *taken), refusals=refusals, notes=())

    def _accept(self, work: _Work, answer: Answer, waiting_answers: Sequence[Answer], campaign: Campaign) -> Answer:
        """Return a proposal as a change of the incumbent, with its rider. UsageError if it cannot be run."""
        if answer.source is None or answer.cause is not None:
            raise UsageError(answer.cause or "no edit")
        controller, context = self._controller, work.context
        keys = change_keys(parse(context.source), parse(answer.source))  # against what the agent was given
        if not keys:
            raise UsageError("no key of train.toml trains otherwise than the incumbent's", "Change one.")
        change = campaign.known(keys)
        number, direction = self._ledger.next_number(), context.direction
        answer = replace(answer, number=number, change=change, kept=context.campaign.kept, direction=direction)
        run = Run(kept=campaign.kept, new=change)
        scope = scope_of(context.direction)
        controller.admit(campaign.compose(run.changes), Request(run=run, only=scope), campaign)
        if any(change.keys == other.change.keys for other in waiting_answers if other.change):
            raise UsageError("this change waits for its turn already", "Change train.toml.")
        is_first = waiting_answers == self._not_started()
        rider = context.rider if is_first else self._rider(campaign, waiting_answers)
        if rider is not None and rider.keys.keys() & change.keys.keys():
            rider = None
        return replace(answer, rider=rider)

    def _asks_at(self) -> float:
        """Return when the agent is asked again, on the clock; 0 if it can be asked."""
        if self.state.unavailable is None:
            return 0.0
        wait = parse_time(self.state.unavailable.asks_at) - self._controller.now()
        return self._controller.clock() + wait.total_seconds()

    def _pay(self, answer: Answer) -> None:
        """Log the cost of an agent's answers, which the first of them holds, taken or not. Note once that --max-cost
        lacks dollars."""
        cost, most = answer.proposal.cost, self.state.request.max_cost
        if cost is not None:
            night = (self.state.branch, self.state.rules_hash, self.state.started)
            log_proposal(self._ledger.runs_dir, *night, cost)
        is_priced = cost is not None and cost.is_whole("dollars")
        if most is None or is_priced or self._is_price_note_made or answer.unavailable is not None:
            return  # an agent that cannot be asked may have spent nothing
        self._is_price_note_made = True
        dollars = (
            f"{self._proposer.name} reported {'no' if cost is None or cost.dollars is None else 'not all'} dollars"
        )
        self._note(f"--max-cost {most:g}: {dollars}, so this rule cannot hold; others stop it")

    def _refuse(self, cause: str, notes: Sequence[str] = (), *, is_fill: bool = False, is_edited: bool = True) -> None:
        """Go on without a proposal. Too many refusals in a row end the night with `cause`."""
        self._note(f"proposal refused: {cause}")
        if is_fill:
            self._fill_refusals = (*self._fill_refusals, cause)
            if len(self._fill_refusals) % MAX_REFUSALS == 0:  # their number is part of the next draw's seed
                self._fills_at = self._controller.clock() + _FILL_PAUSE_SECONDS
            return
        refusals = (*self.state.refusals, cause)
        notes = (*self.state.notes, *notes, f"proposal {len(refusals)} refused: {cause}")
        self._update(refusals=refusals, notes=notes)
        if len(refusals) >= MAX_REFUSALS:
            self._over = Stop(f"{len(refusals)} proposals in a row were refused, the last one: {cause}", False)
        elif not is_edited:
            self._proposes_at = self._controller.clock() + self._pause_seconds(len(refusals))

    def _drop(self, answer: Answer, cause: str) -> None:
        """Refuse a proposal that was taken before."""
        self._forget(answer)
        self._refuse(cause, answer.proposal.notes, is_fill=answer.proposal.proposer == FILL)

    def _forget(self, answer: Answer) -> None:
        self._update(pending=tuple(other for other in self.state.pending if other is not answer))

    def _start(self, pending: Answer, campaign: Campaign) -> None:
        """Start a proposal's run: its change on the incumbent of this moment, with its rider if that still applies."""
        # Only the first experiment of a proposal has the proposal's cost.
        answer = pending.with_proposal(cost=None) if attempts(pending, self._own()) else pending
        assert pending.change is not None
        try:
            kept = campaign.kept
            before, now = ({k: v for c in changes for k, v in c.keys.items()} for changes in (answer.kept, kept))
            keys = [key for key in pending.change.keys if before.get(key) != now.get(key)]
            if keys and answer.proposal.prediction is not None:  # made against another value of its keys
                cause = f"the incumbent's {', '.join(keys)} changed meanwhile"
                note = f"prediction not scored, because {cause}: {answer.proposal.prediction}"
                answer = answer.with_proposal(prediction=None, notes=(*answer.proposal.notes, note))
            rider = pending.rider  # must not set a key of the incumbent
            if rider is not None and any(rider.keys.keys() & change.keys.keys() for change in kept):
                rider = None
            run = Run(kept=kept, rider=rider, new=campaign.known(pending.change.keys))
            try:
                config = campaign.compose(run.changes)
                self._bench.engine.validate(config)
            except UsageError:
                run = structs.replace(run, rider=None)
                config = campaign.compose(run.changes)
            record = self._controller.start(Request(answer.proposal, run=run), config, campaign)
        except UsageError as error:
            self._drop(pending, str(error))
            return
        if record.status != STARTED:
            self._conclude(record)

    def _conclude(self, record: Record) -> None:
        """Act on a verdict: notify, and run a proposal again whose run infrastructure lost."""
        if record.failure is Failure.MACHINERY:  # a worker that was killed may have left gigabytes
            remains.clean(self._ledger.runs_dir, self._ledger.run_dir(record.number))
        own = self._own()
        lost = [pending for pending in undecided(self.state, own) if record in attempts(pending, own)]
        self._tidy()
        self._has_news, own = True, self._own()
        if (event := event_of(record, own)) is not None:
            self._send(event, record.why, record)
        if record.failure is Failure.MACHINERY:
            # Two tries of one proposal in a row do not count: MAX_TRIES drops it.
            last, progress = by_end(own)[-2:], [read_progress(self._ledger.run_dir(r.number)) for r in own]
            causes = [r.why if r.failure is Failure.MACHINERY else None for r in last]
            is_retry = last[0].run.new is not None and last[0].config_hash == last[-1].config_hash
            if is_second(causes) and not is_retry and not any(each and each.num_steps for each in progress):
                cause = "; ".join([f"two starts in a row failed: {record.why}", *self._bench.warnings()])
                self._over = Stop(cause, is_planned=False)
                return
            if record.run.new is None:
                self._pause(num_crashes(own))
        for pending in lost:
            num_tries = sum(r.failure is Failure.MACHINERY for r in attempts(pending, own))
            if num_tries >= MAX_TRIES:
                self._is_given_up = True
                self._drop(pending, f"infrastructure lost its run {num_tries} times: {record.why}")
            else:
                self._pause(num_tries)  # infrastructure failed, not the config: once more

    def _pause(self, num_failures: int) -> None:
        """Begin nothing new for a while, longer after more failures in a row."""
        self._begins_at = self._controller.clock() + self._pause_seconds(num_failures)

    def _pause_seconds(self, num_failures: int) -> float:
        return self._pauses[min(max(num_failures, 1), len(self._pauses)) - 1]

    def _close(self, stop: Stop | None, cut_off: str | None = None) -> None:
        """Write the state, train.toml and the summary; one that fails does not prevent the others. `cut_off`: why runs
        were interrupted, None if none was. With `stop` None the night can be resumed: no notification is sent."""
        try:
            if cut_off is not None:
                self._controller.interrupt(cut_off)
        finally:
            cause = None if stop is None else stop.cause
            is_planned = stop is None or stop.is_planned
            for write in (partial(self._update, cause=cause, is_planned=is_planned), self._tidy, self._write_summary):
                try:
                    write()
                except (NightshiftError, OSError) as error:
                    if str(error) != cause:  # which the summary says
                        self._note(f"the night's last traces are not whole: {error}")
            if cause is not None:
                self._send_end(cause)

    def _write_summary(self) -> None:
        """Write and print the summary; its page takes a second."""
        self._tell(write_summary(self.state, self._controller))
        self._has_news = False

    def _send(self, event: str, why: str, record: Record | None = None) -> None:
        self._notifier.send(event, message(event, self.state, self._controller, why, record))

    def _send_end(self, cause: str) -> None:
        """Notify of the end once: a full disk does not prevent it."""
        if not self._is_end_sent:
            self._send(END, cause)
            self._is_end_sent = True

    def _update(self, **changes: Any) -> None:
        self.state = replace(self.state, **changes)
        save(self._ledger, self.state)

    def _cost(self) -> Cost:
        return night_cost(self.state, self._ledger)

    def _own(self) -> list[Record]:
        return self.state.own(self._ledger.records())
