"""What people see while they wait, on a real terminal: a line that is rewritten, and no code."""

import json
import re
import sys
from pathlib import Path

import pytest

from nightshift.errors import ExitCode
from tests.conftest import git
from tests.night_checkout import leftovers, problems, start_run, until_training
from tests.stand_ins import fault
from tests.terminals import CONTROLS, Terminal

ROOT = Path(__file__).parents[2]
BASELINE = b"[orchestrator]\nbatch_size = 256\ngroup_size = 4\n[trainer.optim]\nlr = 3e-6\n"
TICKS = 3  # so often a line has to come anew, each time with more seconds
HOSTILE = "\x1b[31mlr\x1b]0;title\x07 \u202eevil\u2066\u200b\r\n---\x9b2J"
CTRL_C = b"\x03"


def run_py(root: Path, columns: int = 80, *flags: str, **variables: str) -> Terminal:
    command = [sys.executable, str(ROOT / "tests" / "stand_in_run.py"), str(root), "--engine", "trl"]
    return Terminal([*command, "--budget-seconds", "2", *flags], root, columns, **variables)


def night(root: Path, **asked: object) -> Terminal:
    asked = {"engine": "trl", "budget_seconds": 30.0, **asked}
    command = [sys.executable, str(ROOT / "tests" / "stand_in_night.py"), str(root), json.dumps(asked)]
    return Terminal(command, root, TMPDIR=str(root.parent / "temporary"))


def seconds_of(terminal: Terminal, words: str) -> list[int]:
    """The seconds that the lines with these words count, in order."""
    told = (re.search(rf"{re.escape(words)}.*?(\d+) s\b", line) for line in terminal.lines)
    return [int(found[1]) for found in told if found]


def ticks(terminal: Terminal, words: str) -> None:
    """Read on until the line with these words has come several times, with growing seconds."""
    terminal.until(lambda: len({*seconds_of(terminal, words)}) >= TICKS, f"ticks of {words!r}")
    assert seconds_of(terminal, words) == sorted(seconds_of(terminal, words))


def is_plain(terminal: Terminal) -> None:
    """No code but line ends and carriage returns reached the terminal, and no line wrapped."""
    assert not {*terminal.said} & CONTROLS
    assert not any(character in terminal.said for character in "\u202e\u2066\u200b")
    live = [part.rstrip() for line in terminal.said.replace("\r\n", "\n").split("\n") for part in line.split("\r")[1:]]
    assert max(map(len, live), default=0) <= terminal.columns


@pytest.mark.slow
def test_a_run_ticks_while_it_trains_and_ctrl_c_is_answered_at_once(root: Path) -> None:
    terminal = run_py(root, 40)
    assert terminal.finish() == ExitCode.MEASURED
    is_plain(terminal)
    assert terminal.screen[terminal.screen.index("---") + 1].startswith("eval_score:")
    fault(root, "hold", once=False)
    (root / "train.toml").write_bytes(BASELINE.replace(b"3e-6", b"4e-6"))
    terminal = run_py(root, 80, "-m", HOSTILE)
    ticks(terminal, "0002: training, step")
    assert re.search(r"reward 0\.\d\d, \d+ s, \d+ s of the budget left", terminal.said)
    terminal.press(CTRL_C)
    terminal.shows("SIGINT: stopping: what runs here is ended")
    (root / "stand-in.json").unlink()
    assert terminal.finish() == ExitCode.INTERRUPTED
    is_plain(terminal)
    left = "train.toml still holds what was tried; git checkout train.toml puts the incumbent's back"
    assert " ".join(" ".join(terminal.screen).split()).endswith(f"does not wait {left} stopped by SIGINT")
    assert git(root, "checkout", "train.toml") == ""
    assert b"3e-6" in (root / "train.toml").read_bytes()


