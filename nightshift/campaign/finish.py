"""The end of an experiment: record, git, model, row. A kill may come between two steps: `resume` does the rest."""

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path

from msgspec.structs import replace

from nightshift.campaign.campaign import Campaign
from nightshift.campaign.git import GitLockedError, Head, Repo
from nightshift.campaign.index import fold
from nightshift.campaign.ledger import STARTED, Ledger
from nightshift.campaign.records import NOT_ISOLATED, Failure, Judgement, Record, Verdict
from nightshift.campaign.verify import resume_journal
from nightshift.errors import EngineError, UsageError
from nightshift.files import disk_error, remove_tree
from nightshift.text import clean

WEIGHTS_NAME, MODEL_NAME = "weights", "model"  # of a run, as its engine left them; of a kept experiment
_FAILED = "not done: "
MODELS_GB = 20.0  # in 1e9 bytes: about twenty models of 0.5B parameters


def close(record: Record, ledger: Ledger, repo: Repo) -> Record:
    """Write a record that has its verdict, do to git what the verdict says, keep or delete the model, add the row."""
    if record.judgement and record.failure is Failure.TRAINING:
        # Where the parent is the incumbent no more, git has another's config.
        incumbent = fold(ledger, ledger.records(), record.branch, record.rules_hash).incumbent
        if incumbent and incumbent.number != record.parent:
            record = replace(record, judgement=replace(record.judgement, incumbent=incumbent.number))
    ledger.write(record)
    record = _settle(record, ledger, repo)
    keep_model(ledger, record)
    ledger.close(record)
    return record


def _settle(record: Record, ledger: Ledger, repo: Repo) -> Record:
    """Commit a kept config; put the incumbent back after a discard. A failure of git is written into the record."""
    head, journal = Head(record.branch, record.commit), ledger.journal.head
    if not head.is_campaign:
        where = f"branch {head.branch}" if head.branch else "a detached HEAD"
        return replace(record, git_action=f"{_FAILED}{where} is no campaign")
    if record.failure in (Failure.MACHINERY, Failure.INTERRUPTED):
        return replace(record, git_action="train.toml left as it is: nothing was decided")
    if record.parent is None:
        return replace(record, git_action="baseline: nothing to commit")
    assert record.judgement is not None
    trailers = f"Nightshift-Run: {record.number:04d}\n" + (f"Nightshift-Journal: {journal}\n" if journal else "")
    trailers += "" if record.proposal.is_isolated else f"Nightshift-Agent: {NOT_ISOLATED}\n"
    # git takes neither NUL nor surrogates, a terminal no codes of others, and a reason no trailer of its own.
    message = f"{clean(record.proposal.description)}\n\n{clean(record.judgement.why)}\n\n{trailers}"
    try:
        candidate = ledger.stored_config(ledger.record(record.number)).source
        if record.is_keep:
            commit, settled = repo.keep(head, candidate, message)
            return replace(record, kept_commit=commit, git_action=settled)
        numbers = [record.judgement.incumbent or record.parent, record.judgement.taken_back_to]
        sources = [ledger.stored_config(ledger.record(number)).source for number in numbers if number is not None]
        before, incumbent = sources[0], sources[-1]
        restore = f"Restore the incumbent after experiment {record.number:04d}\n\n{message}"
        return replace(record, git_action=repo.discard(head, candidate, incumbent, restore, before))
    except (EngineError, UsageError, OSError, ValueError) as error:
        if isinstance(error, GitLockedError) and error.is_known and record.git_action:
            return record  # the same lock file as before: the record says so
        return replace(record, git_action=f"{_FAILED}{error}")


def uncommitted(campaign: Campaign) -> str | None:
    """What git did not take of the campaign's standing verdicts, in one line; None if nothing is missing."""
    last = campaign.decided[-1] if campaign.decided else None
    for record in (campaign.incumbent, last):
        if record is not None and (record.is_keep or record is last) and _is_unsettled(record) and record.git_action:
            verdict = "kept and not committed" if record.is_keep else "discarded, but the branch may still hold it"
            cause = record.git_action.removeprefix(_FAILED).rstrip(".")
            return f"{record.number:04d} is {verdict}: {cause}. Each later experiment and start tries again."
    return None


