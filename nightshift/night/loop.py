"""The overnight loop: propose, run, decide. It can be stopped and resumed at any time.

Each `_step` does one thing and writes the result to disk. A run is the incumbent with one new change and at most one
re-test; the final check runs measure baseline and incumbent. proposals.py makes proposals; state.py has the waits.
"""

import signal
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from datetime import datetime, timedelta

from msgspec import structs

from nightshift.agents.base import Answer, Proposer
from nightshift.campaign.campaign import Campaign, resume
from nightshift.campaign.git import CONFIG_NAME
from nightshift.campaign.ledger import STARTED, baseline_of
from nightshift.campaign.posterior import measuring_run
from nightshift.campaign.records import LOG_NAME, Record, Request, Run, Stage
from nightshift.campaign.waits import CHECK_SECONDS
from nightshift.config.train_toml import load, read_source
from nightshift.engines.prime_rl import remains
from nightshift.errors import ConfigError, EngineError, Failure, Interrupted, NightshiftError, UsageError
from nightshift.executors.process import interruptible
from nightshift.experiment import certify
from nightshift.experiment.checkout import IntegrityError
from nightshift.experiment.experiment import Controller
from nightshift.files import write_atomically
from nightshift.night.observers import Page, certified_line
from nightshift.night.proposals import Proposals, attempts, undecided
from nightshift.night.state import STOP_NAME, Kind, NightState, Stop
from nightshift.waiting import waiting

MAX_TRIES = 3  # of a config whose runs are lost to infrastructure
_BASELINE_HOLDS = timedelta(hours=1)  # a night starts with a run of the baseline unless the last one is younger


