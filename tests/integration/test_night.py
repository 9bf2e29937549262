"""Whole nights, as processes, with the stand-in engine: what stops them, what resumes them, what they leave."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from nightshift.campaign.ledger import Ledger
from nightshift.campaign.records import CERTIFY_NAME
from nightshift.errors import Failure
from nightshift.executors.process import is_alive
from tests.checkouts import git
from tests.night_checkout import (
    BASELINE,
    finish,
    good_end,
    good_night,
    is_running,
    leftovers,
    nightshift,
    problems,
    records,
    start,
    start_held,
    start_run,
    state,
    whole_night,
)
from tests.stand_ins import fault
from tests.waiting import wait_for


def test_a_night_measures_the_baseline_then_what_is_proposed(root: Path) -> None:
    stdout, _ = good_night(root, agent="lr", proposer="lr", experiments=5)
    ours = records(root)
    assert [r.proposal.description for r in ours] == ["baseline", "lr 1e-06", "lr 3e-05", "lr 6e-06", "lr 2e-06"]
    assert {r.status for r in ours[1:]} == {"keep", "discard"}
    assert [r.proposal.prediction for r in ours] == [None, *["better"] * 4]
    assert [r.proposal.lesson for r in ours[:-1]] == [None, "lesson 2", "lesson 3", "lesson 4"]
    assert ours[-1].proposal.lesson is None  # no brief came any more
    lines = stdout.splitlines()
    assert [line[:5] for line in lines[:5]] == [f"{number:04d} " for number in range(1, 6)]
    assert re.match(
        r"0002 trainer.optim.lr 6e-7 -> 1e-6: measured \S+ %, effect \S+ ± \S+ pp, \w+: P\(it helps\) ([<>] )?\d+ %",
        lines[1],
    )
    labels = [line.partition(":")[0] for line in lines]
    assert {*labels[labels.index("page") + 1 :]} == {"next"}
    summary = (root / "runs" / "night.txt").read_text()
    assert stdout.endswith(summary)
    assert "stopped:          5 experiments are done\n" in summary


@pytest.mark.slow
def test_a_running_night_reads_revert_as_the_users_decision(root: Path) -> None:
    for lr in (b"6e-7", b"3e-6"):
        (root / "train.toml").write_bytes(BASELINE.replace(b"6e-7", lr))
        good_end(start_run(root, "--engine", "trl", "--budget-seconds", "30"), root)
    fault(root, "hold", once=False)
    night = start(root, agent="keys", proposer="keys", experiments=2)
    wait_for(lambda: is_running(root, 3))
    code, stdout, stderr = nightshift(root, "revert", "0002")
    said = ["took out 0002: trainer.optim.lr = 3e-6 (effect " in stdout, "\ncommitted " in stdout]
    assert (code, said) == (0, [True, True]), stderr
    refusal = "0002 is not kept on autoresearch/test. Kept there: nothing.\n"
    assert nightshift(root, "revert", "2")[::2] == (2, refusal)
    (root / "stand-in.json").unlink()
    good_end(night, root)
    *_, third, fourth = records(root)
    decisions = [d for record in (third, fourth) for d in record.user_decisions]
    assert [(d.action, d.change.name) for d in decisions] == [("revert", "0002")]
    assert [change.name for change in third.run.kept] == ["0002"]
    assert "0002" not in [change.name for change in fourth.run.changes]


@pytest.mark.slow
def test_a_config_whose_runs_the_infrastructure_keeps_losing_is_given_up(root: Path) -> None:
    assert whole_night(root, agent="lr", proposer="lr", experiments=1)[0] == 0
    fault(root, "sigkill", once=False)
    code, stdout, _ = whole_night(root, agent="lr", proposer="lr", experiments=9)
    assert code == 1
    assert "5 crashes in a row" in stdout
    changes = [r.run.new and r.run.new.keys for r in records(root)]
    assert [changes.index(each) for each in changes] == [0, 1, 1, 1, 4, 4]


# Several runs side by side: who decides, who survives whom

SIDE_BY_SIDE = {"agent": "lr", "proposer": "lr", "pairs": 2, "page": True}


def workers(root: Path) -> list[psutil.Process]:
    found = [process for process in leftovers(root) if Path(process.cmdline()[-1]).parent.name == "runs"]
    assert len(found) == 2, found
    return sorted(found, key=lambda process: process.pid)


def test_ctrl_c_once_waits_for_what_runs_and_twice_ends_all_of_it(root: Path) -> None:
    night = start_held(root, **SIDE_BY_SIDE)
    wait_for(lambda: is_running(root, 2) and is_running(root, 3))
    page = root / "runs" / "report.html"
    wait_for(lambda: page.exists() and 'http-equiv="refresh"' in page.read_text())  # written after the baseline
    before = workers(root)
    night.send_signal(signal.SIGINT)
    assert night.stderr
    assert any("press Ctrl-C again to stop now" in line for line in night.stderr)
    assert all(map(is_alive, before)), "the first Ctrl-C is to let them finish"
    night.send_signal(signal.SIGINT)
    assert "Traceback" not in night.stderr.read()
    code, stdout, _ = finish(night)
    assert code == 130
    assert "stopped:          stopped by SIGINT" in stdout
    assert 'http-equiv="refresh"' not in page.read_text()
    interrupted = records(root)[1:]
    assert [(r.status, r.failure) for r in interrupted] == [("crash", Failure.INTERRUPTED)] * 2
    assert all("stopped by SIGINT" in r.judgement.why for r in interrupted if r.judgement)
    assert all(r.hardware.endswith(", 2 side by side, 1 core each") for r in interrupted)
    assert state(root)["cause"].startswith("stopped by SIGINT")
    assert problems(root) == []
    assert leftovers(root) == []


@pytest.mark.slow
def test_a_night_that_was_killed_can_be_stopped(root: Path) -> None:
    night = start_held(root, **SIDE_BY_SIDE, experiments=3)
    wait_for(lambda: is_running(root, 2) and is_running(root, 3))
    assert re.search(r"^night: +lr since ", nightshift(root, "status")[1], re.MULTILINE)
    assert nightshift(root, "night", "--stop")[0] == 2, "its controller lives"
    night.kill()
    night.communicate()
    wait_for(lambda: not leftovers(root))
    assert "run the same command again to resume: uv run nightshift night --agent" in nightshift(root, "status")[1]
    code, stdout, stderr = nightshift(root, "night", "--stop")
    assert code == 0, stderr
    assert "is over" in stdout
    assert [r.failure for r in records(root)] == [None, *[Failure.INTERRUPTED] * 2]
    assert nightshift(root, "night", "--stop")[1] == "no night to stop\n"


@pytest.mark.slow
def test_a_campaign_keeps_its_number_of_slots(root: Path) -> None:
    """Free memory changes, and results of another number do not compare."""
    assert whole_night(root, agent="lr", proposer="lr", pairs=1, experiments=1)[0] == 0
    _, stderr = good_night(root, agent="lr", proposer="lr", pairs=0, experiments=1)
    assert "--pairs auto: 1 run at a time, as autoresearch/test began" in stderr
    assert len({r.hardware for r in records(root)}) == 1


# Detached from its terminal; ending with a certificate


def detached(root: Path) -> tuple[int, str, str]:
    """A night of three experiments with --detach: what the command says."""
    return finish(start(root, "--detach", agent="random", proposer="lr", experiments=3))


@pytest.mark.slow
def test_a_detached_night_outlives_its_terminal_and_is_followed(root: Path) -> None:
    fault(root, "hold", once=False)
    git(root, "switch", "--quiet", "-C", "main")
    code, stdout, stderr = detached(root)
    assert code == 0, stderr
    wait_for(lambda: is_running(root, 1))
    assert stderr.startswith("new branch autoresearch/")
    assert "nightshift wait --night" in stdout
    pid = state(root)["pid"]
    assert f"running in process {pid}; its output: " in stdout
    assert os.getsid(pid) == pid
    psutil.Process(pid).send_signal(signal.SIGHUP)
    code, followed, stderr = nightshift(root, "wait", "--night", "--timeout", "0")
    assert code == 124, stderr
    command, pipe = ["nightshift", "wait", "--night"], subprocess.PIPE
    follower = subprocess.Popen(command, cwd=root, stdout=pipe, stderr=pipe, text=True)
    (root / "stand-in.json").unlink()
    code, followed, stderr = finish(follower)
    assert code == 0, stderr
    assert "experiment 0003: " in followed
    summary, _, tagged = followed.rstrip().rpartition("\n")
    assert summary.endswith((root / "runs" / "night.txt").read_text().rstrip())
    assert tagged.startswith("tagged as night/autoresearch/")
    assert followed.count("stopped:          3 experiments are done") == 1
    assert nightshift(root, "wait", "--night") == (0, (root / "runs" / "night.txt").read_text(), "")
    assert len(records(root)) == 3
    wait_for(lambda: not psutil.pid_exists(pid) or not is_alive(psutil.Process(pid)))
    assert leftovers(root) == []
    assert problems(root) == []


def test_a_detached_night_that_cannot_begin_shows_its_error(root: Path) -> None:
    (root / "STOP").touch()
    code, _, stderr = detached(root)
    assert (code, "the file STOP is still in the checkout" in stderr) == (2, True)
    code, _, stderr = nightshift(root, "wait", "--night")
    assert (code, "no night was started here yet" in stderr) == (2, True)


@pytest.mark.slow
def test_a_certificate_is_made_in_all_slots_resumed_by_its_night_and_told(root: Path) -> None:
    folder = root / "runs" / CERTIFY_NAME
    folder.mkdir(parents=True)
    fault(folder, "hold", once=False)
    asked = {"agent": "random", "proposer": "lr", "experiments": 4, "certify": 2, "slots": 2}
    night = start(root, **asked)
    wait_for(lambda: len([*folder.glob("*/*/metrics.jsonl")]) == 2)
    night.kill()
    finish(night)
    (folder / "stand-in.json").unlink()
    stdout, _ = good_night(root, **asked)
    line = state(root)["certificate"]
    assert re.match(r"certified: better, .* %, \+", line), line
    assert line.endswith(" pp (2 scored runs of each config, test split)")
    assert f"certificate:      {line}" in stdout
    assert f"certificate: {line}" in nightshift(root, "status")[1]
    [comparison] = Ledger(root).comparisons()
    assert len(comparison.runs) == 4
    assert {access.number for access in Ledger(root).accesses()} == {1}
    killed = {**state(root), "certificate": None, "cause": None}  # after comparison.json, before night.json
    (root / "runs" / "night.json").write_text(json.dumps(killed))
    assert whole_night(root, **asked)[0] == 0
    assert state(root)["certificate"] == line
    assert [path.name for path in folder.iterdir()] == ["0001"]


def test_a_search_refuses_a_direction_which_it_cannot_read(root: Path) -> None:
    code, _, stderr = whole_night(root, agent="tpe", direction="only the rate, please", experiments=2)
    assert (code, "--agent tpe cannot have --direction, --agent-model or --agent-effort. Use --only" in stderr) == (
        2,
        True,
    )
    assert not (root / "runs" / "night.json").exists()
