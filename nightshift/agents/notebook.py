"""What was thought and learnt, experiment by experiment: part of every brief, and `runs/notebook.md` for people.

It is made of the records and nothing else, so it survives the night and nobody can write in it but through them. Beside
what was expected stands what was measured, and how far an agent's predictions can be trusted.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from nightshift.campaign.records import POINTS, Record
from nightshift.campaign.standing import Z95, effect_at_decision, num_since_keep
from nightshift.text import clean

NOTEBOOK_NAME = "notebook.md"
MAX_BYTES = 60_000  # of the file: the latest entries
_MAX_LESSONS = 12
_THEN = "effect_at_decision"  # as everywhere: what its verdict said
_NUM_DISCARDS = 3  # discards and crashes in a row that change the mode, and two more that change it again
_SAYS = {"better": ("better", "confirmed", "improved", "helped"), "worse": ("worse", "refuted", "hurt", "failed")}


@dataclass(frozen=True, slots=True)
class Calibration:
    """Of one agent: means of what it expected and of what came, fractions, over so many predictions."""

    proposer: str
    num_predictions: int
    predicted: float
    measured: float

    def __str__(self) -> str:
        return (
            f"{self.proposer} expects {100 * self.predicted:+.1f} pp, gets {100 * self.measured:+.1f} pp "
            f"({self.num_predictions} predictions)"
        )


def predicted(text: str | None, sign: int = 1) -> float | None:
    """The change of the score that a prediction names, a fraction: the first number of `pp` in it; None without one.
    `sign`: of a number that is written without."""
    found = POINTS.search((text or "").replace("\u2212", "-"))
    return None if found is None else float(found[1]) / 100 * (1 if found[1][0] in "+-" else sign)


def calibrations(decided: Sequence[Record]) -> list[Calibration]:
    """A line for each agent whose predictions were measured."""
    pairs = dict[str, list[tuple[float, float]]]()
    for record in decided:
        said, then = predicted(record.proposal.prediction), effect_at_decision(record)
        if said is not None and then is not None and record.proposal.proposer:
            pairs.setdefault(record.proposal.proposer, []).append((said, then.mean))
    return [Calibration(name, len(both), *map(fmean, zip(*both, strict=True))) for name, both in pairs.items()]


def belied(record: Record) -> str:
    """In words, where what its proposer says came of an experiment is not what was measured; else empty."""
    then, told = effect_at_decision(record), (record.proposal.reported_outcome or "").lower()
    if then is None or not then.stderr:
        return ""
    said = {way for way, words in _SAYS.items() if any(re.search(rf"\b{word}", told) for word in words)}
    apart, sign = Z95 * then.stderr, -1 if said == {"worse"} else 1  # "worse by 3 pp"
    number = predicted(told, sign)
    is_off = number is not None and abs(number - then.mean) > apart
    against = {"worse"} if then.mean > apart else {"better"} if then.mean < -apart else set[str]()
    if not is_off and (said != against or not against):
        return ""
    return f"{_THEN} {then}: what it says is not what came"


def entry(record: Record) -> list[str]:
    """One experiment: what was thought, what came, what was learnt."""
    then, lines = (
        effect_at_decision(record),
        [f"{record.number:04d} {record.status}: {clean(record.proposal.description, 240)}"],
    )
    for name, text in (("mechanism", record.proposal.mechanism), ("refuted by", record.proposal.falsifier)):
        lines += [f"  {name}: {clean(text, 240)}"] if text else []
    measured = f"{_THEN} {then}" if then else ""
    if record.proposal.prediction or measured:
        said = f"predicted {clean(record.proposal.prediction, 120)}" if record.proposal.prediction else ""
        lines.append(f"  {'; '.join(filter(None, (said, measured)))}")
    if record.proposal.reported_outcome:
        lines.append(f"  outcome, as told: {clean(record.proposal.reported_outcome, 240)}")
        lines += [f"  BUT {found}"] if (found := belied(record)) else []
    return [*lines, *([f"  lesson: {clean(record.proposal.lesson, 240)}"] if record.proposal.lesson else [])]


def lessons(decided: Sequence[Record]) -> list[str]:
    """Those of these experiments, the latest first, in a line each: as many as a brief has room for."""
    learnt = [record for record in reversed(decided) if record.proposal.lesson and record.parent is not None]
    return [f"{record.number:04d} {clean(record.proposal.lesson or '', 160)}" for record in learnt[:_MAX_LESSONS]]


def notebook(decided: Sequence[Record]) -> str:
    """The file: a calibration line an agent, then the entries, at most MAX_BYTES of them."""
    text, room = "# Notebook\n\n" + "".join(f"{each}\n" for each in calibrations(decided)) + "\n", MAX_BYTES
    for record in reversed(decided):
        lines = (
            entry(record)
            if record.proposal.mechanism or record.proposal.lesson or record.proposal.reported_outcome
            else []
        )
        room -= sum(len(line.encode()) + 1 for line in lines)
        if room < 0:
            return f"{text}\n(earlier ones: runs/)\n"
        text += "".join(f"{line}\n" for line in lines)
    return text


def mode(decided: Sequence[Record]) -> str:
    """What a brief asks for when so many in a row were not kept: refine, pivot, or question what they share."""
    num = num_since_keep(decided)
    if num < _NUM_DISCARDS:
        return "Refine: build on what worked."
    if num < _NUM_DISCARDS + 2:
        return f"Pivot: {num} in a row were not kept. Leave the direction of the last ones."
    return f"Question: {num} in a row were not kept. Name the assumption that they share, and test its opposite."
