"""The benchmarks of speed on a small scale: rollouts on the real verifiers package, overhead, where the time goes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import stopwatch  # noqa: E402
import where_the_time_goes  # noqa: E402

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the benchmarks run on Linux only")


def run(name: str, folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, BENCHMARKS / name, *flags, "--output", folder / "result.json"]
    environment = {**os.environ, "TMPDIR": str(folder)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_four_rollouts(tmp_path: Path) -> None:
    done = run("rollouts.py", tmp_path, "--rollouts", "4", "--process-rollouts", "0", "--repetitions", "2")
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    (row,) = result["rollouts"]
    assert (row["name"], row["harness"], row["num_rollouts"]) == ("in-process", "nightshift-arithmetic", 4)
    assert len(row["repetitions"]) == 2
    assert row["cpu_seconds_per_rollout"] > 0
    seconds = sorted(repetition["wall_seconds"] for repetition in row["repetitions"])
    assert 4 / seconds[1] <= row["rewards_per_second"] <= 4 / seconds[0]
    assert "in-process" in done.stdout
    assert "in-process: 2 of 2" in done.stderr  # progress stays out of the table
    assert "2 of 2" not in done.stdout
    assert list(tmp_path.iterdir()) == [tmp_path / "result.json"]  # no throw-away home is left, and no process
    here = str(tmp_path)
    assert not [p.pid for p in psutil.process_iter(["cmdline"]) if here in " ".join(p.info["cmdline"] or [])]


def test_overhead_is_measured_part_by_part(tmp_path: Path) -> None:
    small = ("--experiments", "1", "--refusals", "1", "--sizes", "3")
    done = run("overhead.py", tmp_path, *small)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    experiment = result["experiment"]
    parts = experiment["parts"]
    assert set(stopwatch.ENGINE) < set(parts), "the trainer was timed, in whatever process"
    assert sum(parts.values()) == pytest.approx(experiment["wall_seconds"], rel=0.05, abs=0.05)
    engine = sum(parts[part] for part in stopwatch.ENGINE)
    assert experiment["harness_seconds"] == pytest.approx(experiment["wall_seconds"] - engine)
    assert set(result["refusals"]) >= {"syntax error", "already tried"}
    assert result["commands"][0]["report_mb"] > 0
    assert "the harness: all but the trainer" in done.stdout


def test_shares_add_up_and_a_warm_parent_saves_no_more_than_the_start() -> None:
    row = {"start-up of the trainer": 8.0, "training": 60.0, "evaluation": 6.0, "harness": 6.0, "all": 80.0}
    start = {"interpreter": 1.0, "import": 5.0, "model": 0.5, "trainer": 1.5, "all": 8.0, "cpu_seconds": 7.0}
    result = {**where_the_time_goes.summarize([row, row, {**row, "training": 61.0}], start), "start": start}
    assert result["shares"]["training"] == 0.75
    assert sum(result["shares"].values()) == pytest.approx(1)
    assert result["warm_parent_saves_at_most"] == pytest.approx(6 / 80)
    assert "training                               60.0   75.0%" in where_the_time_goes.table(result)
