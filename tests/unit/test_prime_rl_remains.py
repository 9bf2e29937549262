"""What a run leaves that is heavy goes: at its end, or with the next start; whatever lies where its trace would."""

import json
import os
from pathlib import Path

import psutil
import pytest

from nightshift.engines.prime_rl.remains import TRACE_NAME, Remains, sweep

DEAD = {"pid": 1, "began": 0.0, "keep_all": False, "segments": []}


def made(folder: Path) -> Path:
    """The folder of an attempt with what is heavy, and what is not."""
    for name in ("broadcasts/step_3", "earlier/step_2", "rollouts/step_3", "configs"):
        (folder / "prime-rl" / name).mkdir(parents=True)
    return folder


def heavy(folder: Path) -> list[bool]:
    return [(folder / "prime-rl" / name).is_dir() for name in ("broadcasts", "earlier", "rollouts", "configs")]


@pytest.mark.parametrize("keep_all", [False, True])
def test_a_session_removes_its_own(tmp_path: Path, keep_all: bool) -> None:
    folder = made(tmp_path / "attempt-0")
    remains = Remains(folder / "prime-rl", keep_all, lambda: 0.0)
    remains.begin()
    assert json.loads((folder / TRACE_NAME).read_text())["pid"] == os.getpid()
    for _ in range(2):
        remains.remove()
        assert heavy(folder) == [keep_all, keep_all, keep_all, True]
        assert not (folder / TRACE_NAME).exists()


@pytest.mark.parametrize("place", ["0001", "0001/incumbent", "certify/0001/a-7"])
def test_the_next_start_removes_what_a_kill_left(tmp_path: Path, place: str) -> None:
    folder = made(tmp_path / place)
    (folder / TRACE_NAME).write_text(json.dumps(DEAD))
    sweep(tmp_path)
    assert heavy(folder) == [False, False, False, True]
    assert not (folder / TRACE_NAME).exists()


def test_what_a_living_worker_has_stays_and_so_does_what_the_person_wants(tmp_path: Path) -> None:
    mine = {"pid": os.getpid(), "began": psutil.Process().create_time()}
    for number, trace in enumerate((DEAD | mine, DEAD | {"keep_all": True}), 1):
        folder = made(tmp_path / f"{number:04d}")
        (folder / TRACE_NAME).write_text(json.dumps(trace))
        sweep(tmp_path)
        assert heavy(folder) == [True, True, True, True]
        assert (folder / TRACE_NAME).exists() is (number == 1)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"null",
        b"[" * 100_000,
        json.dumps(DEAD | {"pid": "1"}).encode(),
        json.dumps(DEAD | {"segments": [["../../etc/passwd", 1, 2]]}).encode(),
        json.dumps(DEAD | {"prime_dir": "/"} | {"began": None}).encode(),
    ],
)
def test_a_trace_that_is_none_removes_nothing(tmp_path: Path, content: bytes) -> None:
    folder = made(tmp_path / "0001")
    (folder / TRACE_NAME).write_bytes(content)
    sweep(tmp_path)
    assert heavy(folder) == [True, True, True, True]


def test_no_link_and_no_pipe_leads_out_of_runs(tmp_path: Path) -> None:
    outside, runs = made(tmp_path / "outside"), tmp_path / "runs"
    places = [runs / f"{number:04d}" for number in range(1, 5)]
    for folder in places[1:]:
        folder.mkdir(parents=True)
    places[0].symlink_to(outside)  # the whole folder
    (outside / TRACE_NAME).write_text(json.dumps(DEAD))
    (places[1] / "prime-rl").symlink_to(outside / "prime-rl")
    (places[1] / TRACE_NAME).write_text(json.dumps(DEAD))
    (places[2] / "prime-rl").mkdir()
    (places[2] / "prime-rl" / "broadcasts").symlink_to(outside / "prime-rl" / "broadcasts")
    (places[2] / TRACE_NAME).write_text(json.dumps(DEAD))
    os.mkfifo(places[3] / TRACE_NAME)
    sweep(runs)
    assert heavy(outside) == [True, True, True, True]
