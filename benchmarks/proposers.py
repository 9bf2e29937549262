"""Compare proposers without training: nights whose scores come from an emulator, decided by the package's rule.

    uv run --group dev benchmarks/proposers.py --nights 40        continues where it stopped

The emulator is a random forest over the 62 recorded runs of arithmetic: another family than any proposer's model. Every
night has its own resample of the trees. A night composes train.toml from the kept changes, asks the proposer for a
change of the incumbent, adds a rider, and lets the rule decide. All proposers meet the same emulators and noise, with
and without riders. Gains are true ones, in percentage points.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

import click
import numpy as np
from machine import RESULTS, machine, standard_error, table, write_result
from numpy.typing import NDArray
from recorded import NIGHTS, rules, runs
from sklearn.ensemble import RandomForestRegressor

from nightshift.agents.base import Context
from nightshift.agents.search import DECAY, STEPS, WARMUP, Planner, SearchProposer, SearchSpace, planner
from nightshift.campaign.campaign import Campaign, already_tried
from nightshift.campaign.commits import change_keys, incumbent_config
from nightshift.campaign.posterior import measuring_run, next_stage
from nightshift.campaign.records import (
    Action,
    Change,
    Evaluation,
    Outcome,
    Proposal,
    Record,
    Result,
    Run,
    Stage,
    Training,
    Weights,
    packed,
)
from nightshift.config.allowlist import KEYS
from nightshift.config.train_toml import Config, parse
from nightshift.engines.base import used_keys
from nightshift.engines.trl.engine import TrlEngine
from nightshift.errors import UsageError

ROOT = Path(__file__).parents[1]
PROPOSERS = ("tpe", "random")
NUM_RUNS = 40  # of a night, the baseline and the last runs among them
NUM_EXAMPLES = 400
BUDGET_SECONDS = 60.0
RUN_SECONDS = 75.0
START = datetime(2026, 1, 1, tzinfo=UTC)
MAX_REFUSALS = 50  # of one proposal
NUM_TREES = 40  # of a night's emulator
HELD_OUT = 0.3  # share of the recorded runs that the emulator is tested on
Floats = NDArray[np.float64]


@cache
def engine() -> TrlEngine:
    return TrlEngine(rules(), ROOT, {})


@cache
def shipped() -> Config:
    return parse((ROOT / "train.toml").read_bytes())


@cache
def searched_keys() -> frozenset[str]:
    return frozenset(used_keys(engine(), shipped()) or ())


@cache
def recorded_runs() -> tuple[tuple[Config, Result], ...]:
    """The runs of the two recorded nights, with their configs."""
    return tuple(run for night in NIGHTS for run in runs(night))


@cache
def plan() -> Planner:
    """The true throughput of every night."""
    return planner(recorded_runs(), BUDGET_SECONDS)


@cache
def space() -> SearchSpace:
    """The space of the emulator's inputs: around the shipped config."""
    return SearchSpace.of([key for key in KEYS if key.path in searched_keys()], shipped(), plan())


def features(config: Config, used_budget: float, used_steps: float) -> list[float]:
    """Return the emulator's inputs. `used_budget`, `used_steps`: shares of the budget and of the planned steps."""
    schedule = [(config.get(path) or 0) / (config.get(STEPS) or math.inf) for path in (WARMUP, DECAY)]
    return [*space().places(config).values(), *schedule, min(used_budget, 1.0), min(used_steps, 1.0)]


