"""A stand-in campaign: a ledger in the real file formats whose "training" is a made-up function of the config.

    python -m tests.stand_in_campaign FOLDER [NUM_EXPERIMENTS]

Scores, decisions, diffs and files go through the real decision rule, config and ledger, with riders and the last runs
of a night; the numbers mean nothing. It is for tests and for looking at the page.
"""

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from statistics import NormalDist
from typing import Any
from unittest import mock

import numpy as np

from nightshift.campaign.campaign import Campaign
from nightshift.campaign.commits import change_keys, incumbent_config
from nightshift.campaign.ledger import Ledger
from nightshift.campaign.metrics import Step, write_steps
from nightshift.campaign.posterior import measuring_run
from nightshift.campaign.records import (
    Action,
    Evaluation,
    Judgement,
    Outcome,
    Record,
    Result,
    Run,
    Stage,
    Training,
    Weights,
    packed,
)
from nightshift.config.train_toml import Config, diff, parse, set_values
from nightshift.errors import Failure
from nightshift.evaluation import environment as environments
from nightshift.evaluation.evaluate import examples_digest
from tests.campaigns import a_record, replace
from tests.rules import ARITHMETIC_TRL

BRANCH = "autoresearch/stand-in"
RULES_HASH = "57a2d1250000"
_BEGAN = datetime(2026, 11, 20, 21, 4, tzinfo=UTC)
_BASELINE = parse(b"""# A stand-in train.toml.
seq_len = 2048                   # tokens of a packed training row

[orchestrator]
batch_size = 256
group_size = 4        # rollouts an example

[orchestrator.train.sampling]
temperature = 1.0
max_completion_tokens = 1024

[orchestrator.algo]
type = "grpo"

[trainer.optim]
lr = 3e-6                        # peak learning rate
weight_decay = 0.01
max_norm = 1.0
""")
_CHOICES: dict[str, Sequence[Any]] = {
    "trainer.optim.lr": (1e-6, 2e-6, 3e-6, 4e-6, 5e-6, 7e-6, 1e-5, 3e-5),
    "orchestrator.group_size": (2, 4, 8, 16, 32),
    "orchestrator.train.sampling.temperature": (0.7, 0.8, 0.9, 1.0, 1.1, 1.2),
    "trainer.optim.max_norm": (0.2, 0.5, 1.0, 2.0),
    "trainer.optim.weight_decay": (0.0, 0.01, 0.05, 0.1),
    "orchestrator.batch_size": (128, 256, 512),
    "orchestrator.algo.type": ("grpo", "max_rl"),
}
_LAST_RUNS = (Stage.LAST_BASELINES, Stage.LAST_BASELINES, Stage.LAST_INCUMBENTS, Stage.LAST_INCUMBENTS)
_MANY = 24  # experiments, from which on the last runs of a night are made


@dataclass
class State:
    """A stand-in campaign while it is made."""

    ledger: Ledger
    rng: np.random.Generator
    examples: list[Any]
    difficulty: np.ndarray
    with_files: bool
    changes: dict[str, object]
    examples_sha256: str
    now: datetime = _BEGAN
    campaign: Campaign = field(default_factory=Campaign)


def build(
    root: Path,
    num_experiments: int = 32,
    seed: int = 3,
    num_examples: int = 4000,
    with_files: bool = True,
    **changes: object,
) -> Ledger:
    """`num_experiments` of a campaign in `root`/runs: a baseline, keeps, discards, reverts, crashes, a collapse, and
    from _MANY on the last runs of a night.

    Without `with_files` the runs have neither metrics nor rollouts. `changes` to every record say whose they are.
    """
    rng = np.random.default_rng(seed)
    (rules,) = ARITHMETIC_TRL.environments
    (environment,) = environments.load(Path(__file__).parents[1], [replace(rules, num_validation=num_examples)])
    examples = environment.examples("validation")
    sha256 = examples_digest([(environment, example) for example in examples])
    state = State(Ledger(root), rng, examples, rng.standard_normal(num_examples), with_files, changes, sha256)
    with mock.patch("os.fsync"):  # no power cut here, and five of them an experiment take their time
        for number in range(1, num_experiments + 1):
            stage = _LAST_RUNS[number - num_experiments - 1] if number > num_experiments - len(_LAST_RUNS) else None
            _experiment(state, number, Stage.SEARCH if num_experiments < _MANY else stage or Stage.SEARCH)
        state.ledger.runs_dir.mkdir(parents=True, exist_ok=True)
        state.ledger.sync_tsv()  # once: it is written whole
    return state.ledger


