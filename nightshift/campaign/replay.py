"""Decide a recorded campaign again under other constants of the rule, without training.

The scores are the recorded ones. What was never run is not made up: where the baseline would have had more runs than
the records hold, it is decided with those there are, and the line says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from nightshift.campaign.campaign import Campaign
from nightshift.records import Evaluation, Record, Verdict


@dataclass(frozen=True, slots=True)
class Options:
    """What is different from the recorded campaign. `num_examples`: only the first so many."""

    constants: dict[str, Any]  # fields of DecisionRules
    num_examples: int | None = None


@dataclass(frozen=True, slots=True)
class Redecision:
    """One experiment, decided again. `parent`: the incumbent that it met; `is_short`: the baseline lacks a run."""

    record: Record
    verdict: Verdict
    delta: float | None = None
    p_better: float | None = None
    parent: int | None = None
    is_short: bool = False

    @property
    def differs(self) -> bool:
        """True if the recorded verdict was another."""
        return self.verdict != self.record.status


@dataclass(frozen=True, slots=True)
class Replay:
    """One recorded campaign (branch, rules hash), decided again."""

    options: Options
    redecisions: tuple[Redecision, ...]
    campaign: Campaign


def campaigns(records: Sequence[Record]) -> list[list[Record]]:
    """The decided experiments by branch and rules hash, in the order of their decisions."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in sorted((r for r in records if r.decided is not None), key=lambda record: record.decided or 0):
        groups.setdefault((record.branch, record.rules_hash), []).append(record)
    return list(groups.values())


def replay(records: Sequence[Record], options: Options) -> Replay:
    """Decide the experiments of one campaign in order, each against the incumbent of the replayed campaign."""
    campaign, redecisions = Campaign(), list[Redecision]()
    for recorded in records:
        record = _changed(recorded, options)
        parent = campaign.incumbent
        if not record.evaluations:
            redecision = Redecision(recorded, Verdict.CRASH, parent=parent.number if parent else None)
            record = replace(record, status=Verdict.CRASH)
        elif parent is None:
            is_short = len(record.evaluations) < record.decision.baseline_runs
            redecision = Redecision(recorded, Verdict.KEEP, is_short=is_short)
            record = replace(record, status=Verdict.KEEP)
        else:
            record = replace(record, parent=parent.number)
            judgement = campaign.judge(record)
            redecision = Redecision(recorded, judgement.verdict, judgement.delta, judgement.p_better, parent.number)
            record = replace(record, status=judgement.verdict)
        redecisions.append(redecision)
        campaign = campaign.step(record)
    return Replay(options, tuple(redecisions), campaign)


def _changed(record: Record, options: Options) -> Record:
    """The record as it would be with the other constants, and with fewer examples."""
    rules = replace(record.decision, **options.constants)
    runs = [run for run in record.runs if run.evaluation is not None]
    if record.parent is None:
        runs = runs[: rules.baseline_runs]
    cut = [replace(run, evaluation=_first_examples(run.evaluation, options.num_examples)) for run in runs]
    return replace(record, decision=rules, runs=tuple(cut))


def _first_examples(evaluation: Evaluation | None, num_examples: int | None) -> Evaluation | None:
    return evaluation and replace(evaluation, scores=evaluation.scores[:num_examples])


def table(result: Replay) -> str:
    """The replay for people: a line an experiment, what differs, and what cannot be known."""
    rows, first = result.redecisions, result.redecisions[0].record
    constants = ", ".join(f"{name} {value:g}" for name, value in result.options.constants.items()) or "as recorded"
    examples = f"; {result.options.num_examples} examples" if result.options.num_examples else ""
    lines = [
        f"branch {first.branch or '(detached)'}, rules {first.rules_hash}; constants: {constants}{examples}",
        f"{'run':>4}  {'recorded':8}  {'replayed':8}  {'against':>7}  {'delta':>8}  {'p':>4}  description",
    ]
    for row in rows:
        delta = "" if row.delta is None else f"{100 * row.delta:+.2f} pp"
        p_better = "" if row.p_better is None else f"{row.p_better:.2f}"
        parent = "" if row.parent is None else f"{row.parent:04d}"
        lines.append(
            f"{row.record.number:04d}{'*' if row.differs else ' '} {row.record.status:8}  {row.verdict:8}  "
            f"{parent:>7}  {delta:>8}  {p_better:>4}  {row.record.description}"
        )
    return "\n".join([*lines, *_conclusions(result)])


def _conclusions(result: Replay) -> list[str]:
    rows = result.redecisions
    differing = [row for row in rows if row.differs]
    recorded = sum(row.record.is_keep for row in rows)
    lines = [
        f"kept: {recorded} recorded, {sum(row.verdict is Verdict.KEEP for row in rows)} replayed; "
        f"verdicts that differ (*): {len(differing)}"
    ]
    incumbent, standing = result.campaign.incumbent, result.campaign.standing
    if incumbent is not None and standing is not None:
        lines.append(f"incumbent at the end: {incumbent.number:04d}, believed at {standing.incumbent:.4f}")
    if any(row.is_short for row in rows):
        lines.append("not known: further runs of the baseline were never made, and it was decided here without them")
    if differing:
        lines.append(
            f"not known: what would have been proposed after {differing[0].record.number:04d}, the first verdict "
            "that differs; later configs were made from the recorded incumbent"
        )
    return lines
