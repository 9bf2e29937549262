"""The overnight loop: propose, run_experiment, record; stoppable at any time, resumable after any end.

One `_step` does one thing and leaves its result on disk, so a night that was killed anywhere goes on with the same
command: a proposal waits in night.json until it is decided, and jobs of a cluster are taken over. Runs are side by
side, one in each slot of the executor, and are decided as they end; train.toml is the incumbent's all the time.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from msgspec import structs

from nightshift.agents.base import Answer, Context, Proposer
from nightshift.campaign.campaign import Campaign
from nightshift.campaign.cost import log_proposal
from nightshift.campaign.finish import resume
from nightshift.campaign.git import CONFIG_NAME
from nightshift.campaign.ledger import STARTED, Ledger
from nightshift.campaign.recombine import base_of, next_base
from nightshift.campaign.records import Cost, Failure, Load, Proposal, Record, Request
from nightshift.campaign.scores import BUSY, to_repeat
from nightshift.config.rules import covered_files
from nightshift.config.toml_text import read_source
from nightshift.config.train_toml import load, parse
from nightshift.engines.base import used_keys
from nightshift.engines.prime_rl import remains
from nightshift.errors import ConfigError, EngineError, Interrupted, NightshiftError, UsageError
from nightshift.executors.gpus import taken_now
from nightshift.executors.process import interruptible
from nightshift.executors.slurm import SlurmExecutor, jobs_left
from nightshift.experiment.experiment import admit, collect, interrupt, start, withdraw
from nightshift.experiment.runs import cancel
from nightshift.experiment.setup import Setup
from nightshift.files import write_atomically
from nightshift.night.notify import END, REPEATED_CRASH, Notifier, event_of, is_second
from nightshift.night.state import (
    STOP_NAME,
    NightState,
    Stop,
    decided,
    is_full,
    is_spent,
    night_cost,
    num_since_keep,
    run_seconds,
    save,
    stop_rule,
    used,
)
from nightshift.night.summary import message, write_summary
from nightshift.report.slices import shown_examples
from nightshift.waiting import news, waiting


@lru_cache(maxsize=512)
def _hash(source: bytes) -> str:
    """Of a train.toml that waits, and is asked for at each step of a night."""
    return parse(source).hash


def attempts(pending: Answer, own: Sequence[Record]) -> list[Record]:
    """The closed experiments that ran a proposal; `own` are the night's."""
    if pending.source is None:
        return []
    tried, after = _hash(pending.source), -1 if pending.repeats is None else pending.repeats
    return [record for record in own if record.config_hash == tried and record.number > after]


def undecided(state: NightState, own: Sequence[Record]) -> tuple[Answer, ...]:
    """Those that no closed experiment has decided."""
    return tuple(pending for pending in state.pending if not decided(attempts(pending, own)))


def not_started(state: NightState, in_flight: Sequence[Record]) -> list[Answer]:
    """Those that nothing runs."""
    running = [record.config_hash for record in in_flight]
    found = []
    for pending in state.pending:
        config_hash = _hash(pending.source or b"")
        if config_hash in running:
            running.remove(config_hash)
        else:
            found.append(pending)
    return found


def withdraw_jobs(in_flight: Sequence[Record], why: str, setup: Setup) -> None:
    """Take back what waits for its turn on a cluster: it would begin when the night is over."""
    for record in in_flight:
        if not setup.executor.has_begun(setup.ledger.run_dir(record.number)):
            withdraw(record.number, f"its job still waited when the night ended: {why}", setup)


def take_over_jobs(state: NightState, setup: Setup) -> None:
    """Take over the jobs in SLURM that an earlier controller of this night submitted, or their results."""
    jobs = jobs_left(setup.ledger, state.first)
    if not isinstance(setup.executor, SlurmExecutor) or not jobs:
        return
    for folder, job in jobs.items():
        setup.executor.take_over(folder, job)
    setup.surroundings.look(covered_files(setup.root, setup.rules.frozen))
    numbers = ", ".join(sorted(folder.name for folder in jobs))
    setup.reporter.note(f"took over the jobs of experiments that an earlier start of this night submitted: {numbers}")