def _truth(config: Config) -> float:
    """A made-up score of a config, 0..1."""
    lr, group, temperature, max_norm, _, _, algo = map(config.get, _CHOICES)
    if lr > 2e-5:
        return 0.03
    return float(
        0.56
        + 0.14 * math.exp(-((math.log(lr / 7e-6)) ** 2) / 0.9)
        + 0.06 * math.exp(-((math.log2(group / 16)) ** 2) / 3)
        + 0.04 * math.exp(-((temperature - 0.9) ** 2) / 0.02)
        + (0.02 if algo == "max_rl" else 0.0)
        - 0.05 * abs(math.log2(max_norm / 0.5)) / 4
    )


def _run_of(state: State, stage: Stage) -> tuple[Run, Config, tuple[str, ...]]:
    """What the next run is made of, its config, and its new change by key."""
    campaign, rng = state.campaign, state.rng
    if campaign.posterior is None:
        return Run(), _BASELINE, ()
    if stage is not Stage.SEARCH:
        run = measuring_run(campaign.kept, stage)
        return run, incumbent_config(_BASELINE, run.changes), ()
    incumbent = incumbent_config(_BASELINE, campaign.kept)
    values = dict[str, Any]()
    for key in rng.choice(list(_CHOICES), size=2 if rng.random() < 0.2 else 1, replace=False):
        choices = [choice for choice in _CHOICES[key] if choice != incumbent.get(key)]
        values[str(key)] = choices[rng.integers(len(choices))]
    new = campaign.known(change_keys(incumbent, parse(set_values(incumbent.source, values))))
    run = Run(kept=campaign.kept, rider=campaign.posterior.rider(new), new=new)
    before = incumbent_config(_BASELINE, replace(run, new=None).changes)
    config = incumbent_config(_BASELINE, run.changes)
    return run, config, tuple(change.line for change in diff(before, config))


def _experiment(state: State, number: int, stage: Stage) -> None:
    run, config, lines = _run_of(state, stage)
    parent = state.campaign.parent
    told = "; ".join(line.rpartition("trainer.")[2].rpartition("orchestrator.")[2] for line in lines)
    named = "baseline" if run.is_baseline else "incumbent"
    identity = {"branch": BRANCH, "rules_hash": RULES_HASH, "hardware": "stand-in hardware, no training"}
    record = a_record(
        **identity | state.changes,
        parent=parent.number if parent else None,
        decided_before=len(state.campaign.decided),
        run=run,
        description=f"{told}: the curves say that it should help" if lines else f"{named} again" if parent else named,
        started=state.now.isoformat(timespec="seconds"),
        config_hash=config.hash,
        diff=lines,
        versions={"nightshift": "0.1.0", "python": "3.11"},
        prediction="+1 to +2 pp, and a shorter completion" if lines and number % 3 else None,
    )
    record = state.ledger.reserve(record, {"train.toml": config.source})
    state.campaign.step(True, record)
    draw = state.rng.random()
    record = _crashed(state, record, draw) if lines and draw < 0.1 else _decided(state, record, config)
    # The harness's own seconds, then the proposer's pause until the next experiment.
    seconds = (record.result.total_seconds if record.result else 0.0) + 1.5
    record = replace(record, total_seconds=seconds)
    state.now += timedelta(seconds=seconds + float(state.rng.uniform(10, 50)))
    state.ledger.write(record)
    if record.decided:
        state.campaign.step(False, record)


def _crashed(state: State, record: Record, draw: float) -> Record:
    failure, cause = (
        (Failure.CONFIG, "loss became nan at step 41 with lr 3e-05")
        if draw < 0.07
        else (Failure.INFRASTRUCTURE, "the worker was killed by SIGKILL: out of memory?")
    )
    training = Training(Outcome.CRASHED, 41, cause=cause, failure=failure)
    run = Result(1000, training, startup_seconds=7.2, total_seconds=float(state.rng.uniform(12, 50)))
    write_steps(state.ledger.run_dir(record.number) / "metrics.jsonl", _steps(state, 0.4, 40))
    decided = len(state.campaign.decided) + 1 if failure is Failure.CONFIG else None
    judgement = Judgement(why=cause)
    return replace(record, status="crash", failure=failure, judgement=judgement, result=run, decided=decided)


