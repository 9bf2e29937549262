"""One experiment, end to end, on a real git checkout, with a stand-in for the training process."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from nightshift.campaign.ledger import Ledger
from nightshift.engines import ProgressCallback
from nightshift.engines.trl.engine import TrlEngine
from nightshift.errors import EngineError, Interrupted, UsageError
from nightshift.experiment import Request, run_experiment
from nightshift.git.repo import Repo
from nightshift.records import Failure, Judgement, Outcome, Phase, Progress, Record, Side, Verdict
from nightshift.rules import ARITHMETIC_TRL, Rules
from nightshift.setup import Lab
from tests.conftest import git, living_children

STAND_IN = Path(__file__).parents[1] / "stand_in_worker.py"
RULES = replace(
    ARITHMETIC_TRL, budget_seconds=0.1, startup_seconds=3.0, evaluation_seconds=3.0, learning_rate_scale=200.0
)
GOOD, POOR, BAD = "3e-6", "6e-7", "3e-5"  # the stand-in scores about 0.60, 0.35 and 0.25


class SilentReporter:
    """A stand-in for the terminal; `on_progress` lets a test act in the middle of a run."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.on_progress: Callable[[Progress], None] = lambda reading: None

    def note(self, text: str) -> None:
        self.notes.append(text)

    def progress(self, record: Record, run_index: int, side: Side) -> ProgressCallback:
        return lambda reading: self.on_progress(reading)


@pytest.fixture
def reporter() -> SilentReporter:
    return SilentReporter()


@pytest.fixture
def lab(checkout: Path, reporter: SilentReporter) -> Lab:
    model = checkout / "models" / "arithmetic-base"
    model.mkdir(parents=True)
    (model / "model.safetensors").touch()
    return make_lab(checkout, reporter, RULES)


def make_lab(checkout: Path, reporter: SilentReporter, rules: Rules) -> Lab:
    return Lab(
        root=checkout,
        rules=rules,
        rules_hash="stand-in",
        engine=TrlEngine(rules, checkout, dict(os.environ), worker=STAND_IN),
        ledger=Ledger(checkout),
        repo=Repo(checkout),
        reporter=reporter,
        now=lambda: datetime.now(UTC),
        clock=time.monotonic,
        versions={"python": "3"},
    )


def write(lab: Lab, lr: str, extra: str = "") -> bytes:
    """Put a config in place, as an agent would."""
    source = f"[orchestrator]\nbatch_size = 256\ngroup_size = 4\n{extra}\n[trainer.optim]\nlr = {lr}\n".encode()
    (lab.root / "train.toml").write_bytes(source)
    return source


def run(lab: Lab, **request: object) -> Record:
    return run_experiment(Request(**request), lab)  # type: ignore[arg-type]


def baseline(lab: Lab, lr: str = GOOD) -> bytes:
    source = write(lab, lr)
    git(lab.root, "commit", "--quiet", "--all", "-m", "baseline config")
    assert run(lab).status == "keep"
    return source


def subjects(lab: Lab) -> list[str]:
    return git(lab.root, "log", "--format=%s").splitlines()


def fault(lab: Lab, name: str) -> None:
    (lab.root / "stand-in.json").write_text(json.dumps({"fault": name, "once": True}))


def test_the_baseline_is_run_twice_and_makes_no_commit(lab: Lab) -> None:
    baseline(lab)
    (record,) = lab.ledger.records()
    assert [r.seed for r in record.runs] == [1000, 1001]
    assert record.judgement is not None
    assert record.judgement.why == "baseline: 2 runs"
    assert record.judgement.delta is None
    assert record.settled == "baseline: nothing to commit"
    assert subjects(lab) == ["baseline config", "start"]


def test_a_harmful_change_is_discarded_and_train_toml_restored(lab: Lab) -> None:
    source = baseline(lab)
    write(lab, BAD)
    record = run(lab, description="lr x10")
    assert record.status == "discard"
    assert record.diff == ("trainer.optim.lr 3e-6 -> 3e-5",)
    assert (lab.root / "train.toml").read_bytes() == source
    assert subjects(lab) == ["baseline config", "start"]
    assert git(lab.root, "status", "--porcelain", "--untracked-files=no") == ""


def test_a_helpful_change_is_kept_and_committed(lab: Lab) -> None:
    baseline(lab, POOR)
    source = write(lab, GOOD)
    record = run(lab, description="lr 6e-7 -> 3e-6: expect +20 pp")
    assert record.status == "keep"
    assert record.judgement is not None
    assert (record.judgement.delta or 0) > 0.1
    assert subjects(lab)[0] == "lr 6e-7 -> 3e-6: expect +20 pp"
    assert lab.repo.config_at("HEAD") == source
    assert record.kept_commit == lab.repo.head().commit
    assert lab.ledger.read(record.number) == record


