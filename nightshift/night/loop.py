"""The overnight loop: propose, run, decide. It can be stopped and resumed at any time.

Each `_step` does one thing and writes the result to disk. proposals.py makes proposals; slots.py starts and decides
runs; state.py has the waits. Page and notifications are observers of the night's events. train.toml always contains the
incumbent's config.
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
    """A running night. Use it as the controller (Ledger.lock)."""

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
        """`tell` gets the summaries; news goes to the reporter. `filler` proposes while `proposer` is unavailable.
        `unavailable`: why `proposer` was unavailable before the night."""
        self._controller = replace(controller, is_stopping=lambda: any(self._signs))
        self.desk = Desk(state, self._controller)
        self._executor, self._note = controller.bench.executor, controller.reporter.note
        self._proposals = Proposals(self.desk, proposer, filler)
        self._slots = Slots(self.desk, self._proposals)
        self.desk.observers += [Page(tell), Notifications(notifier or Notifier(None, self._note))]
        self._unavailable = unavailable
        self._is_interrupted = False  # by the first Ctrl-C, after which nothing new is started

    @property
    def state(self) -> NightState:
        return self.desk.state

    def run(self) -> Stop:
        """Run until a stop rule applies or a measuring file changed. Returns the reason. Interrupted and UsageError
        also end the night, with the same files on disk."""
        with interruptible(is_noted=self._is_first_interrupt):
            try:
                self.desk.update()  # for `status`, and to resume after a kill
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
                # A second Ctrl-C ends the night. After a SIGTERM (a reboot) the same command resumes it.
                self._close(Stop(error.cause) if self._is_interrupted else None, cut_off=error.cause)
                raise
            except IntegrityError as error:
                self._note(str(error))
                self._close(stop := Stop(str(error), is_planned=False), cut_off=error.cause)
                return stop
            except UsageError as error:
                self._controller.cancel()  # damaged files may be unreadable: the next start closes the records
                self._close(Stop(str(error), is_planned=False))
                raise
            except Exception as error:  # a full disk at the start, or a bug: notify the user
                self.desk.emit(Kind.OVER, why=f"{type(error).__name__}: {error}")
                raise
            finally:
                try:
                    self._proposals.close()
                finally:
                    self._controller.cancel()

    def _certify(self) -> str:
        """Certify the incumbent, like `nightshift certify`. Returns the line with the result."""
        controller, deadline, branch = self._controller, self.state.deadline, self.state.branch
        if (now := controller.repo.head().branch) != branch:
            return f"not certified: {now or 'a detached HEAD'} is checked out instead of {branch}"
        if self.desk.bench.in_flight:
            return "not certified: the runs in flight could not be judged"
        try:
            task = certify.open_task(controller, self.state.request.certify, night=self.state.started)
            needed = (task.num_waves() - 0.5) * self.desk.run_seconds()  # the last run may have been slow
            if deadline is not None and controller.now() + timedelta(seconds=needed) > deadline:
                return f"not certified: too few hours are left for {2 * task.plan.num_seeds} runs"
            comparison = certify.certify(task)
        except (UsageError, EngineError) as error:
            return f"not certified: {error}"
        except Interrupted:
            if not any(self._signs):  # a reboot: the same command resumes the night
                raise
            return "not certified: stopped"
        return certified_line(comparison)

    def _is_first_interrupt(self, number: int) -> bool:
        """Remember the first SIGINT. A second SIGINT, or another stopping signal, raises Interrupted."""
        is_first = number == signal.SIGINT and not self._is_interrupted
        self._is_interrupted |= is_first
        return is_first

    @property
    def _signs(self) -> tuple[bool, bool]:
        """The user's requests to stop: the first SIGINT, and the file STOP. A change ends a wait."""
        return self._is_interrupted, (self._controller.bench.root / STOP_NAME).exists()

    def _step(self) -> Stop | None:
        """Do one thing, or wait. Returns why the night is over, None to continue."""
        desk, before, stop = self.desk, self._signs, None
        seconds: float | None = None  # of a wait that stops the whole night
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
            # The branch is back, so its files must be back. Without a baseline there is nothing to compare.
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
        if desk.open_wait("branch"):  # runs that ended cannot be judged; queued jobs are cancelled
            left = [folder for folder in under_way if not self._executor.is_over(folder)]
            under_way = [folder for folder in left if self._executor.has_begun(folder)]
        if stop is not None and not under_way:
            return stop
        sentence = " And ".join(desk.state.waiting)
        with waiting(sentence) if sentence and not under_way else nullcontext():
            self._wait(before, stop, seconds)
        return None

    def _is_prevented(self) -> bool:
        """Return True while the branch is not checked out or the disk is full. Results stay on disk.

        Raises:
            IntegrityError: the branch does not exist.
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
        """Decide a finished run, start the next run, or propose. With `stop`, start nothing. Returns False if there is
        nothing to do."""
        self._tidy()  # first, because an interrupted verdict can be completed only while it is the last
        if self._slots.collect():
            return True
        if stop is not None:
            self._proposals.stop()
            self._slots.take_back(stop.cause)
            return False
        if not self.desk.num_free() and not self._proposals.has_something_to_do():
            return False
        campaign = self.desk.campaign()
        if campaign.branch != self.state.branch:  # the user has just checked out another branch
            return True
        return self._slots.begin(campaign) or self._proposals.act(campaign)

    def _wait(self, before: tuple[bool, bool], stop: Stop | None, seconds: float | None) -> None:
        """Wait for `seconds`; without, until a run has ended, an answer is ready, a try is due, or the stopping night
        has a queued job. Return at once if the user's requests to stop differ from `before`."""
        controller, executor, desk = self._controller, self._executor, self.desk
        tries = filter(None, map(desk.seconds_until, ("agent", "run")))
        ends_at = controller.clock() + (seconds or min([LOOK_SECONDS, *tries]))
        desk.emit(Kind.IDLE)
        due = [desk.ledger.run_dir(number) for number in desk.bench.in_flight]
        while self._signs == before and (seconds or desk.over is None or due):
            if seconds_suspended := controller.wait():
                desk.add_pause(suspended(seconds_suspended), seconds_suspended)
            has_answers = self._proposals.advance()  # this also applies the agent's time limit
            if controller.clock() >= ends_at:
                return
            if seconds is None:
                is_queued = stop is not None and not all(map(executor.has_begun, executor.in_flight()))
                is_waiting = due or self._proposals.is_under_way or any(wait.ended is None for wait in desk.state.waits)
                if has_answers or is_queued or any(map(executor.is_over, due)) or not is_waiting:
                    return

    def _tidy(self) -> None:
        """Close interrupted experiments, forget decided proposals, and write the incumbent's train.toml on the night's
        branch. A train.toml that the user edited is saved to another file first."""
        controller, ledger, branch = self._controller, self.desk.ledger, self.state.branch
        resume(ledger, controller.repo, self._note, self.desk.bench.in_flight)
        if (pending := undecided(self.state, self.desk.closed())) != self.state.pending:
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
            self._note(f"train.toml was edited during the night: the edited file is saved as {aside}")
        write_atomically(path, source)

    def _why_stop(self) -> Stop | None:
        """Return why nothing new starts, None to continue. Runs in flight are finished."""
        desk = self.desk
        if self._is_interrupted and desk.over is None:
            desk.over = Stop("stopped by SIGINT", by_user=True)
            self._note("Ctrl-C: finishing the runs in flight, then stopping; press Ctrl-C again to stop now")
        if desk.over is None and (self._controller.bench.root / STOP_NAME).exists():
            return Stop(f"file {STOP_NAME} found", by_user=True)
        return desk.over or desk.stop_rule()

    def _close(self, stop: Stop | None, cut_off: str | None = None) -> None:
        """Write state, train.toml and summary, each even if another fails. `cut_off`: why runs were interrupted.
        With `stop` None the night can be resumed, and no notification is sent."""
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
                if str(error) != cause:  # the summary shows the cause
                    self._note(f"the files of the night are incomplete: {error}")
        if cause is not None:
            desk.emit(Kind.OVER, why=cause)