def repeat_of(record: Record, campaign: Campaign, why: str, after: int, ledger: Ledger) -> Answer:
    """An experiment's train.toml once more, with another seed; it is the first to run that `after` that one."""
    base, source = base_of(campaign, record, ledger.stored_config), ledger.source(record.number)
    said = record.proposal
    proposal = Proposal(description=f"{why}: {said.description}", prediction=said.prediction, base=base)
    return Answer(source, proposal, repeats=after)


def request_of(pending: Answer, own: Sequence[Record]) -> Request:
    """What its experiment is asked for. Only the first experiment of a proposal has the proposal's cost."""
    answer = pending.with_proposal(cost=None) if attempts(pending, own) else pending
    return Request(answer.proposal, again=pending.repeats is not None)


def ask(
    proposer: Proposer,
    state: NightState,
    setup: Setup,
    campaign: Campaign,
    incumbent: Record,
    queued: Sequence[Answer],
) -> Answer:
    """One answer, with the base that it was made from and who made it. `queued`: those that nothing runs yet."""
    own, now, in_flight = state.own(setup.ledger.records()), setup.now(), setup.in_flight
    num_open = len(in_flight) + len(queued)
    base, config = next_base(
        campaign, used(state, own, now), setup.ledger.stored_config, setup.engine.validate, num_open
    )
    admit(config, Request(Proposal(base=base), again=True), setup)  # no proposal is to blame for the set-up
    plateau, last = state.request.plateau, campaign.decided[-1]
    parent = next((kept for kept in campaign.kept if kept.number == last.parent), None)
    flips = shown_examples(last.environments, setup.root).flips(last, parent) if parent else ()
    context = Context(
        number=setup.ledger.next_number(),
        incumbent=incumbent,
        source=config.source,
        base=base,
        campaign=campaign,
        rules=setup.rules,
        ledger=setup.ledger,
        used_keys=used_keys(setup.engine, config),
        refusals=state.refusals,
        in_flight=in_flight,
        waiting=tuple(queued),
        flips=tuple(f"{each.name}: {each.fixed} fixed, {each.broken} broken of {each.num_examples}" for each in flips),
        new_direction=plateau is not None and num_since_keep(own) >= plateau,
        seconds_left=None if state.deadline is None else max((state.deadline - now).total_seconds(), 1.0),
    )
    setup.reporter.note(what := f"{proposer.name} proposes experiment {context.number:04d}")
    with waiting(what):
        answer = proposer.propose(context, setup.is_stopping)
    if answer.cause is None and answer.source in [other.source for other in queued]:
        answer = replace(answer, cause="this config waits for its turn already. Change train.toml.")
    return answer.with_proposal(base=base, proposer=proposer.name)


def learn(answer: Answer, last: Record, setup: Setup) -> None:
    """Write down what a proposer says that the `last` experiment taught, unless that is known."""
    if answer.lesson and last.proposal.lesson is None:
        proposal = structs.replace(last.proposal, reported_outcome=answer.reported_outcome, lesson=answer.lesson)
        with setup.ledger.lock():
            setup.ledger.write(structs.replace(last, proposal=proposal))


def unpriced(proposer: Proposer, answer: Answer, max_cost: float | None) -> str | None:
    """What to tell a person who gave `max_cost` dollars, where it is not known what this proposal cost."""
    cost = answer.proposal.cost
    if max_cost is None or (cost is not None and cost.is_whole("dollars")):
        return None
    told = f"{proposer.name} told {'no' if cost is None or cost.dollars is None else 'not all'} dollars"
    return f"--max-cost {max_cost:g}: {told}, so this rule cannot hold; others stop it"