def test_what_an_agent_committed_first_is_adopted_or_undone_by_a_commit(lab: Lab) -> None:
    baseline(lab, POOR)
    good = write(lab, GOOD)
    git(lab.root, "commit", "--quiet", "--all", "-m", "quick agent: good")
    assert run(lab).kept_commit == lab.repo.head().commit
    write(lab, BAD)
    git(lab.root, "commit", "--quiet", "--all", "-m", "quick agent: bad")
    record = run(lab)
    assert subjects(lab)[:3] == [
        f"Restore the incumbent after experiment {record.number:04d}",
        "quick agent: bad",
        "quick agent: good",
    ]
    assert lab.repo.config_at("HEAD") == good == (lab.root / "train.toml").read_bytes()


def test_a_keep_is_taken_back_when_its_children_disappoint(lab: Lab, reporter: SilentReporter) -> None:
    """Runs are told to be so noisy that a single good one is doubted as soon as everything tried on it is poor."""
    noisy = replace(RULES.decision, seed_sd=0.3, prior_sd=0.1, ideas=((1.0, 0.0, 1.0),), run_value=1.0)
    lab = make_lab(lab.root, reporter, replace(RULES, decision=noisy))
    source = baseline(lab, POOR)
    good = write(lab, GOOD)
    assert run(lab).status == "keep"
    for attempt in range(12):
        write(lab, f"{1 + attempt / 100}e-4")
        record = run(lab)
        assert record.judgement is not None
        if record.judgement.taken_back_to is not None:
            break
        assert lab.repo.config_at("HEAD") == good
    assert (record.status, record.judgement.taken_back_to) == ("discard", 1)
    assert "0002 is taken back: 0001 is expected +" in record.judgement.why
    assert lab.repo.config_at("HEAD") == source == (lab.root / "train.toml").read_bytes()
    assert subjects(lab)[0] == f"Restore the incumbent after experiment {record.number:04d}"
    write(lab, "9e-5")
    assert run(lab).parent == 1


def test_a_decided_config_is_refused_and_again_takes_new_seeds(lab: Lab) -> None:
    baseline(lab)
    write(lab, BAD)
    discarded = run(lab)
    write(lab, BAD)
    with pytest.raises(UsageError, match=rf"already tried in experiment {discarded.number:04d} \(discard"):
        run(lab)
    again = run(lab, again=True)
    seeds = {r.seed for r in discarded.runs if r.side is Side.CANDIDATE}
    assert seeds.isdisjoint(r.seed for r in again.runs if r.side is Side.CANDIDATE)


def test_a_config_against_itself_never_sees_a_seed_twice(lab: Lab, reporter: SilentReporter) -> None:
    """A/A with a replicate of the incumbent: both sides are one config, and share its count of seeds."""
    free = replace(RULES.decision, run_value=0.0)  # runs cost nothing, so both sides are replicated
    lab = make_lab(lab.root, reporter, replace(RULES, decision=free))
    write(lab, GOOD)
    git(lab.root, "commit", "--quiet", "--all", "-m", "baseline config")
    run(lab, max_runs=1)
    sides = []
    for _ in range(2):
        record = run(lab, again=True, max_runs=4)
        sides += [r.side for r in record.runs]
    assert Side.INCUMBENT in sides, "no incumbent was replicated: the test would show nothing"
    seeds = [r.seed for record in lab.ledger.records() for r in record.runs]
    assert seeds == list(range(1000, 1000 + len(seeds)))


def test_the_rth_run_of_every_config_has_the_same_seed(lab: Lab) -> None:
    baseline(lab)
    write(lab, BAD)
    assert run(lab).runs[0].seed == 1000


def test_a_change_to_unused_keys_only_is_refused(lab: Lab) -> None:
    baseline(lab)
    write(lab, GOOD, "max_off_policy_steps = 2")
    with pytest.raises(UsageError, match=r"does not use: .*max_off_policy_steps"):
        run(lab)
    gates = "".join(f"orchestrator.train.source.curriculum.gates.gate-{n:020d} = {{}}\n" for n in range(20))
    (lab.root / "train.toml").write_text(
        f"{gates}orchestrator.batch_size = 256\norchestrator.group_size = 4\ntrainer.optim.lr = {GOOD}\n"
    )
    with pytest.raises(UsageError, match="does not use: ") as caught:
        run(lab)
    assert len(str(caught.value)) <= 600
    assert len(lab.ledger.numbers()) == 1