class Night(Proposals):
    """A running night. Use it as the controller (Ledger.lock)."""

    _doubt = ""  # a difference of the measuring files or the branch, found by the last check
    _is_interrupted = False  # by the first Ctrl-C, after which nothing new is started
    _asked: Stop | None = None  # the user's request to stop at the last step

    def __init__(
        self,
        state: NightState,
        controller: Controller,
        proposer: Proposer,
        tell: Callable[[str], None],
        filler: Proposer,
    ) -> None:
        """`tell` gets the summaries; news goes to the reporter. `filler` proposes while `proposer` is unavailable."""
        super().__init__(state, replace(controller, is_stopping=lambda: self._asked_to_stop is not None))
        self.proposer, self.filler = proposer, filler
        self.observers = [Page(tell)]

    def run(self) -> Stop:
        """Run until a stop rule applies or a measuring file changed. Returns the reason."""
        with interruptible(is_noted=self._is_first_interrupt):
            try:
                self.update()  # for `status`, and to resume after a kill
                self.direction()
                while (stop := self._step()) is None:
                    pass
                is_wanted = self.state.request.certify and self.state.certificate is None
                if is_wanted and stop.is_planned and self._asked_to_stop is None:
                    self.update(certificate=self._certify())
                self._close(stop, f"{stop.cause}: it ended while it could not be judged")
                return stop
            except Interrupted as error:
                # A second Ctrl-C ends the night. After a SIGTERM (a reboot) the same command resumes it.
                self._close(Stop(error.cause) if self._is_interrupted else None, error.cause)
                raise
            except Exception as error:  # damaged records, a full disk at the start, or a bug: notify the user
                self.over = Stop(f"{type(error).__name__}: {error}", is_planned=False)
                self.emit(Kind.OVER)
                raise
            finally:
                self.controller.cancel()
                self.end_agent()

    def _certify(self) -> str:
        """Certify the incumbent, like `nightshift certify`. Returns the line with the result."""
        state = self.state
        if (now := self.controller.repo.head().branch) != state.branch:
            return f"not certified: {now or 'a detached HEAD'} is checked out instead of {state.branch}"
        try:
            task = certify.open_task(self.controller, state.request.certify, night=state.started)
            needed = timedelta(seconds=(task.num_waves() - 0.5) * self.run_seconds())  # the last run may be slow
            if state.deadline is not None and self.controller.now() + needed > state.deadline:
                return f"not certified: too few hours are left for {2 * task.plan.num_seeds} runs"
            return certified_line(certify.certify(task))
        except (UsageError, EngineError, IntegrityError) as error:
            return f"not certified: {error}"
        except Interrupted:
            if self._asked_to_stop is None:  # a reboot: the same command resumes the night
                raise
            return "not certified: stopped"

    def _is_first_interrupt(self, number: int) -> bool:
        """Remember the first SIGINT. A second SIGINT, or another stopping signal, raises Interrupted."""
        is_first = number == signal.SIGINT and not self._is_interrupted
        self._is_interrupted |= is_first
        return is_first

    @property
    def _asked_to_stop(self) -> Stop | None:
        """How the user asked the night to stop, which ends a wait; None to continue."""
        if self._is_interrupted:
            return Stop("stopped by SIGINT")
        return Stop(f"file {STOP_NAME} found") if (self.bench.root / STOP_NAME).exists() else None

    def _step(self) -> Stop | None:
        """Do one thing, or wait. Returns why the night is over, None to continue."""
        asked, stop = self._asked_to_stop, None
        if asked != self._asked and asked is not None:
            again = "; press Ctrl-C again to stop now" if self._is_interrupted else ""
            self.note(f"{asked.cause}: finishing the runs in flight, then stopping{again}")
        self._asked = asked
        try:
            stop = self.over or asked or self.stop_rule()
            if not self._is_away():
                has_acted = self._act(stop)
                self.end_wait("machine")
                if has_acted:
                    self._doubt = ""
                    return None
        except IntegrityError as error:
            if str(error) != self._doubt:
                self._doubt = str(error)
                time.sleep(2.0)  # a `git switch` of the user changes files before HEAD: a difference must last
                return None
            self.note(str(error))
            return Stop(str(error), is_planned=False)
        except (EngineError, OSError) as error:
            self.begin_wait("machine", str(error), "this machine is ready")
        if stop is not None and (self.open_waits("branch") or not self.bench.in_flight):
            return stop
        sentence = " And ".join(self.state.waiting)
        with waiting(sentence) if sentence and not self.bench.in_flight else nullcontext():
            self._wait()
        return None

    def _is_away(self) -> bool:
        """Return True while another branch is checked out. IntegrityError if the night's branch does not exist."""
        repo, branch = self.controller.repo, self.state.branch
        if (now := repo.head().branch) == branch:
            self.end_wait("branch")
            return False
        if branch not in repo.branches():
            raise IntegrityError(f"the night's branch {branch} was deleted or renamed", "Start another night.")
        here = now or "a detached HEAD"
        self.begin_wait("branch", f"the checkout moved from {branch} to {here}", f"{branch} is checked out again")
        return True

    def _act(self, stop: Stop | None) -> bool:
        """Decide a finished run, start the next run, or propose. With `stop`, start nothing. Returns False if there is
        nothing to do."""
        self._tidy()  # first, because an interrupted verdict can be completed only while it is the last
        executor = self.executor
        for number in self.bench.in_flight:
            if executor.is_over(self.ledger.run_dir(number)):
                self.require_disk()  # otherwise the result stays in its folder
            if (record := self.controller.collect(number)) is not None:
                self._conclude(record)
                return True
        if stop is None:
            campaign = self.campaign()
            return self._begin(campaign) or self.propose(campaign)
        self.stop_agent()
        # A queued job would start after the night.
        executor.cancel([folder for folder in executor.in_flight() if not executor.has_begun(folder)])
        return False

    def _wait(self) -> None:
        """Wait at most CHECK_SECONDS, until the time of a try, or until the user's request to stop changes. If the
        night is not paused, a run that ended or an answer ends the wait, too."""
        clock, is_paused = self.controller.clock, self.open_waits("branch") or self.open_waits("machine")
        ends_at = clock() + min([CHECK_SECONDS, *self.pauses("agent").values(), *self.pauses("run").values()])
        self.emit(Kind.IDLE)
        due = [self.ledger.run_dir(number) for number in self.bench.in_flight]
        while self._asked_to_stop == self._asked and clock() < ends_at:
            self.controller.wait()
            has_answers = self.advance()  # this also applies the agent's time limit
            if not is_paused and (has_answers or any(map(self.executor.is_over, due))):
                return

    def _tidy(self) -> None:
        """Close interrupted experiments, forget decided proposals, and write the incumbent's train.toml on the night's
        branch. A train.toml that the user edited is saved to another file first."""
        ledger, repo, branch = self.ledger, self.controller.repo, self.state.branch
        resume(ledger, repo, self.note, self.bench.in_flight)
        if (pending := undecided(self.state, self.closed())) != self.state.pending:
            self.update(pending=pending)
        if baseline_of(ledger.records(), branch) is None or repo.head().branch != branch:
            return
        path, source, present = self.bench.root / CONFIG_NAME, repo.config_at("HEAD"), b""
        with suppress(ConfigError):
            present = read_source(path)
        if source not in (None, present):
            if present:
                aside = ledger.runs_dir / f"edited-{self.controller.now():%Y%m%dT%H%M%S}.toml"
                write_atomically(aside, present)
                self.note(f"train.toml is the incumbent's again; its old text is saved as {aside}")
            write_atomically(path, source)

    def _close(self, stop: Stop | None, cut_off: str) -> None:
        """End what is in flight for the reason `cut_off`, and write state, train.toml and summary. With `stop` None the
        night can be resumed, and no notification is sent."""
        self.over = stop
        try:
            self.controller.interrupt(cut_off)
            now = self.controller.now()
            waits = tuple(replace(wait, ended=wait.ended or now) for wait in self.state.waits)
            self.update(waits=waits, cause=stop and stop.cause, is_planned=stop is None or stop.is_planned, pid=0)
            self._tidy()
        except (NightshiftError, OSError) as error:
            self.note(f"the files of the night are incomplete: {error}")
        self.emit(Kind.STOPPED)
        if stop is not None:
            self.emit(Kind.OVER)

    def _begin(self, campaign: Campaign) -> bool:
        """Start a run in a free slot. Returns False if no slot is free or no proposal is queued."""
        if not self.num_free() or self.runs_left() < 1:
            return False
        if campaign.baseline is None:
            if self.bench.in_flight:
                return False
            failed = [record for record in self.closed() if record.failure is not Failure.INTERRUPTED]
            if len(failed) >= MAX_TRIES or (failed and failed[-1].failure is not Failure.INFRASTRUCTURE):
                self.over = Stop(f"the baseline crashed: {failed[-1].why}", is_planned=False)
            else:
                self._launch(Request(), campaign)
            return True
        stage, last = self.stage(), campaign.last_baseline()
        # Once a night, if the last run of the baseline is old: the machine may drift.
        is_old = last is not None and datetime.fromisoformat(self.state.started) - last > _BASELINE_HOLDS
        if is_old and not any(record.run.is_baseline for record in self.runs()):
            self._launch(Request(run=Run()), campaign)
        elif stage is not Stage.SEARCH:
            self._launch(Request(run=measuring_run(campaign.kept, stage)), campaign)
        elif not (queue := self.queue()):
            return False
        elif queue[0].direction == self.direction():  # else the queue is another one now
            self.start(queue[0], campaign)
        return True

    def start(self, answer: Answer, campaign: Campaign) -> None:
        """Start a proposal's run: the current incumbent with its change and, if the config is valid with it, a re-test.
        A proposal that cannot be run is refused."""
        assert answer.change is not None
        new, proposal, cause = campaign.known(answer.change.keys), answer.proposal, ""
        if attempts(answer, self.closed()):  # only the first experiment of a proposal has its cost
            proposal = structs.replace(proposal, cost=None)
        for rider in (self.rider(campaign, new), None):
            try:
                return self._launch(Request(proposal, run=Run(kept=campaign.kept, rider=rider, new=new)), campaign)
            except UsageError as error:
                cause = str(error)
        self.refuse(answer, cause)

    def _launch(self, request: Request, campaign: Campaign) -> None:
        """Start an experiment: the run of `request`, or else train.toml. Conclude it if it ended at once."""
        run = request.run
        config = campaign.compose(run.changes) if run else load(self.bench.root / CONFIG_NAME)
        record = self.controller.start(request, config, campaign)
        if record.status != STARTED:
            self._conclude(record)

    def _conclude(self, record: Record) -> None:
        """Act on a verdict. A proposal runs again if its run was lost to infrastructure."""
        folder, result = self.ledger.run_dir(record.number), record.result
        place = result.slot if result else self.executor.place(folder)
        self.emit(record)
        if record.failure is not Failure.INFRASTRUCTURE:
            self.end_wait("run", place=place)
            return
        remains.clean(self.ledger.runs_dir, folder)  # a worker that was killed may have left gigabytes
        for answer in undecided(self.state, closed := self.closed()):
            tries = attempts(answer, closed)
            if record in tries and sum(r.failure is Failure.INFRASTRUCTURE for r in tries) >= MAX_TRIES:
                self.refuse(answer, f"its run was lost {MAX_TRIES} times to the infrastructure: it was never measured")
        where = f" on {place}" if place else ""
        log = folder / ((result and result.training.log) or LOG_NAME)
        cause = f"experiment {record.number:04d} was lost{where} ({log.relative_to(self.ledger.root)}): {record.why}"
        self.begin_wait("run", cause, f"a run{where} ends normally", place=place)