def _is_unsettled(record: Record) -> bool:
    """True if what its verdict does to the branch was not done, or failed for a reason that may have passed."""
    failed = (record.git_action or "").startswith(_FAILED) and Head(record.branch, None).is_campaign
    return record.judgement is not None and (record.git_action is None or failed)


def crash(record: Record, failure: Failure, cause: str) -> Record:
    """The record of an experiment that came to no verdict of its own."""
    return replace(record, status=Verdict.CRASH, failure=failure, judgement=Judgement(why=clean(cause)))


def resume(ledger: Ledger, repo: Repo, note: Callable[[str], None], in_flight: Collection[int] = ()) -> None:
    """Close what an earlier head left open, but for what is `in_flight`. Call as the head, with the lock held."""
    ledger.sweep(in_flight)
    records = resume_journal(ledger, note)
    due = _due(records, ledger, repo)
    for record in records:
        if record.number in in_flight:
            continue
        if record.status == STARTED:
            cause = "interrupted: the process ended before its verdict"
            close(crash(record, Failure.INTERRUPTED, cause), ledger, repo)
            note(f"experiment {record.number:04d} was interrupted; recorded as crash")
        elif record.number in due:
            settled = close(record, ledger, repo).git_action
            if settled != record.git_action:
                note(f"experiment {record.number:04d} was decided before git was called; now: {settled}")
    for number in reversed(ledger.numbers()):
        if number in in_flight:
            continue
        if (last := ledger.read(number)) is not None:
            keep_model(ledger, last)  # what a full disk would not let go of
            break
        _delete_weights(ledger.run_dir(number))


def _due(records: Sequence[Record], ledger: Ledger, repo: Repo) -> set[int]:
    """The unsettled experiments whose settlement makes the branch right: one that a kill cut off, or that failed and is
    the incumbent, or the last verdict, of the branch checked out. Any other would undo what came after it."""
    unsettled = {record.number: record for record in records if _is_unsettled(record)}
    last, branch = max((r.decided or 0 for r in records), default=0), repo.head().branch if unsettled else ""
    due = {n for n, r in unsettled.items() if r.git_action is None and r.decided in (None, last)}
    for rules_hash in {record.rules_hash for record in unsettled.values() if record.branch == branch}:
        campaign = fold(ledger, records, branch, rules_hash)
        keep, end = campaign.incumbent, (campaign.decided or (None,))[-1]
        due |= {r.number for r in (keep, end) if r and r.number in unsettled and (r is keep or not r.is_keep)}
    return due


def keep_model(ledger: Ledger, record: Record, max_gb: float = MODELS_GB) -> None:
    """Keep the model of a kept experiment as `runs/NNNN/model`; delete all weights of any other.

    Beyond `max_gb` (1e9 bytes) of models in runs/, the oldest are deleted, but never the baseline's, the incumbent's,
    or this one. Raises EngineError when the disk refuses. Call before `Ledger.close`: a kill repeats both.
    """
    folder = ledger.run_dir(record.number)
    try:
        if record.is_keep and record.evaluation and record.baseline is None:
            with suppress(FileNotFoundError):  # moved already: this is the second try after a power cut
                (folder / WEIGHTS_NAME).lstat()
                remove_tree(folder / MODEL_NAME)  # planted: it would refuse the right one at every start
                (folder / WEIGHTS_NAME).rename(folder / MODEL_NAME)
        _delete_weights(folder)
        if not record.is_keep:  # no other adds to the models
            return
        models = sorted(path for path in ledger.runs_dir.glob(f"*/{MODEL_NAME}") if path.is_dir())
        sizes = {model: sum(file.lstat().st_size for file in model.iterdir()) for model in models}
        if sum(sizes.values()) <= max_gb * 1e9:
            return
        campaign = fold(ledger, ledger.records(), record.branch, record.rules_hash)
        spared = [each for each in (*campaign.kept[:1], campaign.incumbent, record) if each is not None]
        folders = {ledger.files_dir(each) for each in spared}
        for model in models[1:-1]:
            if sum(sizes.values()) > max_gb * 1e9 and model.parent not in folders:
                remove_tree(model)
                del sizes[model]
    except OSError as error:
        raise disk_error(error, folder) from None


def _delete_weights(folder: Path) -> None:
    for path in folder.glob(f"*{WEIGHTS_NAME}*"):  # a kill leaves partial ones
        remove_tree(path)  # whatever lies in its place
