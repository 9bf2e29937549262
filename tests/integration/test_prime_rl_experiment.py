"""Whole experiments on the prime-rl engine with stand-in programs: always a record, never a process left."""

import json
import os
import signal
import socket
import subprocess
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from nightshift.campaign.campaign import resume
from nightshift.campaign.git import Repo
from nightshift.campaign.ledger import Ledger
from nightshift.campaign.records import Record, Request
from nightshift.cli.output import summary
from nightshift.engines.base import NO_GPU
from nightshift.engines.prime_rl import engine as prime_rl
from nightshift.engines.prime_rl.engine import PrimeRlEngine
from nightshift.engines.prime_rl.session import Timing
from nightshift.errors import Failure
from nightshift.executors import network
from nightshift.experiment.experiment import Controller
from nightshift.report.page import render, view_of
from tests import stand_in_prime_rl
from tests.conftest import ROOT, git, living_children
from tests.night_checkout import finish, furnish, leftovers, start_run
from tests.stand_in_controller import make_controller
from tests.stand_ins import prime_rl_rules
from tests.waiting import HANG_SECONDS, wait_for

RULES = replace(
    prime_rl_rules(),
    budget_seconds=HANG_SECONDS,  # max_steps ends the training
    startup_seconds=HANG_SECONDS,
    evaluation_seconds=HANG_SECONDS,
)
SOURCE = b"[orchestrator]\nbatch_size = 16\ngroup_size = 4\n[trainer.optim]\nlr = 3e-6\n"


