"""`--notify`: commands that hang, fail, flood or are deaf. None delays a night, and none leaves a process."""

import threading
from contextlib import suppress
from pathlib import Path

import pytest

from nightshift.errors import Interrupted
from nightshift.night.notify import END, KEEP, Notifier
from tests.night_checkout import good_night, records, whole_night
from tests.notify_commands import command, heard, left
from tests.waiting import HANG_SECONDS, wait_for


def test_a_command_gets_the_message_and_your_environment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAND_IN_TOKEN", "secret")
    news = list[str]()
    notifier = Notifier(command(folder, "works"), news.append)
    with notifier.running():
        notifier.send(END, {"version": 1, "why": "é" * 1000})
    [(_, message, token, where)] = heard(folder)
    assert (message, token, where) == ({"version": 1, "why": "é" * 1000}, "secret", str(Path.cwd()))
    assert news == []
    assert left(folder) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "cause"), [("fails", "exit code 1"), ("hangs", "no end after 2 s"), ("floods", "no end after 2 s")]
)
def test_a_command_that_misbehaves_is_a_line_of_news_and_leaves_nothing(folder: Path, kind: str, cause: str) -> None:
    news = list[str]()
    notifier = Notifier(command(folder, kind), news.append, limit_seconds=2.0)
    with notifier.running():
        notifier.send(END, {"version": 1})
        wait_for(lambda: news)
    [line] = news
    assert line == f"--notify: the notification of end failed: {cause}"
    assert left(folder) == []


def test_a_deaf_command_is_no_failure_and_each_notification_is_sent(folder: Path) -> None:
    news = list[str]()
    notifier = Notifier(command(folder, "deaf"), news.append)
    with notifier.running():
        notifier.send(KEEP, {"why": "x" * 20_000})
        notifier.send(END, {})
    assert len(heard(folder)) == 2
    assert news == []


@pytest.mark.slow
def test_after_ctrl_c_a_command_that_hangs_is_ended(folder: Path) -> None:
    news = list[str]()
    notifier = Notifier(command(folder, "hangs"), news.append, limit_seconds=10 * HANG_SECONDS)
    with suppress(Interrupted), notifier.running():
        notifier.send(END, {})
        wait_for(lambda: (folder / "children").exists())
        raise Interrupted("stopped by SIGINT")
    assert news == ["--notify: the notification of end failed: exit code -9"]
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


@pytest.mark.slow
def test_a_night_tells_of_its_keeps_and_its_end_and_stores_no_command(root: Path, folder: Path) -> None:
    good_night(root, agent="lr", proposer="lr", experiments=3, notify=command(folder, "works"), pauses=[0.05] * 3)
    messages, ours = [row[1] for row in heard(folder)], records(root)
    keeps = [record for record in ours if record.is_keep and record.parent is not None]
    assert keeps
    assert [message["event"] for message in messages] == ["keep"] * len(keeps) + ["end"]
    for message, record in zip(messages, keeps, strict=False):
        assert record.judgement is not None
        assert record.decision is not None
        assert message == {
            "version": 2,
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
    assert (last["why"], last["experiment"], last["verdict"]) == ("3 experiments are done", None, None)
    assert last["counts"]["line"].startswith("3 experiments: 1 baseline, ")
    assert (sum(last["counts"]["verdict"].values()), last["counts"]["verdict"].get("keep", 0)) == (3, len(keeps))
    for path in (root / "runs").rglob("*"):
        assert not path.is_file() or str(folder).encode() not in path.read_bytes(), path
    assert left(folder) == []
