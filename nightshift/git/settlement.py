"""What a verdict does to train.toml and the branch, now or after a kill: commit, put back, or leave as it is."""

from __future__ import annotations

from dataclasses import replace

from nightshift.errors import ConfigError, EngineError, UsageError
from nightshift.git.repo import CONFIG_NAME, Head
from nightshift.records import Failure, Record, Verdict
from nightshift.setup import Lab
from nightshift.train_toml import config as configs
from nightshift.train_toml.config import Config


def stored_config(record: Record, lab: Lab) -> Config:
    """What an experiment submitted. UsageError if the stored train.toml is not what its record says was run."""
    name = f"runs/{record.number:04d}/{CONFIG_NAME}"
    source = lab.ledger.source(record.number)
    try:
        config = configs.parse(source, name)
        is_it = config.hash == record.config_hash or not Head(record.branch, record.commit).is_campaign
    except ConfigError:  # its own fixes are for the train.toml that is edited
        is_it = False
    if not is_it:
        commit = (record.kept_commit or record.commit or "HEAD")[:7]
        raise UsageError(
            f"{name} is not what experiment {record.number:04d} ran",
            f"Put it back: git show {commit}:{CONFIG_NAME} > {name}",
        )
    return config


def settle(record: Record, head: Head, lab: Lab) -> Record:
    """Commit a kept config, put the incumbent back after a discard; never fails a measured experiment."""
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
        candidate = stored_config(record, lab).source
        if record.judgement.verdict is Verdict.KEEP:
            commit, settled = lab.repo.keep(head, candidate, message)
            return replace(record, kept_commit=commit, settled=settled)
        parent = stored_config(_read(record.parent, lab), lab).source
        back = record.judgement.taken_back_to
        incumbent = parent if back is None else stored_config(_read(back, lab), lab).source
        restore = f"Restore the incumbent after experiment {record.number:04d}\n\n{message}"
        return replace(record, settled=lab.repo.discard(head, candidate, incumbent, restore, parent))
    except (EngineError, UsageError, OSError) as error:
        return replace(record, settled=f"not settled: {error}")


def _read(number: int, lab: Lab) -> Record:
    record = lab.ledger.read(number)
    if record is None:
        raise UsageError(f"the record of an incumbent, {number:04d}, is gone")
    return record


def finish_earlier(lab: Lab) -> None:
    """Close what a killed harness left open: records without a verdict, verdicts without their commit."""
    lab.ledger.sweep()
    for record in lab.ledger.close_interrupted():
        lab.reporter.note(f"experiment {record.number:04d} was interrupted; recorded as crash")
    for record in lab.ledger.records():
        if record.settled is None and record.status != "started":
            settled = settle(record, Head(record.branch, record.commit), lab)
            lab.ledger.keep_model(record)
            lab.ledger.write(settled)
            lab.reporter.note(f"experiment {record.number:04d} was decided but not settled; done now")
    for record in lab.ledger.records()[-1:]:
        lab.ledger.keep_model(record)  # what a full disk would not let go of
    lab.ledger.sync_tsv()
