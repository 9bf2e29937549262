"""A driven night on the real engine, killed by SIGKILL at random moments and resumed: is anything lost, doubled or
half done? That it decides as an unbroken night does is tested in tests/integration/test_night.py.

    uv run --group dev pytest -n 0 -s -m slow tests/faults/test_night_kill.py       half an hour
"""

from __future__ import annotations

import json
import random
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nightshift.campaign.ledger import Ledger
from nightshift.night import state
from tests.checkouts import ROOT, clone, leftovers, wait_for
from tests.night_checkout import problems

NUM_EXPERIMENTS, NUM_KILLS = 20, 5
FLAGS = ("--agent-timeout=20", "--engine=trl", f"--experiments={NUM_EXPERIMENTS}", "--budget-seconds=5")
FLAGS += ("--sandbox=none",)  # its misbehaviour reaches past the clone
WITHIN_SECONDS = 15.0  # a kill comes so long after an experiment, at most
GOOD = ["edit", "answer"]
# Of tests/stand_in_agent.py, which does what agents must not do.
MISBEHAVIOUR = [
    *([*GOOD, "other files"], ["invalid"], ["repeat"], ["hang"], GOOD, ["exit 1"], [*GOOD, "50 MB"]),
    *([*GOOD, "delete .git"], ["link"], ["fifo"], ["device"], GOOD, [*GOOD, "commit"], [*GOOD, "results.tsv"]),
    *([*GOOD, "grandchild"], ["huge"], [*GOOD, "real train.toml"], [*GOOD, "real results.tsv"]),
]


def night(root: Path, agent: str) -> subprocess.Popen[bytes]:
    command = [str(Path(sys.executable).with_name("nightshift")), "night", f"--agent={agent}", *FLAGS]
    with (root.parent / "night.log").open("ab") as log:
        return subprocess.Popen(command, cwd=root, stdout=log, stderr=log)


def misbehaving(root: Path) -> str:
    """The command of the stand-in agent, with its script beside the clone."""
    script = root.parent / "agent" / "script.json"
    script.parent.mkdir()
    script.write_text(json.dumps({"checkout": str(root), "steps": MISBEHAVIOUR}))
    return shlex.join([sys.executable, str(ROOT / "tests" / "stand_in_agent.py"), str(script)])


@pytest.mark.slow
@pytest.mark.timeout(3 * 3600)
@pytest.mark.parametrize("agent_of", [lambda root: "tpe", misbehaving], ids=["tpe", "misbehaving"])
def test_a_night_that_is_killed_again_and_again(tmp_path: Path, agent_of: object) -> None:
    root = clone(tmp_path / "clone", "autoresearch/kill")
    agent, draws, ledger = agent_of(root), random.Random(0), Ledger(root)  # type: ignore[operator]
    for target in sorted(draws.sample(range(NUM_EXPERIMENTS - 2), NUM_KILLS)):
        process = night(root, agent)
        while len(state.decided(ledger.records())) < target and process.poll() is None:
            time.sleep(0.5)
        time.sleep(draws.uniform(0.5, WITHIN_SECONDS))
        assert process.poll() is None, (root.parent / "night.log").read_text()[-2000:]
        process.kill()
        process.wait()
        print(f"killed after {target} experiments", file=sys.stderr)
        assert wait_for(lambda: not leftovers(root), within_seconds=60), leftovers(root)
    assert night(root, agent).wait() == 0, (root.parent / "night.log").read_text()[-2000:]
    assert problems(root) == []
    assert len(state.decided(ledger.records())) == NUM_EXPERIMENTS
    for record in ledger.records():
        print(f"{record.number:04d}: {record.proposal.notes}", file=sys.stderr)
