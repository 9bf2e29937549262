"""A night with several slots whose runs end in any order: one campaign all the same, whatever is lost on the way."""

import itertools
import random
from collections.abc import Callable, Collection
from pathlib import Path

import pytest

from nightshift.agents.base import Answer, Context
from nightshift.campaign import campaign as campaign_module
from nightshift.campaign.campaign import Campaign
from nightshift.campaign.commits import incumbent_values
from nightshift.campaign.git import Repo
from nightshift.campaign.ledger import Ledger
from nightshift.campaign.records import (
    WEIGHTS_NAME,
    Change,
    Job,
    Outcome,
    Proposal,
    Record,
    Request,
    Result,
    Training,
)
from nightshift.config.train_toml import parse, set_values
from nightshift.errors import EngineError, Failure, UsageError
from nightshift.executors.base import Slot
from nightshift.executors.local import divide
from nightshift.experiment.experiment import Controller
from nightshift.night import observers, state
from nightshift.night.loop import Night
from nightshift.night.state import NightRequest, NightState
from tests.campaigns import a_result, contradictions, replace
from tests.conftest import CAMPAIGN, git
from tests.rules import ARITHMETIC_TRL
from tests.stand_in_controller import install_proofs, make_poor, with_bench
from tests.stand_in_pool import StandInExecutor
from tests.stand_in_proposer import StandInProposer
from tests.stand_in_trainer import right_of
from tests.stand_ins import small

RULES = replace(small(ARITHMETIC_TRL, 200), learning_rate_scale=200.0)
LR = "trainer.optim.lr"


class AnyOrder(StandInExecutor):
    """A stand-in for an executor: results are made up from the learning rate, and a run ends when chance says so.

    `lost` and `crashed`: shares of the runs whose worker is lost, and whose training fails.
    """

    def __init__(self, num_slots: int, seed: int, lost: float = 0.0, crashed: float = 0.0) -> None:
        super().__init__(Path(), num_slots)
        self._rng, self._lost, self._crashed, self._jobs = random.Random(seed), lost, crashed, dict[Path, Job]()
        self.seen = list[tuple[str, int]]()  # settings and seed of each evaluated run
        self.most = 0

    @property
    def free_slots(self) -> list[Slot]:
        return [Slot(name=f"slot {number}") for number in range(self.num_slots - len(self._jobs))]

    def submit(self, folder: Path, job: Job, enter: Callable[[], None]) -> None:
        assert len(self._jobs) < self.num_slots
        self._jobs[folder] = job
        self.most = max(self.most, len(self._jobs))

    def is_over(self, folder: Path) -> bool:
        return folder not in self._jobs or folder in self._over

    def wait(self, timeout_seconds: float) -> None:
        if running := sorted(self._jobs.keys() - self._over):
            self._over.add(self._rng.choice(running))

    def in_flight(self) -> dict[Path, Job]:
        return dict(self._jobs)

    def has_begun(self, folder: Path) -> bool:
        return folder in self._jobs

    def cancel(self, folders: Collection[Path]) -> None:
        for folder in folders:
            self._jobs.pop(folder, None)
            self._over.discard(folder)

    def result(self, folder: Path) -> Result:
        job = self._jobs[folder]
        self.cancel([folder])
        chance = self._rng.random()
        if chance < self._lost:
            raise EngineError("the worker ended without a result: killed by SIGKILL")
        if chance < self._lost + self._crashed and job.incumbent is not None:
            crash = Training(Outcome.CRASHED, 1, failure=Failure.CONFIG, cause="loss is nan")
            return Result(job.seed, crash)
        self.seen.append((str(job.settings), job.seed))
        return a_result(right_of(job.settings["optimizer"]["lr"], job.seed), 200, job.seed)