def place(incumbent: Record, setup: Setup) -> None:
    """Write train.toml as the incumbent has it; what somebody else wrote there is kept aside. On another branch than
    its own it is left alone."""
    path, source = setup.root / CONFIG_NAME, setup.ledger.source(incumbent.number)
    try:
        present = read_source(path)
    except ConfigError:
        present = None
    if present == source or setup.repo.head().branch != incumbent.branch:
        return
    known = {setup.ledger.source(record.number) for record in setup.ledger.records()}
    if present is not None and present not in known | {setup.repo.config_at("HEAD")}:
        aside = setup.ledger.runs_dir / f"edited-{setup.now():%Y%m%dT%H%M%S}.toml"
        write_atomically(aside, present)
        setup.reporter.note(f"train.toml was edited by somebody else: kept as {aside}")
    write_atomically(path, source)


class Interrupt:
    """Two-stage Ctrl-C. `asked`: the first one came, so nothing new is to be started; `origin`: from where. A
    `stop_file` says the same."""

    def __init__(self, stop_file: Path) -> None:
        self.asked, self.origin, self._stop_file = False, "", stop_file

    @property
    def has_file(self) -> bool:
        """Whether the file lies there now."""
        return self._stop_file.exists()

    @property
    def signs(self) -> tuple[bool, bool]:
        """What a night that waits has to look at anew when it changes."""
        return self.asked, self.has_file

    def installed(self) -> AbstractContextManager[None]:
        """The second SIGINT, or the first of the other signals that stop, raises Interrupted in the main thread."""
        return interruptible(is_noted=self._is_first, names_sender=True)

    def _is_first(self, number: int, origin: str) -> bool:
        is_first = number == signal.SIGINT and not self.asked
        if is_first:
            self.asked, self.origin = True, origin
            news.put(f"{origin}: nothing new is begun, and what is in flight is finished; once more to stop now")
        return is_first


MAX_TRIES = 3  # of one config that ends in failures of machinery
MAX_REFUSALS = 8  # of proposals in a row
PAUSES = (60.0, 600.0, 600.0)  # seconds, after failures of machinery in a row, or proposals without an edit


