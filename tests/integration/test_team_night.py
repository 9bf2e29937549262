"""A night of a team: who is asked what, in a sandbox; what it finds and predicts, and that a lie is named."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from nightshift.campaign.waits import FILL
from tests.night_checkout import good_night, records

CODE = (Path(__file__).parents[1] / "stand_in_team.py").read_text()


def team(*of_strategist: str) -> str:
    strategist = shlex.join([sys.executable, "-c", CODE, "strategist", *of_strategist])
    return f"team:{strategist},{shlex.join([sys.executable, '-c', CODE, 'implementer'])}"


@pytest.mark.slow
def test_what_the_strategist_asks_for_is_implemented_and_what_came_is_told_in_a_call_of_its_own(root: Path) -> None:
    good_night(root, agent=team(), sandbox="none", experiments=4)
    ours = records(root)
    program = Path(sys.executable).name
    assert {record.proposal.proposer for record in ours} == {"", f"team:{program},{program}"}
    for record in ours[1:]:
        proposal = record.proposal
        assert "trainer.optim." in record.diff[0]
        assert proposal.description.startswith("set trainer.optim.")
        assert re.fullmatch(r"larger steps, of [1-9]\d* files of logs", proposal.mechanism or "")
        assert (proposal.prediction or "+1.0 pp", proposal.falsifier) == ("+1.0 pp", "a lower score")
    # The lesson comes in a call of its own, when the numbers are there.
    taught = [record for record in ours if record.proposal.lesson]
    assert taught
    for record in taught:
        assert record.proposal.lesson == f"what {record.number:04d} taught"
        assert record.decision is not None
        assert record.decision.effect is not None
        assert record.proposal.reported_outcome == f"{100 * record.decision.effect:+.1f} pp"
    logs = {path.name for path in (root / "runs" / "agent").iterdir()}
    assert logs >= {"0002-1-hypothesis.log", "0002-1.log"}
    assert len([name for name in logs if name.endswith("-outcome.log")]) == len(taught)
    assert not [note for record in ours for note in record.proposal.notes if "changed files" in note]


@pytest.mark.slow
def test_what_a_liar_says_is_told_from_what_was_measured(root: Path) -> None:
    good_night(root, agent=team("lie"), sandbox="none", experiments=5, page=True)
    lied = [record for record in records(root) if record.proposal.reported_outcome]
    assert len(lied) > 1
    assert {record.proposal.reported_outcome for record in lied} == {"better, +9.0 pp, confirmed"}
    notebook = (root / "runs" / "notebook.md").read_text()
    assert notebook.count("pp\n  reported outcome: better, +9.0 pp, confirmed\n") == len(lied), "below the measured one"
    page = (root / "runs" / "report.html").read_text()
    assert page.count("Outcome, as reported") == len(lied)


@pytest.mark.slow
def test_without_a_hypothesis_there_is_no_edit(root: Path) -> None:
    _, stderr = good_night(root, agent="team:true,true", sandbox="none", experiments=3, waits=2.0)
    assert "waiting since" in stderr
    assert (
        "team:true,true: no proposal: its last words: none; ends when team:true,true answers; next check at" in stderr
    )
    assert {record.proposal.proposer for record in records(root)[1:]} == {FILL}
