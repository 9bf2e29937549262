"""What a dead run left is deleted: weights and rollouts, of runs that are over only."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from nightshift.campaign.records import JOB_NAME, RESULT_NAME, Job
from nightshift.engines.prime_rl.remains import sweep
from nightshift.files import write_json
from tests.rules import GSM8K_PRIME_RL

JOB = Job(GSM8K_PRIME_RL, "rules", {}, 1, "validation", 100.0, token="1f")
FOLDERS = ("broadcasts", "earlier", "rollouts", "configs")
ALL = [*FOLDERS]
LIGHT = ["configs"]


def make_run(folder: Path, job: Job = JOB, attempt: str = ".") -> Path:
    """The folder of a run whose worker was killed."""
    for name in FOLDERS:
        (folder / attempt / "prime-rl" / name / "step_3").mkdir(parents=True)
    write_json(folder / JOB_NAME, job)
    return folder


def left(folder: Path, attempt: str = ".") -> list[str]:
    return [name for name in FOLDERS if (folder / attempt / "prime-rl" / name).is_dir()]


@pytest.mark.parametrize(("place", "attempt"), [("0001", "."), ("0001", "incumbent"), ("certify/0001/a-7", ".")])
def test_the_next_start_deletes_what_a_kill_left(tmp_path: Path, place: str, attempt: str) -> None:
    folder = make_run(tmp_path / place, attempt=attempt)
    sweep(tmp_path)
    assert left(folder, attempt) == LIGHT


def test_runs_in_flight_stay_and_so_does_what_the_user_keeps(tmp_path: Path) -> None:
    kept = make_run(tmp_path / "0001", replace(JOB, keep_all=True))
    in_slurm, local = make_run(tmp_path / "0002", replace(JOB, name="nightshift-2")), make_run(tmp_path / "0003")
    sweep(tmp_path, [in_slurm, local])
    assert [left(kept), left(in_slurm), left(local)] == [ALL, ALL, ALL]
    sweep(tmp_path)
    assert [left(kept), left(in_slurm), left(local)] == [ALL, ALL, LIGHT]
    (in_slurm / RESULT_NAME).touch()
    sweep(tmp_path)
    assert [left(kept), left(in_slurm)] == [ALL, LIGHT]


def test_a_run_that_is_lost_in_slurm_leaves_nothing_in_a_night(tmp_path: Path) -> None:
    lost = make_run(tmp_path / "0001", replace(JOB, name="nightshift-1"))
    sweep(tmp_path, in_flight=[])
    assert left(lost) == LIGHT


@pytest.mark.parametrize("content", [b"", b"null", b"[" * 100_000, b'{"keep_all": false}'])
def test_without_a_job_nothing_is_deleted(tmp_path: Path, content: bytes) -> None:
    folder = make_run(tmp_path / "0001")
    (folder / JOB_NAME).write_bytes(content)
    sweep(tmp_path)
    assert left(folder) == ALL


def test_no_link_and_no_pipe_leads_out_of_runs(tmp_path: Path) -> None:
    outside, runs = make_run(tmp_path / "outside"), tmp_path / "runs"
    folders = [runs / f"{number:04d}" for number in range(1, 5)]
    for folder in folders[1:]:
        folder.mkdir(parents=True)
        write_json(folder / JOB_NAME, JOB)
    folders[0].symlink_to(outside)  # the whole folder
    (folders[1] / "prime-rl").symlink_to(outside / "prime-rl")
    (folders[2] / "prime-rl").mkdir()
    (folders[2] / "prime-rl" / "broadcasts").symlink_to(outside / "prime-rl" / "broadcasts")
    (folders[3] / JOB_NAME).unlink()
    os.mkfifo(folders[3] / JOB_NAME)
    sweep(runs)
    assert left(outside) == ALL
