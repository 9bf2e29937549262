"""What a verdict does to the branch and to train.toml: keep commits, discard puts the incumbent back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from nightshift.errors import EngineError, UsageError
from nightshift.git.repo import Head, Repo
from nightshift.records import Failure, Record, Verdict


def settle(record: Record, repo: Repo, source: Callable[[int], bytes]) -> Record:
    """Commit a kept config, put the incumbent back after a discard; never fails a measured experiment.

    `source`: the train.toml that an experiment ran, by its number; UsageError where that cannot be had.
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
    message = f"{record.description}\n\n{record.judgement.why}\n\nNightshift-Run: {record.number:04d}\n"
    try:
        candidate = source(record.number)
        if record.judgement.verdict is Verdict.KEEP:
            commit, settled = repo.keep(head, candidate, message)
            return replace(record, kept_commit=commit, settled=settled)
        parent, back = source(record.parent), record.judgement.taken_back_to
        incumbent = parent if back is None else source(back)
        restore = f"Restore the incumbent after experiment {record.number:04d}\n\n{message}"
        return replace(record, settled=repo.discard(head, candidate, incumbent, restore, parent))
    except (EngineError, UsageError, OSError) as error:
        return replace(record, settled=f"not settled: {error}")
