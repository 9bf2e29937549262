"""Files that others may have put something in the place of: nothing is written through, nothing hangs."""

import json
import os
from pathlib import Path

import pytest

from nightshift import files
from nightshift.campaign.records import packed
from nightshift.files import open_regular, read_file, write_atomically, write_json

TOKEN = "0123456789abcdef"


def plant(path: Path, what: str, outside: Path) -> None:
    match what:
        case "link":
            path.symlink_to(outside)
        case "hard link":
            path.hardlink_to(outside)
        case "fifo":
            os.mkfifo(path)
        case "folder":
            path.mkdir()


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    path = tmp_path / "outside"
    path.write_bytes(b"precious")
    return path


@pytest.mark.parametrize("what", ["link", "hard link", "fifo"])
def test_the_temporary_name_cannot_be_foretold_and_nothing_there_is_opened(tmp_path, outside, what, monkeypatch):
    path = tmp_path / "record.json"
    plant(tmp_path / f".record.json.{os.getpid()}.tmp", what, outside)  # the name of version 0.2.0
    write_atomically(path, b"new")
    assert (path.read_bytes(), outside.read_bytes()) == (b"new", b"precious")
    names = []
    monkeypatch.setattr(Path, "replace", lambda self, target: names.append(self.name))
    write_atomically(path, b"new")
    write_atomically(path, b"new")
    assert len({*names}) == 2
    monkeypatch.setattr(files.secrets, "token_hex", lambda size: TOKEN)  # even if it could be
    plant(tmp_path / f".record.json.{os.getpid()}.{TOKEN}.tmp", what, outside)
    with pytest.raises(FileExistsError):
        write_atomically(path, b"newer")
    assert (path.read_bytes(), outside.read_bytes()) == (b"new", b"precious")


@pytest.mark.parametrize("what", ["link", "fifo", "folder"])
@pytest.mark.parametrize("mode", ["rb", "ab"])
def test_only_a_regular_file_is_opened(tmp_path: Path, outside: Path, what: str, mode: str) -> None:
    path = tmp_path / "worker.log"
    plant(path, what, outside)
    with pytest.raises(OSError, match=r"worker\.log"):
        open_regular(path, mode)
    assert outside.read_bytes() == b"precious"


def test_a_fifo_that_somebody_reads_takes_no_log(tmp_path: Path) -> None:
    os.mkfifo(path := tmp_path / "worker.log")
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(OSError, match="no regular file"):
        open_regular(path, "ab")
    assert os.read(reader, 1) == b""
    os.close(reader)


def test_a_log_is_made_and_added_to(tmp_path: Path) -> None:
    for text in (b"one", b"two"):
        with open_regular(tmp_path / "log", "ab") as file:
            file.write(text)
    assert read_file(tmp_path / "log") == b"onetwo"


def test_a_record_whose_text_is_no_unicode_is_written_with_its_scores(tmp_path: Path) -> None:
    write_json(tmp_path / "x.json", {"scores": packed([1.0, 0.5]), "library_path": "/\udcff"})
    assert json.loads((tmp_path / "x.json").read_bytes()) == {"scores": [1.0, 0.5], "library_path": "/?"}
