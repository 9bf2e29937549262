"""Proposers against each other without training: nights whose scores come from a landscape, decided by the real rule.

    uv run --group dev benchmarks/proposers.py                 about three hours of one core; goes on where it stopped

Everything but the run is a night's own: the drawn set, the proposer with its search space, train.toml, the verdict. All
proposers meet the same landscapes (landscapes.py) and the same noise.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
from landscapes import LANDSCAPES, Landscape, engine, forest, rules, shipped, used_keys
from machine import RESULTS, machine, table, write_result

from nightshift.agents.base import Context
from nightshift.agents.search import SearchProposer
from nightshift.agents.space import DECAY, DECAYING, KIND, STEPS
from nightshift.campaign.campaign import Campaign
from nightshift.campaign.recombine import next_base
from nightshift.campaign.records import (
    Evaluation,
    Outcome,
    Proposal,
    Record,
    Result,
    Training,
    Verdict,
    Weights,
    packed,
)
from nightshift.config.decision_rules import DecisionRules
from nightshift.config.train_toml import Config, diff, parse
from nightshift.errors import UsageError
from nightshift.experiment.runs import hash_of

PROPOSERS = ("search", "tpe", "random")
NUM_EXPERIMENTS = 40  # a night, the baseline among them
NUM_EXAMPLES = 400


class MemoryLedger:
    """A stand-in for the ledger of a night: the train.toml of each experiment."""

    def __init__(self) -> None:
        self.sources = dict[int, bytes]()

    def source(self, number: int) -> bytes:
        return self.sources[number]

    def stored_config(self, record: Record) -> Config:
        return parse(self.sources[record.number])


def play(
    landscape: Landscape,
    proposer: SearchProposer,
    seed: int,
    num_experiments: int,
) -> dict[str, Any]:
    """One night, as long as so many whole runs: true gain of the incumbent in pp, and what its proposals were like."""
    rng, ledger, campaign = np.random.default_rng((seed, 7)), MemoryLedger(), Campaign()
    noise = rng.normal(0, 1, (3 * num_experiments + 2, 3))
    its_rules = replace(rules(), decision=landscape.decision)
    truth, rows = dict[int, float](), list[dict[str, Any]]()

    def run(config: Config, place: int) -> Result:
        true_steps = landscape.throughput.plan(config.resolved).num_steps * math.exp(0.1 * noise[place, 0])
        planned = config.get(STEPS) or true_steps
        num_steps = min(planned, true_steps)
        true = landscape.score(config, num_steps, planned)
        seen = true + landscape.decision.seed_sd * noise[place, 1]
        right = round(
            min(max(seen + 0.4 * math.sqrt(true * (1 - true) / NUM_EXAMPLES) * noise[place, 2], 0), 1) * NUM_EXAMPLES
        )
        scores = packed((1.0,) * right + (0.0,) * (NUM_EXAMPLES - right))
        stderr = math.sqrt(max(right / NUM_EXAMPLES * (1 - right / NUM_EXAMPLES), 1e-4) / NUM_EXAMPLES)
        evaluation = Evaluation(right / NUM_EXAMPLES, stderr, scores, "e" * 64, 0.0, 1.0, Weights(1, "f" * 64), 1.0)
        seconds = 60.0 * min(planned / true_steps, 1.0)
        training = Training(
            Outcome.FINISHED if planned < true_steps else Outcome.BUDGET, max(round(num_steps), 1), seconds
        )
        truth[len(ledger.sources)] = true
        return Result(1000 + place, training, evaluation)

    while len(campaign.decided) < num_experiments:
        number, incumbent = len(campaign.decided) + 1, campaign.incumbent
        if incumbent is None:
            config, base, made_from = shipped(), None, None
        else:
            used = number / num_experiments
            base, made_from = next_base(campaign, used, ledger.stored_config, engine().validate)
            context = Context(number, incumbent, made_from.source, base, campaign, its_rules, ledger, used_keys())  # type: ignore[arg-type]
            config = _proposed(proposer, context, campaign)
        ledger.sources[number] = config.source
        result = run(config, number)
        changes = tuple(change.line for change in diff(made_from, config)) if made_from else ()
        effective = engine().validate(config).settings
        record = _record(number, incumbent, config, changes, result, base, hash_of(effective), landscape.decision)
        campaign = campaign.step(campaign.judge(record))
        if changes and incumbent is not None:
            rows.append(_told(config, result, changes, truth[number] - truth[incumbent.number]))
    assert campaign.incumbent is not None
    decaying = [row for row in rows if row["used"] is not None]
    return {
        "gain": 100 * (truth[campaign.incumbent.number] - truth[1]),
        "best_tried": 100 * (max(truth.values()) - truth[1]),
        "keys": float(np.mean([row["keys"] for row in rows])),
        "far_worse": float(np.mean([row["delta"] < -0.10 for row in rows])),
        "decaying": len(decaying) / len(rows),
        "used_percent": " ".join(f"{100 * row['used']:.0f}" for row in decaying),
        "cut_before_decay": sum(row["is_cut"] for row in decaying),
        "experiments": len(campaign.decided),
    }


def _proposed(proposer: SearchProposer, context: Context, campaign: Campaign) -> Config:
    """Asked again where it is refused, as a night does."""
    refusals = list[str]()
    while True:
        proposal = proposer.propose(replace(context, refusals=tuple(refusals)), lambda: False)
        try:
            config = parse(proposal.source or b"")
            engine().validate(config)
            if proposal.cause is None and campaign.tried(config.hash) is None:
                return config
            refusals.append(proposal.cause or "tried")
        except UsageError as error:
            refusals.append(str(error))


def _told(config: Config, run: Result, changes: tuple[str, ...], delta: float) -> dict[str, Any]:
    """Of a proposal: the share of the budget that its run used, where it has a decay, and whether that was begun."""
    steps, kind = config.get(STEPS), config.get(KIND)
    is_decaying = kind in DECAYING and steps is not None
    begins = 0 if kind == "cosine" else (steps or 0) - (config.get(DECAY) or 0)
    return {
        "delta": delta,
        "keys": sum(STEPS not in change for change in changes),
        "used": (run.training.training_seconds or 0.0) / 60.0 if is_decaying else None,
        "is_cut": is_decaying and run.training.num_steps < begins,
    }


def _record(
    number: int,
    incumbent: Record | None,
    config: Config,
    changes: tuple[str, ...],
    result: Result,
    base: tuple[int, ...] | None,
    effective_hash: str,
    decision: DecisionRules,
) -> Record:
    return Record(
        number=number,
        status=Verdict.KEEP if incumbent is None else Verdict.DISCARD,
        branch="autoresearch/simulated",
        commit=None,
        started="2026-01-01T00:00:00+00:00",
        parent=incumbent.number if incumbent else None,
        proposal=Proposal(description="simulated", base=base),
        diff=changes,
        config_hash=config.hash,
        effective_hash=effective_hash,
        rules_name=rules().name,
        rules_hash="0" * 12,
        decision_rules=decision,
        engine="trl",
        versions={},
        hardware="",
        result=result,
        decided=number,
    )


def _night(landscape: str, proposer: str, seed: int, num_experiments: int) -> dict[str, Any]:
    made, began = LANDSCAPES[landscape](seed), time.process_time()
    night = play(made, SearchProposer(proposer, seed), seed, num_experiments)
    return {
        "landscape": landscape,
        "proposer": proposer,
        "night": seed,
        **{name: round(value, 4) if isinstance(value, float) else value for name, value in night.items()},
        "cpu_seconds": round(time.process_time() - began, 1),
    }


def summary(rows: list[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A line for each landscape and proposer: means; of the gain and of its lead over random with standard errors."""
    lines = []
    for landscape in LANDSCAPES:
        by = {
            name: {r["night"]: r for r in rows if (r["landscape"], r["proposer"]) == (landscape, name)}
            for name in PROPOSERS
        }
        for name, nights in by.items():
            if len(nights) < 2:
                continue
            gains = np.array([row["gain"] for row in nights.values()])
            both = [night for night in nights if night in by["random"]]
            lead = np.array([nights[night]["gain"] - by["random"][night]["gain"] for night in both])
            used = [int(value) / 100 for row in nights.values() for value in row["used_percent"].split()]
            lines.append(
                {
                    "landscape": landscape,
                    "proposer": name,
                    "nights": len(nights),
                    "gain": float(gains.mean()),
                    "stderr": float(gains.std(ddof=1) / len(gains) ** 0.5),
                    "lead": float(lead.mean()) if len(lead) > 1 else None,
                    "lead_stderr": float(lead.std(ddof=1) / len(lead) ** 0.5) if len(lead) > 1 else None,
                    "keys": float(np.mean([row["keys"] for row in nights.values()])),
                    "far_worse": float(np.mean([row["far_worse"] for row in nights.values()])),
                    "decaying": float(np.mean([row["decaying"] for row in nights.values()])),
                    "used_median": float(np.median(used)) if used else None,
                    "used_10": float(np.quantile(used, 0.1)) if used else None,
                    "cut": sum(row["cut_before_decay"] for row in nights.values()),
                    "cpu": float(np.mean([row["cpu_seconds"] for row in nights.values()])),
                }
            )
    return lines


