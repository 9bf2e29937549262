"""Runs as jobs of a real SLURM, two nodes on this machine, with the stand-in trainer."""

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from nightshift.campaign.records import CERTIFY_NAME, Request
from nightshift.errors import EngineError, Failure, UsageError
from nightshift.executors import slurm
from nightshift.executors.slurm import SlurmExecutor, read
from nightshift.experiment.experiment import open_controller
from tests import slurm_cluster, stand_ins
from tests.checkouts import ROOT
from tests.night_checkout import finish, furnish, leftovers, nightshift, problems, records, start
from tests.slurm_cluster import CONFIG, Cluster
from tests.stand_in_controller import SilentReporter
from tests.stand_in_pool import Case
from tests.stand_ins import fault
from tests.waiting import wait_for

cluster = slurm_cluster.cluster
pytestmark = [pytest.mark.skipif(slurm_cluster.missing() is not None, reason=str(slurm_cluster.missing()))]


@pytest.fixture
def root(checkout: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("SLURM_CONF", str(cluster.conf))
    furnish(checkout)
    (checkout.parent / "slurm.toml").write_text(
        "pairs = 4\ngpus = 0\ncpus_per_run = 2\nmem_gb = 2\ntime_minutes = 20\n"
    )
    yield checkout
    for process in leftovers(checkout):
        process.kill()
    cluster.ask("scancel", "--user=root")
    cluster.calm_nodes()  # a controller that forgot a job drains the node that still ran it


@pytest.fixture
def case(root: Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    stand_ins.install("trl")
    monkeypatch.setattr(slurm, "RESULT_SECONDS", 5.0)
    return Case(SlurmExecutor(root, dict(os.environ), CONFIG), root)


@pytest.mark.slow
def test_slots_hold_no_more_and_gpus_are_their_own_and_no_secret_is_in_a_job(root, cluster, monkeypatch, case):
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    fault(root, "hold", once=False)
    case.executor.environ = dict(os.environ)
    folders = [case.submit(number, seed=number) for number in range(1, 6)]
    wait_for(lambda: len([*(root / "runs").glob("*/metrics.jsonl")]) == 4)
    cluster.wait_until(lambda: "Resources" in cluster.ask("squeue", "-h", "-o", "%r"))  # the fifth was refused a place
    states = cluster.ask("squeue", "-h", "-o", "%T").split()
    assert sorted(states) == ["PENDING", *["RUNNING"] * 4]
    running = [p for p in leftovers(root) if p.cmdline()[-1] in map(str, folders)]
    seen = [(p.environ()["SLURMD_NODENAME"], p.environ()["CUDA_VISIBLE_DEVICES"]) for p in running]
    assert sorted(seen) == [("n1", "0,1"), ("n1", "2,3"), ("n2", "0,1"), ("n2", "2,3")]
    assert not any("secret" in p.environ().values() for p in running)
    number = cluster.ask("squeue", "-h", "-t", "RUNNING", "-o", "%i").split()[0]
    assert "secret" not in cluster.ask("scontrol", "write", "batch_script", number, "-")
    (root / "stand-in.json").unlink()
    for folder in folders:
        case.until_over(folder)
        result = case.executor.result(folder)
        assert result.evaluation


@pytest.mark.slow
def test_a_node_that_is_lost_is_noticed_and_named_and_gets_no_job(root: Path, cluster: Cluster, case: Case) -> None:
    fault(root, "hold", once=False)
    folder = case.submit()
    cluster.wait_until(lambda: any(folder.glob("metrics.jsonl")))  # or it says why
    node = cluster.ask("squeue", "-h", "-o", "%N").strip()
    cluster.kill(f"slurmd-{node}")
    case.until_over(folder)
    with pytest.raises(EngineError, match=f"NODE_FAIL.*node {node}"):
        case.executor.result(folder)
    assert case.executor.place(folder) == node
    for process in leftovers(root):
        process.kill()
    cluster.start_node(node)
    cluster.wait_until(lambda: cluster.ask("sinfo", "-h", "-o", "%T").split() == ["idle"])
    (root / "stand-in.json").unlink()
    case.executor.avoided = {node}
    folder = case.submit(2)
    case.until_over(folder)
    assert case.executor.result(folder).slot == {"n1": "n2", "n2": "n1"}[node]


@pytest.mark.slow
def test_a_preempted_job_is_interrupted_and_no_failure_of_the_infrastructure(root, cluster, case) -> None:
    fault(root, "hold", once=False)
    folder = case.submit()
    cluster.wait_until(lambda: any(folder.glob("metrics.jsonl")))
    cluster.ask("sbatch", "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")
    case.until_over(folder)
    with pytest.raises(EngineError, match=r"PREEMPTED") as error:
        case.executor.result(folder)
    assert error.value.failure is Failure.INTERRUPTED


@pytest.mark.slow
def test_a_night_runs_as_a_job_of_its_own_once_and_keeps_a_secret(root: Path, cluster: Cluster) -> None:
    """A night that is refused at its start, which its log shows: what follows is the same as everywhere."""
    config = root.parent / "slurm.toml"
    config.write_text(config.read_text() + "controller_minutes = 9\n")
    asked = ("night", "--slurm", str(config), "--agent", "tpe", "--hours", "0.1")
    cluster.ask("scontrol", "update", "nodename=n[1-2]", "state=drain", "reason=test")
    code, stdout, stderr = nightshift(root, *asked, "--notify", "echo s3cret", "--controller-job")
    assert code == 0, stderr
    name, number, limit = cluster.ask("squeue", "-h", "-o", "%j %i %l").split()
    assert f"job {name} runs the night" in stdout
    assert limit == "9:00"
    assert "s3cret" not in cluster.ask("scontrol", "write", "batch_script", number, "-")
    code, _, stderr = nightshift(root, *asked, "--controller-job")
    assert (code, f"job {name} runs the controller of this checkout already" in stderr) == (2, True)
    (root / "STOP").touch()
    cluster.calm_nodes()
    log = root / "runs" / "detached.log"
    wait_for(lambda: log.exists() and "the file STOP is still in the checkout" in log.read_text())
    cluster.wait_until(lambda: cluster.ask("squeue", "-h") == "")
    assert nightshift(root, *asked, "--controller-job")[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize("is_sent", [False, True])
def test_a_night_that_is_killed_while_sbatch_is_called_loses_no_job_and_doubles_none(
    root, cluster, is_sent, monkeypatch
):
    """A stand-in for sbatch kills the controller, which is the process that calls it, once."""
    config = root.parent / "slurm.toml"
    config.write_text(config.read_text() + f'setup = ["echo $SLURM_JOB_NAME >> {root.parent}/starts"]\n')
    asked = {"agent": "lr", "proposer": "lr", "slurm": str(config)}
    assert finish(start(root, **asked, experiments=1))[0] == 0
    programs = root.parent / "programs"
    programs.mkdir()
    killer = programs / "sbatch"
    killer.write_text(
        '#!/bin/sh\ncase "$*" in *--test-only*) exec /usr/bin/sbatch "$@";; esac\nmv "$0" "$0.used"\n'
        + ('/usr/bin/sbatch "$@"\n' if is_sent else "")
        + "kill -9 $PPID\n"
    )
    killer.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    code, _, stderr = finish(start(root, **asked, experiments=3))
    assert code == -signal.SIGKILL, stderr
    code, _, stderr = finish(start(root, **asked, experiments=3))
    assert code == 0, stderr
    names = (root.parent / "starts").read_text().split()
    assert len(names) == len(set(names)), "a job was started twice"
    ours = records(root)
    assert len([r for r in ours if r.decided]) == 4
    assert len(ours) == 4
    assert len(names) == 4, "a job ran and was not collected"
    assert problems(root) == []
    assert cluster.ask("squeue", "-h") == ""


@pytest.mark.slow
def test_what_a_night_left_on_a_cluster_is_named_and_cancelled(root: Path, cluster: Cluster) -> None:
    """A night was killed while two jobs of its certificate trained."""
    folder = root / "runs" / CERTIFY_NAME
    folder.mkdir(parents=True)
    fault(folder, "hold", once=False)
    config = str(root.parent / "slurm.toml")
    night = start(root, agent="lr", proposer="lr", experiments=4, certify=1, slurm=config)
    wait_for(lambda: len([*folder.glob("*/*/metrics.jsonl")]) == 2)
    night.kill()
    night.communicate()
    (folder / "stand-in.json").unlink()
    assert nightshift(root, "status")[1].count(" is the SLURM job nightshift-") == 2
    assert nightshift(root, "night", "--stop")[0] == 0
    cluster.wait_until(lambda: cluster.ask("squeue", "-h") == "")
    wait_for(lambda: not leftovers(root))
    assert [*folder.glob("*/*/job.json")] == []  # a new start waits for none of them


@pytest.mark.slow
def test_doctor_runs_on_a_node(root: Path, cluster: Cluster) -> None:
    (root / "pyproject.toml").symlink_to(ROOT / "pyproject.toml")
    config = str(root.parent / "slurm.toml")
    code, stdout, stderr = nightshift(root, "doctor", "--slurm", config)
    assert code == 0, stderr
    first, *_, last = stdout.splitlines()
    assert re.fullmatch(r"node:     n[12], answered after \d+\.\d s", first)
    assert last == "ready: --engine trl (arithmetic-trl), which this machine would use"
    assert cluster.ask("squeue", "-h") == ""
    assert [*(root / "runs").iterdir()] == []
    (root.parent / "slurm.toml").write_text(Path(config).read_text() + 'partition = "nowhere"\n')
    code, stdout, stderr = nightshift(root, "doctor", "--slurm", config)
    assert (code, stdout) == (2, "")
    assert "invalid partition specified: nowhere" in stderr


SIZES = "pairs = 4\ngpus = 2\ncpus_per_run = 16\nmem_gb = 128\ntime_minutes = 60\n"


def test_options_that_nightshift_does_not_set_are_passed_on(tmp_path: Path) -> None:
    path = tmp_path / "slurm.toml"
    options = ("--qos=high", "--container-image=x", "--mem-per-gpu=1G", "--exclude=n9", "-x n8")
    path.write_text(f"{SIZES}sbatch = {[*options]}")
    assert read(path).sbatch == options
    assert read(path).layout == replace(read(path), mem_gb=1).layout


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "missing required field `pairs`"),
        (SIZES + 'sbatch = ["--mem=1G"]', "Nightshift itself sets the option --mem=1G of sbatch"),
        (SIZES + 'sbatch = ["--part=cpu"]', "sets the option --part=cpu of"),
    ],
)
def test_a_slurm_toml_that_says_something_else_is_one_line(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "slurm.toml"
    path.write_text(text)
    with pytest.raises(UsageError) as error:
        read(path)
    assert told in str(error.value)
    assert "Its keys: pairs, gpus, cpus_per_run, mem_gb, time_minutes" in str(error.value)


def test_a_job_with_fewer_gpus_than_a_run_uses_is_refused(checkout: Path) -> None:
    (checkout / "pyproject.toml").write_bytes((ROOT / "pyproject.toml").read_bytes())
    (checkout / "rules.toml").unlink()
    (checkout / "rules.toml").write_text('environments = ["arithmetic"]\ntrain_gpus = 3\n')
    path = checkout.parent / "slurm.toml"
    path.write_text(SIZES)
    cause = r"slurm.toml: gpus = 2, and a run of arithmetic-prime-rl needs 4\. Write 4 or more\.$"
    with pytest.raises(UsageError, match=cause):
        open_controller(checkout, Request(slurm=path), SilentReporter())
