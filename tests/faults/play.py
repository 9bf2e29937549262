"""One fault played: struck in a fresh checkout, set right as a person would, and followed by the next experiment."""

import json
import signal
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tests import integrity
from tests.faults import actions, head, scenario
from tests.faults.matrix import EVENTS, Fault
from tests.faults.plan import Plan

HANG_DEADLINE_SECONDS = 3.0

Row = dict[str, Any]
Codes = list[int | None]


def play(fault: Fault, slot: Path, templates: Path) -> Row:
    """One fault, from a fresh checkout to the next experiment; its row."""
    root = slot / "checkout"
    scenario.set_up(fault.scenario, templates, root)
    codes, is_struck = _strike(fault, root, slot / "struck")
    all_gone = scenario.wait_until_gone(root)
    said = (root.parent / "stderr").read_text()
    found = [f"exit code {code}" for code in codes if code not in _expected(fault, is_struck)]
    found += ["a traceback"] if "\nTraceback" in f"\n{said}" else []  # not in the indented last lines of a log
    found += ["it hung"] if None in codes else []
    found += [f"processes were left: {fault.failure}"] if not all_gone else []
    if fault.family == "git state changed" and is_struck:
        actions.restore_git(root, fault.failure)
    foreign = "committed" in f"{fault.scenario}, {fault.failure}"  # by somebody else, to the branch
    found += scenario.next_experiment(root, fault.scenario) + integrity.problems(root, foreign=foreign)
    found += scenario.wrong_scores(root)
    return asdict(fault) | {"struck": is_struck, "problems": found + said.splitlines()[-1:] if found else []}


def _strike(fault: Fault, root: Path, struck: Path) -> tuple[Codes, bool]:
    """Run the experiment with the fault in it: exit codes of the run.py, and whether the moment came."""
    struck.unlink(missing_ok=True)
    flags, plan = scenario.flags_of(fault.scenario), Plan()
    if fault.moment == "before":
        actions.change_git(root, fault.failure)
        return [head.complete(root, flags)], True
    if "hangs" in fault.family:
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
        scenario.wait_until_gone(root)
        codes.append(head.complete(root, flags, Plan(last=int(fault.failure.split()[5]))))
    return codes, struck.exists()


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
