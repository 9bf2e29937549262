"""A recorded campaign decided again: the same constants give the same verdicts, others may not."""

from __future__ import annotations

import os
import subprocess
import time
from dataclasses import fields, replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from nightshift.campaign import decision
from nightshift.campaign.decision import Comparison, Decision
from nightshift.campaign.ledger import Ledger
from nightshift.campaign.replay import Options, campaigns, replay, table
from nightshift.engines import ProgressCallback
from nightshift.engines.trl.engine import TrlEngine
from nightshift.experiment import Request, run_experiment
from nightshift.git.repo import Repo
from nightshift.records import Record, Run, Side, Verdict
from nightshift.rules import ARITHMETIC_TRL, DecisionRules
from nightshift.setup import Lab
from tests.conftest import ROOT, git

STAND_IN = Path(__file__).parents[1] / "stand_in_worker.py"
RULES = replace(ARITHMETIC_TRL, budget_seconds=0.1, startup_seconds=30.0, evaluation_seconds=30.0)
# About 0.25, 0.33, 0.44, 0.44 (a tie), 0.20 and 0.48: the stand-in's score of a learning rate.
RATES = ("6e-7", "1e-6", "2e-6", "2.05e-6", "1e-4", "3e-6")


class Silent:
    """A stand-in for the terminal."""

    def note(self, text: str) -> None:
        pass

    def progress(self, record: Record, run_index: int, side: Side) -> ProgressCallback:
        return lambda reading: None


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`runs/` of a real small campaign: a baseline, keeps, a near tie, a collapse, a crash."""
    root = tmp_path_factory.mktemp("campaign") / "checkout"
    root.mkdir()
    git(root, "init", "--quiet", "--initial-branch", "main")
    (root / ".gitignore").write_text("runs/\nresults.tsv\nmodels/\nenvironments\nstand-in.json\n")
    (root / "environments").symlink_to(ROOT / "environments")
    (root / "models" / "arithmetic-base").mkdir(parents=True)
    (root / "models" / "arithmetic-base" / "model.safetensors").touch()
    lab = Lab(
        root=root,
        rules=RULES,
        rules_hash="stand-in",
        engine=TrlEngine(RULES, root, dict(os.environ), worker=STAND_IN),
        ledger=Ledger(root),
        repo=Repo(root),
        reporter=Silent(),
        now=lambda: datetime.now(UTC),
        clock=time.monotonic,
        versions={},
    )
    write(root, RATES[0])
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "-m", "start")
    git(root, "switch", "--quiet", "--create", "autoresearch/test")
    for rate in RATES:
        write(root, rate)
        run_experiment(Request(description=f"lr {rate}"), lab)
    write(root, "9e-6")
    (root / "stand-in.json").write_text('{"fault": "error", "once": true}')
    assert run_experiment(Request(description="crashes"), lab).status == "crash"
    return root / "runs"


def write(root: Path, rate: str) -> None:
    source = f"[orchestrator]\nbatch_size = 256\ngroup_size = 4\n[trainer.optim]\nlr = {rate}\n"
    (root / "train.toml").write_text(source)


def records_of(runs_dir: Path) -> list[Record]:
    (records,) = campaigns(Ledger(runs_dir.parent).records())
    return records


def test_the_recorded_constants_give_the_recorded_verdicts_and_numbers(recorded: Path) -> None:
    records = records_of(recorded)
    result = replay(records, Options({}))
    assert not any(row.differs for row in result.redecisions)
    for row in result.redecisions[1:]:
        judgement = row.record.judgement
        assert judgement is not None
        assert (row.delta, row.p_better) == (judgement.delta, judgement.p_better)
        assert row.verdict is Verdict.CRASH or row.num_runs == len(row.record.runs)
        assert row.parent == row.record.parent
    kept = [r for r in records if r.status == "keep"]
    assert len(kept) >= 3, "the campaign has no story to replay"
    text = table(result)
    assert "verdicts that differ (*): 0" in text
    assert f"incumbent at the end: {kept[-1].number:04d}" in text
    assert "what would have been proposed" not in text


def test_a_high_threshold_keeps_less_and_says_what_cannot_be_known(recorded: Path) -> None:
    result = replay(records_of(recorded), Options({"threshold": 0.15}))
    kept = [row.record.number for row in result.redecisions if row.verdict is Verdict.KEEP]
    assert kept[0] == 1
    assert len(kept) < sum(row.record.status == "keep" for row in result.redecisions)
    first = next(row.record.number for row in result.redecisions if row.differs)
    assert f"what would have been proposed after {first:04d}" in table(result)
    assert f"{first:04d}*" in table(result)


def test_after_another_verdict_experiments_meet_the_replayed_incumbent(recorded: Path) -> None:
    result = replay(records_of(recorded), Options({"threshold": 0.9}))
    assert {row.parent for row in result.redecisions[1:]} == {1}
    assert result.belief is not None
    assert result.belief.mean < 0.35  # the baseline's


def test_a_run_that_was_never_made_is_named_and_not_made_up(recorded: Path) -> None:
    result = replay(records_of(recorded), Options({"run_value": 0.0}, max_runs=6))
    missing = [row for row in result.redecisions if row.missing is not None]
    assert missing
    assert all(row.num_runs <= len(row.record.runs) for row in result.redecisions)
    assert f"not known: {len(missing)} times (?) the rule asked for a run that was never made" in table(result)


def test_fewer_runs_and_fewer_examples_use_less(recorded: Path) -> None:
    records = records_of(recorded)
    one = replay(records, Options({}, max_runs=1))
    assert all(row.num_runs <= 1 for row in one.redecisions)
    few = replay(records, Options({}, num_examples=50))
    assert few.belief is not None
    assert len(few.belief.runs[0]) == 50
    more = replay(records, Options({}, num_examples=5000))
    assert more.belief is not None
    assert len(more.belief.runs[0]) == 1000


def test_runs_of_another_incumbent_are_not_used(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An incumbent's replicate counts only where the replayed incumbent is the recorded one."""
    records = records_of(recorded)
    kept = next(r for r in records[1:] if r.status == "keep")
    after = next(r for r in records if r.parent == kept.number)
    extra = Run(2, Side.INCUMBENT, 1, after.runs[0].training, after.runs[0].evaluation, None, 1.0)
    changed = [replace(r, runs=(r.runs[0], extra)) if r is after else r for r in records]
    index = records.index(after)

    def asks_for_the_incumbent(comparison: Comparison, rules: DecisionRules, can_replicate: bool) -> Decision:
        return Decision(comparison.delta > rules.threshold, Side.INCUMBENT if can_replicate else None, 1.0)

    monkeypatch.setattr(decision, "decide", asks_for_the_incumbent)
    met = replay(changed, Options({}, max_runs=2)).redecisions[index]
    assert (met.parent, met.num_runs, met.missing) == (kept.number, 2, None)
    unmet = replay(changed, Options({"threshold": 0.9}, max_runs=2)).redecisions[index]
    assert (unmet.parent, unmet.num_runs, unmet.missing) == (1, 1, Side.INCUMBENT)


def test_the_command(recorded: Path) -> None:
    command = ["nightshift", "replay", str(recorded), "--seed-sd", "0.2", "--max-runs", "2", "--num-examples", "400"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "constants: seed_sd 0.2; max-runs 2, 400 examples" in result.stdout
    assert len([line for line in result.stdout.splitlines() if "lr " in line]) == len(RATES)
    shown = subprocess.run(["nightshift", "replay", "--help"], capture_output=True, text=True, check=True).stdout
    for field in fields(DecisionRules):
        if field.name == "ideas":  # not a number
            continue
        assert f"--{field.name.replace('_', '-')} " in shown


def test_an_empty_folder_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    result = subprocess.run(["nightshift", "replay", str(tmp_path / "runs")], capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr.splitlines() == [
        f"{tmp_path}/runs holds no decided experiment. Name a folder runs/ with records."
    ]
