"""Two controllers never work in one checkout, whatever becomes of the file that names the first."""

import errno
import fcntl
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from nightshift.campaign.ledger import HOLDER_NAME, Ledger
from nightshift.errors import NightshiftError, UsageError

HOLD = """
import errno, fcntl, os, stat, sys
from pathlib import Path
from nightshift.campaign.ledger import Ledger
flock = fcntl.flock
def on_nfs(descriptor, kind):
    if stat.S_ISDIR(os.fstat(descriptor).st_mode):
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    flock(descriptor, kind)
if sys.argv[1] == "nfs":
    fcntl.flock = on_nfs
sys.argv = ["/somewhere/nightshift", "night", "--agent", "tpe"]
with Ledger(Path(os.environ["ROOT"])).controller():
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def another_controller(root: Path, file_system: str = "local") -> Iterator[subprocess.Popen[bytes]]:
    """A process that holds the lock until the end of the block."""
    command = [sys.executable, "-c", HOLD, file_system]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, env={**os.environ, "ROOT": str(root)}) as process:
        try:
            assert process.stdout.readline() == b"held\n"
            yield process
        finally:
            process.kill()


def refusal(root: Path) -> str:
    with pytest.raises(UsageError) as refused, Ledger(root).controller():
        pass
    return str(refused.value)


def no_folder(descriptor: int) -> None:
    """What flock does on NFS: it refuses LOCK_EX on a descriptor that is open for reading only."""
    raise OSError(errno.EBADF, os.strerror(errno.EBADF))


def any_folder(descriptor: int) -> None:
    """What flock does on NFS for another host: a folder is locked for one host only."""


def stand_in_flock(monkeypatch: pytest.MonkeyPatch, lock_folder: Callable[[int], None]) -> None:
    """Lock files as ever, and folders by a stand-in."""
    flock: Callable[[int, int], None] = fcntl.flock

    def stand_in(descriptor: int, kind: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").is_dir():
            lock_folder(descriptor)
        else:
            flock(descriptor, kind)

    monkeypatch.setattr(fcntl, "flock", stand_in)


def test_the_lock_dies_with_its_holder(tmp_path: Path) -> None:
    with another_controller(tmp_path):
        pass  # killed, so that the file still names it
    assert (tmp_path / "runs" / HOLDER_NAME).exists()
    assert not Ledger(tmp_path).is_running()
    with Ledger(tmp_path).controller():
        assert Ledger(tmp_path).is_running()
        assert f'"pid":{os.getpid()}' in (tmp_path / "runs" / HOLDER_NAME).read_text()
    assert not (tmp_path / "runs" / HOLDER_NAME).exists()


@pytest.mark.parametrize(("lock_folder", "other"), [(no_folder, "nfs"), (any_folder, "local")])
def test_where_no_folder_keeps_others_out_the_file_does(tmp_path, monkeypatch, lock_folder, other):
    stand_in_flock(monkeypatch, lock_folder)
    ledger = Ledger(tmp_path)
    assert not ledger.is_running()
    with another_controller(tmp_path, other) as first:
        assert ledger.is_running()
        assert f"process {first.pid} (uv run nightshift night" in refusal(tmp_path)
    assert not ledger.is_running()
    with ledger.controller():
        assert ledger.is_running()
        assert f"process {os.getpid()} (" in refusal(tmp_path)
    assert not ledger.is_running()


def test_a_file_that_was_replaced_before_it_was_locked_is_not_the_lock(tmp_path, monkeypatch):
    stand_in_flock(monkeypatch, no_folder)
    path, flock, replaced = tmp_path / "runs" / HOLDER_NAME, fcntl.flock, list[Path]()

    def slow(descriptor: int, kind: int) -> None:
        if kind & fcntl.LOCK_EX and not replaced and path.exists():
            path.rename(path.with_name("old"))
            path.touch()
            replaced.append(path)
        flock(descriptor, kind)

    monkeypatch.setattr(fcntl, "flock", slow)
    with Ledger(tmp_path).controller():
        assert replaced
        assert path.stat().st_size > 0  # the new file was locked, and names this process
        assert Ledger(tmp_path).is_running()


def test_a_file_system_without_locks_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, kind: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(NightshiftError, match="No locks available"), Ledger(tmp_path).controller():
        pass
    assert not Ledger(tmp_path).is_running()


def test_a_link_in_place_of_the_file_is_not_followed(tmp_path: Path) -> None:
    path = tmp_path / "runs" / HOLDER_NAME
    path.parent.mkdir()
    (tmp_path / "private").write_text("mine")
    path.symlink_to(tmp_path / "private")
    with pytest.raises(NightshiftError, match=HOLDER_NAME), Ledger(tmp_path).controller():
        pass
    assert (tmp_path / "private").read_text() == "mine"