@cache
def forest() -> tuple[RandomForestRegressor, float]:
    """Return the forest over all recorded runs, and the share of the variance that a forest explains of runs that it
    was not fitted to."""
    rows, scores = [], []
    for config, run in recorded_runs():
        planned = config.get(STEPS) or run.training.num_steps
        seconds = run.training.training_seconds or BUDGET_SECONDS
        rows.append(features(config, seconds / BUDGET_SECONDS, run.training.num_steps / planned))
        scores.append(run.evaluation.eval_score if run.evaluation else math.nan)
    inputs, outputs, rng = np.array(rows), np.array(scores), np.random.default_rng(0)
    explained = []
    for _ in range(20):
        out, fit = np.split(rng.permutation(len(outputs)), [round(HELD_OUT * len(outputs))])
        errors = outputs[out] - fit_forest(inputs[fit], outputs[fit]).predict(inputs[out])
        explained.append(1 - (errors**2).mean() / ((outputs[out] - outputs[fit].mean()) ** 2).mean())
    return fit_forest(inputs, outputs), float(np.median(explained))


def fit_forest(inputs: Floats, outputs: Floats) -> RandomForestRegressor:
    forest = RandomForestRegressor(200, min_samples_leaf=2, max_features=0.7, random_state=0, n_jobs=1)
    return forest.fit(inputs, outputs)


class Emulator:
    """The true scores of one night: a resample of the forest's trees."""

    def __init__(self, seed: int) -> None:
        chosen = np.random.default_rng((seed, 6)).integers(0, 200, NUM_TREES)
        self._trees = [forest()[0].estimators_[tree] for tree in chosen]

    def score(self, config: Config, speed: float = 1.0) -> float:
        """Return the true score of a config. `speed`: of its steps in this run, in place of the usual 1."""
        possible = plan()(config.resolved)[0]
        planned = config.get(STEPS) or possible * speed
        num_steps = min(planned, possible * speed)
        # The inner tree takes single precision, and skips checks that cost more than the prediction.
        inputs = np.array([features(config, num_steps / possible, num_steps / planned)], np.float32)
        return float(np.mean([tree.tree_.predict(inputs)[0, 0] for tree in self._trees]))


@dataclass
class MemoryLedger:
    """A stand-in for the ledger of a night: the train.toml of each experiment."""

    sources: dict[int, bytes] = field(default_factory=dict)

    def source(self, number: int) -> bytes:
        return self.sources[number]


