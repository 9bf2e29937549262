"""The end of an experiment: record, git, model, row. A kill may come between two steps: `resume` does the rest."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress

from msgspec.structs import replace

from nightshift.campaign.campaign import Campaign, fold
from nightshift.campaign.commits import Reason, commit, incumbent_values, plan
from nightshift.campaign.git import CONFIG_NAME, Head, Repo
from nightshift.campaign.ledger import STARTED, Ledger
from nightshift.campaign.models import delete_weights, keep_model
from nightshift.campaign.records import NOT_ISOLATED, Action, Decision, Failure, Judgement, Record, Verdict
from nightshift.config.train_toml import Config, parse
from nightshift.config.values import Value
from nightshift.errors import ConfigError, EngineError, UsageError
from nightshift.files import write_atomically
from nightshift.text import clean

_FAILED = "not done: "


def crash(record: Record, failure: Failure, cause: str) -> Record:
    """Return the record as a crash with its cause."""
    return replace(record, status=Verdict.CRASH, failure=failure, judgement=Judgement(why=clean(cause)))


def close(record: Record, ledger: Ledger, repo: Repo) -> Record:
    """Write a record with its verdict, commit its decisions, keep or delete the model, and add the row. Commits that
    failed for earlier experiments are made first. Return the record with what git did."""
    ledger.write(record)
    for earlier in _unsettled(ledger.records(), record.branch):
        if earlier.number != record.number and (earlier.decided or 0) < (record.decided or 0):
            ledger.write(_settle(earlier, ledger, repo))
    record = _settle(record, ledger, repo)
    keep_model(ledger, record)
    ledger.close(record)
    return record


def _settle(record: Record, ledger: Ledger, repo: Repo) -> Record:
    """Commit each decision of a record, and write train.toml. Return the record with what git did, or its error."""
    head = Head(record.branch, record.commit)
    if not head.is_campaign:
        where = f"branch {head.branch}" if head.branch else "a detached HEAD"
        return replace(record, git_action=f"{_FAILED}{where} is no campaign")
    if record.failure in (Failure.MACHINERY, Failure.INTERRUPTED):
        return replace(record, git_action="train.toml left as it is: nothing was decided")
    if record.parent is None:
        return replace(record, git_action="baseline: nothing to commit")
    assert record.judgement is not None
    try:
        before = _campaign_before(ledger, record)
        if before.baseline is None:
            return replace(record, git_action="the baseline from now on, as the record of the first one is gone")
        baseline, candidate = ledger.stored_config(before.baseline), ledger.stored_config(record)
        steps, _ = plan(baseline, before.kept, record.judgement.decisions)
        earlier = {id for decided in before.decided for id in decided.commits.values()}
        ids = commit(repo, head, steps, lambda decision: _reason(decision, record, before, ledger), earlier)
        commits = {step.name: id for step, id in zip(steps, ids, strict=True) if id is not None}
        actions = [f"committed {id[:7]} ({name})" for name, id in commits.items()]
        left = [step.name for step in steps if step.after != step.before and step.name not in commits]
        actions += [f"{name} left out: your own commit sets its keys, or does not fit them" for name in left]
        actions.append(_restore(repo, candidate, incumbent_values(baseline, before.kept)))
        return replace(record, commits=commits, git_action="; ".join(actions))
    except (EngineError, UsageError, OSError, ValueError) as error:
        return replace(record, git_action=f"{_FAILED}{error}")


def _campaign_before(ledger: Ledger, record: Record) -> Campaign:
    """Return the campaign as it was when the record was decided."""
    place = record.decided or ledger.num_decided() + 1
    before = [
        other if (other.decided or 0) < place else replace(other, decided=None)
        for other in ledger.records()
        if other.decided_before < place
    ]
    return fold(ledger, before, record.branch, record.rules_hash)


def _reason(decision: Decision, record: Record, campaign: Campaign, ledger: Ledger) -> Reason:
    """Return what the commit's message says besides the decision."""
    change, runs = decision.change, campaign.measured_by(decision.change)
    proposal = record if change == record.run.new else campaign.proposal_of(change)
    if any(change == held for held in record.run.changes):
        runs = (*runs, record.number)
    return Reason(
        run=record.number,
        measured_by=runs,
        with_rider=record.run.with_rider if proposal is record else "",
        hypothesis=proposal.proposal.description if proposal else "",
        campaign=record.branch,
        agent="" if record.proposal.is_isolated else NOT_ISOLATED,
    )


