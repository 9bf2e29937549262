"""The overnight loop: propose, run, record; stoppable at any time, resumable after any end.

One `_step` does one thing and leaves its result on disk. Proposals are made by proposals.py, runs are started and
decided by slots.py. What the night waits for is in the table of waits (state.py). The page and the notifications are
observers of the night's events. train.toml is the incumbent's all the time.
"""

import signal
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from datetime import timedelta
from typing import get_args

from nightshift.agents.availability import Availability
from nightshift.agents.base import Proposer
from nightshift.campaign.campaign import resume
from nightshift.campaign.git import CONFIG_NAME, Head
from nightshift.campaign.ledger import baseline_of
from nightshift.campaign.waits import CHECK_SECONDS, WaitKind
from nightshift.config.train_toml import read_source
from nightshift.errors import ConfigError, EngineError, Interrupted, NightshiftError, UsageError
from nightshift.executors.process import interruptible
from nightshift.experiment import certify
from nightshift.experiment.checkout import IntegrityError
from nightshift.experiment.experiment import Controller, suspended
from nightshift.files import write_atomically
from nightshift.night.observers import Notifications, Notifier, Page, certified_line
from nightshift.night.proposals import Proposals, undecided
from nightshift.night.slots import Slots
from nightshift.night.state import LOOK_SECONDS, STOP_NAME, Desk, Kind, NightState, Stop
from nightshift.waiting import waiting

_SWITCH_SECONDS = 2.0  # git switch writes the files first and HEAD last


