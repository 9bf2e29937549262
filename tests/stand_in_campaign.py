"""A stand-in campaign: a ledger in the real file formats whose "training" is a made-up function of the config.

Scores, decisions, diffs and files go through the real decision rule, config and ledger, with riders and the last runs
of a night; the numbers mean nothing.
"""

import json
import math
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
from nightshift.campaign.records import Action, Judgement, Outcome, Record, Result, Run, Stage, Training, packed
from nightshift.config.train_toml import Config, diff, parse, set_values
from nightshift.errors import Failure
from nightshift.evaluation import environment as environments
from nightshift.evaluation.evaluate import examples_digest
from tests.campaigns import a_record, a_result, replace
from tests.rules import ARITHMETIC_TRL

BRANCH = "autoresearch/stand-in"
RULES_HASH = "57a2d1250000"
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
    now: datetime = datetime(2026, 11, 20, 21, 4, tzinfo=UTC)
    campaign: Campaign = field(default_factory=Campaign)


def build(
    root: Path,
    num_experiments: int,
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
    last_runs = _LAST_RUNS if num_experiments >= _MANY else ()
    with mock.patch("os.fsync"):  # no power cut here, and five of them an experiment take their time
        for stage in (*[Stage.SEARCH] * (num_experiments - len(last_runs)), *last_runs):
            _experiment(state, stage)
        state.ledger.runs_dir.mkdir(parents=True, exist_ok=True)
        state.ledger.sync_tsv()  # once: it is written whole
    return state.ledger


def _truth(config: Config) -> float:
    """A made-up score of a config, 0..1."""
    lr, group, temperature = map(config.get, [*_CHOICES][:3])
    if lr > 2e-5:
        return 0.03
    return float(
        0.54
        + 0.14 * math.exp(-((math.log(lr / 7e-6)) ** 2) / 0.9)
        + 0.06 * math.exp(-((math.log2(group / 16)) ** 2) / 3)
        + 0.04 * math.exp(-((temperature - 0.9) ** 2) / 0.02)
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


def _experiment(state: State, stage: Stage) -> None:
    run, config, lines = _run_of(state, stage)
    parent = state.campaign.parent
    named = "; ".join(lines) or ("baseline" if run.is_baseline else "incumbent")
    identity = {"branch": BRANCH, "rules_hash": RULES_HASH, "hardware": "stand-in hardware, no training"}
    record = a_record(
        **identity | state.changes,
        parent=parent.number if parent else None,
        decided_before=len(state.campaign.decided),
        run=run,
        description=f"set {named}: the curves say that it should help" if lines else named,
        started=state.now.isoformat(timespec="seconds"),
        config_hash=config.hash,
        diff=lines,
        prediction="+1 to +2 pp, and a shorter completion" if lines else None,
    )
    record = state.ledger.reserve(record, config.source)
    state.campaign.step(True, record)
    is_crash = bool(lines) and state.rng.random() < 0.1
    record = _crashed(state, record) if is_crash else _decided(state, record, config)
    state.now += timedelta(seconds=record.total_seconds + float(state.rng.uniform(10, 50)))
    state.ledger.write(record)
    state.campaign.step(False, record)


def _crashed(state: State, record: Record) -> Record:
    cause = "loss became nan at step 41 with lr 3e-05"
    training = Training(Outcome.CRASHED, 41, cause=cause, failure=Failure.CONFIG)
    result = Result(1000, training, startup_seconds=7.2, total_seconds=30.0)
    write_steps(state.ledger.run_dir(record.number) / "metrics.jsonl", _steps(state, 0.4, 40))
    fields = {"failure": Failure.CONFIG, "judgement": Judgement(why=cause), "total_seconds": 31.5}
    return replace(record, status="crash", result=result, decided=len(state.campaign.decided) + 1, **fields)


def _decided(state: State, record: Record, config: Config) -> Record:
    record = replace(record, result=_result(state, record, config), total_seconds=82.0)
    record = replace(state.campaign.judge(record, _BASELINE), decided=len(state.campaign.decided) + 1)
    assert record.judgement is not None
    steps = [d for d in record.judgement.decisions if d.action is not Action.DISCARD]
    commits = {f"{d.action} {d.change.name}": f"{record.number:039x}{place}" for place, d in enumerate(steps)}
    return replace(
        record,
        commits=commits,
        git_action="; ".join(f"committed {id[:7]} ({name})" for name, id in commits.items()) or "nothing was decided",
        lesson="the other direction is open" if record.decision else None,
        health="reward still rising at the end (+0.04 over the last half): a longer schedule may pay",
    )


def _result(state: State, record: Record, config: Config) -> Result:
    """One stand-in run with its metrics.jsonl and evaluation.jsonl."""
    rng, n = state.rng, len(state.examples)
    truth = min(max(_truth(config) + rng.normal(0, 0.025), 0.004), 0.99)
    latent = math.sqrt(0.62) * state.difficulty + math.sqrt(0.38) * rng.standard_normal(n)
    right = latent > NormalDist().inv_cdf(1 - truth)
    if state.with_files:
        folder = state.ledger.run_dir(record.number)
        write_steps(folder / "metrics.jsonl", _steps(state, truth, 120))
        _write_rollouts(folder / "evaluation.jsonl", state.examples, right)
    result, mean = a_result(seed=1000 + record.number), float(right.mean())
    scores = {
        "eval_score": mean,
        "eval_stderr": math.sqrt(mean * (1 - mean) / n),
        "scores": packed([*map(float, right)]),
    }
    return replace(result, evaluation=replace(result.evaluation, examples_sha256=state.examples_sha256, **scores))


def _steps(state: State, end: float, num_steps: int) -> list[Step]:
    """Curves that rise from 0.42 to `end`; KL is not measured, as on the trl engine."""
    rng = state.rng
    share = np.linspace(0, 1, num_steps)
    reward = 0.42 + (end - 0.42) * (1 - np.exp(-4 * share)) + rng.normal(0, 0.03, num_steps)
    return [
        Step(
            step=i + 1,
            time=0.5 * (i + 1),
            reward_mean=float(np.clip(reward[i], 0, 1)),
            all_right_share=0.4,
            all_wrong_share=0.3,
            completion_tokens_mean=float(21 - 3 * share[i]),
            truncated_share=0.03 * float(1 - share[i]),
            entropy=float(0.32 - 0.12 * share[i]),
            grad_norm=float(rng.uniform(0.2, 0.8)),
            lr=3e-4,
            loss=0.0,
            tokens_per_second=9000.0,
            generate_seconds=0.2,
            train_seconds=0.3,
        )
        for i in range(num_steps)
    ]


def _write_rollouts(path: Path, examples: Sequence[Any], right: np.ndarray) -> None:
    with path.open("w", encoding="utf-8") as file:
        for example, is_right in zip(examples, right.tolist(), strict=True):
            line = {
                "environment": "nightshift_arithmetic",
                "key": example.key,
                "score": float(is_right),
                "answer": example.answer,
                "completion": example.solution if is_right else "#### 3",
                "num_tokens": 19,
                "truncated": False,
            }
            file.write(json.dumps(line) + "\n")
