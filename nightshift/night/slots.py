"""Slots of a night: start the next run in a free slot, and decide the runs that ended.

A run is the incumbent with one new change and at most one re-test. The final check runs measure baseline and incumbent.
"""

from datetime import datetime, timedelta

from msgspec import structs

from nightshift.agents.base import Answer
from nightshift.campaign.campaign import Campaign, crash
from nightshift.campaign.git import CONFIG_NAME
from nightshift.campaign.ledger import STARTED
from nightshift.campaign.posterior import measuring_run
from nightshift.campaign.records import LOG_NAME, Record, Request, Run, Stage
from nightshift.config.train_toml import Config, load
from nightshift.engines.prime_rl import remains
from nightshift.errors import EngineError, Failure, UsageError
from nightshift.executors.process import OUT_OF_MEMORY
from nightshift.night.proposals import Proposals, attempts, undecided
from nightshift.night.state import Desk, Kind, Stop

MAX_TRIES = 3  # of a config whose runs are lost to infrastructure; two if the kernel killed them for lack of memory
_BASELINE_HOLDS = timedelta(hours=1)  # a night starts with a run of the baseline unless the last one is younger


class Slots:
    """Starts one run per slot, and decides runs in the order in which they end."""

    def __init__(self, desk: Desk, proposals: Proposals) -> None:
        self._desk, self._controller, self._proposals = desk, desk.controller, proposals

    def collect(self) -> bool:
        """Decide the first run that has ended. Returns False if no run has ended."""
        desk = self._desk
        for number in desk.bench.in_flight:
            if desk.executor.is_over(desk.ledger.run_dir(number)) and (problem := desk.disk_problem()):
                raise EngineError(problem)  # the result stays in its folder
            if (record := self._controller.collect(number)) is not None:
                self._conclude(record)
                return True
        return False

    def begin(self, campaign: Campaign) -> bool:
        """Start a run in a free slot. Returns False if no slot is free or no proposal is queued."""
        desk, most = self._desk, self._desk.state.request.experiments
        if not desk.num_free():
            return False
        if campaign.baseline is None:
            return self._begin_baseline(campaign)
        if most is not None and len(desk.runs()) >= most:
            return False
        stage, last = desk.stage(), campaign.last_baseline()
        # Once a night, if the last run of the baseline is old: the machine may drift.
        is_old = last is not None and datetime.fromisoformat(desk.state.started) - last > _BASELINE_HOLDS
        needs_baseline = is_old and not any(record.run.is_baseline for record in desk.runs())
        if needs_baseline or stage is not Stage.SEARCH:
            if not needs_baseline:
                desk.end_wait("agent")  # the agent is not asked any more
            run = Run() if needs_baseline else measuring_run(campaign.kept, stage)
            self._launch(Request(run=run), campaign.compose(run.changes), campaign)
            return True
        if not (queue := self._proposals.queue()):
            return False
        if queue[0].direction != self._proposals.direction():
            self._proposals.drop(queue[0], "the direction changed after the proposal", is_refused=False)
        else:
            self.start(queue[0], campaign)
        return True

    def _begin_baseline(self, campaign: Campaign) -> bool:
        """Start the campaign's first run; again, up to MAX_TRIES times, if it was lost to infrastructure."""
        failed = [record for record in self._desk.closed() if record.failure is not Failure.INTERRUPTED]
        num_lost = sum(record.failure is Failure.INFRASTRUCTURE for record in failed)
        if self._desk.bench.in_flight:
            return False
        if failed and (num_lost < len(failed) or num_lost >= MAX_TRIES):
            self._desk.over = Stop(f"the baseline crashed: {failed[-1].why}", is_planned=False)
            return False
        self._launch(Request(), load(self._desk.bench.root / CONFIG_NAME), campaign)
        return True

    def start(self, answer: Answer, campaign: Campaign) -> None:
        """Start a proposal's run: the current incumbent with its change, and with its re-test if that still applies."""
        assert answer.change is not None
        kept, rider, proposal = campaign.kept, answer.rider, answer.proposal
        if rider is not None and any(rider.keys.keys() & change.keys.keys() for change in kept):
            rider = None  # a re-test must not set a key of the incumbent
        if attempts(answer, self._desk.closed()):  # only the first experiment of a proposal has its cost
            proposal = structs.replace(proposal, cost=None)
        try:
            run = Run(kept=kept, rider=rider, new=campaign.known(answer.change.keys))
            try:
                config = campaign.compose(run.changes)
                self._desk.bench.engine.validate(config)
            except UsageError:
                run = structs.replace(run, rider=None)
                config = campaign.compose(run.changes)
            self._launch(Request(proposal, run=run), config, campaign)
        except UsageError as error:
            self._proposals.drop(answer, str(error))

    def _launch(self, request: Request, config: Config, campaign: Campaign) -> None:
        """Start an experiment. Conclude it if it ended at once."""
        record = self._controller.start(request, config, campaign)
        if record.status != STARTED:
            self._conclude(record)

    def _conclude(self, record: Record) -> None:
        """Act on a verdict. A proposal runs again if its run was lost to infrastructure."""
        desk, is_lost = self._desk, record.failure is Failure.INFRASTRUCTURE
        folder, result = desk.ledger.run_dir(record.number), record.result
        place = result.slot if result else desk.executor.place(folder)
        if is_lost:  # a worker that was killed may have left gigabytes
            remains.clean(desk.ledger.runs_dir, folder)
        elif record.failure is not Failure.INTERRUPTED:
            desk.end_wait("run", place=place)
        desk.emit(Kind.CLOSED, record=record)
        if not is_lost:
            return
        closed, most = desk.closed(), 2 if OUT_OF_MEMORY in record.why else MAX_TRIES
        for answer in undecided(desk.state, closed):
            tries = attempts(answer, closed)
            if record in tries and sum(r.failure is Failure.INFRASTRUCTURE for r in tries) >= most:
                self._proposals.drop(answer, f"its run was lost {most} times: {record.why}")
        where = f" on {place}" if place else ""
        log = folder.relative_to(desk.ledger.root) / ((result and result.training.log) or LOG_NAME)
        cause = f"experiment {record.number:04d} was lost{where} ({log}): {record.why}"
        desk.begin_wait("run", cause, f"a run{where} ends normally", place=place)

    def take_back(self, cause: str) -> None:
        """Cancel queued jobs of a cluster, which would start after the night."""
        for record in self._controller.in_flight:
            folder = self._desk.ledger.run_dir(record.number)
            if not self._desk.executor.has_begun(folder):
                self._controller.cancel(record.number)
                text = f"its job was still queued when the night ended: {cause}"
                self._controller.conclude(crash(record, Failure.INTERRUPTED, text))
