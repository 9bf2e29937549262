"""Decide recorded nights again with today's rule, beside what the nights' certificates measured.

    uv run benchmarks/replay.py

The two nights of recorded_runs.json ran on arithmetic under version 0.1.0, whose incumbents were trained again with
fresh seeds (their certificates). Every recorded run is one observation of today's rule: a config is the baseline plus
the changes of its recorded parents and a change of its own. The proposals are the recorded ones, made from the recorded
incumbents; a night of today's rule would have had other proposals, riders and last runs. Prints the decisions, and
writes results/replay.json.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import click
import recorded
from machine import RESULTS, machine, write_result

from nightshift.campaign.next_run import Run
from nightshift.campaign.posterior import Posterior
from nightshift.campaign.records import Action, Change, Decision, Record
from nightshift.config.decision_rules import RuleConstants
from nightshift.config.train_toml import Config, changed_keys, spelled


class Replay(NamedTuple):
    """A recorded night, decided again. `configs`: the changes of each recorded config, by experiment. `decisions`: by
    experiment, without discards."""

    posterior: Posterior
    configs: dict[int, tuple[Change, ...]]
    decisions: dict[int, list[Decision]]


def changes_between(before: Config, after: Config) -> dict[str, str | None]:
    """Return the keys by which `after` trains otherwise, as a Change holds them."""
    return {key: spelled(after.values[key]) if key in after.values else None for key in changed_keys(before, after)}


def hours_between(first: Record, record: Record) -> float:
    """Return the hours from the start of one experiment to that of another."""
    return (datetime.fromisoformat(record.started) - datetime.fromisoformat(first.started)).total_seconds() / 3600


def replay(night: str, rules: RuleConstants) -> Replay:
    """Decide a recorded night again. The two runs of its baseline are two observations."""
    records = recorded.records(night)
    train_tomls = recorded.configs(night)
    first, second = (result.evaluation for _, result in recorded.runs(night)[:2])
    assert first is not None
    assert second is not None
    posterior = Posterior(first.eval_score, first.eval_stderr, rules)
    posterior.observe(Run(), second.eval_score, 0.0)
    configs: dict[int, tuple[Change, ...]] = {records[0].number: ()}
    decisions: dict[int, list[Decision]] = {}
    for record in records[1:]:
        assert record.parent is not None
        assert record.score is not None
        keys = changes_between(train_tomls[record.parent], train_tomls[record.number])
        run = Run(kept=configs[record.parent], new=Change(experiment=record.number, keys=keys))
        decided = posterior.observe(run, record.score, hours_between(records[0], record))
        configs[record.number] = tuple(run.changes)
        decisions[record.number] = [decision for decision in decided if decision.action is not Action.DISCARD]
    return Replay(posterior, configs, decisions)


def gain_of(replayed: Replay, changes: tuple[Change, ...]) -> tuple[float, float]:
    """Return the gain over the baseline that the rule would report of a config, and half of its 95 % interval. The
    replay's incumbent becomes this config."""
    posterior = replayed.posterior
    for change in posterior.kept:
        posterior.decide_for_user(change, is_kept=False)
    for change in changes:
        posterior.decide_for_user(change, is_kept=True)
    return posterior.gain()


def compare(night: str) -> dict[str, Any]:
    """Return the figures of a night; scores in percentage points. `certified`: what the certificate measured of the
    recorded incumbent; `same_config`: what today's rule reports of that config."""
    replayed = replay(night, recorded.constants())
    kept = [change.experiment for change in replayed.posterior.kept]
    gain, half = replayed.posterior.gain()
    recorded_keeps = [record.number for record in recorded.records(night)[1:] if record.is_keep]
    certificate = recorded.certificate(night)
    certified = max(recorded_keeps)  # the last keep was the incumbent
    same_gain, same_half = gain_of(replayed, replayed.configs[certified])
    decided = [decision for decisions in replayed.decisions.values() for decision in decisions]
    low, high = certificate["interval"]
    return {
        "night": night,
        "experiments": len(replayed.configs),
        "recorded_keeps": recorded_keeps,
        "kept": kept,
        "commits_in": sum(decision.action is not Action.REVERT for decision in decided),
        "commits_out": sum(decision.action is Action.REVERT for decision in decided),
        "gain": 100 * gain,
        "half_interval": 100 * half,
        "certified_config": certified,
        "same_config": 100 * same_gain,
        "same_config_half_interval": 100 * same_half,
        "certified": 100 * certificate["difference"],
        "certified_interval": [100 * low, 100 * high],
    }


def decision_lines(replayed: Replay) -> list[str]:
    """Return a line for each decision that changed the incumbent."""
    return [
        f"after {number:04d}: {decision.action.value} {decision.change.experiment:04d}, "
        f"effect {100 * (decision.effect or 0):+.1f} pp, P(it helps) {100 * (decision.p_helps or 0):.0f} %"
        for number, decisions in replayed.decisions.items()
        for decision in decisions
    ]


@click.command(help=__doc__)
@click.option("--output", type=click.Path(path_type=Path), default=RESULTS / "replay.json", show_default=True)
def main(output: Path) -> None:
    """Decide both nights again, print the decisions and write the figures."""
    rows = []
    for night in recorded.NIGHTS:
        row = compare(night)
        rows.append(row)
        click.echo("\n".join([night, *decision_lines(replay(night, recorded.constants()))]))
        low, high = row["certified_interval"]
        click.echo(
            f"kept {row['kept']}: reported {row['gain']:+.1f} ± {row['half_interval']:.1f} pp\n"
            f"the config of {row['certified_config']:04d}: reported {row['same_config']:+.1f} ± "
            f"{row['same_config_half_interval']:.1f} pp, certified {row['certified']:+.1f} ({low:+.1f} to {high:+.1f})"
        )
    write_result(output, "uv run benchmarks/replay.py", {"nights": rows}, machine())


if __name__ == "__main__":
    main()