class Night:
    """A night under way. Run it as the head (Ledger.controller). `state`: what it remembers beside the ledger."""

    def __init__(
        self,
        state: NightState,
        setup: Setup,
        proposer: Proposer,
        tell: Callable[[str], None],
        pauses: tuple[float, ...] = PAUSES,
        look: Callable[[], Load] = taken_now,
        notifier: Notifier | None = None,
    ) -> None:
        """`tell` gets the summary after every experiment and at the end; news goes to the setup's reporter. `look`
        tells what others take of the machine now."""
        self.state = state
        self._interrupt = Interrupt(setup.root / STOP_NAME)
        self._setup = replace(setup, is_stopping=self._is_stopping)
        self._proposer, self._pauses, self._look = proposer, pauses, look
        self._tell, self._notifier = tell, notifier or Notifier(None, setup.reporter.note)
        self._has_news = self._is_end_sent = False  # since the last summary; of the notification
        self._failures = list[str]()  # causes of infrastructure failures in a row
        self._proposal_seconds = 0.0  # of the last proposal
        self._goes_on_at = 0.0  # on the clock: before that nothing new is begun
        self._over: Stop | None = None  # what cannot be gone on after
        # STOP came while an agent was at work; an agent tells not all dollars; what was taken was refused after all.
        self._is_stop_new = self._is_unpriced_told = self._is_given_up = False

    def run(self) -> Stop:
        """Until a stop rule holds; why. Interrupted and UsageError end it too, with the same traces on disk."""
        with self._interrupt.installed():
            try:
                self._update()  # for `status`, and for the same command after a kill
                while (stop := self._step_or_pause()) is None:
                    pass
                self._close(stop, cut_off=stop.cause if self._setup.executor.in_flight() else None)
                return stop
            except Interrupted as error:
                # A second Ctrl-C is a person's word. After a SIGTERM (a reboot) the same command goes on.
                self._close(Stop(error.cause) if self._interrupt.asked else None, cut_off=error.cause)
                raise
            except UsageError as error:
                cancel(self._setup)  # what is damaged may not be read again: the next start closes the records
                self._close(Stop(str(error), is_planned=False))
                raise
            except Exception as error:  # a disk that is full from the start, a bug: who sleeps is to know of it
                self._send_end(f"{type(error).__name__}: {error}")
                raise
            finally:
                cancel(self._setup)

    def _step_or_pause(self) -> Stop | None:
        try:
            return self._step()
        except (EngineError, OSError) as error:
            self._failures.append(str(error))
            num_failures = len(self._failures)
            if is_second(self._failures):
                self._send(REPEATED_CRASH, str(error))
            if num_failures > len(self._pauses):
                return Stop(f"{num_failures} infrastructure failures in a row: {error}", is_planned=False)
            self._setup.reporter.note(f"{error} -- once more in {self._pause(num_failures):g} s")
        before = self._interrupt.signs
        while self._setup.clock() < self._goes_on_at and self._interrupt.signs == before:
            self._setup.wait()  # a result that waits in its folder is safer than one whose record cannot be written
        return None

    def _step(self) -> Stop | None:
        """One thing: decide what has ended, start what waits, tell, propose, or repeat; else wait."""
        setup, executor = self._setup, self._setup.executor
        self._tidy()  # first: a verdict that was cut off is settled only as long as it is the last
        for number in sorted(setup.experiments_in_flight()):
            if (record := collect(number, setup)) is not None:
                self._conclude(record)
                return None
        stop, num_free = self._why_stop(), max(executor.num_slots - len(executor.in_flight()), 0)
        if stop and not executor.in_flight():
            return stop
        # Proposals are made ahead, so that slots that get free at about the same time do not wait for them in turn.
        has_next = num_free == 0 and (
            executor.num_slots == 1 or len(self._not_started()) >= (executor.num_slots + 1) // 2
        )
        if stop:
            withdraw_jobs(self._setup.in_flight, stop.cause, setup)
        if stop or has_next or setup.clock() < self._goes_on_at or not self._begin(num_free):
            self._wait(is_stopping=stop is not None)
        else:
            self._failures.clear()
        return None

    def _wait(self, is_stopping: bool) -> None:
        """Until a run has ended, a pause is over, somebody wants to stop, or who does is told of a job that waits."""
        self._tell_news()
        setup, began, before = self._setup, self._setup.clock(), self._interrupt.signs
        due = [setup.ledger.run_dir(record.number) for record in setup.in_flight]
        while self._interrupt.signs == before:
            setup.wait()
            is_queued = is_stopping and not all(map(setup.executor.has_begun, setup.executor.in_flight()))
            if (
                is_queued
                or not due
                or any(map(setup.executor.is_over, due))
                or began < self._goes_on_at <= setup.clock()
            ):
                return

    def _begin(self, num_free: int) -> bool:
        """Start what waits, or see to it that something does; False where there is nothing to begin."""
        if num_free and (queued := self._not_started()):
            self._start(queued[0])
            return True
        self._tell_news()  # a page takes a second: not before what waits was started
        campaign = self._setup.campaign(self.state.branch)
        if (incumbent := campaign.incumbent) is None:
            return not self._setup.executor.in_flight() and self._baseline()
        num_open = len(self._setup.in_flight) + len(self._not_started())
        if is_full(self.state, self._own(), num_open) or is_spent(self.state, self._cost()):
            return False
        busy, repeated = to_repeat(self._own(), incumbent.number), {p.repeats for p in self.state.pending}
        if busy and busy.number not in repeated and self._look().taken < BUSY:
            self._repeat(busy, campaign, f"{busy.number:04d} again, which was run on a busy machine", busy.number)
        elif num_free > 1 and self._proposal_seconds * self._setup.executor.num_slots > run_seconds(
            self._own(), math.inf
        ):
            last = max(self._setup.ledger.numbers())
            self._repeat(incumbent, campaign, f"{incumbent.number:04d} again, in an idle slot", last)
        else:
            self._propose(campaign, incumbent)
        return True

    def _tidy(self) -> None:
        """Close what was cut off; forget what is decided; have train.toml be the incumbent's."""
        setup = self._setup
        with setup.ledger.lock():
            resume(setup.ledger, setup.repo, setup.reporter.note, setup.experiments_in_flight())
        if (left := undecided(self.state, self._own())) != self.state.pending:
            self._update(pending=left, refusals=(), notes=())
            self._is_given_up = False
        if (incumbent := setup.campaign(self.state.branch).incumbent) is not None:
            place(incumbent, setup)

    def _not_started(self) -> list[Answer]:
        return not_started(self.state, self._setup.in_flight)

    def _why_stop(self) -> Stop | None:
        """Why nothing new is to be begun; what is in flight is waited for."""
        if self._over or self._interrupt.asked:
            return self._over or Stop(f"stopped by {self._interrupt.origin}")
        if self._interrupt.has_file:
            by = f"appeared while {self._proposer.name} was at work, and may be its own"
            return Stop(f"file {STOP_NAME} {by if self._is_stop_new else 'found'}", is_planned=not self._is_stop_new)
        if (branch := self._setup.repo.head().branch) != self.state.branch:
            return Stop(f"the checkout moved from {self.state.branch} to {branch or 'a detached HEAD'}", False)
        seconds = run_seconds(self._own(), self._setup.rules.budget_seconds)
        return stop_rule(self.state, self._own(), self._setup.now(), seconds, self._cost())

    def _baseline(self) -> bool:
        """Have train.toml wait as the campaign's first; False where that crashed already."""
        failed = [r for r in self._own() if r.failure is not Failure.INTERRUPTED]
        if failed and failed[-1].judgement:
            self._over = Stop(f"the baseline crashed: {failed[-1].judgement.why}", is_planned=False)
            return False
        admit(config := load(self._setup.root / CONFIG_NAME), Request(), self._setup)
        self._update(pending=(Answer(config.source, Proposal(description="baseline")),))
        return True

    def _propose(self, campaign: Campaign, incumbent: Record) -> None:
        """Ask once for the next train.toml; it waits in the state then, or why it was refused does."""
        setup, began = self._setup, self._setup.clock()
        answer = ask(self._proposer, self.state, setup, campaign, incumbent, self._not_started())
        self._proposal_seconds = setup.clock() - began
        self._pay(answer)
        self._is_stop_new = self._interrupt.has_file and not self._proposer.is_walled
        if self._interrupt.asked:
            return
        learn(answer, campaign.decided[-1], setup)
        answer = answer.with_proposal(notes=(*self.state.notes, *answer.proposal.notes))
        if answer.source is None or answer.cause is not None:
            self._refuse(answer, answer.cause or "no edit")
            return
        try:
            admit(parse(answer.source), Request(Proposal(base=answer.proposal.base)), setup)
        except UsageError as error:
            self._refuse(answer, str(error))
            return
        refusals = self.state.refusals if self._is_given_up else ()  # else what is always lost would have no end
        self._update(pending=(*self.state.pending, answer), refusals=refusals, notes=())

    def _is_stopping(self) -> bool:
        """Whether a person wants to. Agents ask all the while they think: so who waits is told of here."""
        self._setup.tell()
        return self._interrupt.asked

    def _pay(self, answer: Answer) -> None:
        """Count what was asked for, whether it is taken or not."""
        if answer.proposal.cost is not None:
            night = (self.state.branch, self.state.rules_hash, self.state.started)
            log_proposal(self._setup.ledger.runs_dir, *night, answer.proposal.cost)
        if not self._is_unpriced_told and (news := unpriced(self._proposer, answer, self.state.request.max_cost)):
            self._is_unpriced_told = True
            self._setup.reporter.note(news)

    def _repeat(self, record: Record, campaign: Campaign, why: str, after: int) -> None:
        """Run an experiment's train.toml once more, with another seed; it is the first to do so `after` that one."""
        self._setup.reporter.note(why)
        self._update(pending=(*self.state.pending, repeat_of(record, campaign, why, after, self._setup.ledger)))

    def _refuse(self, answer: Answer, cause: str) -> None:
        """Go on without this proposal; the night is over with `cause` when that happens too often in a row."""
        refusals = (*self.state.refusals, cause)
        notes = (*answer.proposal.notes, f"proposal {len(refusals)} refused: {cause}")
        left = tuple(other for other in self.state.pending if other is not answer)
        self._is_given_up |= left != self.state.pending
        self._update(pending=left, refusals=refusals, notes=notes)
        self._setup.reporter.note(f"proposal refused: {cause}")
        if len(refusals) >= MAX_REFUSALS:
            self._over = Stop(f"{len(refusals)} proposals in a row were refused, the last one: {cause}", False)
        elif answer.source is None:
            self._pause(len(refusals))

    def _start(self, pending: Answer) -> None:
        try:
            record = start(request_of(pending, self._own()), parse(pending.source or b""), self._setup)
        except UsageError as error:
            self._refuse(pending, str(error))
            return
        if record.status != STARTED:
            self._conclude(record)

    def _conclude(self, record: Record) -> None:
        """After a verdict: what the machinery lost is run again."""
        if record.failure is Failure.MACHINERY:  # a worker that was killed may have left gigabytes
            remains.sweep(self._setup.root / "runs")
        lost = [p for p in undecided(self.state, self._own()) if record in attempts(p, self._own())]
        self._tidy()
        self._has_news = True
        if (event := event_of(record, self._own())) is not None:
            self._send(event, record.judgement.why if record.judgement else "", record)
        for pending in lost:
            num_tries = sum(r.failure is Failure.MACHINERY for r in attempts(pending, self._own()))
            if num_tries >= MAX_TRIES and record.judgement:
                self._refuse(pending, f"the machinery lost its run {num_tries} times: {record.judgement.why}")
            else:
                self._pause(num_tries)  # the machinery failed, not the config: once more

    def _pause(self, num_failures: int) -> float:
        """After so many failures in a row begin nothing new for so many seconds."""
        seconds = self._pauses[min(max(num_failures, 1), len(self._pauses)) - 1]
        self._goes_on_at = self._setup.clock() + seconds
        return seconds

    def _close(self, stop: Stop | None, cut_off: str | None = None) -> None:
        """Write the state, git's part and the summary; one that fails does not prevent the others. `cut_off`: why runs
        were interrupted, None if none was. With `stop` None the night can be resumed: no notification is sent."""
        try:
            if cut_off is not None:
                interrupt(cut_off, self._setup)
        finally:
            cause = None if stop is None else stop.cause
            traces: tuple[Callable[[], None], ...] = (
                partial(self._update, cause=cause),
                self._tidy,
                self._write_summary,
            )
            for write in traces:
                try:
                    write()
                except (NightshiftError, OSError) as error:
                    if str(error) != cause:  # which is told already
                        self._setup.reporter.note(f"the night's last traces are not whole: {error}")
            if cause is not None:
                self._send_end(cause)

    def _tell_news(self) -> None:
        """Print the summary if an experiment has ended since the last one; it takes a second."""
        if self._has_news:
            self._write_summary()
        self._has_news = False

    def _write_summary(self) -> None:
        self._tell(write_summary(self.state, self._setup))

    def _send(self, event: str, why: str, record: Record | None = None) -> None:
        self._notifier.send(event, message(event, self.state, self._setup, why, record))

    def _send_end(self, cause: str) -> None:
        """Notify of the end once: a full disk does not prevent it."""
        if not self._is_end_sent:
            self._send(END, cause)
            self._is_end_sent = True

    def _update(self, **changes: Any) -> None:
        """Change the state, on disk too."""
        self.state = replace(self.state, **changes)
        save(self._setup.ledger, self.state)

    def _cost(self) -> Cost:
        """What all proposals of this night cost."""
        return night_cost(self.state, self._setup.ledger)

    def _own(self) -> list[Record]:
        """The closed experiments of this night."""
        return self.state.own(self._setup.ledger.records())
