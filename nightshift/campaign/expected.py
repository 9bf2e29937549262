"""The two numbers of an experiment, each a difference to its parent: `expected_then`, of its verdict, and `expected`.

What is believed of an idea moves with every later run that tells of it. A verdict is about what was believed then, and
stays as it was; a table of a campaign says what is believed now. Nothing is decided by either.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from nightshift.campaign.standing import Z95
from nightshift.records import Record

if TYPE_CHECKING:
    from nightshift.campaign.campaign import Campaign


class Expected(NamedTuple):
    """A difference of scores, a fraction: posterior mean and standard deviation."""

    mean: float
    stderr: float

    def __str__(self) -> str:
        """`+2.4 ± 4.9 pp`, the second half of its 95 % interval."""
        return f"{100 * self.mean:+.1f} ± {100 * Z95 * self.stderr:.1f} pp"


def expected_then(record: Record) -> Expected | None:
    """Candidate less parent as its verdict had it; None for the baseline, a repeat, a crash."""
    judged = record.judgement
    if judged is None or judged.delta is None or judged.delta_stderr is None:
        return None
    return Expected(judged.delta, judged.delta_stderr)


def expected(campaign: Campaign, record: Record) -> Expected | None:
    """The same as believed now; what was believed last, where one of the ideas is forgotten: it was clearly worse."""
    then, belief, own = expected_then(record), campaign.belief, campaign.ideas.get(record.number)
    places = [place for place, kept in enumerate(campaign.kept) if kept.number == record.parent]
    if then is None or belief is None:
        return then
    made_from = campaign.ideas_of(campaign.kept[places[0]]) if places else frozenset[int]()
    made_from = made_from if record.base is None else frozenset(record.base)
    is_known_set = record.base is not None and not record.diff  # one run again: no idea of its own
    if not places or not made_from <= campaign.ideas.keys() or (own is None and not is_known_set):
        return campaign.last_expected.get(record.number, then)
    ideas = made_from if own is None else made_from - own.replaced | {record.number}
    candidate = np.isin(belief.ideas, [int(belief.ideas[0]), *ideas])
    mean, sd = belief.of(candidate - belief.set_of(places[0]))
    return Expected(float(mean), float(sd))


def last_expected(before: Campaign, after: Campaign) -> dict[int, Expected]:
    """Of the experiments that one step made impossible to tell, what was believed before it."""
    gone = before.ideas.keys() - after.ideas.keys()
    records = [r for r in before.decided if r.number in gone or gone & {*(r.base or ())}] if gone else []
    found = {record.number: expected(before, record) for record in records}
    return {number: each for number, each in found.items() if each is not None}