@pytest.fixture
def controller(checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Controller:
    monkeypatch.setattr(prime_rl, "examine", lambda *arguments: [])  # the stand-in is no installation that passes
    installation = stand_in_prime_rl.installation(tmp_path)
    timing = Timing(RULES.startup_seconds, hang_seconds=HANG_SECONDS, grace_seconds=1.0, poll_seconds=0.05)
    monkeypatch.setattr(PrimeRlEngine, "timing", timing)
    monkeypatch.setattr("nightshift.engines.prime_rl.served.READER", [str(installation.bin_dir / "reader.py")])
    engine = PrimeRlEngine(RULES, checkout, dict(os.environ), "none")
    engine.installation = installation
    (checkout / "train.toml").write_bytes(b"max_steps = 10\n" + SOURCE)
    git(checkout, "commit", "--quiet", "--all", "-m", "baseline config")
    return make_controller(checkout, RULES, monkeypatch, engine=engine)


def run_with(controller: Controller, fault: str | None) -> Record:
    assert isinstance(controller.bench.engine, PrimeRlEngine)
    stand_in_prime_rl.misbehave(controller.bench.engine.installation.bin_dir.parent, fault)
    controller.run(Request())
    (record,) = controller.ledger.records()
    assert living_children() == []
    return record


def test_a_measured_experiment(controller: Controller) -> None:
    record = run_with(controller, None)
    assert (record.status, record.engine, record.hardware) == ("keep", "prime-rl", NO_GPU)
    run = record.result
    assert run is not None
    assert run.evaluation.weights.step == run.training.num_steps == 10
    assert (controller.ledger.run_dir(1) / "model" / "model.safetensors").is_file()
    proof = (record.health or "").splitlines()[0]
    assert proof.startswith("served = file: 0.0000 nats a token from the file, 0.")
    assert f"\nhealth:           {proof}\n" in summary(record)
    page = render(view_of(controller.ledger, controller.now()))
    assert proof in page


@pytest.mark.parametrize(
    ("fault", "failure", "cause"),
    [
        ("config_refused", Failure.CONFIG, "train.toml:6: trainer.optim.lr"),
        ("chat_500", Failure.INFRASTRUCTURE, "500"),
        ("serves_the_start", Failure.INFRASTRUCTURE, "the server did not serve the file: its log-probabilities are 0."),
        ("swapped_after_scoring", Failure.INFRASTRUCTURE, "the server's weights after the scoring are not those"),
    ],
)
def test_a_failed_experiment_is_a_record_with_its_cause(
    controller: Controller, fault: str, failure: Failure, cause: str
) -> None:
    root = controller.bench.root
    before = (root / "train.toml").read_bytes(), git(root, "rev-parse", "HEAD")
    record = run_with(controller, fault)
    assert (record.status, record.failure) == ("crash", failure)
    assert (record.decided is None) is (failure is Failure.INFRASTRUCTURE)
    assert ((root / "train.toml").read_bytes(), git(root, "rev-parse", "HEAD")) == before
    assert cause in record.judgement.why
    assert "incumbent" not in record.judgement.why, "a baseline has none whose start tells whose fault it is"
    assert list(controller.ledger.run_dir(1).glob("**/*.safetensors")) == []


def trains(checkout: Path, process: subprocess.Popen[str]) -> bool:
    steps = checkout.glob("runs/0001/prime-rl/broadcasts/step_*/STABLE")
    return any(path.parent.name not in ("step_0", "step_1") for path in steps)  # an old one is soon deleted


def proves(checkout: Path, process: subprocess.Popen[str]) -> bool:
    found = (p.info for p in psutil.process_iter(["ppid", "cmdline"]))
    return any(info["ppid"] == process.pid and "reader" in (info["cmdline"] or ()) for info in found)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize(("moment", "max_steps"), [(trains, b""), (proves, b"max_steps = 2\n")])
def test_a_killed_controller_leaves_no_process_and_no_verdict(checkout, tmp_path, moment, max_steps, number):
    furnish(checkout, max_steps + SOURCE)
    made = stand_in_prime_rl.installation(tmp_path / "installation")
    stand_in_prime_rl.misbehave(made.bin_dir.parent, "reader_hangs")
    before = git(checkout, "rev-parse", "HEAD"), (checkout / "train.toml").read_bytes()
    process = start_run(checkout, "--stand-in", f"prime-rl:{tmp_path / 'installation'}")

    def has_come() -> bool:
        assert process.poll() is None, process.communicate()
        return moment(checkout, process)

    wait_for(has_come)
    process.send_signal(number)
    process.communicate()
    wait_for(lambda: not leftovers(checkout))
    status = Ledger(checkout).records()[0].status
    assert (status == "started") == (number == signal.SIGKILL), "the next start closes it"
    resume(Ledger(checkout), Repo(checkout), print)
    record = Ledger(checkout).read(1)
    assert record is not None
    assert (record.status, record.failure, record.decided) == ("crash", Failure.INTERRUPTED, None)
    assert (git(checkout, "rev-parse", "HEAD"), (checkout / "train.toml").read_bytes()) == before
    assert list((checkout / "runs").glob("**/*.safetensors")) == []
    assert process.returncode == (130 if number == signal.SIGTERM else -9)


@pytest.mark.slow
@pytest.mark.parametrize("is_shared", [False, True])
def test_only_a_run_that_shares_the_network_can_be_reached_from_outside(checkout, tmp_path, is_shared):
    if problem := network.problem():
        pytest.skip(problem)
    furnish(checkout, b"max_steps = 100\n" + SOURCE)
    (checkout / "machine.toml").write_text(f"share_network = {str(is_shared).lower()}\n")
    stand_in_prime_rl.installation(tmp_path / "installation")
    process = start_run(checkout, "--stand-in", f"prime-rl:{tmp_path / 'installation'}")
    wait_for(lambda: trains(checkout, process))
    port = json.loads((checkout / "runs/0001/rl.json").read_text())["inference"]["server"]["port"]
    with socket.socket() as outside:
        assert (outside.connect_ex(("127.0.0.1", port)) == 0) == is_shared
    code, _, stderr = finish(process)
    assert code == 0, stderr
    (record,) = Ledger(checkout).records()
    assert record.result.versions["network"] == ("shared" if is_shared else "namespace of its own")
    assert ("SECURITY.md): machine.toml has share_network = true" in stderr) == is_shared
    assert leftovers(checkout) == []


def test_a_machine_without_gpus_is_told_so_in_a_line(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real front door: nothing is installed, nothing is downloaded."""
    (checkout / "train.toml").write_bytes(SOURCE)
    git(checkout, "commit", "--quiet", "--all", "-m", "baseline config")
    (checkout / "pyproject.toml").symlink_to(ROOT / "pyproject.toml")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("NIGHTSHIFT_PRIME_RL", str(checkout / "nowhere"))
    flags = ("--stand-in", "real", "--engine", "prime-rl")
    code, stdout, stderr = finish(start_run(checkout, *flags))
    assert (code, stdout, len(stderr.splitlines())) == (2, "", 1)
    assert all(words in stderr for words in ("this machine has 0", "needs 2 NVIDIA GPUs", "--engine trl"))
    (checkout / "prime-rl").mkdir()
    code, stdout, stderr = finish(start_run(checkout, *flags, "--dry-run", "--verbose", "--prime-rl", "prime-rl"))
    assert code == 2, stderr
    assert "missing:  a run needs 2 NVIDIA GPUs" in stdout
    assert f"\nmissing:  prime-rl is not installed in {checkout / 'prime-rl'}" in stdout
    assert not (checkout / "runs").exists()
