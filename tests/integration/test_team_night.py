"""A night of a team: who is asked what, what it finds and predicts."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from nightshift.campaign.waits import FILL
from tests.night_checkout import good_night, records

CODE = (Path(__file__).parents[1] / "stand_in_team.py").read_text()


@pytest.mark.slow
def test_what_the_strategist_asks_for_is_implemented_and_each_run_gets_a_lesson(root: Path) -> None:
    strategist, implementer = (shlex.join([sys.executable, "-c", CODE, role]) for role in ("strategist", "implementer"))
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