@click.command(help=__doc__)
@click.option("--nights", default=100, show_default=True)
@click.option("--first", default=0, show_default=True, help="Seed of the first night.")
@click.option("--proposers", default=",".join(PROPOSERS), show_default=True)
@click.option("--landscapes", default=",".join(LANDSCAPES), show_default=True)
@click.option("--experiments", default=NUM_EXPERIMENTS, show_default=True)
@click.option(
    "--output", type=click.Path(path_type=Path), default=RESULTS / "proposers.json", help="The result as JSON."
)
def main(
    nights: int,
    first: int,
    proposers: str,
    landscapes: str,
    experiments: int,
    output: Path,
) -> None:
    """Play what is missing, print, write."""
    kind, command = machine(), f"uv run --group dev benchmarks/proposers.py --experiments {experiments}"
    old = json.loads(output.read_text()) if output.exists() else {}
    rows: list[dict[str, Any]] = old.get("rows", []) if old.get("command") == command else []
    done = {(row["landscape"], row["proposer"], row["night"]) for row in rows}
    for seed in range(first, first + nights):
        for landscape in landscapes.split(","):
            for name in proposers.split(","):
                if (landscape, name, seed) not in done:
                    rows.append(_night(landscape, name, seed, experiments))
                    click.echo({k: v for k, v in rows[-1].items() if k != "used_percent"}, err=True)
        write_result(output, command, {"emulator_explains": forest()[1], "summary": summary(rows), "rows": rows}, kind)
    columns = {"landscape": "<10", "proposer": "<9", "nights": ">7", "gain": ">7.2f", "stderr": ">7.2f"}
    columns |= {"lead": ">+7.2f", "lead_stderr": ">12.2f", "keys": ">6.2f", "far_worse": ">10.2f", "decaying": ">9.2f"}
    columns |= {"used_median": ">12.3f", "used_10": ">9.3f", "cut": ">5", "cpu": ">6.1f"}
    click.echo(table(summary(rows), columns))
    click.echo(f"the forest explains {forest()[1]:.2f} of the variance of recorded runs that it was not fitted to")


if __name__ == "__main__":
    main()