@pytest.mark.slow
def test_an_agent_at_work_is_named_with_its_limit_and_ctrl_c_stops_it(root: Path) -> None:
    sleeps = f"{sys.executable} -c 'import time; time.sleep(600)'"
    terminal = night(root, agent=sleeps, budget_seconds=1.0, sandbox="none", agent_timeout_seconds=500.0)
    ticks(terminal, "is at work on experiment 0002,")
    assert re.search(r"python\S* is at work on experiment 0002, \d+ s of at most 500 s", terminal.said)
    terminal.press(CTRL_C)
    terminal.shows("Ctrl-C: nothing new is begun, and what is in flight is finished; once more to stop now")
    assert terminal.finish() == ExitCode.MEASURED
    assert (problems(root), leftovers(root)) == ([], [])  # no clone of the agent is left either
    is_plain(terminal)
    for line in terminal.screen:  # the summaries, which go to the other stream of the same terminal
        assert "night:" not in line or line.startswith("night:")


@pytest.mark.slow
def test_wait_shows_what_it_waits_for_and_leaves_it_alone(root: Path) -> None:
    fault(root, "hold", once=False)
    process = start_run(root, "--engine", "trl", "--budget-seconds", "1")
    until_training(root, process)
    terminal = Terminal(["nightshift", "wait"], root)
    ticks(terminal, "0001: training, step")
    terminal.press(CTRL_C)
    terminal.shows("SIGINT: what runs goes on; nobody waits for it any more")
    assert terminal.finish() == ExitCode.INTERRUPTED
    is_plain(terminal)
    assert process.poll() is None
    (root / "stand-in.json").unlink()
    process.communicate()
    assert process.returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("variables", [{"TERM": "dumb"}, {"PYTHONIOENCODING": "ascii"}])
def test_a_poor_terminal_gets_what_it_can_show(root: Path, variables: dict[str, str]) -> None:
    terminal = run_py(root, 80, "-m", f"Δ {HOSTILE}", **variables)
    assert terminal.finish() == ExitCode.MEASURED
    assert "Traceback" not in terminal.said
    is_plain(terminal)
    if "TERM" in variables:
        assert "\r" not in terminal.said.replace("\r\n", "\n")
    if "PYTHONIOENCODING" in variables:
        assert terminal.said.isascii()


@pytest.mark.slow
def test_no_foreign_word_moves_a_terminal(root: Path) -> None:
    """Of a description, a branch, a file and an argument: their codes reach neither the terminal nor a commit."""
    git(root, "switch", "--quiet", "--create", "autoresearch/\u202eevil\u2066\u200b\u009b2J")
    for config in (BASELINE, BASELINE.replace(b"3e-6", b"5e-6")):
        (root / "train.toml").write_bytes(config)
        terminal = run_py(root, 80, "-m", HOSTILE)
        assert terminal.finish() == ExitCode.MEASURED, terminal.said
        is_plain(terminal)
    assert git(root, "log", "-2", "--format=%B").replace("\n", "").isprintable()
    commands = [["status"], ["show", "2"], ["history"], ["diff", "1", "2"], ["wait"]]
    for words in [*commands, ["report", "--output", str(root / HOSTILE)]]:
        terminal = Terminal(["nightshift", *words], root)
        assert terminal.finish() == ExitCode.MEASURED, (words, terminal.said)
        is_plain(terminal)
    for words in ([f"--{HOSTILE}"], ["show", HOSTILE], [HOSTILE], ["diff", HOSTILE], ["doctor", "--engine", HOSTILE]):
        terminal = Terminal(["nightshift", *words], root)
        assert terminal.finish() == ExitCode.USAGE, words
        is_plain(terminal)
    terminal = Terminal([sys.executable, str(root / "run.py"), f"--{HOSTILE}"], root)
    assert terminal.finish() == ExitCode.USAGE
    is_plain(terminal)


COMMANDS = (
    "certify", "diff", "doctor", "history", "new", "night", "report", "show", "status",
    "wait",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["-h", "--version"])
def test_every_command_answers_and_says_whole_sentences_in_80_columns(root: Path, flag: str) -> None:
    programs = [["nightshift"], *(["nightshift", name] for name in COMMANDS)]
    programs += [[sys.executable, str(ROOT / name)] for name in ("run.py", "prepare.py")]
    for program in programs:
        terminal = Terminal([*program, flag], root)
        assert terminal.finish() == ExitCode.MEASURED, terminal.said
        assert max(map(len, terminal.lines)) <= 80
        assert "..." not in terminal.said.replace("[ARGS]...", "")
        wanted = "nightshift 0." if flag == "--version" else "Usage: "
        assert wanted in terminal.said