@pytest.mark.parametrize(
    ("name", "failure", "cause"),
    [
        ("sigkill", Failure.MACHINERY, "killed by SIGKILL"),
        ("exit_at_start", Failure.MACHINERY, "no model here"),
        ("silent_start", Failure.MACHINERY, "not ready after"),
        ("short_answers", Failure.MACHINERY, "999 of 1000 examples"),
        ("error", Failure.TRAINING, "loss is nan"),
        ("hang", Failure.TRAINING, "deadline"),
    ],
)
def test_a_failed_run_is_a_recorded_crash(lab: Lab, name: str, failure: Failure, cause: str) -> None:
    incumbent = baseline(lab)
    candidate = write(lab, BAD)
    fault(lab, name)
    record = run(lab)
    assert (record.status, record.failure) == ("crash", failure)
    assert record.judgement is not None
    assert cause in record.judgement.why
    assert record.runs[0].evaluation is None
    assert living_children() == []
    left = (lab.root / "train.toml").read_bytes()
    if failure is Failure.TRAINING:  # the config's own doing: undone, and not tried twice
        assert left == incumbent
        write(lab, BAD)
        with pytest.raises(UsageError, match="already tried"):
            run(lab)
    else:  # nothing was decided: the same config may be run again
        assert left == candidate
        assert run(lab).status == "discard"


def test_a_worker_that_leaves_a_process_behind_does_not(lab: Lab) -> None:
    write(lab, GOOD)
    git(lab.root, "commit", "--quiet", "--all", "-m", "baseline config")
    fault(lab, "orphan")
    assert run(lab).status == "keep"
    assert living_children() == []


def test_an_interruption_closes_the_record_and_decides_nothing(lab: Lab, reporter: SilentReporter) -> None:
    baseline(lab)
    candidate = write(lab, BAD)

    def interrupt(reading: Progress) -> None:
        if reading.phase is Phase.TRAINING:
            raise Interrupted("stopped by SIGINT")

    reporter.on_progress = interrupt
    with pytest.raises(Interrupted):
        run(lab)
    record = lab.ledger.records()[-1]
    assert (record.status, record.failure) == ("crash", Failure.INTERRUPTED)
    assert (lab.root / "train.toml").read_bytes() == candidate
    assert living_children() == []
    reporter.on_progress = lambda reading: None
    assert run(lab).status == "discard"


def test_an_interruption_loses_the_run_in_flight_only(lab: Lab, reporter: SilentReporter) -> None:
    write(lab, GOOD)
    git(lab.root, "commit", "--quiet", "--all", "-m", "baseline config")

    def interrupt(reading: Progress) -> None:
        if lab.ledger.records()[-1].runs:  # the baseline's second run
            raise Interrupted("stopped by SIGINT")

    reporter.on_progress = interrupt
    with pytest.raises(Interrupted):
        run(lab)
    (record,) = lab.ledger.records()
    assert record.failure is Failure.INTERRUPTED
    assert [r.evaluation is not None for r in record.runs] == [True]


def test_a_verdict_whose_commit_was_lost_is_settled_by_the_next_start(lab: Lab) -> None:
    baseline(lab, POOR)
    good = write(lab, GOOD)
    record = run(lab)
    parent = git(lab.root, "rev-parse", "HEAD~1").strip()
    git(lab.root, "update-ref", "HEAD", parent)  # as if the power had failed between verdict and commit
    lab.ledger.write(replace(record, kept_commit=None, settled=None))
    lab.ledger.tsv_path.unlink()
    write(lab, BAD)
    assert run(lab).status == "discard"
    settled = lab.ledger.read(record.number)
    assert settled is not None
    assert settled.kept_commit is not None
    assert lab.repo.config_at(settled.kept_commit) == good
    assert len(lab.ledger.tsv_path.read_text().splitlines()) == 4


