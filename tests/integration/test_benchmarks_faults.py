"""The benchmarks of faults, overhead and time, on a small scale: they run, and their checks can fail."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import fault_deeds  # noqa: E402
import fault_scene  # noqa: E402
import where_the_time_goes  # noqa: E402
from fault_matrix import FAMILIES, REAL, REAL_EVERY, SCENES, draw  # noqa: E402

from nightshift.campaign.ledger import Ledger  # noqa: E402
from tests.campaigns import campaign  # noqa: E402
from tests.conftest import git  # noqa: E402

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the benchmark of faults runs on Linux only")
MOMENTS = {scene: [("admit", 3), ("settle", 2)] for scene in SCENES}
DOZEN = (
    "run.py killed", "run.py asked to stop", "run.py killed twice", "file operation refused", "worker killed",
    "worker exits", "worker talks nonsense", "watchdog killed or stopped", "file damaged in flight", "clock jump",
    "two run.py at once", "git state changed",
)  # fmt: skip


def run(name: str, folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, BENCHMARKS / name, *flags, "--output", folder / "result.json"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_dozen_faults_leave_nothing_and_are_not_played_twice(tmp_path: Path) -> None:
    only = [word for family in DOZEN for word in ("--only", family)]
    flags = ("--folder", str(tmp_path / "scratch"), "--num", str(len(DOZEN)), *only)
    done = run("faults.py", tmp_path, *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert [row["family"] for row in result["families"]] == [name for name in FAMILIES if name in DOZEN]
    assert sum(row["faults"] for row in result["families"]) == result["num"] == len(DOZEN)
    assert sum(row["struck"] for row in result["families"]) >= len(DOZEN) - 2  # a moment may not come
    assert result["findings"] == []
    finished = (tmp_path / "scratch" / "faults-0.jsonl").read_bytes()
    assert run("faults.py", tmp_path, *flags).returncode == 0
    assert (tmp_path / "scratch" / "faults-0.jsonl").read_bytes() == finished


def test_faults_are_drawn_by_seed_from_every_class() -> None:
    faults = [draw(number, 0, MOMENTS) for number in range(1000)]
    assert faults == [draw(number, 0, MOMENTS) for number in range(1000)]
    assert faults != [draw(number, 1, MOMENTS) for number in range(1000)]
    assert {fault.family for fault in faults} == set(FAMILIES)
    assert sum(fault.family == REAL for fault in faults) == 1000 // REAL_EVERY


def break_tsv(root: Path) -> None:
    (root / "results.tsv").write_text((root / "results.tsv").read_text().replace("idea 2", "idea 9"))


def open_a_record(root: Path) -> None:
    path = root / "runs" / "0002" / "record.json"
    path.write_text(path.read_text().replace('"status": "keep"', '"status": "started"'))


def leave_weights(root: Path) -> None:
    (root / "runs" / "0002" / "run-1" / "weights").mkdir(parents=True)


def lose_a_number(root: Path) -> None:
    (root / "runs" / "0002").rename(root / "runs" / "0003")


@pytest.mark.parametrize(
    ("spoil", "finding"),
    [
        (break_tsv, "results.tsv is not what the records say"),
        (open_a_record, "0002 is open"),
        (leave_weights, "left behind: runs/0002/run-1/weights"),
        (lambda root: (root / "runs" / "0001" / ".record.json.7.tmp").touch(), "left behind: runs/0001/.record"),
        (lose_a_number, "numbers are not 1, 2, 3"),
        (lambda root: (root / "stray.txt").touch(), "git status"),
        (lambda root: git(root, "commit", "--allow-empty", "-m", "x\n\nNightshift-Run: 0002\n"), "kept nothing"),
    ],
)
def test_the_check_finds_what_is_wrong(checkout: Path, spoil: object, finding: str) -> None:
    campaign(Ledger(checkout), ["3e-5"], branch="autoresearch/test")
    (checkout / "train.toml").write_bytes(Ledger(checkout).source(1))
    git(checkout, "commit", "--quiet", "--all", "-m", "baseline config")
    tolerance = fault_scene.Tolerance()
    measured = {"0001 was decided without a whole evaluation", "0002 was decided without a whole evaluation"}
    before = set(fault_scene.check(checkout, tolerance))
    assert before <= measured  # the made-up campaign has other sizes
    spoil(checkout)  # type: ignore[operator]
    found = set(fault_scene.check(checkout, tolerance)) - before
    assert any(problem.startswith(finding) or finding in problem for problem in found), found


def test_what_is_done_to_git_is_undone(checkout: Path) -> None:
    git(checkout, "branch", "-m", fault_deeds.BRANCH)
    before = git(checkout, "for-each-ref") + git(checkout, "symbolic-ref", "HEAD") + git(checkout, "status")
    reversible = ("index locked", "branch locked", "HEAD locked", "detached HEAD", "another branch", "branch renamed",
                  "merge under way", "no repository")  # fmt: skip
    for how in reversible:
        fault_deeds._change_git(checkout, how)
        fault_deeds._restore_git(checkout, how)
        after = git(checkout, "for-each-ref") + git(checkout, "symbolic-ref", "HEAD") + git(checkout, "status")
        assert after == before, how


def test_overhead_is_measured_part_by_part(tmp_path: Path) -> None:
    small = ("--experiments", "1", "--refusals", "1", "--sizes", "3", "--records", "20")
    done = run("overhead.py", tmp_path, *small)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    experiment = result["experiment"]
    engine = ("worker starts", "worker trains", "worker completes")
    harness = sum(seconds for part, seconds in experiment["parts"].items() if part not in engine)
    assert harness == pytest.approx(experiment["harness_seconds"])
    whole = harness + sum(experiment["parts"][part] for part in engine)
    assert 0.8 < whole / experiment["wall_seconds"] < 1.01  # all but the way from one part to the next
    assert set(result["refusals"]) >= {"syntax error", "already tried"}
    assert result["commands"][0]["report_mb"] > 0
    assert result["ledger"]["seconds"]["close"] > 0
    assert "the harness: all but the worker" in done.stdout


def test_shares_add_up_and_a_warm_parent_saves_no_more_than_the_start() -> None:
    row = {"start-up of the worker": 8.0, "training": 60.0, "evaluation": 6.0, "harness": 6.0, "all": 80.0}
    start = {"interpreter": 1.0, "import": 5.0, "model": 0.5, "trainer": 1.5, "all": 8.0, "cpu_seconds": 7.0}
    result = {**where_the_time_goes.summarize([row, row, {**row, "training": 61.0}], start), "start": start}
    assert result["shares"]["training"] == 0.75
    assert sum(result["shares"].values()) == pytest.approx(1)
    assert result["warm_parent_saves_at_most"] == pytest.approx(6 / 80)
    assert "training                               60.0   75.0%" in where_the_time_goes.table(result)
