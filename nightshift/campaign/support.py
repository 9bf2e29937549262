"""What later runs say of a keep: it is provisional until one supports it, and undecided where the odds are even.

For people and agents to read; nothing is decided by it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from enum import StrEnum
from statistics import NormalDist

from nightshift.campaign.decision import Belief
from nightshift.records import Record, Verdict

DECIDED = 0.6  # what is better with less is undecided: no change at all is thought so about every third time
_SMALL = 1e-12


class Support(StrEnum):
    """Of a change that was kept, and that the incumbent stands on."""

    UNDECIDED = "undecided"
    PROVISIONAL = "provisional"
    SUPPORTED = "supported"

    @classmethod
    def of(cls, p_better: float, is_run_since: bool = False) -> Support:
        """Undecided where the odds are nearly even."""
        return cls.UNDECIDED if p_better < DECIDED else cls.SUPPORTED if is_run_since else cls.PROVISIONAL


def supports(
    belief: Belief, kept: Sequence[Record], lineage: Sequence[Record], decided: Sequence[Record]
) -> dict[int, Support]:
    """By number, of every keep of the lineage but the baseline; `kept` in the order of the belief's configs.

    Each run of a keep, or of what was made from it, tells something of it: after one it is judged by what is believed
    now of the difference to what it was made from.
    """
    told = _ancestors_of_runs(kept, decided)
    places = {record.number: place for place, record in enumerate(kept)}
    found = {}
    for parent, record in itertools.pairwise(lineage):
        if record.number in told:
            delta, sd = belief.difference(places[record.number], places[parent.number])
            p_better = NormalDist(0, max(float(sd), _SMALL)).cdf(record.decision.calibration * float(delta))
            found[record.number] = Support.of(p_better, is_run_since=True)
        elif record.judgement is not None and record.judgement.p_better is not None:
            found[record.number] = Support.of(record.judgement.p_better)
    return found


def _ancestors_of_runs(kept: Sequence[Record], decided: Sequence[Record]) -> set[int]:
    """Keeps that a later run was made from, or from what was made from it."""
    parents = {record.number: record.parent for record in kept}
    found: set[int] = set()
    for record in decided:
        parent = record.parent if record.status != Verdict.CRASH else None
        while parent is not None and parent not in found:
            found.add(parent)
            parent = parents.get(parent)
    return found
