"""Hypotheses, outcomes and lessons of a campaign: for the agent's logs, the page, and `runs/notebook.md`.

An entry shows the prediction next to the measured difference and the effect at the decision.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from msgspec import structs

from nightshift.campaign.records import Record
from nightshift.campaign.results import UNDECIDED, verdict_of
from nightshift.text import clean

if TYPE_CHECKING:
    from nightshift.campaign.campaign import Campaign  # it imports numpy
    from nightshift.campaign.ledger import Ledger

MAX_CHARACTERS = 60_000  # of the entries in the file
MAX_SENTENCE = 240  # characters of a hypothesis, prediction or lesson
MAX_ASKED = 6  # experiments whose outcome and lesson one call reports
_FIELDS = {  # label of a line of the answer: field of Proposal
    "HYPOTHESIS": "description",
    "MECHANISM": "mechanism",
    "PREDICTION": "prediction",
    "REFUTED BY": "falsifier",
    "OUTCOME": "reported_outcome",
    "LESSON": "lesson",
}
_LABEL = re.compile(rf"\b({'|'.join(_FIELDS)})\b[ \t*]*+(?:(\d{{1,9}})[ \t*]*+)?:[ \t*]*")

Lessons = Mapping[int, Mapping[str, str]]  # experiment: fields of its Proposal


def unexplained(campaign: Campaign) -> list[Record]:
    """Return the latest decided experiments with a new change and without a lesson, in their order."""
    records = [record for record in campaign.decided if record.run.new and record.proposal.lesson is None]
    return records[-MAX_ASKED:]


def parse_answer(text: str) -> tuple[dict[str, str], dict[int, dict[str, str]]]:
    """Read an answer such as `HYPOTHESIS: ... LESSON 0012: ...`. Returns the fields of the new Proposal, and the
    Lessons. The last text of a label counts; `<placeholders>` do not."""
    fields, lessons = dict[str, str](), dict[int, dict[str, str]]()
    for line in text.splitlines():
        pieces = _LABEL.split(line)
        for label, number, value in zip(pieces[1::3], pieces[2::3], pieces[3::3], strict=True):
            cleaned = clean(value.strip(" \t*`|"), MAX_SENTENCE)
            if cleaned and not cleaned.startswith("<"):
                is_lesson = label in ("OUTCOME", "LESSON")
                target = lessons.setdefault(int(number or 0), {}) if is_lesson else fields
                target[_FIELDS[label]] = cleaned
    return fields, lessons


def store_lessons(ledger: Ledger, asked: Campaign, lessons: Lessons) -> None:
    """Write lessons into the records of the experiments that the agent was asked about. `asked`: the campaign that it
    saw."""
    for record in unexplained(asked):
        fields, stored = lessons.get(record.number, {}), ledger.record(record.number)
        if "lesson" in fields and stored.proposal.lesson is None:
            ledger.write(structs.replace(stored, proposal=structs.replace(stored.proposal, **fields)))


def entry(record: Record) -> list[str]:
    """Return the lines of one experiment. `measured` is its score minus the expected score of the incumbent."""
    proposal, effect = record.proposal, record.decision.estimate if record.decision else None
    expected = record.judgement.expected_score if record.judgement else None
    outcome = [f"predicted {clean(proposal.prediction, 120)}"] if proposal.prediction else []
    if effect is not None and expected is not None and record.score is not None:
        outcome.append(f"measured {100 * (record.score - expected):+.1f} pp, effect {effect}")
    text = f"""\
  mechanism: {clean(proposal.mechanism or "", MAX_SENTENCE)}
  refuted by: {clean(proposal.falsifier or "", MAX_SENTENCE)}
  {clean("; ".join(outcome), MAX_SENTENCE)}
  reported outcome: {clean(proposal.reported_outcome or "", MAX_SENTENCE)}
  lesson: {clean(proposal.lesson or "", MAX_SENTENCE)}"""
    first = f"{record.number:04d} {verdict_of(record) or UNDECIDED}: {clean(proposal.description, MAX_SENTENCE)}"
    return [first, *(line for line in text.split("\n") if not line.endswith(" "))]


def notebook(campaign: Campaign) -> str:
    """Return the text of the notebook: the latest entries first, cut after MAX_CHARACTERS."""
    records = [record for record in reversed(campaign.decided) if record.proposal.mechanism or record.proposal.lesson]
    return "# Notebook\n\n" + "".join(f"{line}\n" for record in records for line in entry(record))[:MAX_CHARACTERS]
