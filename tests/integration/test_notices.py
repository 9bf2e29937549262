"""`--notify`: commands that hang, fail, flood or are not there; none delays a night, and none leaves a process."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from nightshift.errors import UsageError
from nightshift.night.notices import END, MAX_WAITING, REPEATED_CRASH, Notices, words_of
from nightshift.processes.supervise import ProcessGroup
from tests.night_checkout import leftovers, records, whole_night
from tests.notice_commands import command, heard, left, pids, until_quiet
from tests.stand_ins import fault
from tests.waiting import HANG_SECONDS, wait_for


def test_one_that_works_gets_the_message_and_the_persons_environment(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_TOKEN", "secret")
    said = list[str]()
    with Notices(command(folder, "works"), said.append) as notices:
        notices.send("keep", {"version": 1, "why": "é" * 1000})
        until_quiet(notices)
    [(_, message, token, where)] = heard(folder)
    assert (message, token, where) == ({"version": 1, "why": "é" * 1000}, "secret", str(Path.cwd()))
    assert said == []
    assert left(folder) == []


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        ("fails", "exit code 1; its last words: no route to the phone"),
        ("hangs", "no end after 2 s: ended"),
        ("floods", "no end after 2 s: ended; its last words: "),
    ],
)
def test_one_that_misbehaves_is_a_line_of_news_and_leaves_nothing(folder: Path, kind: str, cause: str) -> None:
    said = list[str]()
    with Notices(command(folder, kind), said.append, limit_seconds=2.0) as notices:
        began = time.process_time()
        notices.send("keep", {"version": 1})
        until_quiet(notices)
        assert time.process_time() - began < HANG_SECONDS  # looking costs nothing to speak of
    assert len(heard(folder)) == 1
    [line] = said
    assert line.startswith(f"--notify: the notice of keep failed: {cause}")
    assert len(line) < 400
    assert left(folder) == []


def test_one_runs_at_a_time_and_who_comes_while_many_wait_is_dropped(folder: Path) -> None:
    said = list[str]()
    with Notices(command(folder, "waits"), said.append) as notices:
        for number in range(MAX_WAITING + 3):
            notices.send(f"event {number}", {"number": number})
        wait_for(lambda: heard(folder))
        assert said == [f"--notify: the notice of event {n} is dropped: {MAX_WAITING} others wait" for n in (1, 2)]
        assert len(heard(folder)) == 1
        (folder / "go").touch()
        until_quiet(notices)
    assert [row[1]["number"] for row in heard(folder)] == [0, *range(3, MAX_WAITING + 3)]
    assert left(folder) == []


def test_on_leaving_only_the_last_word_is_waited_for_and_what_is_dropped_is_said(folder: Path) -> None:
    said = list[str]()
    with Notices(command(folder, "hangs"), said.append, limit_seconds=HANG_SECONDS) as notices:
        notices.send("keep", {})
        wait_for(lambda: (folder / "children").exists())
        notices.send("keep", {})
    assert said == [
        "--notify: the notice of keep is dropped: the night is over",
        "--notify: the notice of keep was not finished",
    ]
    assert left(folder) == []
    with Notices(command(folder, "works"), said.append) as notices:
        for event in ("keep", REPEATED_CRASH, "keep", "keep"):
            notices.send(event, {"event": event})
            wait_for(lambda: len(heard(folder)) == 2)
    assert [row[1] for row in heard(folder)[1:]] == [{"event": "keep"}, {"event": REPEATED_CRASH}]
    with Notices(command(folder, "works"), said.append) as notices:
        for event in (REPEATED_CRASH, REPEATED_CRASH, END):
            notices.send(event, {"event": event})
    assert [row[1] for row in heard(folder)[3:]] == [{"event": REPEATED_CRASH}, {"event": END}]
    assert said[-1] == "--notify: the notice of repeated crash is dropped: the night is over"
    assert left(folder) == []


@pytest.mark.parametrize("is_agent_first", [False, True])
def test_an_agent_that_is_ended_meanwhile_takes_no_notice_with_it_and_leaves_no_orphan(
    folder: Path, is_agent_first: bool
) -> None:
    """What an agent detached and hid must be found though a stranger's process runs beside it, and only that."""
    orphan = (
        "import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], "
        f"start_new_session=True, env={{}}); open({str(folder / 'children')!r}, 'a').write(f'{{child.pid}}\\n')"
    )
    group = ProcessGroup("agent-of-a-test", 1.0)
    said = list[str]()
    with Notices(command(folder, "waits"), said.append) as notices:

        def tell() -> None:
            notices.send("keep", {})
            wait_for(lambda: heard(folder))

        def think() -> None:
            words = [sys.executable, "-c", orphan]
            group.start("agent", words, log_path=folder / "log", env={"PATH": ""}, cwd=folder).wait()

        for step in (think, tell) if is_agent_first else (tell, think):
            step()
        _, orphan_pid = pids(folder)
        assert psutil.pid_exists(orphan_pid)
        assert group.stop() == []
        assert left(folder) == [heard(folder)[0][0]]
        (folder / "go").touch()
        until_quiet(notices)
    assert said == []
    assert left(folder) == []


