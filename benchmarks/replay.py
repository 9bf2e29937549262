"""Decide recorded campaigns again under the current rule, without training.

\b
    uv run benchmarks/replay.py                                  the nights of recorded_runs.json
    uv run benchmarks/replay.py runs --constant seed_sd=0.02     the campaigns of a folder runs/, with another constant

The scores are the recorded ones. The constants are those that this checkout has for the records' environments. A
baseline is decided with the runs that it has, even where the rule now wants more. After the first verdict that differs
(*), nobody knows what would have been proposed: the later configs were made from the recorded incumbent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import click
import recorded
from msgspec import structs

from nightshift.campaign.campaign import Campaign, ordered
from nightshift.campaign.ledger import Ledger
from nightshift.campaign.records import Record
from nightshift.campaign.standing import Counts, effect_at_decision
from nightshift.config.rules_toml import Chosen, rules_of
from nightshift.errors import NightshiftError, UsageError

ROOT = Path(__file__).resolve().parents[1]


def campaigns(records: Sequence[Record]) -> list[list[Record]]:
    """The decided experiments by branch and rules hash, in the order of their decisions."""
    keys = dict.fromkeys((record.branch, record.rules_hash) for record in records)
    return [campaign for key in keys if (campaign := ordered(records, *key))]


def replay(records: Sequence[Record], constants: Mapping[str, Any]) -> Campaign:
    """Decide one campaign again, with `constants` in place of those fields of DecisionRules.

    An experiment is compared with its recorded parent, or with the incumbent where the parent is not kept now.
    """
    campaign = Campaign()
    for old in records:
        decision, parent = replace(old.decision_rules, **constants), old.parent
        if campaign.incumbent and parent not in [kept.number for kept in campaign.kept]:
            parent = campaign.incumbent.number
        new = structs.replace(old, decision_rules=decision, parent=parent)
        if new.evaluation:
            new = campaign.judge(new)
        campaign = campaign.step(new)
    return campaign


def current_constants(records: Sequence[Record], changes: Mapping[str, float]) -> dict[str, Any]:
    """The constants that this checkout has for a campaign's environments, with `changes`.

    Raises:
        UsageError: an environment that is not in this checkout, or a change of something that is no number.
    """
    chosen = Chosen(environments=[*records[0].environments])
    decision = rules_of(ROOT, chosen, records[0].engine, gpu_count=0).decision
    constants = {field.name: getattr(decision, field.name) for field in fields(decision)}
    numbers = [name for name, value in constants.items() if isinstance(value, int | float)]
    for name in changes.keys() - numbers:
        raise UsageError(f"the rule has no constant {name!r} that is a number", f"Name one of {', '.join(numbers)}.")
    return constants | {name: type(constants[name])(value) for name, value in changes.items()}


def table(records: Sequence[Record], campaign: Campaign) -> str:
    """A line an experiment; then the counts, and what is expected of the incumbent."""
    lines = [f"{records[0].branch or '(detached)'}, rules {records[0].rules_hash}"]
    for old, new in zip(records, campaign.decided, strict=True):
        verdicts = f"{old.status:8} {new.status:8}{'*' if new.status != old.status else ' '}"
        lines.append(f"{new.number:04d} {verdicts} {effect_at_decision(new) or ''!s:16} {new.proposal.description}")
    lines += [f"recorded: {Counts.of(records)}", f"replayed: {Counts.of(campaign.decided)}"]
    if campaign.incumbent and campaign.standing:
        score, gain = campaign.standing.incumbent, 100 * campaign.standing.difference
        lines.append(
            f"incumbent: {campaign.incumbent.number:04d}, expected {score:.4f}, {gain:+.1f} pp over the baseline"
        )
    return "\n".join(lines)


@click.command(help=__doc__)
@click.argument("runs", required=False, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--constant", "changes", multiple=True, metavar="NAME=VALUE", help="A number of the rule; repeatable.")
def main(runs: Path | None, changes: tuple[str, ...]) -> None:
    """Read, decide, print."""
    try:
        numbers = {name: float(value) for name, _, value in (change.partition("=") for change in changes)}
    except ValueError:
        raise click.BadParameter(f"{', '.join(changes)}: write NAME=VALUE, with a number for VALUE") from None
    try:
        found = campaigns(Ledger(runs, runs).records()) if runs else [recorded.records(n) for n in recorded.NIGHTS]
        if not found:
            raise UsageError(f"{runs} holds no decided experiment", "Name a folder runs/ with records.")
        for records in found:
            click.echo(table(records, replay(records, current_constants(records, numbers))))
    except NightshiftError as error:
        raise click.ClickException(str(error)) from None


if __name__ == "__main__":
    main()
