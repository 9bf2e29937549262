"""`--notify` where the system refuses what it needs, and where its words or paths are no text: never more than news."""

from __future__ import annotations

import os
import shlex
import tempfile
from pathlib import Path

import pytest

from nightshift.night.notices import Notices
from tests.night_checkout import records, whole_night
from tests.notice_commands import command, heard, left, until_quiet

LATIN = os.fsdecode(b"caf\xe9")  # as a shell hands it over


def test_a_word_that_is_no_text_is_handed_on_as_it_is_and_a_message_that_is_none_with_question_marks(
    folder: Path,
) -> None:
    said = list[str]()
    script = f'cat > {folder}/heard-it; printf %s "$1" > {folder}/word'
    with Notices(shlex.join(["sh", "-c", script, "sh", LATIN]), said.append) as notices:
        notices.send("keep", {"page": f"/home/{LATIN}/report.html", "counts": {"line": "é", "kept": 1}})
        until_quiet(notices)
    assert said == []
    assert (folder / "word").read_bytes() == b"caf\xe9"
    assert (folder / "heard-it").read_text() == (
        '{"page": "/home/caf?/report.html", "counts": {"line": "é", "kept": 1}}'
    )


def test_a_script_as_one_long_word_is_run(folder: Path) -> None:
    said = list[str]()
    script = f"cat > {folder}/heard-it; : {'a long remark ' * 400}"
    with Notices(shlex.join(["sh", "-c", script]), said.append) as notices:
        notices.send("keep", {})
        until_quiet(notices)
    assert said == []
    assert (folder / "heard-it").read_text() == "{}"


def test_no_temporary_folder_is_a_line_of_news(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = list[str]()
    with Notices(command(folder, "works"), said.append) as notices:
        monkeypatch.setattr(tempfile, "tempdir", str(folder / "gone"))
        notices.send("keep", {})
        monkeypatch.undo()
    assert heard(folder) == []
    [line] = said
    assert line.startswith("--notify: the notice of keep failed: [Errno 2] No such file or directory: ")


def test_no_current_folder_is_a_line_of_news_and_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = list[str]()
    with Notices(command(folder, "works"), said.append) as notices:
        (folder / "here").mkdir()
        monkeypatch.chdir(folder / "here")
        (folder / "here").rmdir()
        notices.send("keep", {})
        notices.send("keep", {})
        monkeypatch.chdir(folder)
    assert heard(folder) == []
    assert said == ["--notify: the notice of keep failed: [Errno 2] No such file or directory"] * 2
    assert left(folder) == []


def test_a_night_whose_command_is_no_text_tells_of_its_keep_and_its_end(root: Path, folder: Path) -> None:
    named = folder / f"{LATIN}.py"
    (folder / "notice.py").rename(named)
    words = command(folder, LATIN).replace("notice.py", named.name)
    code, _, stderr = whole_night(root, agent="lr", proposer="lr", experiments=3, notify=words)
    assert code == 0, stderr
    assert "--notify" not in stderr
    keeps = [record for record in records(root) if record.is_keep and record.parent is not None]
    assert keeps
    assert [row[1]["event"] for row in heard(folder)] == ["keep"] * len(keeps) + ["end"]
    assert left(folder) == []
