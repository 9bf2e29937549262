"""Decide a recorded campaign again under other constants of the rule, without training.

The scores are the recorded ones. What was never run is not made up: where the rule asks for a run that
the records do not hold, it decides without, and the line says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from nightshift.campaign import decision
from nightshift.campaign.decision import Belief
from nightshift.campaign.noise import Scores
from nightshift.errors import UsageError
from nightshift.records import Failure, Record, Side, Verdict
from nightshift.rules import ALL_RULES, DecisionRules


@dataclass(frozen=True, slots=True)
class Options:
    """What is different from the recorded campaign. `num_examples`: the first so many of each environment."""

    constants: dict[str, Any]  # fields of DecisionRules
    max_runs: int = 3
    num_examples: int | None = None


@dataclass(frozen=True, slots=True)
class Redecision:
    """One experiment, decided again. `missing`: a run that the rule asked for and that was never made."""

    record: Record
    verdict: Verdict
    delta: float | None = None
    p_better: float | None = None
    num_runs: int = 0
    missing: Side | None = None
    parent: int | None = None  # experiment number of the incumbent that it met

    @property
    def differs(self) -> bool:
        """True if the recorded verdict was another."""
        return self.verdict != self.record.status


@dataclass(frozen=True, slots=True)
class Replay:
    """One recorded campaign (branch, rules hash), decided again."""

    branch: str
    rules_hash: str
    options: Options
    redecisions: tuple[Redecision, ...]
    belief: Belief | None
    incumbent: Record | None  # at the end


def campaigns(records: Sequence[Record]) -> list[list[Record]]:
    """The decided experiments by branch and rules hash, in the order of their first one."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        if record.judgement is not None and record.failure not in (Failure.MACHINERY, Failure.INTERRUPTED):
            groups.setdefault((record.branch, record.rules_hash), []).append(record)
    return list(groups.values())


def replay(records: Sequence[Record], options: Options) -> Replay:
    """Decide the experiments of one campaign in order. UsageError for rules that this version does not know."""
    first = records[0]
    recorded = next((r for r in ALL_RULES if r.name == first.rules_name), None)
    if recorded is None:
        raise UsageError(
            f"experiment {first.number:04d} has rules {first.rules_name!r}, which this version does not know",
            "Replay it with the version that recorded it.",
        )
    rules = replace(recorded.decision, **options.constants)
    configs = {record.number: record.config_hash for record in records}
    belief: Belief | None = None
    kept: list[Record] = []
    redecisions = []
    for record in records:
        runs: dict[Side, list[Scores]] = {Side.CANDIDATE: [], Side.INCUMBENT: []}
        for run in record.runs:
            if run.evaluation is not None:
                scores = _first_examples(run.evaluation.scores, len(recorded.environments), options.num_examples)
                runs[run.side].append(scores)
        incumbent = kept[belief.incumbent] if belief else None
        parent = incumbent.number if incumbent else None
        if record.status == Verdict.CRASH or not runs[Side.CANDIDATE]:
            redecisions.append(Redecision(record, Verdict.CRASH, parent=parent))
        elif belief is None or incumbent is None:
            wanted = min(rules.baseline_runs, options.max_runs)
            used = runs[Side.CANDIDATE][:wanted]
            missing = Side.CANDIDATE if len(used) < wanted else None
            redecisions.append(Redecision(record, Verdict.KEEP, num_runs=len(used), missing=missing))
            belief, kept = decision.baseline(used, rules), [record]
        else:
            if configs.get(record.parent or 0) != incumbent.config_hash:
                runs[Side.INCUMBENT] = []  # of another config than the replayed incumbent
            redecision, belief = _decide(
                Redecision(record, Verdict.DISCARD, parent=parent), belief, runs, rules, options
            )
            redecisions.append(redecision)
            if redecision.verdict is Verdict.KEEP:
                kept.append(record)
    incumbent = kept[belief.incumbent] if belief else None
    return Replay(first.branch, first.rules_hash, options, tuple(redecisions), belief, incumbent)


