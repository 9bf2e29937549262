"""What a dead run left goes: its heavy folders, and segments in /dev/shm that only its processes mapped."""

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from nightshift.engines.prime_rl.remains import (
    SHARED_MEMORY,
    TRACE_NAME,
    Remains,
    mapped_segments,
    remove_segments,
    sweep,
)
from tests.waiting import wait_for

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


pytestmark = pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="no /dev/shm here")
MAPS = """
import mmap, os, sys, time
file = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o600)
os.truncate(file, 4096)
segment = mmap.mmap(file, 4096)
print(flush=True)
time.sleep(600)
"""


@pytest.fixture
def name() -> Iterator[str]:
    name = f"nightshift-test-{uuid.uuid4().hex}"
    yield name
    (SHARED_MEMORY / name).unlink(missing_ok=True)


def holder(name: str) -> subprocess.Popen[bytes]:
    """A process that maps the segment, as vLLM does, and unlinks nothing when it is killed."""
    process = subprocess.Popen([sys.executable, "-c", MAPS, str(SHARED_MEMORY / name)], stdout=subprocess.PIPE)
    process.stdout.readline()
    return process


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_segment_goes_once_all_who_map_it_are_gone(name: str) -> None:
    first, second = holder(name), holder(name)
    try:
        seen = mapped_segments([psutil.Process(first.pid)])
        assert [segment[0] for segment in seen] == [name]
        end(first)
        assert remove_segments(seen) == []  # the other one, which nobody knows of, has it still
        assert (SHARED_MEMORY / name).exists()
    finally:
        end(second)
    assert remove_segments(seen) == [name]
    assert not (SHARED_MEMORY / name).exists()
    assert remove_segments(seen) == []


def test_what_took_its_name_stays(name: str) -> None:
    process = holder(name)
    seen = mapped_segments([psutil.Process(process.pid)])
    end(process)
    (SHARED_MEMORY / f"{name}-new").write_bytes(b"of another program")
    (SHARED_MEMORY / f"{name}-new").chmod(0o600)
    (SHARED_MEMORY / f"{name}-new").rename(SHARED_MEMORY / name)
    assert remove_segments(seen) == []
    assert (SHARED_MEMORY / name).read_bytes() == b"of another program"


def test_what_others_may_open_stays_and_so_does_what_is_no_segment(name: str, tmp_path: Path) -> None:
    process = holder(name)
    seen = mapped_segments([psutil.Process(process.pid)])
    end(process)
    (SHARED_MEMORY / name).chmod(0o644)
    assert remove_segments(seen) == []
    outside = tmp_path / "file"
    outside.touch(mode=0o600)
    inode = outside.stat().st_ino
    (SHARED_MEMORY / name).unlink()
    (SHARED_MEMORY / name).symlink_to(outside)
    hostile = [
        (f"../..{outside}", inode),
        (name, inode),
        ("..", 1),
        ("", 2),
        ("a\0b", 3),
        ("x" * 5000, 4),
        (name, 1 << 99),
    ]
    assert remove_segments(hostile) == []
    assert outside.exists()


def test_what_was_unlinked_is_nobody_s_and_a_process_that_is_gone_has_nothing(name: str) -> None:
    process = holder(name)
    (SHARED_MEMORY / name).unlink()
    assert mapped_segments([psutil.Process(process.pid)]) == set()
    gone = psutil.Process(process.pid)
    end(process)
    wait_for(lambda: not psutil.pid_exists(gone.pid))
    assert mapped_segments([gone]) == set()
    assert mapped_segments([psutil.Process(os.getpid())]) == set()
