"""One experiment, end to end, on a real git checkout, with stand-ins for the executor and for the training process."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from nightshift.campaign import campaign as campaign_module
from nightshift.campaign import git as git_module
from nightshift.campaign.campaign import keep_model, uncommitted
from nightshift.campaign.ledger import Ledger
from nightshift.campaign.records import Outcome, Proposal, Record, Request
from nightshift.cli.output import summary
from nightshift.config.train_toml import load, set_values
from nightshift.engines.trl.session import TrlSession
from nightshift.errors import EngineError, Failure, Interrupted, UsageError
from nightshift.experiment.experiment import Controller
from tests.campaigns import judged, replace, stored
from tests.conftest import git, living_children
from tests.rules import ARITHMETIC_TRL
from tests.stand_in_controller import GOOD, POOR, during, furnish, make_controller, with_bench, write
from tests.stand_ins import NUM_VALIDATION, fault, quick

RULES = replace(quick(ARITHMETIC_TRL), learning_rate_scale=200.0)
UNTOUCHED = "left train.toml as it is: it is neither the config that ran nor the incumbent"
BAD = "3e-5"  # of GOOD, POOR and BAD the stand-in scores about 0.60, 0.35 and 0.25


@pytest.fixture
def controller(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> Controller:
    furnish(checkout)
    return make_controller(checkout, RULES, monkeypatch)


def run(controller: Controller, again: bool = False, **proposal: Any) -> Record:
    return controller.run(Request(Proposal(**proposal), again=again))


def tried(controller: Controller, lr: str, **asked: Any) -> Record:
    """The experiment of a config that an agent put in place."""
    write(controller, lr)
    return run(controller, **asked)


UNUSED = "orchestrator.max_off_policy_steps"  # by trl


def commit(controller: Controller, lr: str) -> bytes:
    """The config that a campaign begins with, committed by its user."""
    source = write(controller, lr)
    git(controller.bench.root, "commit", "--quiet", "--all", "-m", "baseline config")
    return source


def baseline(controller: Controller, lr: str = GOOD, then: str | None = None) -> bytes:
    """The config of a baseline that was measured; `then` is in place after it."""
    source = commit(controller, lr)
    assert run(controller).status == "keep"
    if then:
        write(controller, then)
    return source


def subjects(controller: Controller) -> list[str]:
    return git(controller.bench.root, "log", "--format=%s").splitlines()


def interrupt() -> None:
    raise Interrupted("stopped by SIGINT")


def test_the_baseline_is_recorded_as_it_was_and_makes_no_commit(controller, monkeypatch):
    commit(controller, GOOD)
    close, is_scored = TrlSession.close, list[bool]()

    def closing(session: TrlSession) -> None:
        is_scored.append((controller.ledger.run_dir(1) / "evaluation.jsonl").exists())
        close(session)

    monkeypatch.setattr(TrlSession, "close", closing)
    record = run(controller, prediction="no change")
    assert [controller.ledger.read(1)] == controller.ledger.records() == [record]
    assert record.result.seed == 1000
    assert record.result.training.outcome is Outcome.FINISHED
    assert "later ones are compared with it" in record.why
    assert record.decision is None
    assert record.git_action == "nothing to commit: train.toml is the baseline"
    assert subjects(controller) == ["baseline config", "start"]
    assert record.proposal.prediction == "no change"
    assert record.health
    assert is_scored == [False]  # answers and result appear together, once the score is final
    evaluation = record.result.evaluation
    lines = (controller.ledger.run_dir(1) / "evaluation.jsonl").read_text().splitlines()
    assert [json.loads(line)["score"] for line in lines] == list(evaluation.example_scores)
    assert len(lines) == NUM_VALIDATION
    assert evaluation.eval_score == pytest.approx(sum(evaluation.example_scores) / NUM_VALIDATION)


def test_a_helpful_change_is_kept_and_committed(controller: Controller) -> None:
    baseline(controller, POOR)
    write(controller, GOOD, "max_off_policy_steps = 2  # a key that only prime-rl reads")
    record = run(controller, description="a higher rate: expect +20 pp")
    assert record.status == "keep"
    assert (record.decision.effect or 0) > 0.1
    assert subjects(controller)[:2] == ["keep 0002: lr 6e-7 → 3e-6, max_off_policy_steps 8 → 2", "baseline config"]
    body = git(controller.bench.root, "log", "-1", "--format=%b")
    assert f"Evidence: effect {record.decision.estimate}, P(it helps) > 99 %, measured by 0002" in body
    assert "Hypothesis: a higher rate: expect +20 pp" in body
    assert f"\nNightshift-Experiment: 0002\nNightshift-Campaign: {controller.repo.head().branch}\n" in body
    assert [(line.event, line.file.split("/")[0]) for line in controller.ledger.journal()] == [
        *(("submitted", number) for number in ("0001", "0002"))
    ]
    assert "train.toml:" not in summary(record)  # no other change left or joined
    assert record.commits == {"keep 0002": controller.repo.head().commit}
    assert (controller.bench.root / "train.toml").read_bytes() == controller.repo.config_at("HEAD")
    assert tomllib.loads((controller.bench.root / "train.toml").read_text())["trainer"]["optim"]["lr"] == 3e-6
    assert controller.ledger.read(record.number) == record
    assert record.judgement.why.endswith("P(it helps) > 99 %: keep")
    assert record.evaluation.strict_score == record.score


def test_a_commit_of_the_users_is_a_decision_that_the_rule_does_not_undo(controller: Controller) -> None:
    baseline(controller, GOOD)
    bad = write(controller, BAD)
    git(controller.bench.root, "commit", "--quiet", "--all", "-m", "I want this rate")
    mine = controller.repo.head().commit
    measured = run(controller)
    assert (measured.status, measured.commits) == ("measured", {})
    [decision] = measured.user_decisions
    assert (decision.action, decision.commit, decision.change.keys) == ("keep", mine, {"trainer.optim.lr": "3e-5"})
    campaign = controller.campaign()
    assert campaign.posterior.effect(campaign.kept[0]).p_helps < 0.05
    assert controller.repo.config_at("HEAD") == bad == (controller.bench.root / "train.toml").read_bytes()
    with pytest.raises(UsageError, match="already tried in experiment 0002"):
        run(controller)


def test_a_keep_that_more_runs_do_not_confirm_is_reverted_and_the_last_line_says_so(controller, monkeypatch):
    """Runs are told to be so noisy that a single good one is doubted as soon as its config disappoints."""
    noisy = replace(RULES.decision, keep_at=0.5, revert_below=0.8, seed_sd=0.3, kinds=((0.0, 0.1, 1.0),))
    controller = make_controller(controller.bench.root, replace(RULES, decision=noisy), monkeypatch)
    source = baseline(controller, POOR, then=GOOD)
    assert run(controller).status == "keep"
    record = tried(controller, BAD)
    assert [str(d.action) for d in record.judgement.decisions] == ["revert", "discard"]
    assert re.search(r"; 0002 reverted \(effect \S+ ± \S+ pp, P\(it helps\) (< )?\d+ %\)$", record.judgement.why)
    assert summary(record).rstrip().splitlines()[-1].split() == ["train.toml:", "0002", "reverted"]
    assert controller.repo.config_at("HEAD") == source == (controller.bench.root / "train.toml").read_bytes()
    assert subjects(controller)[0].startswith("revert 0002: lr 3e-6 → 6e-7")
    assert controller.campaign().rows([controller.ledger.record(2)])[0].now == "reverted"
    assert tried(controller, "9e-5").parent == 1


@pytest.mark.slow
def test_the_baseline_runs_once_more_whatever_train_toml_holds(controller: Controller) -> None:
    baseline(controller, POOR, then=GOOD)
    run(controller)
    candidate = write(controller, BAD)
    record = controller.run(Request(baseline=True))
    assert (record.status, record.run.is_baseline) == ("measured", True)
    assert record.proposal.description == "re-run of the baseline"
    assert record.effective == controller.ledger.record(1).effective
    assert (controller.bench.root / "train.toml").read_bytes() == candidate
    assert record.git_action == UNTOUCHED
    assert "predicted for the baseline: " in record.judgement.why


def test_a_train_toml_that_was_edited_meanwhile_is_left_alone(controller: Controller) -> None:
    baseline(controller)
    path = controller.bench.root / "train.toml"
    write(controller, BAD)
    with during(controller, lambda folder: path.write_bytes(b"lr = 9\n")):
        record = run(controller)
    assert (record.status, record.git_action) == ("discard", UNTOUCHED)
    assert path.read_bytes() == b"lr = 9\n"


def test_a_harmful_change_is_discarded_once_and_again_takes_new_seeds(controller: Controller, checkout: Path) -> None:
    source = baseline(controller, then=BAD)
    discarded = run(controller, description="lr x10")
    assert (discarded.status, discarded.diff) == ("discard", ("trainer.optim.lr 3e-6 -> 3e-5",))
    assert (checkout / "train.toml").read_bytes() == source
    assert subjects(controller) == ["baseline config", "start"]
    assert git(checkout, "status", "--porcelain", "--untracked-files=no") == ""
    write(controller, BAD)
    (checkout / "train.toml").write_bytes(set_values((checkout / "train.toml").read_bytes(), {UNUSED: 3}))
    with pytest.raises(UsageError, match=rf"already tried in experiment {discarded.number:04d}"):
        run(controller)
    write(controller, BAD)
    again = run(controller, again=True)
    assert (discarded.result.seed, again.result.seed) == (1001, 1002)
    assert (again.status, again.run.new, again.run.kept) == ("measured", None, (discarded.run.new,))
    write(controller, GOOD)
    itself = [run(controller, again=True) for _ in range(2)]
    assert [(record.status, record.result.seed) for record in itself] == [("measured", 1003), ("measured", 1004)]


@pytest.mark.slow
def test_a_run_that_is_lost_in_its_evaluation_is_run_again_with_the_same_seed_and_its_starts_are_counted(controller):
    """No free redraw: whoever ends a run whose score is low gets the same seed, and readers see how often."""
    baseline(controller)
    for starts in ("", "start 2 of this config"):
        write(controller, BAD)
        fault(controller.bench.root, "short_answers")
        lost = run(controller)
        assert (lost.failure, lost.result.seed, lost.starts) == (Failure.INFRASTRUCTURE, 1001, starts)
        folder = controller.ledger.run_dir(lost.number)
        assert [path.name for path in folder.iterdir() if "evaluation" in path.name] == []
    measured = tried(controller, BAD)
    assert (measured.result.seed, measured.num_starts) == (1001, 3)
    again = tried(controller, BAD, again=True)
    assert (again.result.seed, again.num_starts) == (1002, 4)
    assert "\nstarts:           start 4 of this config\n" in summary(again)


def test_unused_keys_alone_and_other_rules_are_refused_and_nothing_is_recorded(controller: Controller) -> None:
    baseline(controller)
    write(controller, GOOD, "max_off_policy_steps = 2")
    with pytest.raises(UsageError, match="all changes are to keys that this engine does not use"):
        run(controller)
    with pytest.raises(UsageError, match="began with rules "):
        with_bench(controller, rules_hash="other").run(Request())
    path = controller.bench.root / "train.toml"
    path.write_bytes(set_values(path.read_bytes(), {"trainer.optim.weight_decay": 0.5}))
    git(controller.bench.root, "commit", "--quiet", "--all", "-m", "mine")  # an incumbent that never ran
    path.write_bytes(set_values(path.read_bytes(), {UNUSED: 3}))
    with pytest.raises(UsageError, match=f"all changes are to keys that this engine does not use: {UNUSED}"):
        run(controller)
    assert controller.ledger.numbers() == [1]


@pytest.mark.parametrize(
    ("name", "failure", "cause"),
    [
        ("short_answers", Failure.INFRASTRUCTURE, f"{NUM_VALIDATION - 1} of {NUM_VALIDATION} examples"),
        ("error", Failure.CONFIG, "loss is nan"),
    ],
)
def test_a_failed_run_is_a_recorded_crash(controller: Controller, name: str, failure: Failure, cause: str) -> None:
    incumbent = baseline(controller)
    candidate = write(controller, BAD)
    fault(controller.bench.root, name)
    record = run(controller)
    assert (record.status, record.failure) == ("crash", failure)
    assert cause in record.judgement.why
    assert record.result.evaluation is None
    assert living_children() == []
    left = (controller.bench.root / "train.toml").read_bytes()
    if failure is Failure.CONFIG:  # the config's own doing: undone, and not tried twice
        assert left == incumbent
        write(controller, BAD)
        with pytest.raises(UsageError, match="already tried"):
            run(controller)
    else:  # nothing was decided: the same config may be run again
        assert left == candidate
        assert run(controller).status == "discard"


def test_an_interruption_closes_the_record_and_decides_nothing(controller: Controller) -> None:
    baseline(controller)
    candidate = write(controller, BAD)
    with during(controller, lambda folder: interrupt()), pytest.raises(Interrupted):
        run(controller)
    record = controller.ledger.records()[-1]
    assert (record.status, record.failure, record.decided) == ("crash", Failure.INTERRUPTED, None)
    assert (controller.bench.root / "train.toml").read_bytes() == candidate
    assert controller.bench.executor.in_flight() == {}
    assert run(controller).status == "discard"


def test_a_keep_that_met_a_lock_of_git_is_committed_by_a_later_start(controller, monkeypatch):
    """git leaves such a file when it is killed, and holds it while somebody else commits."""
    monkeypatch.setattr(git_module, "LOCK_SECONDS", 0.2)
    baseline(controller, POOR)
    source = write(controller, GOOD)
    lock = controller.bench.root / ".git" / "index.lock"
    lock.touch()
    record = run(controller)
    assert (record.status, record.kept_commit) == ("keep", None)
    assert record.git_action.startswith(f"not committed yet: git could not write: its lock file {lock} is ")
    missing = uncommitted(controller.ledger.records(), record.branch)
    assert missing.startswith("keep 0002: decided, but not committed: git could not write")
    assert (controller.bench.root / "train.toml").read_bytes() == source
    assert tried(controller, "4e-5").status == "discard"  # while the lock is still held
    lock.unlink()
    assert tried(controller, BAD).status == "discard"
    settled = controller.ledger.read(record.number)
    assert controller.repo.config_at("HEAD") == (controller.bench.root / "train.toml").read_bytes() == source
    assert settled.kept_commit == controller.repo.head().commit
    assert uncommitted(controller.ledger.records(), record.branch) is None
    staged = git(controller.bench.root, "diff", "--cached", "--name-only")
    assert staged == "", "your next commit would take it back"
    assert subjects(controller)[0] == "keep 0002: lr 6e-7 → 3e-6"
    assert [r.user_decisions for r in controller.ledger.records() if r.user_decisions] == []


def test_a_stored_config_that_is_not_what_was_run_is_put_back_as_told(controller: Controller) -> None:
    source = baseline(controller)
    stored = controller.ledger.run_dir(1) / "train.toml"
    stored.write_bytes(source.replace(GOOD.encode(), b"1e-9"))
    write(controller, BAD)
    with pytest.raises(
        UsageError, match=r"runs/0001/train\.toml is not the config that .* Restore it: git show"
    ) as refused:
        run(controller)
    assert controller.ledger.numbers() == [1]
    stored.write_bytes(git(controller.bench.root, *refused.value.fix.partition("git ")[2].split()[:2]).encode())
    assert run(controller).status == "discard"
    assert (controller.bench.root / "train.toml").read_bytes() == source
    stored.write_bytes(source + b"# a comment changes nothing\n")
    assert tried(controller, POOR).status == "discard"


def test_old_models_go_when_there_are_too_many_but_never_the_first_the_last_and_the_incumbents(tmp_path, monkeypatch):
    monkeypatch.setattr(campaign_module, "MODELS_GB", 3.5e-6)
    ledger = stored(tmp_path, judged([0.5, 0.9, 0.5, 0.5]))
    (ledger.runs_dir / "notes").mkdir()
    (ledger.runs_dir / "notes" / "model").write_text("a file of the user's\n")
    for number in ledger.numbers():
        model = ledger.run_dir(number) / "model"
        model.mkdir()
        (model / "model.safetensors").write_bytes(b"0" * 1000)
    keep_model(ledger, replace(ledger.records()[-1], status="keep"))
    assert [path.parent.name for path in sorted(ledger.runs_dir.glob("0*/model"))] == ["0001", "0002", "0004"]


@pytest.mark.parametrize("victim", ["keep_model", "close"])
def test_a_kill_after_the_commit_is_made_good_by_the_next_start(controller, victim, monkeypatch):
    baseline(controller, POOR, then=GOOD)

    def killed(*arguments: object) -> None:
        if any(isinstance(argument, Record) and argument.number == 2 for argument in arguments):
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(campaign_module if victim == "keep_model" else Ledger, victim, killed)
        with pytest.raises(KeyboardInterrupt):
            run(controller)
    controller.ledger.sync_tsv()  # a row without the commit
    tried(controller, BAD)
    kept = controller.ledger.read(2)
    assert f"\n{kept.kept_commit[:7]}\t" in controller.ledger.tsv_path.read_text()
    assert (controller.ledger.run_dir(2) / "model" / "model.safetensors").is_file()
    assert list(controller.ledger.runs_dir.glob("*/weights")) == []


def test_a_run_that_another_controller_started_and_that_was_lost_has_no_seconds(controller, monkeypatch):
    baseline(controller)
    record = controller.start(Request(again=True), load(controller.bench.root / "train.toml"), controller.campaign())
    other = Controller(controller.bench, controller.ledger, controller.repo, controller.reporter)
    monkeypatch.setattr(type(controller.bench.executor), "is_over", lambda *_: True)
    monkeypatch.setattr(type(controller.bench.executor), "result", Mock(side_effect=EngineError("NODE_FAIL")))
    assert other.collect(record.number).total_seconds is None
    controller.cancel()
    assert len(controller.ledger.records()) == 2