def _decide(
    start: Redecision, belief: Belief, runs: dict[Side, list[Scores]], rules: DecisionRules, options: Options
) -> tuple[Redecision, Belief]:
    """One experiment with the recorded runs, and the belief after it."""
    comparison = decision.observe(decision.compare(belief, rules), Side.CANDIDATE, runs[Side.CANDIDATE][0], rules)
    left = {Side.CANDIDATE: runs[Side.CANDIDATE][1:], Side.INCUMBENT: list(runs[Side.INCUMBENT])}
    num_runs = 1
    choice = decision.decide(comparison, rules, can_replicate=num_runs < options.max_runs)
    while choice.replicate is not None and left[choice.replicate]:
        comparison = decision.observe(comparison, choice.replicate, left[choice.replicate].pop(0), rules)
        num_runs += 1
        choice = decision.decide(comparison, rules, can_replicate=num_runs < options.max_runs)
    redecision = replace(
        start,
        verdict=Verdict.KEEP if choice.keep else Verdict.DISCARD,
        delta=comparison.delta,
        p_better=comparison.p_better,
        num_runs=num_runs,
        missing=choice.replicate,
    )
    return redecision, decision.settle(comparison, choice.keep, rules)


def _first_examples(scores: Scores, num_environments: int, num_examples: int | None) -> Scores:
    """The first examples of each environment's equal share of the set."""
    share = len(scores) // num_environments
    if num_examples is None or num_examples >= share:
        return scores
    return tuple(score for start in range(0, len(scores), share) for score in scores[start : start + num_examples])


def table(result: Replay) -> str:
    """The replay for people: a line an experiment, what differs, and what cannot be known."""
    rows = result.redecisions
    constants = ", ".join(f"{name} {value:g}" for name, value in result.options.constants.items()) or "as recorded"
    examples = f", {result.options.num_examples} examples" if result.options.num_examples else ""
    lines = [
        f"branch {result.branch or '(detached)'}, rules {result.rules_hash}; "
        f"constants: {constants}; max-runs {result.options.max_runs}{examples}",
        f"{'run':>4}  {'recorded':8}  {'replayed':8}  {'against':>7}  {'delta':>8}  {'p':>4}  runs  description",
    ]
    for row in rows:
        delta = "" if row.delta is None else f"{100 * row.delta:+.2f} pp"
        p_better = "" if row.p_better is None else f"{row.p_better:.2f}"
        parent = "" if row.parent is None else f"{row.parent:04d}"
        lines.append(
            f"{row.record.number:04d}{'*' if row.differs else ' '} {row.record.status:8}  {row.verdict:8}  "
            f"{parent:>7}  {delta:>8}  {p_better:>4}  {row.num_runs:>2}{'?' if row.missing else ' '}   "
            f"{row.record.description}"
        )
    return "\n".join([*lines, *_conclusions(result)])


def _conclusions(result: Replay) -> list[str]:
    rows = result.redecisions
    differing = [row for row in rows if row.differs]
    missing = [row for row in rows if row.missing]
    recorded = sum(row.record.status == Verdict.KEEP for row in rows)
    used, made = sum(row.num_runs for row in rows), sum(len(row.record.runs) for row in rows)
    lines = [
        f"kept: {recorded} recorded, {sum(row.verdict is Verdict.KEEP for row in rows)} replayed; "
        f"verdicts that differ (*): {len(differing)}; runs used: {used} of {made}"
    ]
    if result.belief is not None and result.incumbent is not None:
        lines.append(f"incumbent at the end: {result.incumbent.number:04d}, believed at {result.belief.mean:.4f}")
    if missing:
        lines.append(
            f"not known: {len(missing)} times (?) the rule asked for a run that was never made, "
            "and decided here without it"
        )
    if differing:
        lines.append(
            f"not known: what would have been proposed after {differing[0].record.number:04d}, the first verdict "
            "that differs; later configs were made from the recorded incumbent"
        )
    lines.append("not known: what the time of runs saved or added would have been used for")
    return lines
