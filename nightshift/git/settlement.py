"""What a verdict does to the branch, and whether it was done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from nightshift.errors import EngineError, UsageError
from nightshift.git.repo import Head, Repo
from nightshift.records import Failure, Record, Verdict

_FAILED = "not settled: "


def settle(record: Record, repo: Repo, source: Callable[[int], bytes], chain: str = "") -> Record:
    """What a verdict does to the branch: commits a kept config, puts the incumbent back after a discard.

    Never fails a measured experiment: `settled` says what was done, or why nothing was (`is_unsettled`).

    `source`: the train.toml that an experiment ran, by its number; UsageError where that cannot be had. `chain`: the
    head of the chain (campaign/chain.py), which has this verdict in it, for the commit's trailer.
    """
    head = Head(record.branch, record.commit)
    if not head.is_campaign:
        where = f"branch {head.branch}" if head.branch else "a detached HEAD"
        return replace(record, settled=f"not settled: {where} is no campaign (git switch -c autoresearch/<tag>)")
    if record.failure in (Failure.MACHINERY, Failure.INTERRUPTED):
        return replace(record, settled="train.toml left as it is: nothing was decided")
    if record.parent is None:
        return replace(record, settled="baseline: nothing to commit")
    assert record.judgement is not None
    trailers = f"Nightshift-Run: {record.number:04d}\n" + (f"Nightshift-Chain: {chain}\n" if chain else "")
    text = f"{record.description}\n\n{record.judgement.why}\n\n{trailers}"
    message = "".join(c if c.isprintable() or c == "\n" else " " for c in text)  # git takes neither NUL nor surrogates
    try:
        candidate = source(record.number)
        if record.judgement.verdict is Verdict.KEEP:
            commit, settled = repo.keep(head, candidate, message)
            return replace(record, kept_commit=commit, settled=settled)
        before, back = source(record.judgement.incumbent or record.parent), record.judgement.taken_back_to
        incumbent = before if back is None else source(back)
        restore = f"Restore the incumbent after experiment {record.number:04d}\n\n{message}"
        return replace(record, settled=repo.discard(head, candidate, incumbent, restore, before))
    except (EngineError, UsageError, OSError, ValueError) as error:
        return replace(record, settled=f"{_FAILED}{error}")


def is_unsettled(record: Record) -> bool:
    """True if what its verdict does to the branch was not done, or failed for a reason that may have passed."""
    failed = (record.settled or "").startswith(_FAILED) and Head(record.branch, None).is_campaign
    return record.judgement is not None and (record.settled is None or failed)
