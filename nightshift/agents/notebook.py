"""Hypotheses, outcomes and lessons of a campaign: for the agent's logs, the page, and `runs/notebook.md`.

The notebook is made from the records only, so it survives the night. Each prediction stands beside the measured
difference and the effect as all runs so far estimate it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from msgspec import structs

from nightshift.campaign.records import POINTS, Effect, Record
from nightshift.campaign.results import UNDECIDED, verdict_of
from nightshift.text import clean

if TYPE_CHECKING:
    from nightshift.campaign.campaign import Campaign  # it imports numpy
    from nightshift.campaign.ledger import Ledger

MAX_BYTES = 60_000  # of the file: the latest entries
MAX_SENTENCE = 240  # characters of a hypothesis, prediction or lesson
MAX_ASKED = 6  # experiments whose outcome and lesson one call is asked for
_FIELDS = {  # of Proposal, by the label of the answer's line
    "HYPOTHESIS": "description",
    "MECHANISM": "mechanism",
    "PREDICTION": "prediction",
    "REFUTED BY": "falsifier",
    "OUTCOME": "reported_outcome",
    "LESSON": "lesson",
}
_LABEL = re.compile(rf"\b({'|'.join(_FIELDS)})\b[ \t*]*+(?:(\d{{1,9}})[ \t*]*+)?:[ \t*]*")

Lessons = Mapping[int, Mapping[str, str]]  # by experiment: fields of its Proposal; 0: the answer has no number


def unexplained(campaign: Campaign) -> list[Record]:
    """Return the latest decided experiments with a new change that have no lesson yet, in their order."""
    records = [record for record in campaign.decided if record.run.new and record.proposal.lesson is None]
    return records[-MAX_ASKED:]


def parse_answer(text: str) -> tuple[dict[str, str], dict[int, dict[str, str]]]:
    """Return the last text of each label (`HYPOTHESIS: ... LESSON 0012: ...`, on one line or several), cleaned, by the
    fields of Proposal: those of the proposal, and those of Lessons. The placeholders of the form are left out."""
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
    """Write the lessons into the records that were asked about; `asked`: the campaign as the agent saw it. A lesson
    without a number belongs to the only experiment that was asked about."""
    records = unexplained(asked)
    for record in records:
        fields = lessons.get(record.number) or (lessons.get(0) if len(records) == 1 else None)
        stored = ledger.record(record.number)
        if fields and "lesson" in fields and stored.proposal.lesson is None:
            ledger.write(structs.replace(stored, proposal=structs.replace(stored.proposal, **fields)))


def predicted(text: str | None) -> float | None:
    """Read the first number of `pp` in a prediction, as a fraction; None without one."""
    match = POINTS.search((text or "").replace("\u2212", "-"))
    return None if match is None else float(match[1]) / 100


def compare_prediction(record: Record, now: Effect | None = None) -> str:
    """`expected +5 pp, measured +7.5 pp, effect now +4.6 ± 1.1 pp`; empty without a predicted number or a score.

    Measured is the score less the expected score of the incumbent: part of that is noise, or comes from the rider.
    `now`: the current estimate (Campaign.effect_now); without it, the effect at the decision is shown.
    """
    prediction, outcome = predicted(record.proposal.prediction), _outcome(record, now)
    return f"expected {100 * prediction:+g} pp, {outcome}" if prediction is not None and outcome else ""


def _outcome(record: Record, now: Effect | None = None) -> str:
    effect = record.decision.estimate if record.decision else None
    expected = record.judgement.expected_score if record.judgement else None
    if effect is None or expected is None or record.score is None:
        return ""
    measured = 100 * (record.score - expected)
    return f"measured {measured:+.1f} pp, {f'effect now {now}' if now else f'effect {effect}'}"


def entry(record: Record, now: Effect | None = None) -> list[str]:
    """Return the lines of one experiment: what was expected, measured and learnt. `now`: see `compare_prediction`."""
    proposal = record.proposal
    outcome = [f"predicted {clean(proposal.prediction, 120)}"] if proposal.prediction else []
    outcome += [text] if (text := _outcome(record, now)) else []
    texts = {
        "mechanism: ": proposal.mechanism,
        "refuted by: ": proposal.falsifier,
        "": "; ".join(outcome),
        "reported outcome: ": proposal.reported_outcome,
        "lesson: ": proposal.lesson,
    }
    first = f"{record.number:04d} {verdict_of(record) or UNDECIDED}: {clean(proposal.description, MAX_SENTENCE)}"
    return [first, *(f"  {name}{clean(text, MAX_SENTENCE)}" for name, text in texts.items() if text)]


def notebook(campaign: Campaign) -> str:
    """Return the file: the entries, the latest first, at most MAX_BYTES of them."""
    text, room = "# Notebook\n\n", MAX_BYTES
    for record in reversed(campaign.decided):
        proposal = record.proposal
        if proposal.mechanism or proposal.lesson or proposal.reported_outcome:
            lines = "".join(f"{line}\n" for line in entry(record, campaign.effect_now(record)))
            room -= len(lines.encode())
            if room < 0:
                return f"{text}\n(earlier ones: runs/)\n"
            text += lines
    return text
