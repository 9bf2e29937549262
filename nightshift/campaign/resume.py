"""What a killed harness left open is closed by the next one: records without a verdict, verdicts without a commit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from nightshift.campaign.ledger import STARTED, Ledger
from nightshift.campaign.models import keep_model
from nightshift.campaign.version_1 import FINISH
from nightshift.git.repo import Head, Repo, settle
from nightshift.records import Failure, Judgement, Record, Verdict


def close(record: Record, ledger: Ledger, repo: Repo) -> Record:
    """Write a record whose verdict is made, do to git what the verdict says, keep or delete the model, add the row.

    The verdict is safe before git is touched; each step is done again by `resume` where a kill came between.
    """
    ledger.write(record)
    record = settle(record, repo, lambda number: source_of(number, ledger))
    keep_model(ledger, record)
    ledger.close(record)
    return record


def source_of(number: int, ledger: Ledger) -> bytes:
    """The train.toml that an experiment ran. UsageError where runs/ does not hold it any more."""
    record = ledger.read(number)
    if record is None:
        return ledger.source(number)  # which says what is missing
    return ledger.stored_config(record, Head(record.branch, record.commit).is_campaign).source


def interrupted(record: Record, cause: str) -> Record:
    """The record of an experiment that was cut off: it decides nothing."""
    judgement = Judgement(Verdict.CRASH, f"interrupted: {cause}")
    return replace(record, status=Verdict.CRASH, failure=Failure.INTERRUPTED, judgement=judgement)


def resume(ledger: Ledger, repo: Repo, note: Callable[[str], None]) -> None:
    """Close what an earlier head left open. Call as the head, with the lock held."""
    ledger.sweep()
    for record in ledger.records():
        if record.version == 1:
            if record.status == STARTED:
                note(f"experiment {record.number:04d} was never ended. {FINISH}, or delete runs/{record.number:04d}.")
        elif record.status == STARTED:
            record = interrupted(record, "the process ended before its verdict")
            keep_model(ledger, record)
            ledger.close(replace(record, settled="train.toml left as it is: nothing was decided"))
            note(f"experiment {record.number:04d} was interrupted; recorded as crash")
        elif record.settled is None:
            close(record, ledger, repo)
            note(f"experiment {record.number:04d} was decided but not settled; done now")
    for record in ledger.records()[-1:]:
        keep_model(ledger, record)  # what a full disk would not let go of
    ledger.sync_tsv()