class Rates(StandInProposer):
    """A stand-in proposer: learning rates by chance, three of them again and again."""

    name = "rates"

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self.in_flight = list[int]()

    def answer(self, context: Context) -> Answer:
        self.in_flight.append(len(context.in_flight))
        rate = self._rng.choice([1e-6, 3e-6, 3e-5, *(self._rng.uniform(1e-6, 1e-5) for _ in range(8))])
        return Answer(set_values(context.source, {LR: rate}), Proposal(description=f"lr {rate:g}"))


@pytest.fixture
def controller(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> Controller:
    monkeypatch.setattr(observers, "write_summary", lambda state, controller: "")  # a page for each takes a second
    monkeypatch.setattr(state, "FIRST_SECONDS", 0.0)
    return make_poor(checkout, RULES, monkeypatch)


def night_of(
    controller: Controller, executor: AnyOrder, proposer: Rates | None = None, experiments: int | None = None
) -> Night:
    controller = with_bench(controller, executor=executor)
    request, started = NightRequest("rates", experiments=experiments), controller.now().isoformat()
    state = NightState(request, controller.bench.rules_hash, started=started, first=1, branch=CAMPAIGN)
    return Night(state, controller, proposer or Rates(0), lambda text: None, Rates(0))


def night(
    controller: Controller, executor: AnyOrder, num_experiments: int, seed: int = 0, proposer: Rates | None = None
) -> tuple[list[Record], Rates]:
    proposer = proposer or Rates(seed)
    stop = night_of(controller, executor, proposer, num_experiments).run()
    assert stop.cause == f"{num_experiments} experiments are done", stop
    return controller.ledger.records(), proposer


def test_what_the_user_commits_while_an_agent_thinks_is_no_part_of_its_change(controller: Controller) -> None:
    decay = "trainer.optim.weight_decay"

    class Slow(Rates):
        def answer(self, context: Context) -> Answer:
            answer = super().answer(context)
            if context.number == 3:
                (controller.bench.root / "train.toml").write_bytes(set_values(context.source, {decay: 0.5}))
                git(controller.bench.root, "commit", "--quiet", "--all", "-m", "mine")
            return answer

    ours, _ = night(controller, AnyOrder(num_slots=1, seed=0), 5, proposer=Slow(1))
    assert [list(record.run.new.keys) for record in ours[1:]] == [[LR]] * 4
    assert [change.keys for change in ours[2].run.kept if change.commit] == [{decay: "0.5"}]
    assert parse(controller.repo.config_at("HEAD")).get(decay) == 0.5


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))])
def test_whatever_ends_first_it_is_one_campaign(controller: Controller, seed: int) -> None:
    executor = AnyOrder(num_slots=(2, 3, 4, 8)[seed % 4], seed=seed, lost=0.08, crashed=0.08)
    ours, proposer = night(controller, executor, num_experiments=16, seed=seed)
    decided = sorted((r for r in ours if r.decided), key=lambda r: r.decided or 0)
    assert [r.decided for r in decided] == [*range(1, 17)]
    assert [r.number for r in decided] != sorted(r.number for r in decided), "all ended in the order of their starts"
    assert executor.most == executor.num_slots
    assert max(proposer.in_flight) >= executor.num_slots - 1
    assert len(set(executor.seen)) == len(executor.seen), "a config saw a seed twice"
    campaign = controller.campaign()
    assert campaign.standing == Campaign.of(ours, CAMPAIGN, controller.bench.rules_hash).standing
    baseline = controller.ledger.stored_config(ours[0])
    assert incumbent_values(parse(controller.repo.config_at("HEAD"))) == incumbent_values(baseline, campaign.kept)
    assert (controller.bench.root / "train.toml").read_bytes() == controller.repo.config_at("HEAD")
    assert contradictions(ours, controller.ledger.stored_config) == []
    assert {r.failure for r in ours if not r.decided} <= {Failure.INFRASTRUCTURE}


