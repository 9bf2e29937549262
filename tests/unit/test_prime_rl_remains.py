"""What a dead run left is deleted: weights and rollouts, of runs that are over only."""

from dataclasses import replace
from pathlib import Path

import pytest

from nightshift.campaign.records import JOB_NAME, RESULT_NAME, Job
from nightshift.engines.prime_rl.remains import clean, sweep
from nightshift.experiment import bench
from nightshift.files import write_json
from tests.rules import GSM8K_PRIME_RL

JOB = Job(GSM8K_PRIME_RL, "rules", {}, 1, 100.0, token="1f")
ALL = ["broadcasts", "earlier", "rollouts", "configs"]
LIGHT = ["configs"]


def make_run(folder: Path, job: Job = JOB, attempt: str = ".") -> Path:
    """The folder of a run whose worker was killed."""
    for name in ALL:
        (folder / attempt / "prime-rl" / name / "step_3").mkdir(parents=True)
    write_json(folder / JOB_NAME, job)
    return folder


def left(folder: Path, attempt: str = ".") -> list[str]:
    return [name for name in ALL if (folder / attempt / "prime-rl" / name).is_dir()]


@pytest.mark.parametrize(("place", "attempt"), [("0001", "."), ("0001", "incumbent"), ("certify/0001/a-7", ".")])
def test_the_next_start_deletes_what_a_kill_left(tmp_path: Path, place: str, attempt: str) -> None:
    folder = make_run(tmp_path / "runs" / place, attempt=attempt)
    bench.sweep(tmp_path, print)
    assert left(folder, attempt) == LIGHT


def test_runs_in_flight_stay_and_so_does_what_the_user_keeps(tmp_path: Path) -> None:
    kept, unclear = make_run(tmp_path / "0001", replace(JOB, keep_all=True)), make_run(tmp_path / "0004")
    (unclear / JOB_NAME).write_bytes(b'{"keep_all": false}')
    in_slurm, local = make_run(tmp_path / "0002", replace(JOB, name="nightshift-2")), make_run(tmp_path / "0003")
    clean(tmp_path, kept)
    assert [left(folder) for folder in (kept, unclear, in_slurm, local)] == [ALL, ALL, ALL, ALL]
    sweep(tmp_path)
    assert [left(folder) for folder in (kept, unclear, in_slurm, local)] == [ALL, ALL, ALL, LIGHT]
    (in_slurm / RESULT_NAME).touch()
    sweep(tmp_path)
    assert [left(folder) for folder in (kept, unclear, in_slurm)] == [ALL, ALL, LIGHT]
    lost, other = (make_run(tmp_path / name, replace(JOB, name=name)) for name in ("0005", "0006"))
    clean(tmp_path, lost)  # in a night, which knows that this job in SLURM is over
    assert [left(folder) for folder in (lost, other)] == [LIGHT, ALL]


def test_no_link_leads_out_of_runs(tmp_path: Path) -> None:
    outside, runs = make_run(tmp_path / "outside"), tmp_path / "runs"
    folders = [runs / f"{number:04d}" for number in range(1, 4)]
    for folder in folders[1:]:
        folder.mkdir(parents=True)
        write_json(folder / JOB_NAME, JOB)
    folders[0].symlink_to(outside)  # the whole folder
    (folders[1] / "prime-rl").symlink_to(outside / "prime-rl")
    (folders[2] / "prime-rl").mkdir()
    (folders[2] / "prime-rl" / "broadcasts").symlink_to(outside / "prime-rl" / "broadcasts")
    sweep(runs)
    assert left(outside) == ALL
