"""Runs that others took much of the machine from: said, believed less, and made again by a night.

A wall-clock budget lets such a run make fewer steps; in recorded nights half of the budget cost 3.6 pp where ideas
scatter by 8. So the noise of a run grows by the share that was taken, on that scale:
its variance by (share x prior_sd)^2.
"""

from __future__ import annotations

from collections.abc import Sequence

from nightshift.records import Record

BUSY = 0.25  # what others took, from which a run is called busy: half a core of two


def taken(record: Record) -> float:
    """The largest share that others took of what one of its runs needed, 0..1."""
    return max((run.load.taken for run in record.runs if run.load), default=0.0)


def extra_variance(record: Record) -> float:
    """Of one of its runs' scores, beside that of seeds and examples."""
    share = taken(record)
    return (share * record.decision.prior_sd) ** 2 if share >= BUSY else 0.0


def remark(record: Record) -> str | None:
    """What a summary says of a busy machine."""
    loads = [run.load for run in record.runs if run.load and run.load.taken >= BUSY]
    if not loads:
        return None
    load = max(loads, key=lambda one: one.taken)
    shares = {
        "of the processors' time went to other processes": load.others_share,
        "of it was stolen by other virtual machines": load.stolen_share,
        "of the looks at its GPUs found somebody else there": load.gpu_shared,
        "of them found their clocks held down": load.throttled,
    }
    told = ", ".join(f"{share:.0%} {what}" for what, share in shares.items() if share and share >= 0.005)
    return f"busy machine: {told}; the run counts for less"


def to_repeat(records: Sequence[Record], incumbent: int | None) -> Record | None:
    """The last decided experiment of a night that was busy, and whose settings it has not run again; of a baseline
    only while it is the `incumbent`."""
    measured = [record for record in records if record.decided is not None and record.evaluations]
    hashes = [record.effective_hash for record in measured]
    for record in reversed(measured):
        if taken(record) >= BUSY and hashes.count(record.effective_hash) == 1:
            return record if record.parent is not None or record.number == incumbent else None
    return None