@pytest.mark.parametrize("victim", ["keep_model", "close"])
def test_a_kill_after_the_commit_is_made_good_by_the_next_start(
    lab: Lab, victim: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    baseline(lab, POOR)
    write(lab, GOOD)

    def killed(self: Ledger, record: Record) -> None:
        if record.number == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(Ledger, victim, killed)
    with pytest.raises(KeyboardInterrupt):
        run(lab)
    monkeypatch.undo()
    assert lab.ledger.sync_tsv()  # as a report or `prepare.py` in between would: a row without the commit
    write(lab, BAD)
    run(lab)
    kept = lab.ledger.read(2)
    assert kept is not None
    assert kept.kept_commit is not None
    assert f"\n{kept.kept_commit[:7]}\t" in lab.ledger.tsv_path.read_text()
    assert (lab.ledger.run_dir(2) / "model" / "model.safetensors").is_file()
    assert list(lab.ledger.runs_dir.glob("*/run-*/weights")) == []


def test_without_the_record_of_its_baseline_a_campaign_begins_anew(lab: Lab) -> None:
    source = baseline(lab)
    write(lab, BAD)
    assert run(lab).status == "discard"
    lab.ledger.run_dir(1).rename(lab.root.parent / "moved-out")
    write(lab, POOR)
    with pytest.raises(UsageError, match="first experiment measures the baseline"):
        run(lab)
    (lab.root / "train.toml").write_bytes(source)
    assert run(lab, max_runs=1).settled == "baseline: nothing to commit"


@pytest.mark.parametrize("damage", [b"\xff\x00", b"max_steps = 3\n[orchestrator]\n"])
def test_a_stored_config_that_is_not_what_was_run_is_put_back_as_told(lab: Lab, damage: bytes) -> None:
    source = baseline(lab)
    stored = lab.ledger.run_dir(1) / "train.toml"
    stored.write_bytes(damage)
    write(lab, BAD)
    with pytest.raises(UsageError, match=r"runs/0001/train\.toml is not what .* Put it back: git show") as refused:
        run(lab)
    stored.write_bytes(git(lab.root, *refused.value.fix.partition("git ")[2].split()[:2]).encode())
    assert run(lab).status == "discard"
    assert (lab.root / "train.toml").read_bytes() == source


def test_nothing_is_settled_with_bytes_that_were_not_run(lab: Lab, reporter: SilentReporter) -> None:
    baseline(lab, POOR)
    source = write(lab, GOOD)
    stored = lab.ledger.run_dir(2) / "train.toml"
    reporter.on_progress = lambda reading: stored.write_bytes(source.replace(b"3e-6", b"9e-6"))  # type: ignore[assignment, return-value]
    record = run(lab)
    assert (record.status, record.kept_commit) == ("keep", None)
    assert record.settled is not None
    assert record.settled.startswith("not settled: runs/0002/train.toml is not what experiment 0002 ran")


def test_weights_that_could_not_be_deleted_go_with_the_next_start(lab: Lab) -> None:
    baseline(lab)
    write(lab, BAD)
    run(lab)
    left = lab.ledger.run_dir(2) / "run-1" / "weights"
    left.mkdir()
    write(lab, POOR)
    run(lab)
    assert not left.exists()


def test_off_a_campaign_everything_is_recorded_and_nothing_settled(lab: Lab) -> None:
    git(lab.root, "switch", "--quiet", "main")
    write(lab, POOR)
    assert run(lab).status == "keep"
    source = write(lab, GOOD)
    record = run(lab)
    assert record.status == "keep"
    assert record.settled is not None
    assert "branch main is no campaign" in record.settled
    assert subjects(lab) == ["start"]
    assert (lab.root / "train.toml").read_bytes() == source
    assert run(lab).status in ("keep", "discard")  # no campaign: the same config may be repeated


def test_a_campaign_stays_on_its_rules_and_on_its_harness(lab: Lab, reporter: SilentReporter) -> None:
    baseline(lab)
    write(lab, BAD)
    with pytest.raises(UsageError, match="uses rules stand-in"):
        run_experiment(Request(), replace(lab, rules_hash="other"))
    (lab.root / "prepare.py").write_text("MEASURES = 'better'\n")
    with pytest.raises(UsageError, match=r"prepare\.py differ from the branch point"):
        run(lab)
    assert len(lab.ledger.numbers()) == 1


def test_an_edited_baseline_is_refused(lab: Lab) -> None:
    write(lab, GOOD)
    with pytest.raises(UsageError, match="first experiment measures the baseline"):
        run(lab)


def test_max_runs_and_until_bound_the_experiment(lab: Lab) -> None:
    source = write(lab, GOOD)
    git(lab.root, "commit", "--quiet", "--all", "-m", "baseline config")
    record = run(lab, until=datetime.now(UTC) + timedelta(seconds=0.05))
    assert len(record.runs) == 1
    (lab.root / "train.toml").write_bytes(source)
    again = run(lab, again=True, max_runs=1)
    assert len(again.runs) == 1


def test_the_record_says_what_was_predicted_and_what_the_curves_say(lab: Lab) -> None:
    write(lab, GOOD)
    git(lab.root, "commit", "--quiet", "--all", "-m", "baseline config")
    record = run(lab, prediction="no change")
    assert record.prediction == "no change"
    assert record.health
    assert lab.ledger.read(1) == record


def test_missing_machinery_is_an_error_and_no_experiment(lab: Lab) -> None:
    write(lab, GOOD)
    git(lab.root, "commit", "--quiet", "--all", "-m", "baseline config")
    (lab.root / "models" / "arithmetic-base" / "model.safetensors").unlink()
    with pytest.raises(EngineError, match="--rebuild-base"):
        run(lab)
    assert lab.ledger.numbers() == []


def test_one_model_of_a_keep_stays_and_nothing_of_a_discard(lab: Lab) -> None:
    baseline(lab)
    write(lab, BAD)
    run(lab)
    assert list(lab.ledger.runs_dir.glob("*/run-*/weights")) == []
    (model,) = lab.ledger.runs_dir.glob("*/model")
    assert model.parent.name == "0001"
    assert (model / "model.safetensors").is_file()


def test_old_models_go_when_there_are_too_many_but_never_first_and_last(lab: Lab) -> None:
    baseline(lab)
    (record,) = lab.ledger.records()
    for number in (2, 3, 4):
        model = lab.ledger.run_dir(number) / "model"
        model.mkdir(parents=True)
        (model / "model.safetensors").write_bytes(b"0" * 1000)
    lab.ledger.keep_model(replace(record, number=4), max_gb=2.5e-6)
    assert [path.parent.name for path in sorted(lab.ledger.runs_dir.glob("*/model"))] == ["0001", "0003", "0004"]


def test_the_model_of_an_incumbent_that_came_back_stays(lab: Lab) -> None:
    baseline(lab)
    (record,) = lab.ledger.records()
    for number in (2, 3, 4):
        kept = lab.ledger.reserve(replace(record, parent=1), {})
        (model := lab.ledger.run_dir(number) / "model").mkdir()
        (model / "model.safetensors").write_bytes(b"0" * 1000)
        lab.ledger.write(kept)
    judgement = Judgement(Verdict.DISCARD, "why", taken_back_to=2)
    last = lab.ledger.reserve(replace(record, parent=4), {})
    lab.ledger.keep_model(replace(last, status="discard", judgement=judgement), max_gb=2.5e-6)
    assert [path.parent.name for path in sorted(lab.ledger.runs_dir.glob("*/model"))] == ["0001", "0002", "0004"]


def test_evaluation_writes_one_line_an_example(lab: Lab) -> None:
    baseline(lab)
    record = lab.ledger.records()[0]
    lines = (lab.ledger.run_dir(1) / "run-1" / "evaluation.jsonl").read_text().splitlines()
    scores = [json.loads(line)["score"] for line in lines]
    assert len(scores) == 1000
    evaluation = record.runs[0].evaluation
    assert evaluation is not None
    assert evaluation.eval_score == pytest.approx(sum(scores) / 1000)
    assert record.runs[0].training.outcome is Outcome.BUDGET


def test_a_harness_that_changes_while_an_experiment_runs_makes_it_count_for_nothing(
    lab: Lab, reporter: SilentReporter
) -> None:
    baseline(lab)
    write(lab, POOR)
    reporter.on_progress = lambda reading: (lab.root / "prepare.py").write_text("MEASURES = False\n") and None
    record = run(lab)
    assert (record.status, record.failure) == ("crash", Failure.MACHINERY)
    assert record.judgement is not None
    assert record.judgement.why == "prepare.py changed while the experiment ran: it counts for nothing"
    assert lab.ledger.read(2) == record
    with pytest.raises(UsageError, match=r"prepare\.py differ from the branch point"):
        run(lab)


def test_a_stored_train_toml_that_was_edited_is_refused(lab: Lab) -> None:
    source = baseline(lab)
    path = lab.ledger.run_dir(1) / "train.toml"
    path.write_bytes(source + b"# a comment changes nothing\n")
    write(lab, POOR)
    run(lab)
    path.write_bytes(source.replace(GOOD.encode(), b"1e-9"))
    write(lab, BAD)
    commit = (lab.ledger.records()[0].commit or "")[:7]
    with pytest.raises(
        UsageError, match=rf"0001 ran\. Put it back: git show {commit}:train\.toml > runs/0001/train\.toml"
    ):
        run(lab)
    assert lab.ledger.numbers() == [1, 2]
