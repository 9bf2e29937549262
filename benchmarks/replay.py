"""Decide recorded nights again with today's rule, beside what the nights' certificates measured.

    uv run benchmarks/replay.py

The two nights of recorded_runs.json ran on arithmetic under version 0.1.0. Their incumbents were trained again with
fresh seeds (their certificates). The proposals are the recorded ones, made from the recorded incumbents; a night of
today's rule would have had other proposals, riders and last runs. Prints the decisions, and writes results/replay.json.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import recorded
from machine import RESULTS, machine, write_result

from nightshift.campaign.campaign import Campaign
from nightshift.campaign.records import Action, Decision


def replay(night: str) -> Campaign:
    """Return the recorded night as today's rule decides it."""
    records = recorded.records(night)
    return Campaign.of(records, records[0].branch, records[0].rules_hash)


def decisions_of(campaign: Campaign) -> dict[int, list[Decision]]:
    """Map an experiment to the decisions after it that changed the incumbent."""
    found: dict[int, list[Decision]] = {}
    for record in campaign.decided:
        made = record.judgement.decisions if record.judgement else ()
        if changed := [decision for decision in made if decision.action is not Action.DISCARD]:
            found[record.number] = changed
    return found


def compare(night: str) -> dict[str, Any]:
    """Return the figures of a night; scores in percentage points. `certified`: what the certificate measured of the
    recorded incumbent; `same_config`: what today's rule reports of that config."""
    campaign = replay(night)
    certificate = recorded.certificate(night)
    incumbent = recorded.recorded_keeps(night)[-1]
    (changes,) = (record.run.changes for record in campaign.decided if record.number == incumbent)
    posterior = campaign.posterior
    assert posterior is not None
    kept, (gain, half) = campaign.kept, posterior.gain()
    posterior.set_kept(changes)
    same_gain, same_half = posterior.gain()
    actions = [decision.action for decisions in decisions_of(campaign).values() for decision in decisions]
    low, high = certificate["interval"]
    return {
        "night": night,
        "experiments": len(campaign.decided),
        "recorded_keeps": recorded.recorded_keeps(night),
        "kept": [change.experiment for change in kept],
        "commits_in": len(actions) - actions.count(Action.REVERT),
        "commits_out": actions.count(Action.REVERT),
        "gain": 100 * gain,
        "half_interval": 100 * half,
        "certified_config": incumbent,
        "same_config": 100 * same_gain,
        "same_config_half_interval": 100 * same_half,
        "certified": 100 * certificate["difference"],
        "certified_interval": [100 * low, 100 * high],
    }


def decision_lines(campaign: Campaign) -> list[str]:
    """Return a line for each decision that changed the incumbent."""
    return [
        f"after {number:04d}: {d.action} {d.change.name}: {d.change.settings}; "
        f"effect {d.estimate and d.estimate.with_p}"
        for number, decisions in decisions_of(campaign).items()
        for d in decisions
    ]


@click.command(help=__doc__)
@click.option("--output", type=click.Path(path_type=Path), default=RESULTS / "replay.json", show_default=True)
def main(output: Path) -> None:
    """Decide both nights again, print the decisions and write the figures."""
    rows = []
    for night in recorded.NIGHTS:
        row = compare(night)
        rows.append(row)
        click.echo("\n".join([night, *decision_lines(replay(night))]))
        low, high = row["certified_interval"]
        click.echo(
            f"kept {row['kept']}: reported {row['gain']:+.1f} ± {row['half_interval']:.1f} pp\n"
            f"the config of {row['certified_config']:04d}: reported {row['same_config']:+.1f} ± "
            f"{row['same_config_half_interval']:.1f} pp, certified {row['certified']:+.1f} ({low:+.1f} to {high:+.1f})"
        )
    write_result(output, "uv run benchmarks/replay.py", {"nights": rows}, machine())


if __name__ == "__main__":
    main()