def _decided(state: State, record: Record, config: Config) -> Record:
    record = replace(record, result=_result(state, record, config))
    record = replace(state.campaign.judge(record, _BASELINE), decided=len(state.campaign.decided) + 1)
    assert record.judgement is not None
    steps = [d for d in record.judgement.decisions if d.action is not Action.DISCARD]
    commits = {f"{d.action} {d.change.name}": f"{record.number:039x}{place}" for place, d in enumerate(steps)}
    return replace(
        record,
        commits=commits,
        git_action="; ".join(f"committed {id[:7]} ({name})" for name, id in commits.items()) or "nothing was decided",
        lesson="the other direction is open" if record.decision and record.number % 4 else None,
        health="reward still rising at the end (+0.04 over the last half): a longer schedule may pay\n"
        "78 % of groups all right or all wrong: no gradient in them (group_size, temperature)"
        if record.number % 2
        else None,
    )


def _result(state: State, record: Record, config: Config) -> Result:
    """One stand-in run with its metrics.jsonl and evaluation.jsonl."""
    rng, n = state.rng, len(state.examples)
    seed = 1000 + record.number
    truth = min(max(_truth(config) + rng.normal(0, 0.025), 0.004), 0.99)
    latent = math.sqrt(0.62) * state.difficulty + math.sqrt(0.38) * rng.standard_normal(n)
    right = latent > NormalDist().inv_cdf(1 - truth)
    num_steps = int(rng.integers(80, 190))
    steps = _steps(state, truth, num_steps) if state.with_files else []
    truncated = rng.random(n) < 0.004
    scores = tuple((right & ~truncated).astype(float).tolist())
    mean = sum(scores) / n
    evaluation = Evaluation(
        mean, math.sqrt(mean * (1 - mean) / n), packed(scores), state.examples_sha256, float(truncated.mean()), 19.3,
        Weights(num_steps, f"{record.number:064x}"), 4.1,
    )  # fmt: skip
    training = Training(Outcome.BUDGET, num_steps, 60.2, truth, 1.18)
    startup, rest = float(rng.uniform(6, 9)), float(rng.uniform(8, 11))
    run = Result(seed, training, evaluation, startup_seconds=startup, total_seconds=60.2 + 4.1 + rest)
    folder = state.ledger.run_dir(record.number)
    if state.with_files:
        write_steps(folder / "metrics.jsonl", steps)
        _write_rollouts(folder / "evaluation.jsonl", state.examples, right & ~truncated, truncated)
    return run


def _steps(state: State, end: float, num_steps: int) -> list[Step]:
    """Curves that rise from 0.42 to `end`; KL is not measured, as on the trl engine."""
    rng = state.rng
    share = np.linspace(0, 1, num_steps)
    reward = 0.42 + (end - 0.42) * (1 - np.exp(-4 * share)) + rng.normal(0, 0.03, num_steps)
    seconds = 60.2 / num_steps * 0.98
    return [
        Step(
            step=i + 1,
            time=seconds * (i + 1),
            reward_mean=float(np.clip(reward[i], 0, 1)),
            reward_std=0.45,
            all_right_share=0.4,
            all_wrong_share=0.3,
            completion_tokens_mean=float(21 - 3 * share[i] + rng.normal(0, 0.4)),
            truncated_share=float(max(0.0, 0.03 * (1 - share[i]) + rng.normal(0, 0.004))),
            entropy=float(0.32 - 0.12 * share[i] + rng.normal(0, 0.006)),
            grad_norm=float(rng.uniform(0.2, 0.8)),
            lr=3e-4,
            loss=float(rng.normal(0, 0.01)),
            tokens_per_second=9000.0,
            generate_seconds=0.42 * seconds,
            train_seconds=0.55 * seconds,
        )
        for i in range(num_steps)
    ]


def _write_rollouts(path: Path, examples: Sequence[Any], right: np.ndarray, truncated: np.ndarray) -> None:
    with path.open("w", encoding="utf-8") as file:
        for example, is_right, is_cut in zip(examples, right.tolist(), truncated.tolist(), strict=True):
            text = example.solution if is_right else example.solution.rpartition("#### ")[0] + "#### 3"
            line = {
                "environment": "nightshift_arithmetic",
                "key": example.key,
                "score": float(is_right),
                "answer": example.answer,
                "completion": text[:30] if is_cut else text,
                "num_tokens": 64 if is_cut else 19,
                "truncated": is_cut,
            }
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    build(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 32)
