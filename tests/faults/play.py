"""One fault played: struck in a fresh checkout, set right as a person would, and followed by the next experiment."""

import json
import signal
import socket
import subprocess
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec

from nightshift.campaign.ledger import Ledger
from nightshift.campaign.records import JOB_NAME, Job, Result
from nightshift.engines.prime_rl.launch import free_ports
from nightshift.errors import EngineError
from nightshift.executors.result import read_result
from tests import integrity
from tests.faults import actions, head, outside, scenario
from tests.faults.matrix import EVENTS, IN_THE_WORLD, REAL, Fault
from tests.faults.plan import Plan

DISK_SIZE = "300m"  # the engine asks for 200 MB
HANG_DEADLINE_SECONDS = 3.0
PRIME_RL_DEADLINE_SECONDS = 30.0

Row = dict[str, Any]
Codes = list[int | None]


def play(fault: Fault, slot: Path, templates: Path) -> Row:
    """One fault, from a fresh checkout to the next experiment; its row."""
    began = time.monotonic()
    disk = _mounted(slot / "disk") if fault.family == "disk full" else None
    if fault.family == "disk full" and disk is None:
        return asdict(fault) | {"skipped": "mounting a small file system needs root"}
    root = (disk or slot) / "checkout"
    scenario.set_up(fault.scenario, templates, root)
    codes, is_struck = _strike(fault, root, slot / "struck")
    gone_seconds = scenario.seconds_until_gone(root)
    said = (root.parent / "stderr").read_text()
    found = [f"exit code {code}" for code in codes if code not in _expected(fault, is_struck)]
    found += ["a traceback"] if "Traceback" in said else []
    found += ["it hung"] if None in codes else []
    found += [f"processes were left: {fault.failure}"] if gone_seconds is None else []
    if fault.family == "result forged" and is_struck:
        found += _believed(fault, root)
    if fault.family in IN_THE_WORLD and is_struck:
        actions.undo(fault, root)
    told, after = scenario.next_experiment(root, fault.scenario)
    # verify names a file that was damaged, and a job.json that was edited after its worker had read it.
    is_named = fault.victim.startswith("runs/") or fault.victim == "job of another config"
    gaps = is_named or "move the damaged record away" in told
    foreign = "committed" in f"{fault.scenario}, {fault.failure}"  # by somebody else, to the branch
    found += after + integrity.problems(root, gaps=gaps, foreign=foreign)
    found += scenario.wrong_scores(root) if fault.family != REAL else []
    return asdict(fault) | {
        "struck": is_struck,
        "exit_codes": codes,
        "told": told,
        "problems": found,
        "said": said.splitlines()[-1:] if found else [],
        "gone_seconds": gone_seconds,
        "seconds": time.monotonic() - began,
    }


def _strike(fault: Fault, root: Path, struck: Path) -> tuple[Codes, bool]:
    """Run the experiment with the fault in it: exit codes of the run.py, and whether the moment came."""
    struck.unlink(missing_ok=True)
    flags, plan = scenario.flags_of(fault.scenario), Plan()
    if fault.family == "two run.py at once":
        pids = [head.start(root, flags)]
        time.sleep(float(fault.failure.split()[1]))
        pids += [head.start(root, flags, output=name) for name in ("-2", "-3")]
        return [head.finish(pid) for pid in pids], True
    if fault.family == REAL:
        pid = head.launch(root, flags)
        is_struck = outside.strike(fault, root, pid)
        return [head.finish(pid, head.REAL_TAKES_SECONDS)], is_struck
    if fault.scenario == "prime-rl":
        plan = replace(plan, deadline_seconds=PRIME_RL_DEADLINE_SECONDS)
    if fault.family.startswith("prime-rl"):
        return _strike_prime_rl(fault, root, plan)
    if fault.moment == "before":
        is_struck = actions.do(fault, root)
        return [head.complete(root, flags)], is_struck
    if "hangs" in fault.family or fault.failure == "closed pipe":
        plan = replace(plan, deadline_seconds=HANG_DEADLINE_SECONDS)
    if fault.moment in EVENTS:
        order = {"event": fault.moment, "victim": fault.victim, "failure": fault.failure}
        (root / "fault.json").write_text(json.dumps(order))
        code = head.complete(root, flags, plan)
        is_struck = not (root / "fault.json").exists()
        (root / "fault.json").unlink(missing_ok=True)
        return [code], is_struck
    codes = [head.complete(root, flags, replace(plan, fault=fault, struck=str(struck)))]
    if fault.family == "run.py killed twice":
        scenario.seconds_until_gone(root)
        codes.append(head.complete(root, flags, Plan(last=int(fault.failure.split()[5]))))
    return codes, struck.exists()


def _strike_prime_rl(fault: Fault, root: Path, plan: Plan) -> tuple[Codes, bool]:
    """Stand-in programs that misbehave, that get a signal, or whose port is taken."""
    flags = scenario.flags_of(fault.scenario)
    if fault.victim == "stand-in programs":
        scenario.install_prime_rl(root, fault.failure, int(fault.moment.split()[1]))
        codes = [head.complete(root, flags, plan)]
        scenario.install_prime_rl(root)
        return codes, True
    if fault.family == "prime-rl port taken":
        ports = free_ports()
        with socket.create_server(("127.0.0.1", getattr(ports, fault.failure))):
            return [head.complete(root, flags, replace(plan, ports=ports))], True
    pid = head.start(root, flags, plan)
    is_struck = outside.strike(fault, root, pid)
    return [head.finish(pid)], is_struck


def _expected(fault: Fault, is_struck: bool) -> set[int]:
    """Exit codes that a fault may lead to: 0 to 2 as documented, 130 if asked to stop, minus the signal if killed."""
    name = fault.failure.partition(",")[0]
    is_at_run = "run.py" in fault.victim and name.startswith("SIG") and name != "SIGSTOP"
    if not is_struck or not is_at_run:
        return {0, 1, 2}
    number = -int(signal.Signals[name])
    if name in ("SIGTERM", "SIGINT", "SIGHUP"):
        return {130, number}  # the signal itself where nothing is under way: in the last line of the summary
    return {0, 1, 2, number} if fault.family == "run.py killed twice" else {number}


def _left(root: Path, number: int) -> Result | None:
    """The result that the worker of an experiment left, as it lies there; None for anything else."""
    folder = Ledger(root).run_dir(number)
    try:
        return read_result(folder, msgspec.json.decode((folder / JOB_NAME).read_bytes(), type=Job))
    except (EngineError, FileNotFoundError):
        return None


def _believed(fault: Fault, root: Path) -> list[str]:
    """What is wrong with the verdict on a run whose result was forged: it must be a crash that names the file.

    Or it changes nothing, and the score is the honest one: of a job that the worker has read, of what it writes its own
    result over a moment later.
    """
    record = scenario.readable(root)[-1]
    why = record.judgement.why if record.judgement else "no verdict"
    is_named = record.failure == "machinery" and "/result.json" in why
    is_unread = fault.victim == "job of another config" and record.failure is None
    is_honest = record.failure is None and record.result == _left(root, record.number)
    return [] if is_named or is_unread or is_honest else [f"not named: {record.status}, {why}"]


def _mounted(folder: Path) -> Path | None:
    """An empty file system of 300 MB at `folder`; None where that is not allowed."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["umount", "-l", str(folder)], capture_output=True, check=False)
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_SIZE}", "tmpfs", str(folder)]
    return folder if subprocess.run(command, capture_output=True, check=False).returncode == 0 else None
