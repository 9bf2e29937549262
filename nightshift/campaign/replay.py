"""Decide a recorded campaign again under other constants of the rule, without training.

The scores are the recorded ones. What was never run is not made up: where the baseline would have had more runs than
the records hold, it is decided with those there are, and the line says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from nightshift.campaign.campaign import Campaign, ordered
from nightshift.campaign.composite import first, run_scores
from nightshift.campaign.counts import Counts
from nightshift.campaign.expected import expected_then
from nightshift.records import Record


def campaigns(records: Sequence[Record]) -> list[list[Record]]:
    """The decided experiments by branch and rules hash, in the order of their decisions."""
    groups = [ordered(records, *whose) for whose in dict.fromkeys((r.branch, r.rules_hash) for r in records)]
    return sorted(filter(None, groups), key=lambda group: group[0].decided or 0)


def replay(records: Sequence[Record], constants: Mapping[str, Any], num_examples: int | None = None) -> Campaign:
    """Decide the experiments of one campaign in order, each against its parent, or, if that is not kept in the replayed
    campaign, against the incumbent there.

    `constants`: fields of DecisionRules that are different; `num_examples`: only the first so many of every
    environment. The campaign's `decided` are the records as they come out.
    """
    campaign = Campaign()
    for recorded in records:
        rules = replace(recorded.decision, **constants)
        is_cut = recorded.parent is None and "baseline_runs" in constants
        runs = [run for run in recorded.runs[: rules.baseline_runs if is_cut else None] if run.evaluation]
        if num_examples is not None and runs and run_scores(replace(recorded, runs=tuple(runs))).size:
            runs = [replace(run, evaluation=first(run.evaluation, num_examples)) for run in runs if run.evaluation]
        parent = campaign.incumbent.number if campaign.incumbent else None
        if recorded.parent in [kept.number for kept in campaign.kept]:
            parent = recorded.parent
        record = replace(recorded, decision=rules, runs=tuple(runs), parent=parent)
        if runs:
            judgement = campaign.judge(record)
            record = replace(record, status=judgement.verdict, judgement=judgement)
        campaign = campaign.step(record)
    return campaign


def table(records: Sequence[Record], campaign: Campaign, changed: str) -> str:
    """The replay for people: a line an experiment, what differs, and what cannot be known."""
    lines = [
        f"branch {records[0].branch or '(detached)'}, rules {records[0].rules_hash}; constants: {changed}",
        f"{'run':>4}  {'recorded':8}  {'replayed':8}  {'against':>7}  {'expected_then':>14}  {'p':>4}  description",
    ]
    for recorded, record in zip(records, campaign.decided, strict=True):
        then, p_better = expected_then(record), ""
        if record.judgement and record.judgement.p_better is not None:
            p_better = f"{record.judgement.p_better:.2f}"
        parent = "" if record.parent is None else f"{record.parent:04d}"
        lines.append(
            f"{record.number:04d}{'*' if record.status != recorded.status else ' '} {recorded.status:8}  "
            f"{record.status:8}  {parent:>7}  {then or ''!s:>14}  {p_better:>4}  {record.description}"
        )
    return "\n".join([*lines, *_conclusions(records, campaign)])


def _conclusions(records: Sequence[Record], campaign: Campaign) -> list[str]:
    differing = [old.number for old, new in zip(records, campaign.decided, strict=True) if old.status != new.status]
    lines = [
        f"recorded: {Counts.of(records)}",
        f"replayed: {Counts.of(campaign.decided)}",
        f"verdicts that differ (*): {len(differing)}",
    ]
    if campaign.incumbent and campaign.standing:
        believed = campaign.standing.incumbent
        lines.append(f"incumbent at the end: {campaign.incumbent.number:04d}, believed at {believed:.4f}")
    if campaign.kept and len(campaign.kept[0].runs) < campaign.kept[0].decision.baseline_runs:
        lines.append("not known: further runs of the baseline were never made, and it was decided here without them")
    if differing:
        lines.append(
            f"not known: what would have been proposed after {differing[0]:04d}, the first verdict "
            "that differs; later configs were made from the recorded incumbent"
        )
    return lines
