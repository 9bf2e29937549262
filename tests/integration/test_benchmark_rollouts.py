"""benchmarks/rollouts.py on the real verifiers package: four rollouts in-process, with the stand-in model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "rollouts.py"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the benchmark runs on Linux only")


def run(tmp_path: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, BENCHMARK, *flags, "--output", tmp_path / "result.json"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_four_rollouts(tmp_path: Path) -> None:
    done = run(tmp_path, "--rollouts", "4", "--process-rollouts", "0", "--repetitions", "2")
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    (row,) = result["rollouts"]
    assert (row["name"], row["harness"], row["num_rollouts"]) == ("in-process", "nightshift-arithmetic", 4)
    assert len(row["repetitions"]) == 2
    assert row["cpu_seconds_per_rollout"] > 0
    seconds = sorted(repetition["wall_seconds"] for repetition in row["repetitions"])
    assert 4 / seconds[1] <= row["rewards_per_second"] <= 4 / seconds[0]
    assert all(scoring["calls_per_second"] > 0 for scoring in result["scoring"])
    assert "in-process" in done.stdout
    assert "in-process: 2 of 2" in done.stderr  # progress stays out of the table
    assert "2 of 2" not in done.stdout
    assert list(tmp_path.iterdir()) == [tmp_path / "result.json"]  # no throw-away home is left, and no process
    here = str(tmp_path)
    assert not [p.pid for p in psutil.process_iter(["cmdline"]) if here in " ".join(p.info["cmdline"] or [])]


def test_the_help_names_both_paths_and_starts_nothing(tmp_path: Path) -> None:
    done = run(tmp_path, "--help")
    assert done.returncode == 0
    assert "in-process" in done.stdout
    assert "`null` harness" in done.stdout
    assert not list(tmp_path.iterdir())