def test_a_messenger_whose_head_is_killed_ends_by_itself(folder: Path) -> None:
    code = (
        "import sys, os, signal; from nightshift.night.notices import Notices\n"
        f"notices = Notices({command(folder, 'hangs')!r}, print, limit_seconds=2.0)\n"
        "notices.send('keep', {}); print(flush=True); signal.pause()"
    )
    head = psutil.Popen([sys.executable, "-c", code], stdout=-1)
    head.stdout.readline()
    wait_for(lambda: (folder / "children").exists())
    head.kill()
    head.communicate()
    wait_for(lambda: not left(folder))


@pytest.mark.parametrize(
    "plant",
    [
        lambda path: path.write_text("raise SystemExit('forged')"),
        lambda path: (path.unlink(), os.mkfifo(path)),  # who opens that waits
        lambda path: os.truncate(path, 1 << 40),  # who reads that takes minutes
    ],
)
def test_what_the_command_names_must_be_what_it_was(folder: Path, plant: Callable[[Path], object]) -> None:
    said = list[str]()
    with Notices(command(folder, "works"), said.append) as notices:
        plant(folder / "notice.py")
        notices.send("keep", {})
    assert heard(folder) == []
    assert said == [f"--notify: {folder}/notice.py is not what it was when the night began: nothing of it is run"]


@pytest.mark.parametrize("wrong", ["no-such-program --to me", "", "'open"])
def test_a_command_that_cannot_be_run_is_refused(wrong: str) -> None:
    with pytest.raises(UsageError, match="--notify"):
        words_of(wrong)


def test_a_night_whose_command_is_missing_does_not_begin(root: Path) -> None:
    code, stdout, stderr = whole_night(root, agent="lr", proposer="lr", experiments=3, notify="no-such-program")
    assert (code, stdout) == (2, "")
    assert stderr == (
        "--notify 'no-such-program': no program 'no-such-program' on PATH. "
        "Install it, give its path, or leave --notify out.\n"
    )
    assert not (root / "runs" / "night.json").exists()


def test_a_night_tells_of_its_keeps_and_its_end_and_stores_no_command(root: Path, folder: Path) -> None:
    code, _, stderr = whole_night(
        root, agent="lr", proposer="lr", experiments=4, notify=command(folder, "works"), pauses=[0.05] * 3
    )
    assert code == 0, stderr
    messages, ours = [row[1] for row in heard(folder)], records(root)
    keeps = [record for record in ours if record.is_keep and record.parent is not None]
    assert keeps
    assert [message["event"] for message in messages] == ["keep"] * len(keeps) + ["end"]
    for message, record in zip(messages, keeps, strict=False):
        assert record.judgement is not None
        assert message == {
            "version": 1,
            "event": "keep",
            "campaign": "autoresearch/test",
            "experiment": record.number,
            "verdict": "keep",
            "expected_then": record.judgement.delta,
            "why": record.judgement.why,
            "counts": message["counts"],
            "page": str(root / "runs" / "report.html"),
        }
    last = messages[-1]
    assert (last["why"], last["experiment"], last["verdict"]) == ("4 experiments are done", None, None)
    assert last["counts"]["line"].startswith(f"4 experiments: the baseline, {len(keeps)} kept")
    assert (last["counts"]["num_experiments"], last["counts"]["kept"]) == (4, len(keeps))
    for path in (root / "runs").rglob("*"):
        assert not path.is_file() or str(folder).encode() not in path.read_bytes(), path
    assert left(folder) == []
    assert leftovers(root) == []


def test_a_night_tells_of_a_crash_that_repeats_and_a_command_that_fails_does_not_stop_it(
    root: Path, folder: Path
) -> None:
    assert whole_night(root, agent="lr", proposer="lr", experiments=1)[0] == 0
    fault(root, "error", once=False)
    code, _, stderr = whole_night(root, agent="lr", proposer="lr", experiments=3, notify=command(folder, "fails"))
    assert code == 0, stderr
    assert [record.status for record in records(root)] == ["keep", "crash", "crash", "crash"]
    events = [row[1]["event"] for row in heard(folder)]
    assert events == ["repeated crash", "end"]
    told = heard(folder)[0][1]
    assert (told["experiment"], told["verdict"], told["expected_then"]) == (3, "crash", None)
    assert stderr.count("--notify: the notice of repeated crash failed: exit code 1") == 1
    assert left(folder) == []