def _restore(repo: Repo, candidate: Config, before: Mapping[str, Value]) -> str:
    """Write train.toml as committed, if it holds the candidate or the incumbent of before. Return what was done."""
    path, source = repo.root / CONFIG_NAME, repo.config_at("HEAD")
    there = path.read_bytes() if path.is_file() and not path.is_symlink() else None
    if there == source:
        return "train.toml holds the incumbent"
    with suppress(ConfigError):
        is_ours = there is not None and (there == candidate.source or incumbent_values(parse(there)) == before)
        if is_ours and source is not None:
            write_atomically(path, source)
            return "put the incumbent into train.toml"
    return "left train.toml alone: it is neither the config that ran nor the incumbent"


def uncommitted(records: Sequence[Record], branch: str) -> str | None:
    """Return the decisions of a campaign that git did not commit, in one line; None if there are none."""
    for record in records:
        decisions = record.judgement.decisions if record.judgement else ()
        names = [f"{d.action} {d.change.name}" for d in decisions if d.action is not Action.DISCARD]
        if record.branch == branch and _is_unsettled(record) and record.git_action and names:
            cause = f"{', '.join(names)}: decided and not committed: {record.git_action.removeprefix(_FAILED)}"
            return f"{cause.rstrip('.')}. Each later experiment and start tries again."
    return None


def _is_unsettled(record: Record) -> bool:
    """Return True if the verdict's commits were not made, or failed for a reason that may have passed."""
    failed = (record.git_action or "").startswith(_FAILED) and Head(record.branch, None).is_campaign
    return record.judgement is not None and (record.git_action is None or failed)


def _unsettled(records: Sequence[Record], branch: str) -> list[Record]:
    """Return the experiments of a branch whose commits are missing, in the order of their decisions. Decisions before a
    commit of the user's stay as the user left them."""
    ours = [record for record in records if record.branch == branch]
    by_user = max((record.decided_before for record in ours if record.user_decisions), default=0)
    due = [record for record in ours if _is_unsettled(record) and (record.decided or 0) > by_user]
    return sorted(due, key=lambda record: record.decided or 0)


def resume(ledger: Ledger, repo: Repo, note: Callable[[str], None], in_flight: Collection[int] = ()) -> None:
    """Close what an earlier controller left open, except what is `in_flight`. Call as the controller."""
    ledger.sweep(in_flight)
    records = ledger.records()
    due = {record.number for record in records if record.git_action is None}
    if any(map(_is_unsettled, records)):
        due |= {record.number for record in _unsettled(records, repo.head().branch)}
    records = [record for record in records if record.number in due and record.number not in in_flight]
    for record in sorted(records, key=lambda record: (record.decided is None, record.decided or 0, record.number)):
        if record.status == STARTED:
            cause = "interrupted: the process ended before its verdict"
            close(crash(record, Failure.INTERRUPTED, cause), ledger, repo)
            note(f"experiment {record.number:04d} was interrupted; recorded as crash")
        elif record.judgement is not None:
            git_action = close(record, ledger, repo).git_action
            if git_action != record.git_action:
                note(f"experiment {record.number:04d} was decided before git was called; now: {git_action}")
    for number in (number for number in reversed(ledger.numbers()) if number not in in_flight):
        if (last := ledger.read(number)) is not None:
            keep_model(ledger, last)  # a full disk may have kept the weights
            break
        delete_weights(ledger, number)
