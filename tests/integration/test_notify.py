"""`--notify`: commands that hang, fail, flood or are deaf. None delays a night, and none leaves a process."""

import shlex
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from nightshift.errors import Interrupted
from nightshift.night.notify import END, MAX_WAITING, REPEATED_CRASH, Notifier
from tests.night_checkout import good_night, records, whole_night
from tests.notify_commands import command, heard, left
from tests.waiting import HANG_SECONDS, wait_for


def test_a_command_gets_the_message_and_your_environment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAND_IN_TOKEN", "secret")
    news = list[str]()
    with Notifier(command(folder, "works"), news.append) as notifier:
        notifier.send(END, {"version": 1, "why": "é" * 1000})
    [(_, message, token, where)] = heard(folder)
    assert (message, token, where) == ({"version": 1, "why": "é" * 1000}, "secret", str(Path.cwd()))
    assert news == []
    assert left(folder) == []


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        ("fails", "exit code 1; its last words: no route to the phone"),
        ("hangs", "no end after 2 s: ended"),
        ("floods", "no end after 2 s: ended; its last words: "),
    ],
)
def test_a_command_that_misbehaves_is_a_line_of_news_and_leaves_nothing(folder: Path, kind: str, cause: str) -> None:
    news = list[str]()
    with Notifier(command(folder, kind), news.append, limit_seconds=2.0) as notifier:
        notifier.send(END, {"version": 1})
    assert len(heard(folder)) == 1
    [line] = news
    assert line.startswith(f"--notify: the notification of end failed: {cause}")
    assert len(line) < 400
    assert left(folder) == []


def test_a_command_gets_every_signal(tmp_path: Path) -> None:
    script = tmp_path / "blocked.py"
    script.write_text("import signal, sys\nsys.exit(len(signal.pthread_sigmask(signal.SIG_BLOCK, ())))\n")
    news = list[str]()
    with Notifier(shlex.join((sys.executable, str(script))), news.append) as notifier:
        notifier.send(END, {"version": 1})
    assert news == []  # it exits with the number of signals that are blocked


def test_a_deaf_command_is_no_failure(folder: Path) -> None:
    news = list[str]()
    with Notifier(command(folder, "deaf"), news.append) as notifier:
        notifier.send(END, {"why": "x" * 20_000})
    assert len(heard(folder)) == 1
    assert news == []


def test_send_returns_at_once_and_the_oldest_of_too_many_is_dropped(folder: Path) -> None:
    news = list[str]()
    with Notifier(command(folder, "waits"), news.append) as notifier:
        notifier.send("event 0", {"number": 0})
        wait_for(lambda: heard(folder))
        for number in range(1, MAX_WAITING + 3):
            notifier.send(f"event {number}", {"number": number})
        dropped = [f"--notify: the notification of event {n} is dropped: {MAX_WAITING} others wait" for n in (1, 2)]
        assert news == dropped
        assert len(heard(folder)) == 1, "one command runs at a time"
        (folder / "go").touch()
        wait_for(lambda: len(heard(folder)) == MAX_WAITING + 1)
    assert [row[1]["number"] for row in heard(folder)] == [0, *range(3, MAX_WAITING + 3)]
    assert left(folder) == []


def test_on_leaving_only_the_last_word_is_waited_for(folder: Path) -> None:
    news = list[str]()
    with Notifier(command(folder, "hangs"), news.append, limit_seconds=HANG_SECONDS) as notifier:
        notifier.send("keep", {})
        wait_for(lambda: (folder / "children").exists())
        notifier.send("keep", {})
    assert news == [
        "--notify: the notification of keep failed: the night is over: ended",
        "--notify: the notification of keep is dropped: the night is over",
    ]
    assert left(folder) == []
    news.clear()
    (folder / "heard").unlink()
    with Notifier(command(folder, "waits"), news.append) as notifier:
        notifier.send("keep", {"event": "keep"})
        wait_for(lambda: heard(folder))
        for event in (REPEATED_CRASH, "keep", END):
            notifier.send(event, {"event": event})
        (folder / "go").touch()
    assert heard(folder)[-1][1] == {"event": END}
    assert left(folder) == []


def test_after_ctrl_c_the_last_word_is_waited_for_briefly(folder: Path) -> None:
    began = time.monotonic()
    with suppress(Interrupted), Notifier(command(folder, "hangs"), print, limit_seconds=HANG_SECONDS) as notifier:
        notifier.send(END, {})
        wait_for(lambda: (folder / "children").exists())
        raise Interrupted("stopped by SIGINT")
    assert time.monotonic() - began < HANG_SECONDS
    assert left(folder) == []
    assert not [thread for thread in threading.enumerate() if thread.name == "notify"]


def test_a_night_whose_command_is_missing_does_not_begin(root: Path) -> None:
    code, stdout, stderr = whole_night(root, agent="lr", proposer="lr", experiments=3, notify="no-such-program")
    assert (code, stdout) == (2, "")
    assert stderr == (
        "--notify 'no-such-program': no program 'no-such-program' on PATH. "
        "Install it, give its path, or leave --notify out.\n"
    )
    assert not (root / "runs" / "night.json").exists()


def test_a_night_tells_of_its_keeps_and_its_end_and_stores_no_command(root: Path, folder: Path) -> None:
    good_night(root, agent="lr", proposer="lr", experiments=4, notify=command(folder, "works"), pauses=[0.05] * 3)
    messages, ours = [row[1] for row in heard(folder)], records(root)
    keeps = [record for record in ours if record.is_keep and record.parent is not None]
    assert keeps
    assert [message["event"] for message in messages] == ["keep"] * len(keeps) + ["end"]
    for message, record in zip(messages, keeps, strict=False):
        assert record.judgement is not None
        assert record.decision is not None
        assert message == {
            "version": 1,
            "event": "keep",
            "campaign": "autoresearch/test",
            "experiment": record.number,
            "verdict": "keep",
            "effect_at_decision": record.decision.effect,
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