class Night:
    """A night under way. Run it as the controller (Ledger.lock). `state`: what the ledger does not hold."""

    def __init__(
        self,
        state: NightState,
        controller: Controller,
        proposer: Proposer,
        tell: Callable[[str], None],
        notifier: Notifier | None = None,
        filler: Proposer | None = None,
        unavailable: Availability | None = None,
    ) -> None:
        """`tell` gets the summaries; news goes to the reporter. `filler` proposes while `proposer` cannot.
        `unavailable`: why `proposer` could not be asked before the night."""
        self._controller = replace(controller, is_stopping=lambda: any(self._signs))
        self.desk = Desk(state, self._controller)
        self._executor, self._note = controller.bench.executor, controller.reporter.note
        self._proposals = Proposals(self.desk, proposer, filler)
        self._slots = Slots(self.desk, self._proposals)
        self.desk.observers += [Page(tell), Notifications(notifier or Notifier(None, self._note))]
        self._unavailable = unavailable
        self._interrupted_by = ""  # the first Ctrl-C, so nothing new is to be begun

    @property
    def state(self) -> NightState:
        return self.desk.state

    def run(self) -> Stop:
        """Run until a stop rule applies, or a measuring file changed. Returns why. Interrupted and UsageError end the
        night too, with the same traces on disk."""
        with interruptible(is_noted=self._is_first_interrupt):
            try:
                self.desk.update()  # for `status`, and for the same command after a kill
                self._proposals.direction()
                if self._unavailable is not None:
                    self._proposals.begin_wait(self._unavailable)
                while (stop := self._step()) is None:
                    pass
                cut_off = f"{stop.cause}: it ended while it could not be judged" if self.desk.bench.in_flight else None
                is_asked = self.state.request.certify is not None and self.state.certificate is None
                if is_asked and stop.is_planned and not stop.by_user:
                    self.desk.update(certificate=self._certify())
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
                self.desk.emit(Kind.OVER, why=f"{type(error).__name__}: {error}")
                raise
            finally:
                try:
                    self._proposals.close()
                finally:
                    self._controller.cancel()

    def _certify(self) -> str:
        """Train baseline and incumbent afresh, as `nightshift certify` does. Returns the line with the result."""
        controller, deadline, branch = self._controller, self.state.deadline, self.state.branch
        if (now := controller.repo.head().branch) != branch:
            return f"not certified: {now or 'a detached HEAD'} is checked out in place of {branch}"
        if self.desk.bench.in_flight:
            return "not certified: the last runs could not be judged"
        try:
            task = certify.open_task(controller, self.state.request.certify, night=self.state.started)
            needed = (task.num_waves() - 0.5) * self.desk.run_seconds()  # the last run may have been slow
            if deadline is not None and controller.now() + timedelta(seconds=needed) > deadline:
                return f"not certified: the hours left are too few for its {2 * task.plan.num_seeds} runs"
            comparison = certify.certify(task)
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
        return self._interrupted_by, (self._controller.bench.root / STOP_NAME).exists()

    def _step(self) -> Stop | None:
        """Do one thing, or wait for what prevents it. Returns why the night is over, None to go on."""
        desk, before, stop = self.desk, self._signs, None
        seconds: float | None = None  # of a wait for what prevents the night
        try:
            stop = self._why_stop()
            if self._is_prevented():
                seconds = CHECK_SECONDS
            else:
                has_acted = self._act(stop)
                desk.end_wait("machine")
                if has_acted:
                    return None
        except IntegrityError:
            time.sleep(_SWITCH_SECONDS)
            # The branch is back, so the files must be as well. Without a baseline nothing says what they were.
            if not self._is_prevented() and self._controller.first_to_compare(desk.ledger.records()) is None:
                raise
            return None
        except (EngineError, OSError) as error:
            seconds = LOOK_SECONDS
            if problem := desk.disk_problem():
                desk.begin_wait("disk", problem, "runs/ can be written")
            else:
                desk.begin_wait("machine", str(error), "this machine is ready")
        under_way = [desk.ledger.run_dir(number) for number in desk.bench.in_flight]
        if desk.open_wait("branch"):  # what has ended cannot be judged, and a job that still waits is cancelled
            left = [folder for folder in under_way if not desk.bench.is_over(folder)]
            under_way = [folder for folder in left if folder in desk.bench.proofs or self._executor.has_begun(folder)]
        if stop is not None and not under_way:
            return stop
        sentence = " And ".join(desk.state.waiting)
        with waiting(sentence) if sentence and not under_way else nullcontext():
            self._wait(before, stop, seconds)
        return None

    def _is_prevented(self) -> bool:
        """Return True while the branch is not checked out, or the disk cannot be written: results wait on disk.

        Raises:
            IntegrityError: the branch does not exist any more.
        """
        repo, branch, desk = self._controller.repo, self.state.branch, self.desk
        if (now := repo.head().branch) != branch:
            if branch not in repo.branches():
                raise IntegrityError(f"the night's branch {branch} was deleted or renamed", "Start another night.")
            cause = f"the checkout moved from {branch} to {now or 'a detached HEAD'}"
            desk.begin_wait("branch", cause, f"{branch} is checked out again")
            return True
        is_full = desk.open_wait("disk") is not None and desk.disk_problem() is not None
        desk.end_wait("branch", *([] if is_full else ["disk"]))
        return is_full

    def _act(self, stop: Stop | None) -> bool:
        """Decide a run that has ended, start one that waits, or propose. With `stop` begin nothing. Returns False if
        there is nothing to do."""
        self._tidy()  # first: a verdict that was cut off is settled only as long as it is the last
        if self._slots.collect():
            return True
        if stop is not None:
            self._proposals.stop()
            self._slots.take_back(stop.cause)
            return False
        if not self.desk.num_free() and not self._proposals.has_something_to_do():
            return False
        campaign = self.desk.campaign()
        if campaign.branch != self.state.branch:  # another one was checked out a moment ago
            return True
        return self._slots.begin(campaign) or self._proposals.act(campaign)

    def _wait(self, before: tuple[str, bool], stop: Stop | None, seconds: float | None) -> None:
        """Wait until a run has ended, an answer is there, a try is due, or a job still waits while the night stops;
        with `seconds` for so long. Return at once when the user wants to stop: `before` are the signs of that when
        this step began."""
        controller, executor, desk = self._controller, self._executor, self.desk
        tries = filter(None, map(desk.seconds_until, ("agent", "run")))
        ends_at = controller.clock() + (seconds or min([LOOK_SECONDS, *tries]))
        desk.emit(Kind.IDLE)
        due = [desk.ledger.run_dir(number) for number in desk.bench.in_flight]
        while self._signs == before and (seconds or desk.over is None or due):
            if seconds_suspended := controller.wait():
                desk.add_pause(suspended(seconds_suspended), seconds_suspended)
            has_answers = self._proposals.advance()  # the agent's time is bounded all the same
            if controller.clock() >= ends_at:
                return
            if seconds is None:
                is_queued = stop is not None and not all(map(executor.has_begun, executor.in_flight()))
                is_waiting = due or self._proposals.is_under_way or any(wait.ended is None for wait in desk.state.waits)
                if has_answers or is_queued or any(map(desk.bench.is_over, due)) or not is_waiting:
                    return

    def _tidy(self) -> None:
        """Close experiments that were cut off; forget decided proposals; write the incumbent's train.toml on its own
        branch. Text that the user wrote there is kept in a file of its own."""
        controller, ledger, branch = self._controller, self.desk.ledger, self.state.branch
        resume(ledger, controller.repo, self._note, self.desk.bench.in_flight)
        if (pending := undecided(self.state, self.desk.own())) != self.state.pending:
            self.desk.update(pending=pending, refusals=())
        first = baseline_of(ledger.records(), branch)
        if first is None or controller.repo.head().branch != branch:
            return
        path, source, present = self.desk.bench.root / CONFIG_NAME, controller.repo.config_at("HEAD"), None
        with suppress(ConfigError):
            present = read_source(path)
        if present == source or source is None:
            return
        history = controller.repo.config_history(Head(branch, first.commit))
        earlier = {text for entry in history for text in (entry.before, entry.after)}
        if present is not None and present not in earlier:
            aside = ledger.runs_dir / f"edited-{controller.now():%Y%m%dT%H%M%S}.toml"
            write_atomically(aside, present)
            self._note(f"train.toml was edited by somebody else: kept as {aside}")
        write_atomically(path, source)

    def _why_stop(self) -> Stop | None:
        """Return why nothing new begins, None to go on. Runs in flight are waited for."""
        desk = self.desk
        if self._interrupted_by and desk.over is None:
            desk.over = Stop(f"stopped by {self._interrupted_by}", by_user=True)
            self._note("Ctrl-C: nothing new is begun, and what is in flight is finished; once more to stop now")
        if desk.over is None and (self._controller.bench.root / STOP_NAME).exists():
            return Stop(f"file {STOP_NAME} found", by_user=True)
        return desk.over or desk.stop_rule()

    def _close(self, stop: Stop | None, cut_off: str | None = None) -> None:
        """Write the state, train.toml and the summary; one that fails does not prevent the others. `cut_off`: why runs
        were interrupted, None if none was. With `stop` None the night can be resumed: no notification is sent."""
        desk, cause = self.desk, None if stop is None else stop.cause
        steps: list[Callable[[], None]] = [
            lambda: None if cut_off is None else self._controller.interrupt(cut_off),
            lambda: desk.end_wait(*get_args(WaitKind)),
            lambda: desk.update(cause=cause, is_planned=stop is None or stop.is_planned),
            self._tidy,
            lambda: desk.emit(Kind.STOPPED),
        ]
        for step in steps:
            try:
                step()
            except (NightshiftError, OSError) as error:
                if str(error) != cause:  # which the summary says
                    self._note(f"the night's last traces are not whole: {error}")
        if cause is not None:
            desk.emit(Kind.OVER, why=cause)
