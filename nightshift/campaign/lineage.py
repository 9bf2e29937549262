"""Which keeps stand: a keep that was taken back is no longer part of the incumbent."""

from __future__ import annotations

from collections.abc import Sequence

from nightshift.records import Record, Verdict


def incumbent_number(records: Sequence[Record]) -> int | None:
    """The experiment whose train.toml is the incumbent's after these of one campaign; None before the baseline."""
    number: int | None = None
    for record in records:
        if record.status == Verdict.KEEP:
            number = record.number
        elif record.judgement is not None and record.judgement.taken_back_to is not None:
            number = record.judgement.taken_back_to
    return number


def lineage(records: Sequence[Record]) -> list[Record]:
    """The baseline and the keeps that the incumbent of one campaign stands on, in order."""
    kept = {r.number: r for r in records if r.status == Verdict.KEEP}
    number, found = incumbent_number(records), list[Record]()
    while number is not None and number in kept:
        record = kept.pop(number)  # a damaged ledger may go in circles
        found.insert(0, record)
        number = record.parent
    return found


def taken_back(records: Sequence[Record]) -> list[Record]:
    """The keeps of one campaign that are not part of its incumbent (any more), in order."""
    standing = {r.number for r in lineage(records)}
    return [r for r in records if r.status == Verdict.KEEP and r.parent is not None and r.number not in standing]
