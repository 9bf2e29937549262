"""A night that is detached from its terminal, and one that ends with a certificate: whole processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from nightshift.executors.watchdog import is_alive
from tests.checkouts import ROOT
from tests.night_checkout import is_running, leftovers, nightshift, problems, records, state, whole_night
from tests.waiting import wait_for


def detached(root: Path, **asked: object) -> str:
    """Start a night with --detach; what the command printed."""
    asked = {"agent": "random", "engine": "trl", "budget_seconds": 30.0, "proposer": "keys", **asked}
    command = [sys.executable, str(ROOT / "tests" / "stand_in_night.py"), str(root), json.dumps(asked), "--detach"]
    environment = {**os.environ, "TMPDIR": str(root.parent / "temporary")}
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_detached_night_outlives_its_terminal_and_is_followed(root: Path) -> None:
    stdout = detached(root, experiments=4)
    assert is_running(root, 1)
    assert "nightshift wait --night" in stdout
    pid = state(root)["pid"]
    assert f"running in process {pid}; its output: " in stdout
    assert os.getsid(pid) == pid
    psutil.Process(pid).send_signal(signal.SIGHUP)
    code, followed, stderr = nightshift(root, "wait", "--night", "--timeout", "0")
    assert code == 124, stderr
    code, followed, stderr = nightshift(root, "wait", "--night")
    assert code == 0, stderr
    assert "experiment 0004: " in followed
    assert followed.rstrip().endswith((root / "runs" / "night.txt").read_text().rstrip())
    assert followed.count("stopped:      4 experiments are done") == 1
    assert nightshift(root, "wait", "--night") == (0, (root / "runs" / "night.txt").read_text(), "")
    assert "stopped:      4 experiments are done" in followed
    assert len(records(root)) == 4
    wait_for(lambda: not psutil.pid_exists(pid) or not is_alive(psutil.Process(pid)))
    assert leftovers(root) == []
    assert problems(root) == []


def test_a_detached_night_that_cannot_begin_shows_its_error(root: Path) -> None:
    (root / "STOP").touch()
    asked = {"agent": "random", "engine": "trl"}
    command = [sys.executable, str(ROOT / "tests" / "stand_in_night.py"), str(root), json.dumps(asked), "--detach"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert (done.returncode, "the file STOP is still in the checkout" in done.stderr) == (2, True)
    code, _, stderr = nightshift(root, "wait", "--night")
    assert (code, "no night was started here yet" in stderr) == (2, True)


def test_a_night_ends_with_a_certificate(root: Path) -> None:
    code, stdout, stderr = whole_night(root, agent="random", proposer="lr", experiments=3, certify=2)
    assert code == 0, stderr
    assert problems(root) == []
    line = state(root)["certificate"]
    assert line.startswith("certified: incumbent better, +"), line
    assert "test split, 2 fresh runs each, 95 % interval " in line
    assert f"certificate:  {line}" in stdout
    assert len([*(root / "runs" / "certify" / "0001").glob("*-*/run.json")]) == 4
    assert f"certificate: {line}" in nightshift(root, "status")[1]
    killed = {**state(root), "certificate": None, "cause": None}  # after comparison.json, before night.json
    (root / "runs" / "night.json").write_text(json.dumps(killed))
    code, stdout, stderr = whole_night(root, agent="random", proposer="lr", experiments=3, certify=2)
    assert (code, state(root)["certificate"]) == (0, line), stderr
    assert [path.name for path in (root / "runs" / "certify").iterdir()] == ["0001"]


def test_a_night_without_a_keep_says_why_there_is_no_certificate(root: Path) -> None:
    code, stdout, stderr = whole_night(root, agent="random", proposer="lr", experiments=1, certify=2)
    assert code == 0, stderr
    assert "certificate:  not certified: nothing was kept" in stdout
    assert not (root / "runs" / "certify").exists()


def test_a_search_refuses_a_direction_which_it_cannot_read(root: Path) -> None:
    code, _, stderr = whole_night(root, agent="tpe", direction="only the rate, please", experiments=2)
    assert (code, "--direction: tpe reads no text. Leave --direction out, or name an agent." in stderr) == (2, True)
    assert not (root / "runs" / "night.json").exists()
