"""The end of an experiment: record, git, model, row. A kill may come between two steps: `resume` does the rest."""

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress

from msgspec.structs import replace

from nightshift.campaign.campaign import Campaign
from nightshift.campaign.commits import commit
from nightshift.campaign.git import CONFIG_NAME, Head, Repo
from nightshift.campaign.ledger import RECORD_NAME, STARTED, Ledger
from nightshift.campaign.records import MODEL_NAME, WEIGHTS_NAME, Judgement, Record, Verdict
from nightshift.errors import EngineError, Failure, UsageError
from nightshift.files import disk_error, remove_tree, write_atomically
from nightshift.text import clean

MODELS_GB = 20.0  # in 1e9 bytes: about twenty models of 0.5B parameters


def crash(record: Record, failure: Failure, cause: str) -> Record:
    """Return the record as a crash with its cause."""
    return replace(record, status=Verdict.CRASH, failure=failure, judgement=Judgement(why=clean(cause)))


def close(record: Record, ledger: Ledger, repo: Repo) -> Record:
    """Write a record with its verdict, commit its decisions and owed ones, keep or delete the model, add the row."""
    ledger.write(record)
    ledger.log("decided", ledger.run_dir(record.number) / RECORD_NAME)
    for earlier in _owed(ledger.records(), record.branch):
        if (earlier.decided or 0) < (record.decided or 0):
            ledger.write(_settle(earlier, ledger, repo))
    record = _settle(record, ledger, repo)
    keep_model(ledger, record)
    ledger.close(record)
    return record


def _settle(record: Record, ledger: Ledger, repo: Repo) -> Record:
    """Make a record's planned commits, and write train.toml. Return the record with what git did, or its error."""
    if record.failure in (Failure.INFRASTRUCTURE, Failure.INTERRUPTED):
        return replace(record, git_action="train.toml left as it is: nothing was decided")
    if record.parent is None:
        return replace(record, git_action="baseline: nothing to commit")
    if record.is_keep and record.decision is None:
        return replace(record, git_action="the baseline from now on, as the record of the first one is gone")
    assert record.judgement is not None
    steps, head, path = record.judgement.steps, Head(record.branch, record.commit), repo.root / CONFIG_NAME
    try:
        texts = {ledger.stored_config(record).source, repo.config_at("HEAD")}
        # After a kill: commits of the journal were made, even if the user has reset the branch since.
        if not (commits := ledger.made_commits(record.number)):
            others = {id for r in ledger.records() if r.number != record.number for id in r.commits.values()}
            ids = commit(repo, head, steps, others)
            commits = {step.name: id for step, id in zip(steps, ids, strict=True) if id is not None}
            if commits:
                ledger.log("committed", ledger.run_dir(record.number) / RECORD_NAME, commits=commits)
        actions = [f"committed {id[:7]} ({name})" for name, id in commits.items()]
        left = [step.name for step in steps if step.keys and step.name not in commits]
        actions += [f"{name} left out: your own commit sets its keys, or does not fit them" for name in left]
        texts |= {entry.before for entry in repo.config_history(head)}
        source, there = repo.config_at("HEAD"), path.read_bytes() if path.is_file() and not path.is_symlink() else None
        if there == source:
            actions.append("train.toml holds the incumbent")
        elif there is not None and source is not None and there in texts:
            write_atomically(path, source)
            actions.append("put the incumbent into train.toml")
        else:
            actions.append("left train.toml alone: it is neither the config that ran nor the incumbent")
        return replace(record, commits=commits, git_action="; ".join(actions), git_error=None)
    except (EngineError, UsageError, OSError, ValueError) as error:
        return replace(record, git_action=f"not done: {error}", git_error=str(error))


def uncommitted(records: Sequence[Record], branch: str) -> str | None:
    """Return the decisions of a campaign that git did not commit, in one line; None if there are none."""
    for record in records:
        if record.branch == branch and record.git_error and record.judgement and record.judgement.steps:
            names = ", ".join(step.name for step in record.judgement.steps)
            cause = f"{names}: decided and not committed: {record.git_error}"
            return f"{cause.rstrip('.')}. Each later experiment and start tries again."
    return None


def _owed(records: Sequence[Record], branch: str) -> list[Record]:
    """Return the experiments whose commits are owed, in order. What the user decided since stays."""
    ours = [record for record in records if record.branch == branch]
    by_user = max((record.decided_before for record in ours if record.user_decisions), default=0)
    open_records = [record for record in ours if record.judgement and (record.git_action is None or record.git_error)]
    return sorted((r for r in open_records if (r.decided or 0) > by_user), key=lambda record: record.decided or 0)


def resume(ledger: Ledger, repo: Repo, note: Callable[[str], None], in_flight: Collection[int] = ()) -> None:
    """Close what an earlier controller left open, except what is `in_flight`. Call as the controller."""
    ledger.sweep(in_flight)
    records = ledger.records()
    due = [record for record in records if record.git_action is None]
    if any(record.git_error for record in records):
        due += [record for record in _owed(records, repo.head().branch) if record.git_action is not None]
    for record in sorted(due, key=lambda record: (record.decided is None, record.decided or 0, record.number)):
        if record.number in in_flight:
            continue
        if record.status == STARTED:
            cause = "interrupted: the process ended before its verdict"
            close(crash(record, Failure.INTERRUPTED, cause), ledger, repo)
            note(f"experiment {record.number:04d} was interrupted")
        elif record.judgement and (git_action := close(record, ledger, repo).git_action) != record.git_action:
            note(f"experiment {record.number:04d} was decided before git was called; now: {git_action}")
    for number in (number for number in reversed(ledger.numbers()) if number not in in_flight):
        if (last := ledger.read(number)) is not None:
            keep_model(ledger, last)  # a full disk may have kept the weights
            break
        delete_weights(ledger, number)


def keep_model(ledger: Ledger, record: Record, max_gb: float = MODELS_GB) -> None:
    """Keep the model of a keep and of a run of the incumbent as `runs/NNNN/model`; delete other weights. Above `max_gb`
    (1e9 bytes) in runs/ the oldest go, but never the baseline's, the last one of the incumbent, or this one. Call
    before `Ledger.close`: a kill repeats both. EngineError if the disk refuses."""
    folder = ledger.run_dir(record.number)
    try:
        is_model = record.is_keep or record.is_incumbent
        if is_model and record.evaluation:
            with suppress(FileNotFoundError):  # moved already: this is the second try after a kill
                (folder / WEIGHTS_NAME).rename(folder / MODEL_NAME)
        delete_weights(ledger, record.number)
        if not is_model:
            return
        models = sorted(path for path in ledger.runs_dir.glob(f"*/{MODEL_NAME}") if path.is_dir())
        sizes = {model: sum(file.lstat().st_size for file in model.iterdir()) for model in models}
        if sum(sizes.values()) <= max_gb * 1e9:
            return
        campaign = Campaign.of(ledger.records(), record.branch, record.rules_hash)
        spared = [each for each in (campaign.baseline, campaign.parent, campaign.incumbent_run, record) if each]
        folders = {ledger.run_dir(each.number) for each in spared}
        for model in models[1:-1]:
            if sum(sizes.values()) > max_gb * 1e9 and model.parent not in folders:
                remove_tree(model)
                del sizes[model]
    except OSError as error:
        raise disk_error(error, folder) from None


def delete_weights(ledger: Ledger, number: int) -> None:
    """Delete the weights that a run left."""
    for path in ledger.run_dir(number).glob(f"*{WEIGHTS_NAME}*"):  # a kill leaves partial ones
        remove_tree(path)
