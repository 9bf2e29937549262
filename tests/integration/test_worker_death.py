"""Whose death ends what: head -> worker -> trainer, with the real TRL engine."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from nightshift.campaign.ledger import Ledger
from nightshift.executors.watchdog import is_alive
from tests.checkouts import git
from tests.night_checkout import furnish, leftovers, start_run, until_training
from tests.waiting import wait_for

END_SECONDS = 5.0  # a GPU is not held for longer by a run that nobody waits for

pytestmark = pytest.mark.wall_clock  # the promise is about seconds


@pytest.fixture
def head(checkout: Path) -> Iterator[subprocess.Popen[str]]:
    """run.py while its first run trains."""
    furnish(checkout, b"[orchestrator]\nbatch_size = 32\ngroup_size = 4\n")
    git(checkout, "switch", "--quiet", "--create", "elsewhere")  # on a campaign all packages would be compared first
    with start_run(checkout, "--stand-in", "real", "--engine", "trl", "--budget-seconds", "600") as process:
        until_training(checkout, process)
        yield process
        for left in leftovers(checkout):
            left.kill()


def worker_and_trainer(checkout: Path) -> list[psutil.Process]:
    ends = ("experiment.worker", "trl.trainer")
    running = {name: p for p in leftovers(checkout) for name in p.cmdline() if name.endswith(ends)}
    assert len(running) == 2, running
    return [running[name] for name in sorted(running, key=lambda name: name.endswith("trainer"))]


def seconds_to_end(processes: list[psutil.Process]) -> float:
    began = time.monotonic()
    wait_for(lambda: not any(map(is_alive, processes)))
    return time.monotonic() - began


def test_the_heads_death_ends_worker_and_trainer(head: subprocess.Popen[str], checkout: Path) -> None:
    below = worker_and_trainer(checkout)
    head.kill()
    assert seconds_to_end(below) < END_SECONDS
    wait_for(lambda: not leftovers(checkout))
    assert [r.status for r in Ledger(checkout).records()] == ["started"]  # the next head closes it


@pytest.mark.parametrize(
    ("victim", "cause"),
    [("worker", "the worker ended without a result: killed by SIGKILL"), ("trainer", "is gone: killed by SIGKILL")],
)
def test_a_death_below_the_head_ends_the_run_and_the_record_says_so(
    head: subprocess.Popen[str], checkout: Path, victim: str, cause: str
) -> None:
    both = dict(zip(("worker", "trainer"), worker_and_trainer(checkout), strict=True))
    both.pop(victim).kill()
    if victim == "worker":
        assert seconds_to_end([*both.values()]) < END_SECONDS
    stdout, _ = head.communicate()
    assert head.returncode == 1
    assert cause in stdout
    assert [(r.status, r.failure, r.decided) for r in Ledger(checkout).records()] == [("crash", "machinery", None)]
    assert leftovers(checkout) == []