class Night:
    """One simulated night: a campaign whose runs are emulated."""

    def __init__(self, proposer: SearchProposer, seed: int, has_rider: bool, num_runs: int) -> None:
        self.proposer = proposer
        self.has_rider = has_rider
        self.num_runs = num_runs
        self.emulator = Emulator(seed)
        self.ledger = MemoryLedger()
        self.campaign = Campaign()
        self.composed: dict[str, Config] = {}
        self.noise = np.random.default_rng((seed, 7)).normal(0, 1, (num_runs + 1, 3))

    def play(self) -> dict[str, Any]:
        """Play the night and return its figures; scores in percentage points."""
        num_last = 0
        effects = []
        self.run(Run())
        while (num_started := len(self.campaign.decided)) < self.num_runs:
            stage = next_stage(num_started, num_last, self.num_runs - num_started, 1)
            if stage is Stage.SEARCH:
                run = self.next_run()
                effects.append(self.true_score([*run.kept, run.new]) - self.true_score(run.kept))
            else:
                run = measuring_run(self.campaign.kept, stage)
                num_last += 1
            self.run(run)
        true_gain = self.true_score(self.campaign.kept) - self.true_score(())
        standing = self.campaign.standing
        assert standing is not None
        judgements = [record.judgement for record in self.campaign.decided if record.judgement]
        actions = [decision.action for judgement in judgements for decision in judgement.decisions]
        return {
            "gain": 100 * true_gain,
            "told_too_high": 100 * (standing.gain - true_gain),
            "half_interval": 100 * standing.gain_halfwidth,
            "holds": abs(standing.gain - true_gain) <= standing.gain_halfwidth,
            "commits_in": sum(action in (Action.KEEP, Action.ADOPT) for action in actions),
            "commits_out": actions.count(Action.REVERT),
            "changes": len(self.campaign.kept),
            "far_worse": float(np.mean(np.array(effects) < -0.10)),
        }

    def true_score(self, changes: Iterable[Change]) -> float:
        return self.emulator.score(self.compose(changes))

    def compose(self, changes: Iterable[Change]) -> Config:
        """Return the shipped config with these changes."""
        changes = list(changes)
        key = repr(changes)
        if key not in self.composed:
            self.composed[key] = incumbent_config(shipped(), changes)
        return self.composed[key]

    def next_run(self) -> Run:
        """Ask the proposer for a change of the incumbent, and choose a rider that fits into the same file."""
        posterior = self.campaign.posterior
        assert posterior is not None
        kept = self.campaign.kept
        change = self.propose(self.compose(kept))
        rider = posterior.rider(change) if self.has_rider else None
        if rider is not None:
            try:
                engine().validate(self.compose([*kept, rider, change]))
            except UsageError:
                rider = None
        return Run(kept=kept, rider=rider, new=change)

    def propose(self, incumbent: Config) -> Change:
        """Ask until the answer is a valid change that was not tried, as a night does."""
        kept = self.campaign.kept
        refusals: list[str] = []
        while len(refusals) < MAX_REFUSALS:
            context = Context(
                number=len(self.campaign.decided) + 1,
                source=incumbent.source,
                campaign=self.campaign,
                rules=rules(),
                ledger=self.ledger,  # type: ignore[arg-type]
                used_keys=searched_keys(),
                refusals=tuple(refusals),
            )
            answer = self.proposer.answer(context)
            try:
                config = parse(answer.source or b"")
                change = Change(experiment=context.number, keys=change_keys(incumbent, config))
                engine().validate(self.compose([*kept, change]))
            except UsageError as error:
                refusals.append(str(error))
                continue
            is_tried = already_tried(self.campaign.decided, Run(kept=kept, new=change), config.hash) is not None
            if answer.cause is None and not is_tried:
                return change
            refusals.append(answer.cause or "tried")
        raise RuntimeError(f"{self.proposer.name} made no valid proposal: {refusals[-1]}")

    def run(self, run: Run) -> None:
        """Measure a run's config and let the campaign decide."""
        number = len(self.campaign.decided) + 1
        config = self.compose(run.changes)
        self.ledger.sources[number] = config.source
        record = Record(
            number=number,
            status="started",
            branch="autoresearch/simulated",
            commit=None,
            started=(START + timedelta(seconds=RUN_SECONDS * number)).isoformat(),
            parent=None if self.campaign.parent is None else self.campaign.parent.number,
            decided_before=number - 1,
            proposal=Proposal(description="simulated"),
            run=run,
            diff=(),
            config_hash=config.hash,
            rules_name=rules().name,
            rules_hash="0" * 12,
            decision_rules=rules().decision,
            engine="trl",
            versions={},
            hardware="",
            result=self.measure(config),
            decided=number,
        )
        self.campaign.step(True, record)
        self.campaign.step(False, self.campaign.judge(record, shipped()))

    def measure(self, config: Config) -> Result:
        """Return the result of a run: steps, score and answers have noise."""
        noise = self.noise[len(self.campaign.decided)]
        speed = math.exp(0.1 * noise[0])
        true = self.emulator.score(config, speed)
        seen = true + rules().decision.seed_sd * noise[1] + 0.4 * math.sqrt(true * (1 - true) / NUM_EXAMPLES) * noise[2]
        num_right = round(min(max(seen, 0.0), 1.0) * NUM_EXAMPLES)
        score = num_right / NUM_EXAMPLES
        evaluation = Evaluation(
            eval_score=score,
            eval_stderr=math.sqrt(max(score * (1 - score), 1e-4) / NUM_EXAMPLES),
            scores=packed((1.0,) * num_right + (0.0,) * (NUM_EXAMPLES - num_right)),
            examples_sha256="e" * 64,
            truncated_share=0.0,
            completion_tokens_mean=1.0,
            weights=Weights(1, "f" * 64),
            seconds=1.0,
        )
        possible = plan()(config.resolved)[0] * speed
        planned = config.get(STEPS) or possible
        outcome = Outcome.FINISHED if planned < possible else Outcome.BUDGET
        num_steps = max(round(min(planned, possible)), 1)
        training = Training(outcome, num_steps, BUDGET_SECONDS * min(planned / possible, 1.0))
        return Result(1000 + len(self.campaign.decided), training, evaluation)


