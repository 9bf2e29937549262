"""Segments in /dev/shm: only what a process of ours was seen to map, and nobody maps now, is removed."""

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from nightshift.engines.prime_rl.remains import SHARED_MEMORY, mapped_segments, remove_segments
from tests.waiting import wait_for

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
