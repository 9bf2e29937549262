"""Coding agents that misbehave: the night goes on, the record names it, harness and history stay as they were."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from nightshift.agents.brief import MAX_CHARACTERS
from nightshift.campaign.waits import FILL
from tests.conftest import git
from tests.night_checkout import good_night, nightshift, records, state
from tests.waiting import HANG_SECONDS

AGENT = Path(__file__).parents[1] / "stand_in_agent.py"
LIMIT_SECONDS = 10 * HANG_SECONDS  # of an agent; one that hangs is given up at once


def script(root: Path, steps: list[list[str]]) -> Path:
    folder = root.parent / "agent"
    folder.mkdir(exist_ok=True)
    path = folder / "script.json"
    path.write_text(json.dumps(steps))
    return path


def drive(root: Path, steps: list[list[str]], **asked: Any) -> tuple[str, str]:
    command = shlex.join([sys.executable, str(AGENT), str(script(root, steps))])
    leaps = str(root.parent / "agent")
    asked = {"sandbox": "none", **asked}  # test_in_sandbox.py and test_other_user.py have the others
    return good_night(root, agent=command, agent_timeout_seconds=LIMIT_SECONDS, leaps=leaps, **asked)


def notes(root: Path, number: int) -> str:
    proposal = records(root)[number - 1].proposal
    assert proposal.is_isolated == (number == 1)  # whoever reads the record knows what could have been written
    return "\n".join(proposal.notes)


def kept_by_agent(root: Path, call: int, kind: str) -> str:
    return (root.parent / "agent" / f"script.{kind}-{call}").read_text()


@pytest.mark.slow
def test_an_agent_that_behaves_and_has_no_sandbox(root: Path) -> None:
    stdout, stderr = drive(root, [], experiments=4, page=True)
    assert "agent: not isolated: it has your rights" in stderr
    assert "agent:            not isolated" in stdout
    proposals = [record.proposal.sandbox for record in records(root)]
    assert (proposals, state(root)["sandbox"]) == (["", "none", "none", "none"], "none")
    assert "\nNightshift-Agent: not isolated\n" in git(root, "log", "--format=%B")
    assert "agent: not isolated in 3 experiments (--sandbox none)" in (root / "runs" / "report.md").read_text()
    ours = records(root)
    assert [r.proposal.description for r in ours[1:]] == [f"call {n} tries another rate" for n in range(3)]
    assert [r.proposal.prediction for r in ours[1:]] == ["+1 pp"] * 3
    lessons = [r.proposal.lesson for r in ours[1:3]]  # of each the next call that began when it was decided
    assert lessons[0] in ("call 1 learnt something", "call 2 learnt something")
    assert lessons[1] in ("call 2 learnt something", None)
    assert [notes(root, n) for n in range(1, 5)] == [""] * 4
    briefs = [kept_by_agent(root, call, "brief") for call in range(3)]
    assert all(len(brief) <= MAX_CHARACTERS for brief in briefs)
    assert "estimated score of the baseline " in briefs[0]
    assert "LESSON" not in briefs[0]  # the baseline teaches nothing
    assert "\nLESSON 0002: <" in briefs[2]
    assert "call 0 tries another rate" in briefs[1]


GOOD = ["edit", "answer"]


@pytest.mark.slow
def test_a_proposal_that_is_refused_is_named_and_another_one_is_asked_for(root: Path) -> None:
    drive(root, [GOOD, ["invalid"], ["locked"], ["repeat"], GOOD], experiments=3, fill=False)  # GOOD: 0002 and 0003
    assert [bool(re.match(r"proposal \d refused: ", line)) for line in notes(root, 3).splitlines()] == [True] * 3
    assert "is not TOML" in notes(root, 3)
    assert 'model.name = "mine" is locked' in notes(root, 3)
    assert "already tried in experiment 0002" in notes(root, 3)


@pytest.mark.slow
@pytest.mark.timeout(1200)  # twelve proposals, each with a limit of its own
def test_the_night_goes_on_whatever_the_agent_leaves_in_its_clone(root: Path) -> None:
    steps = [[*GOOD, "5 MB"], ["link"], ["fifo"], ["huge"], ["no train.toml"]]  # 0002
    steps += [[*GOOD, "commit", "results.tsv"], ["hang"], ["edit", "link answer"], ["german"]]  # 0003
    steps += [[*GOOD, "grandchild", "2 MB", "long path"], ["edit", "exit 1"], ["edit"]]  # 0004, 0005
    main = git(root, "rev-parse", "main")
    _, stderr = drive(root, steps, experiments=5, fill=False)
    assert git(root, "rev-parse", "main") == main
    assert git(root, "branch", "--format=%(refname:short)").split() == ["autoresearch/test", "main"]
    log = root / "runs" / "agent" / "0002-1.log"
    assert log.stat().st_mode & 0o777 == 0o600  # agents print what they are told, and that may be secret
    assert notes(root, 2) == ""
    assert "train.toml cannot be read: it is a symbolic link" in stderr
    assert "it is not a regular file" in stderr
    assert "200,000 bytes" in notes(root, 3)
    assert "train.toml cannot be read: No such file" in notes(root, 3)
    causes = [wait["cause"] for wait in state(root)["waits"]]
    assert any(f"stopped after {LIMIT_SECONDS:.0f} s, the time limit" in cause for cause in causes), causes
    answer = "refused: python: hypothesis.txt in the agent's clone cannot be read: it is a symbolic link"
    assert answer in notes(root, 4)
    assert "this machine is ready" not in stderr  # no failure of ours
    assert any("exit code 1; the last words: stand-in: cannot go on" in cause for cause in causes), causes
    last = records(root)[-1]
    assert (last.proposal.description, last.proposal.prediction) == ("; ".join(last.diff), None)


@pytest.mark.slow
def test_a_program_that_asks_or_fails_in_any_language_or_is_killed_is_asked_again(root: Path) -> None:
    steps = [["question"], ["question"], ["question"], GOOD, ["german"], [*GOOD, "kill"], [*GOOD, "exit 137"], GOOD]
    stdout, stderr = drive(root, steps, experiments=3, fill=False, page=True, max_cost=5.0)
    ours = records(root)
    assert [record.proposal.description for record in ours[1:]] == [f"call {n} tries another rate" for n in (3, 7)]
    assert "proposal refused" not in stderr
    question, german = (wait["cause"] for wait in state(root)["waits"])
    words = "the last words: Which of the two files do you mean?"
    assert question == f"python: no proposal: {words}"
    assert words in kept_by_agent(root, 1, "brief"), "nobody told the agent that nobody answers"
    assert "exit code 137" in german
    assert "Etwas ist schiefgelaufen: Nutzungslimit erreicht." in stderr
    for text in (stdout, (root / "runs" / "report.md").read_text(), nightshift(root, "status")[1]):
        assert "Agent unavailable: " in text
        assert "Which of the two files do you mean?" in text.replace("\\", "")


# A team

TEAM = (Path(__file__).parents[1] / "stand_in_team.py").read_text()


@pytest.mark.slow
def test_what_the_strategist_asks_for_is_implemented_and_each_run_gets_a_lesson(root: Path) -> None:
    strategist, implementer = (shlex.join([sys.executable, "-c", TEAM, role]) for role in ("strategist", "implementer"))
    good_night(root, agent=f"team:{strategist},{implementer}", sandbox="none", experiments=4)
    ours = records(root)
    program = Path(sys.executable).name
    assert {record.proposal.proposer for record in ours} == {"", f"team:{program},{program}"}
    for record in ours[1:]:
        proposal = record.proposal
        assert "trainer.optim." in record.diff[0]
        assert proposal.description.startswith("set trainer.optim.")
        assert re.fullmatch(r"larger steps, of [1-9]\d* files of logs", proposal.mechanism or "")
        assert (proposal.prediction or "+1.0 pp", proposal.falsifier) == ("+1.0 pp", "a lower score")
    taught = [record for record in ours if record.proposal.lesson]
    assert taught
    assert [record.proposal.lesson for record in taught] == [f"what {record.number:04d} taught" for record in taught]
    logs = {path.name for path in (root / "runs" / "agent").iterdir()}
    assert logs >= {"0002-1-hypothesis.log", "0002-1.log"}


@pytest.mark.slow
def test_without_a_hypothesis_there_is_no_edit(root: Path) -> None:
    _, stderr = good_night(root, agent="team:true,true", sandbox="none", experiments=3, waits=2.0)
    words = "team:true,true: no proposal: the last words: none; ends when team:true,true answers; next check at"
    assert re.search(f"^waiting since .*: {words}", stderr, re.MULTILINE)
    assert {record.proposal.proposer for record in records(root)[1:]} == {FILL}
