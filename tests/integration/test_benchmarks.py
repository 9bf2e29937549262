"""The benchmarks of speed on a small scale: overhead, where the time goes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import where_the_time_goes  # noqa: E402

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the benchmarks run on Linux only")


def run(name: str, folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, BENCHMARKS / name, *flags, "--output", folder / "result.json"]
    environment = {**os.environ, "TMPDIR": str(folder)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_overhead_is_what_the_trainer_leaves(tmp_path: Path) -> None:
    done = run("overhead.py", tmp_path, "--experiments", "1", "--refusals", "1", "--sizes", "3")
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert 0 < result["experiment"]["harness_seconds"] < result["experiment"]["wall_seconds"]
    assert set(result["refusals"]) >= {"syntax error", "already tried"}
    assert result["commands"][0]["report_mb"] > 0
    assert "the harness: all but the trainer" in done.stdout


def test_shares_add_up() -> None:
    row = {"start-up of the trainer": 8.0, "training": 60.0, "evaluation": 6.0, "harness": 6.0, "all": 80.0}
    result = where_the_time_goes.summarize([row, row, {**row, "training": 61.0}])
    assert result["shares"]["training"] == 0.75
    assert sum(result["shares"].values()) == pytest.approx(1)
    assert "training                               60.0   75.0%" in where_the_time_goes.table(result)
