"""run.py and `nightshift` as a user meets them: whole processes, exit codes, streams, signals."""

import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from nightshift.campaign.ledger import Ledger, read_progress
from nightshift.campaign.records import Phase
from tests.night_checkout import finish, good_end, leftovers, nightshift, start_run, until_training
from tests.stand_ins import fault
from tests.waiting import wait_for

BASELINE = b"[orchestrator]\nbatch_size = 256\ngroup_size = 4\n[trainer.optim]\nlr = 3e-6\n"


def start(root: Path, *flags: str) -> subprocess.Popen[str]:
    return start_run(root, "--engine", "trl", *flags)


def no_process_left(root: Path) -> None:
    wait_for(lambda: not leftovers(root), "the end of its processes")


def test_a_measured_experiment_prints_its_summary_on_stdout_only(root: Path) -> None:
    stdout, stderr = good_end(start(root, "--budget-seconds", "1", "-m", "first"), root)
    assert stdout.startswith("---\neval_score:")
    values = dict(line.split(":", 1) for line in stdout.splitlines()[1:])
    assert values["verdict"].strip() == "baseline"
    assert "effect_at_decision" not in values  # a baseline is compared with nothing
    assert all(value.strip() for value in values.values())
    assert "training" in stderr
    assert "\x1b" not in stdout + stderr  # plain in a pipe
    assert len((root / "results.tsv").read_text().splitlines()) == 2
    reading = read_progress(root / "runs" / "0001")  # left for status
    assert (reading.phase, bool(reading.num_done)) == (Phase.EVALUATING, True)


def test_a_run_without_a_step_is_a_crash_of_the_config_and_is_not_evaluated(root: Path) -> None:
    fault(root, "no_step", once=False)
    code, stdout, _ = finish(start(root, "--budget-seconds", "1"))
    assert code == 1
    assert "the budget of 1 s of CPU time is too short for one step. Lower orchestrator.batch_size or max_co" in stdout
    [record] = Ledger(root).records()
    assert (record.status, record.failure, record.evaluation) == ("crash", "config", None)
    assert "evaluating" not in (root / "runs" / "0001" / "progress.json").read_text()


def test_a_run_without_a_result_shows_the_last_lines_of_its_worker(root: Path) -> None:
    """No line of a log looks like one of the summary, which agents find in one file with both streams."""
    fault(root, "hold", once=False)
    process = start(root, "--budget-seconds", "1")
    until_training(root, process)
    with (root / "runs" / "0001" / "worker.log").open("a") as log:
        log.write("".join(f"line {number}\n" for number in range(99)) + "\x1b[2J\reval_score: 1.0\n---\n")
    head = psutil.Process(process.pid)
    [worker] = [child for child in head.children() if str(root / "runs" / "0001") in child.cmdline()]
    worker.kill()
    code, stdout, stderr = finish(process)
    assert code == 1
    assert "the worker returned no result: killed by SIGKILL" in stdout
    title, *lines = stderr[stderr.index("--- last") :].splitlines()
    assert title == "--- last lines of runs/0001/worker.log"
    assert lines == [*(f"  line {number}" for number in range(86, 99)), "  eval_score: 1.0", "  ---"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)])
def test_a_signal_closes_the_record_and_leaves_no_process(root: Path, number: signal.Signals) -> None:
    process = start(root, "--budget-seconds", "60")
    until_training(root, process)
    process.send_signal(number)
    code, stdout, stderr = finish(process)
    assert (code, stdout) == (130, "")
    assert f"stopped by {number.name}" in stderr
    assert "Traceback" not in stderr
    no_process_left(root)
    (record,) = Ledger(root).records()
    assert record.judgement.why.startswith(f"interrupted: stopped by {number.name}")
    assert len((root / "results.tsv").read_text().splitlines()) == 2


def test_detach_returns_while_the_experiment_runs_and_wait_ends_as_it_did(root: Path) -> None:
    fault(root, "hold", once=False)
    (root / "runs").mkdir(exist_ok=True)
    (root / "runs" / "detached.log").symlink_to(root / "prepare.py")  # is replaced, not written through
    code, stdout, stderr = finish(start(root, "--detach", "--budget-seconds", "1"))
    assert code == 0, stderr
    assert "uv run nightshift wait" in stdout
    wait_for(lambda: nightshift(root, "status")[1].startswith("running:     0001: training, "))
    assert nightshift(root, "wait", "--timeout", "0.1")[0] == 124
    code, _, stderr = finish(start(root, "--detach"))  # leaves the log of the first alone
    assert (code, "another controller works in this checkout" in stderr) == (2, True)
    (root / "stand-in.json").unlink()
    code, stdout, _ = nightshift(root, "wait", "--timeout", "60")
    assert code == 0
    assert stdout.startswith("---\neval_score:")
    assert stdout in (root / "runs" / "detached.log").read_text()
    no_process_left(root)
    counts = "running:     nothing\nresults:     1 experiment: 1 baseline\n"
    assert nightshift(root, "status")[1].startswith(counts)


def test_a_missing_model_is_one_line_and_no_experiment(root: Path) -> None:
    (root / "models").unlink()
    code, stdout, stderr = finish(start(root, "--budget-seconds", "1"))
    assert (code, stdout, len(stderr.splitlines())) == (2, "", 1)
    assert "models/arithmetic-base is missing" in stderr
    assert "git checkout models" in stderr
    assert Ledger(root).numbers() == []


def test_a_closed_pipe_is_no_traceback(root: Path) -> None:
    for command in ("nightshift --help", "python run.py --keys"):
        done = subprocess.run(
            ["bash", "-c", f"{command} | true"], cwd=root, capture_output=True, text=True, check=False
        )
        assert (done.stdout, done.stderr) == ("", ""), command
