"""run.py and `nightshift` as a user meets them: whole processes, exit codes, streams, signals, kills."""

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from nightshift.campaign.ledger import Ledger, read_progress
from nightshift.campaign.records import Phase
from nightshift.errors import Failure
from nightshift.executors.process import MARKER_NAME, WATCHDOG, digest_of
from tests.night_checkout import (
    finish,
    good_end,
    is_running,
    leftovers,
    nightshift,
    problems,
    records,
    start_run,
    until_training,
)
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
    assert (code, "another command is running in this checkout" in stderr) == (2, True)
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


# Controllers that are killed leave no process, and the same command resumes


def kill(controller: subprocess.Popen[str], root: Path) -> None:
    """SIGKILL, while workers train; fails if a process is left."""
    controller.kill()
    controller.communicate()
    wait_for(lambda: not leftovers(root))


def test_a_killed_run_py_leaves_no_process_and_the_same_command_resumes(root: Path) -> None:
    fault(root, "hold", once=False)
    controller = start(root, "--budget-seconds", "1")
    until_training(root, controller)
    kill(controller, root)
    (root / "stand-in.json").unlink()
    assert records(root)[-1].status == "started"
    code, _, stderr = finish(start(root, "--budget-seconds", "1"))
    assert code == 0, stderr
    assert "0001 was interrupted" in stderr
    assert [record.failure for record in records(root)] == [Failure.INTERRUPTED, None]
    assert records(root)[-1].is_keep
    assert problems(root) == []


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks into /proc")
def test_a_sweep_at_the_start_ends_what_was_killed_together_with_its_watchdog_and_nothing_else(root: Path) -> None:
    """Controller, its watchdog and the worker's watchdog are killed at once: a suspended trainer is left."""
    marks: tuple[dict[str, str], ...] = ({}, {MARKER_NAME: f"{digest_of(root.parent / 'other')}/worker"})
    foreign = [subprocess.Popen(["/bin/sleep", "600"], start_new_session=True, env=mark) for mark in marks]
    fault(root, "hold", once=False)
    controller = start(root, "--budget-seconds", "1")
    until_training(root, controller)
    everything = leftovers(root)
    trainers = [process for process in everything if any("stand_in_trainer" in word for word in process.cmdline())]
    assert trainers
    others = [process for process in everything if process not in trainers]
    for process in everything:
        process.suspend()
    ours = {str(process.pid) for process in everything}
    commands = {p: p.info["cmdline"] or [""] for p in psutil.process_iter(["cmdline"])}
    dogs = [p for p, words in commands.items() if WATCHDOG[1] in " ".join(words) and words[-1] in ours]
    for process in (*dogs, *others):
        process.kill()
    controller.communicate()
    (root / "stand-in.json").unlink()
    code, _, stderr = finish(start(root, "--budget-seconds", "1"))
    assert code == 0, stderr
    [line] = [line for line in stderr.splitlines() if line.startswith("ended processes that an earlier start")]
    assert all(f"pid {process.pid} " in line for process in trainers)
    assert leftovers(root) == []
    assert [process.poll() for process in foreign] == [None, None]
    for process in foreign:
        process.kill()
        process.wait()


def test_an_experiment_runs_without_what_only_linux_has_and_a_kill_leaves_nothing(root: Path) -> None:
    """No affinity, no control groups, no /proc, no prctl: as on macOS."""
    flags = ("--engine", "trl", "--budget-seconds", "1", "--stand-in", "mac")
    code, _, stderr = finish(start_run(root, *flags))
    assert code == 0, stderr
    assert records(root)[-1].hardware.startswith("cpu ")
    fault(root, "hold", once=False)
    controller = start_run(root, *flags, "--again")
    wait_for(lambda: is_running(root, 2))
    for process in leftovers(root):
        if process.pid != controller.pid:
            process.suspend()
    kill(controller, root)


# What only reads works where nothing can be written

# As root, whom permissions do not stop, but without the capability to override them.
SETPRIV = ("setpriv", "--bounding-set", "-dac_override,-dac_read_search,-fowner", "--")


def without_rights(root: Path, *words: str) -> tuple[int, str, str]:
    """A command in a checkout that can only be read: exit code, stdout, stderr."""
    done = subprocess.run([*SETPRIV, *words], cwd=root, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


def state_of(root: Path) -> dict[str, tuple[int, int]]:
    """All that lies in a checkout, with its size and the time of its last change."""
    return {str(path): (path.lstat().st_size, path.lstat().st_mtime_ns) for path in (root, *root.rglob("*"))}


@pytest.mark.slow
def test_what_only_reads_works_where_nothing_can_be_written(root, tmp_path):
    assert finish(start(root, "--budget-seconds", "1"))[0] == 0
    for path in (root, *root.rglob("*")):
        if not path.is_symlink():
            path.chmod(path.stat().st_mode & ~0o222)
    if "Permission denied" not in without_rights(root, "touch", str(root / "runs" / "x"))[2]:
        pytest.skip("nothing is read-only here")
    there, program = state_of(root), str(Path(sys.executable).with_name("nightshift"))
    for command in (["status"], ["history", "--json"], ["show", "1"]):
        code, stdout, stderr = without_rights(root, program, *command)
        assert (code, stderr, len(stdout) > 10) == (0, "", True)
    code, stdout, stderr = without_rights(root, program, "report")
    assert (code, stdout, stderr.count("\n")) == (2, "", 1)
    assert stderr.endswith("write elsewhere: uv run nightshift report --output FOLDER.\n")
    assert without_rights(root, program, "report", "--output", str(tmp_path / "page"))[0] == 0
    assert (tmp_path / "page" / "report.html").exists()
    assert state_of(root) == there