def test_nothing_is_kept_without_its_proof(controller, monkeypatch):
    def is_bad(run_dir: Path) -> bool:
        """The first one of a change."""
        return run_dir.name != "0001" and not any(proof.is_bad for proof in proofs)

    proofs = install_proofs(monkeypatch, 3, is_bad)
    executor = AnyOrder(num_slots=1, seed=0)
    ours, _ = night(controller, executor, num_experiments=8)
    [failed] = [proof.run_dir.name for proof in proofs if proof.is_bad]
    assert len(executor.seen) - len(set(executor.seen)) == 1, "only a lost run has its seed again"
    for record in ours:
        lost = [Failure.INFRASTRUCTURE, "the server did not serve the file"]
        assert ([record.failure, record.why] == lost) == (f"{record.number:04d}" == failed)
        assert "served = file: proven" in (record.health or "") or not record.is_keep
    subjects = git(controller.bench.root, "log", "--format=%s", "main..").splitlines()
    commits = {subject.split(":")[0] for subject in subjects if subject.startswith("keep")}
    assert commits == {f"keep {record.number:04d}" for record in ours[1:] if record.is_keep} != set()


class Killed(BaseException):
    """A stand-in for a kill of the head; what it ran goes on."""


def test_a_verdict_that_a_kill_cut_off_is_settled_before_there_is_another(controller, monkeypatch):
    executor = AnyOrder(num_slots=2, seed=0)

    def killed(record: Record, ledger: Ledger, repo: Repo) -> Record:
        if record.is_keep or not executor.in_flight():
            return settle(record, ledger, repo)
        monkeypatch.setattr(campaign_module, "_settle", settle)
        executor._over.update(executor.in_flight())  # the others ended before there was a head again
        (ledger.run_dir(record.number) / WEIGHTS_NAME).mkdir(parents=True)
        raise Killed

    settle = campaign_module._settle
    monkeypatch.setattr(campaign_module, "_settle", killed)
    made = night_of(controller, executor, experiments=7)
    with pytest.raises(Killed):
        any(made._step() for _ in itertools.count())  # `run` would end what is in flight
    stop = Night(made.state, made.controller, Rates(1), lambda text: None, Rates(0)).run()
    assert stop.is_planned, stop
    ours = controller.ledger.records()
    assert [r.number for r in ours if r.git_action is None] == []
    assert [*controller.ledger.runs_dir.glob(f"*/{WEIGHTS_NAME}")] == []


def test_a_config_that_is_in_flight_is_refused(controller: Controller) -> None:
    executor = AnyOrder(num_slots=2, seed=0)
    night(controller, executor, num_experiments=1)
    controller = with_bench(controller, executor=executor)
    config = parse(set_values((controller.bench.root / "train.toml").read_bytes(), {LR: 3e-6}))
    record = controller.start(Request(), config, controller.campaign())
    with pytest.raises(UsageError, match=rf"already tried in experiment {record.number:04d} \(undecided\)"):
        controller.admit(config, Request(), controller.campaign())
    campaign, rider = controller.campaign(), Change(keys={"trainer.optim.weight_decay": "0.1"})
    run = replace(record.run, rider=rider, new=replace(record.run.new, experiment=0))
    with pytest.raises(UsageError, match="already tried"):  # whatever it runs with
        controller.admit(campaign.compose(run.changes), Request(run=run), campaign)


def test_slots_divide_a_machine() -> None:
    assert divide(1, [], 0, [0, 1]) == [Slot()]
    assert divide(2, [], 0, [0, 1]) == [Slot(None, (0,), "slot 1"), Slot(None, (1,), "slot 2")]
    with pytest.raises(UsageError, match=r"--pairs 3 needs 6 GPUs, this machine has 4\. Write --pairs 2\."):
        divide(3, [0, 1, 2, 3], 2, range(9))
    assert [slot.gpus for slot in divide(0, [0, 1, 2, 3, 4], 2, range(9))] == ["0,1", "2,3"]  # as many as there are for
