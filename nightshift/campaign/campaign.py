"""What the ledger says of one branch under one set of rules: incumbent, belief, tried configs, seeds.

Recomputed from the records at every start, so it survives anything that the records survive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nightshift.campaign import decision
from nightshift.campaign.decision import Belief
from nightshift.errors import UsageError
from nightshift.git.repo import Head
from nightshift.records import Failure, Record, Side, Verdict
from nightshift.rules import Rules


@dataclass(frozen=True, slots=True)
class Campaign:
    """The decided experiments of one branch under one rules hash, in order."""

    decided: tuple[Record, ...]
    belief: Belief | None  # None before the baseline
    kept: tuple[Record, ...]  # in the order of the belief's configs, the baseline first

    @property
    def incumbent(self) -> Record | None:
        """The experiment whose config is believed best; None before the baseline."""
        return self.kept[self.belief.incumbent] if self.belief is not None else None

    def tried(self, config_hash: str) -> Record | None:
        """The last experiment that decided this config; machinery failures and interruptions decide nothing."""
        return next((r for r in reversed(self.decided) if r.config_hash == config_hash), None)

    def num_runs_of(self, config_hash: str) -> int:
        """Evaluated runs of one config so far: the index of its next seed."""
        hashes = {r.number: r.config_hash for r in self.decided}
        owners = (
            record.config_hash if run.side is Side.CANDIDATE else hashes.get(record.parent or 0)
            for record in self.decided
            for run in record.runs
            if run.evaluation is not None
        )
        return sum(owner == config_hash for owner in owners)


def replay(records: Sequence[Record], rules: Rules) -> Campaign:
    """Fold the records of one branch and rules hash into the campaign's state."""
    decided = [
        r for r in records if r.judgement is not None and r.failure not in (Failure.MACHINERY, Failure.INTERRUPTED)
    ]
    belief: Belief | None = None
    kept: list[Record] = []
    for record in decided:
        if record.judgement is None or record.judgement.verdict is Verdict.CRASH:
            continue
        scores = [(run.side, run.evaluation.scores) for run in record.runs if run.evaluation is not None]
        keep = record.judgement.verdict is Verdict.KEEP
        if belief is None and not keep:
            continue  # the baseline's record was taken away, and with it what this one was compared with
        if belief is None:
            belief = decision.baseline([s for _, s in scores], rules.decision)
        else:
            comparison = decision.compare(belief, rules.decision)
            for side, run_scores in scores:
                comparison = decision.observe(comparison, side, run_scores, rules.decision)
            belief = decision.settle(comparison, keep, rules.decision)
        if keep:
            kept.append(record)
    return Campaign(tuple(decided), belief, tuple(kept))


def fixed_by(records: Sequence[Record], head: Head) -> Record | None:
    """The baseline of a campaign branch, the first that was kept: it fixes engine, rules, hardware and harness."""
    if not head.is_campaign:
        return None
    return next((r for r in records if r.branch == head.branch and r.status == Verdict.KEEP), None)


def require_same_setup(first: Record, engine: str, rules_hash: str, hardware: str) -> None:
    """Refuse a run that would not compare with the campaign it is in. Raises UsageError with the reason."""
    fix = "Start a new branch autoresearch/<tag> for it, or go back to what the campaign uses."
    for what, then, now in (
        ("engine", first.engine, engine),
        ("rules", first.rules_hash, rules_hash),
        ("hardware", first.hardware, hardware),
    ):
        if then != now:
            raise UsageError(
                f"campaign {first.branch} uses {what} {then} since its first experiment, this is {now}", fix
            )
