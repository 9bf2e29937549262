"""Two controllers never work in one checkout, whatever becomes of the file that names the first."""

import errno
import fcntl
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock

import pytest

from nightshift.campaign.ledger import HOLDER_NAME, LOCK_NAME, Ledger
from nightshift.errors import NightshiftError, UsageError

HOLD = """
import os, sys
from pathlib import Path
from nightshift.campaign.ledger import Ledger
sys.argv = ["/somewhere/nightshift", "night", "--agent", "tpe"]
with Ledger(Path(os.environ["ROOT"])).lock():
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def another_controller(root: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that holds the lock until the end of the block."""
    command = [sys.executable, "-c", HOLD]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, env={**os.environ, "ROOT": str(root)}) as process:
        try:
            assert process.stdout.readline() == b"held\n"
            yield process
        finally:
            process.kill()


def refusal(root: Path) -> str:
    with pytest.raises(UsageError) as refused, Ledger(root).lock():
        pass
    return str(refused.value)


def test_the_lock_dies_with_its_holder_and_the_refusal_names_it_if_its_file_does(tmp_path: Path) -> None:
    with another_controller(tmp_path) as first:
        assert Ledger(tmp_path).is_running()
        holder = f"process {first.pid} on {socket.gethostname()} (nightshift night --agent tpe), since "
        assert f"is running in this checkout: {holder}" in refusal(tmp_path)
        path = tmp_path / "runs" / HOLDER_NAME
        path.write_text(path.read_text().replace(socket.gethostname(), "elsewhere"))
        assert f"process {first.pid} on elsewhere (nightshift night" in refusal(tmp_path)
        path.unlink()
        assert refusal(tmp_path).startswith("another command is running in this checkout. Wait")
    assert not Ledger(tmp_path).is_running()
    with Ledger(tmp_path).lock():
        assert Ledger(tmp_path).is_running()
        assert f"process {os.getpid()} on {socket.gethostname()} (" in refusal(tmp_path)
    assert not Ledger(tmp_path).is_running()
    assert not (tmp_path / "runs" / HOLDER_NAME).exists()


def test_a_file_system_without_locks_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))))
    with pytest.raises(NightshiftError, match="No locks available"), Ledger(tmp_path).lock():
        pass
    assert not Ledger(tmp_path).is_running()


def replace_file(path: Path) -> None:
    path.with_name("new").touch()
    path.with_name("new").rename(path)


@pytest.mark.parametrize("damage", [Path.unlink, replace_file], ids=["deleted", "replaced"])
def test_a_lock_file_that_was_deleted_or_replaced_ends_the_controller(tmp_path, damage):
    ledger = Ledger(tmp_path)
    with Ledger(tmp_path).lock():
        ledger.sweep()
        damage(tmp_path / "runs" / LOCK_NAME)
        with pytest.raises(UsageError, match="moved away or replaced"):
            ledger.sweep()
    ledger.sweep()  # no controller any more
