"""One experiment as every view and export tells it, and the campaign that it is told of."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from nightshift.campaign.campaign import Campaign, expected
from nightshift.campaign.records import Failure, Record, Verdict
from nightshift.campaign.results import figures
from nightshift.campaign.standing import expected_then
from nightshift.config.train_toml import Change, changes_of
from nightshift.report.views import Part

Outcome = Literal["baseline", "kept", "taken_back", "discarded", "crashed", "interrupted", "undecided"]
_OF_A_VERDICT: dict[str, Outcome] = {Verdict.KEEP: "kept", Verdict.DISCARD: "discarded", Verdict.CRASH: "crashed"}


_SAME = (
    *("eval_score", "eval_stderr", "strict_score", "incumbent_score", "p_better", "why", "num_steps", "reward_mean"),
    *("training_seconds", "total_seconds", "memory_gb", "description", "started"),
)


class Experiment(Part, kw_only=True):
    """`outcome` in the words that experiments are counted by, of a keep that the incumbent does not stand on (any
    more) `taken_back`. `since`: what later runs say of a keep. `expected` is candidate less parent as believed now,
    `expected_then` as its verdict had it; each `_stderr` is a standard deviation of the belief, but `eval_stderr` that
    of the score over examples."""

    number: int
    outcome: Outcome
    since: str | None
    parent: int | None
    branch: str
    rules: str
    started: str
    description: str
    proposer: str | None
    eval_score: float | None
    eval_stderr: float | None
    strict_score: float | None
    environment_scores: dict[str, float]
    incumbent_score: float | None
    expected: float | None
    expected_stderr: float | None
    expected_then: float | None
    expected_then_stderr: float | None
    p_better: float | None
    why: str | None
    failure: Failure | None
    num_steps: float | None
    reward_mean: float | None
    training_seconds: float | None
    total_seconds: float | None
    memory_gb: float | None
    kept_commit: str | None
    changes: tuple[Change, ...]


def outcome_of(record: Record, taken_back: Iterable[int]) -> Outcome:
    """As `campaign.standing.Counts` counts it."""
    if record.is_keep and record.parent is None:
        return "baseline"
    if record.failure is Failure.INTERRUPTED:
        return "interrupted"
    if record.is_keep and record.number in taken_back:
        return "taken_back"
    return _OF_A_VERDICT.get(record.status, "undecided")


def told(records: Iterable[Record], campaign: Campaign) -> tuple[Experiment, ...]:
    """These records of one campaign, in their order."""
    taken_back, since = {record.number for record in campaign.taken_back}, campaign.since
    return tuple(_experiment(record, campaign, taken_back, since.get(record.number)) for record in records)


def _experiment(record: Record, campaign: Campaign, taken_back: set[int], since: str | None) -> Experiment:
    known, now, then = figures(record), expected(campaign, record), expected_then(record)
    return Experiment(
        number=record.number,
        outcome=outcome_of(record, taken_back),
        since=None if since is None else str(since),
        parent=record.parent,
        branch=record.branch,
        rules=record.rules_hash,
        proposer=record.proposer or None,
        environment_scores=record.environment_scores,
        expected=now and now.mean,
        expected_stderr=now and now.stderr,
        expected_then=then and then.mean,
        expected_then_stderr=then and then.stderr,
        failure=record.failure,
        kept_commit=record.kept_commit,
        changes=changes_of(record.diff),
        **{name: known[name] for name in _SAME},
    )
