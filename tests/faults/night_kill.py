"""A driven night that is killed with SIGKILL at random moments and resumed: is anything lost, doubled or half done?

    uv run python -m tests.faults.night_kill --folder FOLDER --experiments 20 --kills 5 --budget-seconds 5

Runs `nightshift night --agent tpe` with the real trl engine in a throw-away clone. Afterwards checks ledger,
results.tsv and branch, and asks TPE again, from the ledger before each experiment, for its proposal: it must be
the one that was run, as in a night that nobody killed.

With --misbehave the agent is tests/stand_in_agent.py, which does what agents must not do; what the records name of
it is printed.
"""

from __future__ import annotations

import json
import random
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click

from nightshift import console
from nightshift.campaign.ledger import Ledger
from nightshift.engines import used_keys
from nightshift.night import state as states
from nightshift.night.loop import MAX_RETURNS, PROPOSAL_NAME
from nightshift.proposers import Context
from nightshift.proposers.search import TpeProposer
from nightshift.train_toml.config import parse
from tests.checkouts import ROOT, clone, leftovers, wait_for
from tests.night_checkout import problems

BRANCH = "autoresearch/kill"
GOOD = ["edit", "answer"]
MISBEHAVIOUR = [
    *([*GOOD, "other files"], ["invalid"], ["repeat"], ["hang"], GOOD, ["exit 1"], [*GOOD, "50 MB"]),
    *([*GOOD, "delete .git"], ["link"], ["fifo"], ["device"], GOOD, [*GOOD, "commit"], [*GOOD, "results.tsv"]),
    *([*GOOD, "grandchild"], ["huge"], [*GOOD, "real train.toml"], [*GOOD, "real results.tsv"]),
]


def night(folder: Path, flags: Sequence[str]) -> subprocess.Popen[bytes]:
    command = [str(Path(sys.executable).with_name("nightshift")), "night", *flags]
    with (folder.parent / f"{folder.name}.log").open("ab") as log:
        return subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)


def drive(folder: Path, flags: Sequence[str], targets: Sequence[int], within_seconds: float, seed: int) -> None:
    """Kill at a random moment after each target, a number of decided experiments; resume, and so on to the end."""
    draws, ledger = random.Random(seed), Ledger(folder)
    for index, target in enumerate(targets, start=1):
        process = night(folder, flags)
        while len(states.decided(ledger.records())) < target and process.poll() is None:
            time.sleep(0.5)
        time.sleep(draws.uniform(0.5, within_seconds))
        if process.poll() is not None:
            sys.exit(f"the night ended with {process.returncode} before kill {index}: see {folder}.log")
        state = states.load(ledger)
        process.kill()
        process.wait()
        began = time.monotonic()
        if not wait_for(lambda: not leftovers(folder), within_seconds=60):
            sys.exit(f"left running after kill {index}: {leftovers(folder)}")
        doing = state.doing[:60] if state is not None and state.doing else "starting"
        print(f"kill {index}: {doing}; every process gone after {time.monotonic() - began:.1f} s", flush=True)
    if night(folder, flags).wait() != 0:
        sys.exit(f"the resumed night failed: see {folder}.log")


def foreign_proposals(folder: Path, budget_seconds: float, seed: int) -> list[str]:
    """Decided experiments that TPE would not have proposed from the ledger before them."""
    lab = open_lab(folder, "trl", budget_seconds, console.TerminalReporter(Ledger(folder).run_dir))
    decided = states.decided(lab.ledger.records())
    found = []
    for index, record in enumerate(decided):
        if record.parent is None:
            continue
        before = tuple(replace(r, lesson=None) for r in decided[:index])
        incumbent = [r for r in before if r.status == "keep"][-1]
        source = lab.ledger.source(incumbent.number)
        used = used_keys(lab.engine, parse(source))
        context = Context(record.number, incumbent, source, before, lab.rules, lab.ledger, used)
        proposer = TpeProposer(seed)
        proposed = [
            proposer.propose(replace(context, refusals=("",) * attempt), lambda: False).source
            for attempt in range(MAX_RETURNS + 1)
        ]
        if lab.ledger.source(record.number) not in proposed:
            found.append(f"{record.number:04d} is not what TPE proposes from the experiments before it")
    return found


def misbehaving(folder: Path) -> str:
    """The command of the stand-in agent, with its script beside the clone."""
    script = folder.parent / f"{folder.name}-agent" / "script.json"
    script.parent.mkdir()
    script.write_text(json.dumps({"checkout": str(folder), "steps": MISBEHAVIOUR}))
    return shlex.join([sys.executable, str(ROOT / "tests" / "stand_in_agent.py"), str(script)])


@click.command(help=__doc__)
@click.option("--folder", type=click.Path(path_type=Path), required=True, help="Where the clone will live.")
@click.option("--experiments", default=20, show_default=True)
@click.option("--kills", default=5, show_default=True)
@click.option("--budget-seconds", default=5.0, show_default=True)
@click.option("--within-seconds", default=15.0, show_default=True, help="A kill comes so long after an experiment.")
@click.option("--misbehave", is_flag=True, help="Not TPE, but the stand-in agent that misbehaves.")
@click.option("--seed", default=0, show_default=True)
def main(
    folder: Path, experiments: int, kills: int, budget_seconds: float, within_seconds: float, misbehave: bool, seed: int
) -> None:
    """Kill, resume, check, print."""
    folder = clone(folder.resolve(), BRANCH)
    agent = misbehaving(folder) if misbehave else "tpe"
    flags = (f"--agent={agent}", "--agent-timeout=20", "--engine=trl", f"--experiments={experiments}")
    began = time.monotonic()
    targets = sorted(random.Random(seed).sample(range(experiments - 2), kills))
    drive(folder, (*flags, f"--budget-seconds={budget_seconds}", f"--seed={seed}"), targets, within_seconds, seed)
    records = Ledger(folder).records()
    wrong = problems(folder) + ([] if misbehave else foreign_proposals(folder, budget_seconds, seed))
    for record in records if misbehave else ():
        for note in json.loads((folder / "runs" / f"{record.number:04d}" / PROPOSAL_NAME).read_text())["notes"]:
            print(f"{record.number:04d}: {note}")
    decided = states.decided(records)
    figures = {
        "kills": kills,
        "decided": len(decided),
        "kept": sum(r.status == "keep" for r in decided),
        "interrupted": sum(r.failure == "interrupted" for r in records),
        "minutes": round((time.monotonic() - began) / 60, 1),
        "problems": wrong,
    }
    print(json.dumps(figures, indent=1))
    sys.exit(1 if wrong or len(decided) != experiments else 0)


if __name__ == "__main__":
    main()