def summary(rows: list[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return one line for each proposer, with and without riders: means and standard errors over nights. `lead`: of the
    gain over that of `random` without riders, night by night; `by_rider`: over the same proposer without riders."""
    nights: dict[tuple[str, bool], dict[int, Mapping[str, Any]]] = {}
    for row in rows:
        nights.setdefault((row["proposer"], row["rider"]), {})[row["night"]] = row
    lines = []
    for (proposer, rider), played in sorted(nights.items()):
        line: dict[str, Any] = {"proposer": proposer, "rider": rider, "nights": len(played)}
        for name in ("gain", "holds"):
            values = (100 if name == "holds" else 1) * np.array([row[name] for row in played.values()], float)
            line |= {name: float(values.mean()), f"{name}_stderr": standard_error(values)}
        for name in ("told_too_high", "half_interval", "commits_in", "commits_out", "changes", "far_worse"):
            line[name] = float(np.mean([row[name] for row in played.values()]))
        for name, other in (("lead", ("random", False)), ("by_rider", (proposer, False))):
            both = sorted(played.keys() & nights.get(other, {}).keys()) if other != (proposer, rider) else []
            leads = np.array([played[night]["gain"] - nights[other][night]["gain"] for night in both])
            line[name] = float(leads.mean()) if both else None
            line[f"{name}_stderr"] = standard_error(leads) if both else None
        lines.append(line)
    return lines


COLUMNS = {
    "proposer": "<9",
    "rider": ">6",
    "nights": ">7",
    "gain": ">7.2f",
    "gain_stderr": ">12.2f",
    "by_rider": ">+9.2f",
    "by_rider_stderr": ">16.2f",
    "lead": ">+7.2f",
    "lead_stderr": ">12.2f",
    "holds": ">6.0f",
    "holds_stderr": ">13.0f",
    "told_too_high": ">14.2f",
    "half_interval": ">14.1f",
    "commits_in": ">11.1f",
    "commits_out": ">12.1f",
    "changes": ">8.1f",
    "far_worse": ">10.2f",
}


@click.command(help=__doc__)
@click.option("--nights", default=40, show_default=True)
@click.option("--proposers", default=",".join(PROPOSERS), show_default=True)
@click.option("--runs", "num_runs", default=NUM_RUNS, show_default=True, help="Runs of a night.")
@click.option("--output", type=click.Path(path_type=Path), default=RESULTS / "proposers.json", show_default=True)
def main(nights: int, proposers: str, num_runs: int, output: Path) -> None:
    """Play the missing nights, write the figures after each, and print a table."""
    kind, command = machine(), f"uv run --group dev benchmarks/proposers.py --runs {num_runs}"
    old = json.loads(output.read_text()) if output.exists() else {}
    rows: list[dict[str, Any]] = old.get("rows", []) if old.get("command") == command else []
    done = {(row["proposer"], row["rider"], row["night"]) for row in rows}
    for seed in range(nights):
        for name in proposers.split(","):
            for rider in (True, False):
                if (name, rider, seed) in done:
                    continue
                began = time.process_time()
                figures = Night(SearchProposer(name, seed), seed, rider, num_runs).play()
                figures |= {"cpu_seconds": round(time.process_time() - began, 1)}
                rows.append({"proposer": name, "rider": rider, "night": seed, **figures})
                click.echo(rows[-1], err=True)
        write_result(output, command, {"emulator_explains": forest()[1], "summary": summary(rows), "rows": rows}, kind)
    click.echo(table(summary(rows), COLUMNS))
    click.echo(f"the forest explains {forest()[1]:.2f} of the variance of recorded runs that it was not fitted to")


if __name__ == "__main__":
    main()
