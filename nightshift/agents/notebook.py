"""Hypotheses, outcomes and lessons of a campaign: part of every brief, and `runs/notebook.md` for people.

The notebook is made from the records only, so it survives the night. Each prediction stands beside the measured
difference and the effect as all runs so far estimate it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from nightshift.campaign.records import POINTS, Z95, Effect, Record
from nightshift.campaign.results import UNDECIDED, num_since_keep, verdict_of
from nightshift.text import clean

if TYPE_CHECKING:
    from nightshift.campaign.campaign import Campaign  # it imports numpy

MAX_BYTES = 60_000  # of the file: the latest entries
_NUM_DISCARDS = 3  # discards and crashes in a row that change the mode, and two more that change it again
_CLAIMS = {"better": ("better", "confirmed", "improved", "helped"), "worse": ("worse", "refuted", "hurt", "failed")}


def predicted(text: str | None, sign: int = 1) -> float | None:
    """Read the first number of `pp` in a prediction, as a fraction; None without one. `sign`: of a number without a
    sign."""
    match = POINTS.search((text or "").replace("\u2212", "-"))
    return None if match is None else float(match[1]) / 100 * (1 if match[1][0] in "+-" else sign)


def compare_prediction(record: Record, now: Effect | None = None) -> str:
    """`expected +5 pp, measured +7.5 pp, effect now +4.6 ± 1.1 pp`; empty without a predicted number or a score.

    Measured is the score less the expected score of the incumbent: part of that is noise, or comes from the rider.
    `now`: the current estimate (Campaign.effect_now); without it, the effect at the decision is shown.
    """
    prediction, outcome = predicted(record.proposal.prediction), _outcome(record, now)
    return f"expected {100 * prediction:+g} pp, {outcome}" if prediction is not None and outcome else ""


def belied(record: Record) -> str:
    """Return what was measured, if the reported outcome is neither the measured difference nor the effect; else ""."""
    effect, measured = _effect(record), _measured(record)
    text = (record.proposal.reported_outcome or "").lower()
    if effect is None or measured is None:
        return ""
    claims = {claim for claim, words in _CLAIMS.items() if any(re.search(rf"\b{word}", text) for word in words)}
    margin = Z95 * effect.sd
    number = predicted(text, sign=-1 if claims == {"worse"} else 1)  # "worse by 3 pp"
    is_off = number is not None and all(abs(number - value) > margin for value in (effect.mean, measured))
    wrong = {"worse"} if effect.mean > margin else {"better"} if effect.mean < -margin else set[str]()
    if is_off or (wrong and claims == wrong):
        return f"{_outcome(record)}: the reported outcome was not measured"
    return ""


def _effect(record: Record) -> Effect | None:
    """The effect of the experiment's change as it was believed at the decision."""
    return record.decision.estimate if record.decision else None


def _measured(record: Record) -> float | None:
    """The score less the expected score of the incumbent, a fraction."""
    expected = record.judgement.expected_score if record.judgement else None
    return None if expected is None or record.score is None else record.score - expected


def _outcome(record: Record, now: Effect | None = None) -> str:
    effect, measured = _effect(record), _measured(record)
    if effect is None or measured is None:
        return ""
    return f"measured {100 * measured:+.1f} pp, {f'effect now {now}' if now else f'effect {effect}'}"


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
        "BUT ": belied(record),
        "lesson: ": proposal.lesson,
    }
    first = f"{record.number:04d} {verdict_of(record) or UNDECIDED}: {clean(proposal.description, 240)}"
    return [first, *(f"  {name}{clean(text, 240)}" for name, text in texts.items() if text)]


def notebook(campaign: Campaign) -> str:
    """Return the file: the entries, the latest first, at most MAX_BYTES of them."""
    text = "# Notebook\n\n"
    room = MAX_BYTES
    for record in reversed(campaign.decided):
        proposal = record.proposal
        if not (proposal.mechanism or proposal.lesson or proposal.reported_outcome):
            continue
        lines = "".join(f"{line}\n" for line in entry(record, campaign.effect_now(record)))
        room -= len(lines.encode())
        if room < 0:
            return f"{text}\n(earlier ones: runs/)\n"
        text += lines
    return text


def mode(decided: Sequence[Record]) -> str:
    """Say what a brief asks for after experiments in a row that were not kept: refine, pivot, or question."""
    num = num_since_keep(decided)
    if num < _NUM_DISCARDS:
        return "Refine: build on what worked."
    if num < _NUM_DISCARDS + 2:
        return f"Pivot: {num} in a row were not kept. Leave the approach of the last ones."
    return f"Question: {num} in a row were not kept. Name the assumption that they share, and test its opposite."
