"""stdout and stderr that take nothing: the records are whole, and the exit code says that something was not said."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from nightshift.campaign.ledger import Ledger
from nightshift.errors import ExitCode
from tests.stand_ins import fault
from tests.waiting import HANG_SECONDS

pytestmark = pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has /dev/full")
ROOT = Path(__file__).parents[2]
BASELINE = b"max_steps = 3\n[orchestrator]\nbatch_size = 256\ngroup_size = 4\n[trainer.optim]\nlr = 3e-6\n"
SAID = "Δ lr → 3e-6, λ 日本 \udcff"  # the last one is a byte that is no UTF-8
# What a shell does with the two streams, and whether all can be said then.
STREAMS = {
    "2>/dev/full": False,
    ">/dev/full": False,
    ">/dev/full 2>&1": False,
    "2>&-": False,
    ">&-": False,
    "<&- >&- 2>&-": False,
    "| true": False,
    "2>&1 | true": False,
    "2>/dev/null": True,
    ">/dev/null": True,
}
VARIABLES = (
    *({"PYTHONIOENCODING": name} for name in ("ascii", "latin-1", "utf-16", "ascii:strict")),
    {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
)


def shell(root: Path, command: list[str], streams: str, **variables: str) -> tuple[int, str]:
    """Exit code of the command itself, and all that came of both streams."""
    line = f"{shlex.join(command)} {streams}; exit ${{PIPESTATUS[0]}}"
    environment = {**os.environ, **variables}
    done = subprocess.run(
        ["bash", "-c", line], cwd=root, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, errors="replace", timeout=4 * HANG_SECONDS, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout


def run(root: Path, streams: str, *flags: str, **variables: str) -> tuple[int, str]:
    command = [sys.executable, str(ROOT / "tests" / "stand_in_run.py"), str(root), "--engine=trl", "--budget-seconds=1"]
    return shell(root, [*command, "-m", SAID, *flags], streams, **variables)


def test_an_experiment_is_recorded_whole_whatever_its_streams_take(root: Path) -> None:
    wrong = {}
    for number, (streams, is_heard) in enumerate(STREAMS.items(), 1):
        code, said = run(root, streams, "--again")
        record = Ledger(root).records()[-1]
        is_whole = (
            record.number == number and record.git_action and record.proposal.description == "Δ lr → 3e-6, λ 日本"
        )
        if code != (ExitCode.MEASURED if is_heard else ExitCode.UNSAID) or "Traceback" in said or not is_whole:
            wrong[streams] = code, said, record.status, record.git_action
    assert not wrong
    assert len((root / "results.tsv").read_text().splitlines()) == len(STREAMS) + 1
    for variables in VARIABLES:
        code, said = run(root, "", "--again", **variables)
        assert (code, "Traceback" in said) == (0, False), (variables, said)
    assert all(record.git_action for record in Ledger(root).records())


@pytest.mark.parametrize("streams", [">/dev/full 2>&1", ">&- 2>&-", "2>&1 | true"])
def test_a_night_that_nobody_hears_goes_on_and_says_so_at_its_end(root: Path, streams: str) -> None:
    asked = json.dumps({"agent": "lr", "proposer": "lr", "experiments": 3, "engine": "trl", "budget_seconds": 1.0})
    command = [sys.executable, str(ROOT / "tests" / "stand_in_night.py"), str(root), asked]
    code, said = shell(root, command, streams, TMPDIR=str(root.parent / "temporary"))
    assert (code, said) == (ExitCode.UNSAID, "")
    assert len(Ledger(root).records()) == 3
    assert "3 experiments are done" in (root / "runs" / "night.txt").read_text()


def test_what_was_wrong_keeps_its_exit_code(root: Path) -> None:
    fault(root, "error", once=False)
    assert run(root, ">/dev/full 2>&1")[0] == ExitCode.CRASH
    (root / "train.toml").write_text("lr = = 1\n")
    assert [run(root, streams)[0] for streams in ("2>&-", ">&-", "2>/dev/full")] == [ExitCode.USAGE] * 3


def test_what_is_only_shown_ends_without_a_traceback(root: Path) -> None:
    assert run(root, "")[0] == 0
    run_py = [sys.executable, "run.py"]
    words = ("status", "history", "show 1", "diff", "report", "--help", "night -h", "--version")
    commands = [*(["nightshift", *each.split()] for each in words), [*run_py, "--keys"], [*run_py, "--help"]]
    for command in commands:
        for streams in (">/dev/full", ">&-", "| true", ">/dev/null"):
            code, said = shell(root, command, streams, PYTHONIOENCODING="ascii")
            wanted = ExitCode.MEASURED if streams == ">/dev/null" else ExitCode.UNSAID
            assert (code, "Traceback" in said) == (wanted, False), (command, streams, said)
        for variables in VARIABLES:
            code, said = shell(root, command, "", **variables)
            assert (code, "Traceback" in said) == (0, False), (command, variables, said)
