"""Foreign text becomes one plain line, once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import json, structs

from nightshift.campaign.records import Proposal
from nightshift.errors import UsageError
from nightshift.text import clean

TEXTS = {
    "a\x1b[31mb\x1b[0m \x1b]8;;http://x\x1b\\link\x1b]8;;\x07": "ab link",
    "one\ntwo\r\nthree\tfour\u2028five\x85six": "one two three four five six",
    "right\u202eto\u2066left\u200bzero\ufeff\U000e0041": "righttoleftzero",
    "\udcff\ud800 lone": "lone",
    "\x9b2J\x00\x07\x7f": "2J",
    "λ 日本 é ✓": "λ 日本 é ✓",
    " \n ": "",
}


@pytest.mark.parametrize("text", TEXTS)
def test_a_foreign_text_is_one_plain_line(text: str) -> None:
    assert clean(text) == TEXTS[text]


@given(st.text(alphabet=st.characters(), max_size=300) | st.text(alphabet="\x1b[]m0;\\\x07 \nx\ud800\u202e"))
def test_whatever_it_is(text: str) -> None:
    cleaned = clean(text, 50)
    cleaned.encode()
    assert cleaned.isprintable()
    assert len(cleaned) <= 50
    assert clean(cleaned, 50) == cleaned


def test_a_proposal_and_an_error_hold_clean_text_only() -> None:
    hostile = {
        "description": "a\x1b[2J\nb" + "x" * 20_000,
        "prediction": "\ud7ff\u202e+1 pp\n",
        "notes": ["n\u202e1", "\n"],
    }
    said = Proposal(**hostile | {"notes": tuple(hostile["notes"])})
    for proposal in (said, json.decode(json.encode(hostile), type=Proposal), structs.replace(Proposal(), **hostile)):
        assert (proposal.description[:4], len(proposal.description)) == ("a bx", 1000)
        assert (proposal.prediction, proposal.notes) == ("+1 pp", ("n1", ""))
    assert Proposal(prediction="\udcff+1 pp").prediction == "+1 pp"
    assert Proposal().prediction is None
    assert str(UsageError("a\x1b[31m\udcff\nb", "Fix\u202e it.")) == "a b. Fix it."
