"""Whole nights, as processes, with the stand-in engine: what stops them, what resumes them, what they leave."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import time
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

from msgspec import structs

from nightshift.campaign.campaign import Campaign
from nightshift.campaign.commits import incumbent_values
from nightshift.campaign.git import Head, Repo
from nightshift.campaign.ledger import Ledger
from nightshift.config.train_toml import parse
from tests.checkouts import MEASURING, git
from tests.conftest import CAMPAIGN
from tests.night_checkout import (
    BASELINE,
    finish,
    is_running,
    leftovers,
    nightshift,
    problems,
    records,
    start,
    state,
    whole_night,
)
from tests.stand_ins import fault
from tests.waiting import wait_for

KILLED = "stopped by SIGINT"


def press_ctrl_c(night: subprocess.Popen[str]) -> None:
    """As another process does it: once, while a run is in flight; returns when the night has taken note."""
    night.send_signal(signal.SIGINT)
    assert any("once more to stop now" in line for line in night.stderr)


def test_a_night_measures_the_baseline_then_what_is_proposed(root: Path) -> None:
    code, stdout, stderr = whole_night(root, agent="lr", proposer="lr", experiments=5)
    assert code == 0, stderr
    assert problems(root) == []
    ours = records(root)
    assert [r.proposal.description for r in ours] == ["baseline", "lr 1e-06", "lr 3e-05", "lr 6e-06", "lr 2e-06"]
    assert {r.status for r in ours[1:]} == {"keep", "discard"}
    assert [r.proposal.prediction for r in ours] == [None, *["better"] * 4]
    assert [r.proposal.lesson for r in ours[:-1]] == ["lesson 1", "lesson 2", "lesson 3", "lesson 4"]
    assert ours[-1].proposal.lesson is None  # no brief came any more
    assert stdout.count("counted:  ") == 5  # after every experiment, of which the last ends the night
    summary = (root / "runs" / "night.txt").read_text()
    assert stdout.endswith(summary)
    assert "stopped:      5 experiments are done\n" in summary
    assert leftovers(root) == []


def test_each_commit_of_a_night_is_one_change_and_the_last_runs_measure_the_tip(root: Path) -> None:
    code, stdout, stderr = whole_night(root, agent="tpe", experiments=24, budget_seconds=1.0)
    assert code == 0, stderr
    assert problems(root) == []
    ours, ledger, repo = records(root), Ledger(root), Repo(root)
    campaign = Campaign.of(ours, ours[0].branch, ours[0].rules_hash)
    assert [record.run.stage for record in ours] == [0] * 20 + [1, 1, 2, 2]
    assert [record.run.changes for record in ours[20:]] == [(), (), campaign.kept, campaign.kept]
    scores = "; ".join(f"{name} {', '.join(f'{100 * r.score:.1f}' for r in pair)} %"
                       for name, pair in (("incumbent", ours[22:]), ("baseline", ours[20:22])))  # fmt: skip
    assert f"last runs:    {scores}\n" in stdout
    for record in ours[1:20]:
        assert record.run.new
        held = record.run.changes
        values = incumbent_values(ledger.stored_config(ours[0]), held)
        assert incumbent_values(ledger.stored_config(record)) == values, "a run is the changes that its record says"
    assert any(record.run.rider for record in ours)
    changes = {f"{d.action} {d.change.name}": d.change for r in ours for d in r.judgement.decisions}
    history = repo.config_history(Head(ours[0].branch, ours[0].commit))
    assert len(history) == sum(len(record.commits) for record in ours) > 0
    for entry in history:
        change = changes[entry.subject.partition(":")[0]]
        before, after = (incumbent_values(parse(text)) for text in (entry.before, entry.after))
        assert {key for key in {*before, *after} if before.get(key) != after.get(key)} == {*change.keys}
    tip = incumbent_values(parse(repo.config_at("HEAD")))
    assert tip == incumbent_values(ledger.stored_config(ours[-1]))
    assert (root / "train.toml").read_bytes() == repo.config_at("HEAD")
    assert nightshift(root, "verify")[0] == 0


def test_a_night_begins_with_the_baseline_if_its_last_run_is_old_and_riders_can_be_switched_off(root: Path) -> None:
    assert whole_night(root, agent="lr", proposer="lr", experiments=3)[0] == 0
    code, _, stderr = whole_night(root, agent="lr", proposer="lr", experiments=2)
    assert code == 0, stderr
    assert [bool(record.run.new) for record in records(root)] == [False, *[True] * 4]  # it is seconds old
    first = Ledger(root).record(1)
    hour_ago = (datetime.fromisoformat(first.started) - timedelta(hours=2)).isoformat()
    Ledger(root).write(structs.replace(first, result=replace(first.result, started=hour_ago)))
    code, _, stderr = whole_night(root, agent="lr", proposer="lr", experiments=3, riders=0)
    assert code == 0, stderr
    last = records(root)[5:]
    assert last[0].proposal.description == "baseline again"
    assert [bool(record.run.new) for record in last] == [False, True, True]
    assert {record.run.rider for record in last} == {None}


def test_a_night_away_from_a_campaign_makes_its_branch_and_another_day_goes_on_there(root: Path) -> None:
    git(root, "switch", "--quiet", "-C", "main")
    before, day = git(root, "log", "--format=%H", "main"), time.strftime("%Y-%m-%d")
    code, _, stderr = whole_night(root, agent="lr", proposer="lr", experiments=2)
    assert code == 0, stderr
    branch = git(root, "branch", "--show-current").strip()
    assert branch in {f"autoresearch/{day}", f"autoresearch/{time.strftime('%Y-%m-%d')}"}  # at midnight
    assert f"branch main is no campaign: created {branch}" in stderr
    assert git(root, "log", "--format=%H", "main") == before
    code, _, _ = whole_night(root, agent="lr", proposer="lr", experiments=2)  # over: a new one, of the same campaign
    assert [(r.branch, r.parent is None) for r in records(root)] == [(branch, n == 0) for n in range(4)]
    assert problems(root) == []


def test_a_tree_that_cannot_be_measured_is_refused_and_nothing_is_made(root: Path) -> None:
    git(root, "switch", "--quiet", "-C", "main")
    (root / "train.toml").write_bytes(BASELINE + b"# not what main has committed")
    code, stdout, stderr = whole_night(root, agent="lr", proposer="lr", experiments=2)
    assert (code, stdout) == (2, "")
    assert "Commit train.toml" in stderr
    assert git(root, "branch", "--show-current").strip() == "main"
    assert records(root) == []
    git(root, "restore", "train.toml")
    git(root, "switch", "--quiet", CAMPAIGN)
    (root / MEASURING).write_text("MEASURES = 'better'\n")
    code, _, stderr = whole_night(root, agent="lr", proposer="lr", experiments=2)
    assert code == 1
    assert f"{MEASURING} differ from commit" in stderr
    assert records(root) == []


def test_the_hours_end_a_night_and_the_file_stop_too(root: Path) -> None:
    code, stdout, _ = whole_night(root, agent="lr", proposer="lr", hours=6 / 3600, budget_seconds=1.0)
    assert code == 0
    assert "hours are over" in stdout
    deadline = datetime.fromisoformat(state(root)["started"]) + timedelta(seconds=6)
    assert [r.number for r in records(root) if datetime.fromisoformat(r.started) > deadline] == []
    done = len(records(root))
    night = start(root, agent="lr", proposer="lr", budget_seconds=1.0)
    wait_for(lambda: len(records(root)) > done + 1)
    (root / "STOP").touch()
    code, stdout, stderr = finish(night)
    assert code == 0, stderr
    assert "file STOP found" in stdout
    code, _, stderr = whole_night(root, agent="lr", proposer="lr", experiments=99, budget_seconds=1.0)
    assert code == 2
    assert "Delete it" in stderr
    assert problems(root) == []


def test_a_config_whose_runs_the_machinery_keeps_losing_is_given_up(root: Path) -> None:
    assert whole_night(root, agent="lr", proposer="lr", experiments=1)[0] == 0
    fault(root, "sigkill", once=False)
    code, stdout, _ = whole_night(root, agent="lr", proposer="lr", experiments=9)
    assert code == 1
    assert "5 crashes in a row" in stdout
    changes = [r.run.new and r.run.new.keys for r in records(root)]
    assert [changes.index(each) for each in changes] == [0, 1, 1, 1, 4, 4]


def test_one_ctrl_c_finishes_the_run_in_flight_and_the_night_is_over(root: Path) -> None:
    fault(root, "hold", once=False)
    night = start(root, agent="lr", proposer="lr", experiments=9)
    wait_for(lambda: is_running(root, 1))
    press_ctrl_c(night)
    (root / "stand-in.json").unlink()
    code, stdout, stderr = finish(night)
    assert code == 0, stderr
    assert f"stopped:      {KILLED}" in stdout
    (record,) = records(root)
    assert record.status == "keep"
    assert problems(root) == []


def test_sigterm_stops_now_and_the_same_command_goes_on_with_the_same_proposal(root: Path) -> None:
    assert whole_night(root, agent="lr", proposer="lr", experiments=1)[0] == 0
    fault(root, "hang")
    asked = {"agent": "lr", "proposer": "lr", "experiments": 3}
    night = start(root, **asked)
    wait_for(lambda: is_running(root, 2))
    night.send_signal(signal.SIGTERM)
    code, _, _ = finish(night)
    assert code == 130
    assert state(root)["cause"] is None
    started = state(root)["started"]
    code, _, stderr = whole_night(root, **asked)
    assert code == 0, stderr
    assert f"going on with the night of {started}" in stderr
    ours = records(root)
    assert [r.failure for r in ours] == [None, "interrupted", None, None, None]
    assert ours[1].config_hash == ours[2].config_hash
    assert problems(root) == []


def test_status_tells_of_a_night_at_work_and_of_one_that_was_cut_off(root: Path) -> None:
    fault(root, "hold", once=False)
    night = start(root, agent="lr", proposer="lr", hours=1.0, experiments=9)
    wait_for(lambda: is_running(root, 1))
    status = nightshift(root, "status")[1]
    assert "night:    lr since " in status
    assert "running:  0001 for " in status
    assert "after 9 more experiments" in status
    night.kill()
    finish(night)
    wait_for(lambda: not leftovers(root))
    assert nightshift(root, "status")[1].endswith("was cut off: run the same command again to resume\n")


def test_what_a_person_wrote_into_train_toml_is_kept_aside(root: Path) -> None:
    assert whole_night(root, agent="lr", proposer="lr", experiments=2)[0] == 0
    edited = BASELINE.replace(b"poor", b"my idea")
    (root / "train.toml").write_bytes(edited)
    code, _, stderr = whole_night(root, agent="lr", proposer="lr", experiments=1)
    assert code == 0
    assert "was edited by somebody else: kept as" in stderr
    (aside,) = (root / "runs").glob("edited-*.toml")
    assert aside.read_bytes() == edited


def num_files(root: Path) -> int:
    """How far a night has come, on a machine of any speed."""
    return sum(len(names) for _, _, names in os.walk(root / "runs"))


def test_sigkill_at_random_moments_leaves_the_ledger_of_an_unbroken_night(root: Path, tmp_path: Path) -> None:
    asked = {"agent": "lr", "proposer": "lr", "experiments": 6}
    unbroken = tmp_path / "unbroken" / "checkout"
    shutil.copytree(root, unbroken, symlinks=True)
    (unbroken.parent / "temporary").mkdir()
    source, num_kills = random.Random(1), 0
    for _ in range(6):
        most = num_files(root) + source.randint(0, 15)
        night = start(root, **asked)
        wait_for(lambda: night.poll() is not None or num_files(root) > most)  # noqa: B023
        num_kills += night.poll() is None
        night.kill()
        night.communicate()
    assert num_kills >= 3, "the night was over before it could be killed: kill it sooner"
    code, _, stderr = whole_night(root, **asked)
    assert code == 0, stderr
    wait_for(lambda: not leftovers(root))
    assert problems(root) == []
    assert whole_night(unbroken, **asked)[0] == 0
    assert told(root) == told(unbroken)


def told(root: Path) -> list[tuple[object, ...]]:
    """What a night decided, in order; without times, numbers, and what was interrupted."""
    decided = [r for r in records(root) if r.failure != "interrupted"]
    places = {r.number: index for index, r in enumerate(decided)}
    return [
        (
            *(
                r.config_hash,
                r.run.rider and r.run.rider.keys,
                r.status,
                places.get(r.parent or 0),
                r.proposal.description,
                r.proposal.prediction,
                r.proposal.lesson,
                r.diff,
            ),
            r.score,
        )
        for r in decided
    ]


def test_a_night_that_cannot_commit_a_keep_says_so_and_the_next_start_commits_it(root: Path) -> None:
    lock = root / ".git" / "index.lock"
    lock.touch()
    code, stdout, stderr = whole_night(root, agent="lr", proposer="lr", experiments=3)
    assert code == 1, stderr
    kept, last = records(root)[1:]
    assert (kept.status, kept.kept_commit, last.number) == ("keep", None, 3)
    line = f"keep 0002: decided and not committed: git could not write: its lock file {lock} is "
    assert f"\ngit:          {line}" in (root / "runs" / "night.txt").read_text()
    assert "\nstopped:      3 experiments are done\n" in stdout
    for name in ("report.md", "report.html"):
        assert "Not in git: keep 0002: decided and not committed" in (root / "runs" / name).read_text()
    lock.unlink()
    code, stdout, stderr = whole_night(root, agent="lr", proposer="lr", experiments=1)
    assert code == 0, stderr
    assert "experiment 0002 was decided before git was called; now: committed " in stderr
    assert "\ngit: " not in (root / "runs" / "night.txt").read_text()
    assert "Not in git" not in (root / "runs" / "report.md").read_text()
    assert problems(root) == []
