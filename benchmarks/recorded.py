"""The runs of two recorded nights, as records and configs: recorded_runs.json says how it writes them.

Version 0.1.0 decided these nights. Here today's rule decides the same runs again: a config is the baseline plus the
changes of its recorded parents and a change of its own. 0.1.0 ran a baseline twice. A record holds the first of the two
runs; `runs` has both.
"""

from __future__ import annotations

import json
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from nightshift.campaign.campaign import Campaign
from nightshift.campaign.commits import change_keys
from nightshift.campaign.records import (
    Change,
    Evaluation,
    Outcome,
    Proposal,
    Record,
    Result,
    Run,
    Training,
    Weights,
    packed,
)
from nightshift.config.rules import Rules
from nightshift.config.rules_toml import Chosen, rules_of
from nightshift.config.train_toml import Config, parse

ROOT = Path(__file__).resolve().parents[1]
PATH = Path(__file__).with_name("recorded_runs.json")
ARITHMETIC = ROOT / "environments" / "arithmetic" / "pyproject.toml"
NIGHTS = ("random-0", "tpe-0")


@cache
def rules() -> Rules:
    """Return the rules of arithmetic on the CPU, as this checkout has them."""
    return rules_of(ROOT, Chosen(environments=["arithmetic"]), "trl", 0)


@cache
def scales() -> tuple[float, float]:
    """Return arithmetic's `prior_sd` and `seed_sd`: the scale of effects, and the noise of seeds."""
    decision = tomllib.loads(ARITHMETIC.read_text())["tool"]["nightshift"]["decision"]
    return decision["prior_sd"], decision["seed_sd"]


@cache
def data() -> dict[str, Any]:
    """The parsed file."""
    found: dict[str, Any] = json.loads(PATH.read_bytes())
    return found


def certificate(night: str) -> dict[str, Any]:
    """The night's certificate: baseline and incumbent, trained again with fresh seeds, on the test split."""
    found: dict[str, Any] = data()["nights"][night]["certificate"]
    return found


@cache
def configs(night: str) -> dict[int, Config]:
    """The train.toml of each experiment, by the experiment's number."""
    return {
        experiment["number"]: _config(experiment["config"]) for experiment in data()["nights"][night]["experiments"]
    }


@cache
def records(night: str) -> tuple[Record, ...]:
    """The night's 30 experiments in order, decided by today's rule with today's constants."""
    campaign = Campaign()
    runs_by_number: dict[int, Run] = {}
    for experiment in data()["nights"][night]["experiments"]:
        number = experiment["number"]
        runs_by_number[number] = _run(night, experiment, runs_by_number)
        parent = campaign.parent.number if campaign.parent else None
        record = campaign.judge(_record(night, experiment, runs_by_number[number], parent), configs(night)[1])
        campaign.step(True, record)
        campaign.step(False, record)
    return tuple(campaign.decided)


def recorded_keeps(night: str) -> list[int]:
    """The experiments that version 0.1.0 kept, without the baseline. The last one is the certified incumbent."""
    return [e["number"] for e in data()["nights"][night]["experiments"] if e["status"] == "keep" and e["parent"]]


@cache
def runs(night: str) -> tuple[tuple[Config, Result], ...]:
    """All runs of the night with their configs."""
    experiments = data()["nights"][night]["experiments"]
    return tuple((configs(night)[each["number"]], _result(run)) for each in experiments for run in each["runs"])


def _config(values: dict[str, Any]) -> Config:
    lines = []
    for key, value in values.items():
        is_opened_below = value == {} and any(other.startswith(f"{key}.") for other in values)
        if not is_opened_below:  # TOML takes a table once
            lines.append(f"{key} = {json.dumps('None' if value is None else value)}\n")
    return parse("".join(lines).encode())


def _run(night: str, experiment: dict[str, Any], earlier: dict[int, Run]) -> Run:
    """What an experiment measured: the changes of its recorded parent, and its own."""
    number, parent = experiment["number"], experiment["parent"]
    if parent is None:
        return Run()
    keys = change_keys(configs(night)[parent], configs(night)[number])
    return Run(kept=earlier[parent].changes, new=Change(experiment=number, keys=keys))


def _record(night: str, experiment: dict[str, Any], run: Run, parent: int | None) -> Record:
    common = data()["common"]
    return Record(
        number=experiment["number"],
        status="started",
        branch=data()["nights"][night]["branch"],
        commit=None,
        started=experiment["started"],
        parent=parent,
        decided_before=experiment["number"] - 1,
        proposal=Proposal(description=experiment["description"]),
        run=run,
        diff=tuple(experiment["diff"]),
        config_hash=configs(night)[experiment["number"]].hash,
        effective=experiment["settings"],
        rules_name=common["rules_name"],
        rules_hash=common["rules_hash"],
        decision_rules=rules().decision,
        engine=common["engine"],
        versions=common["versions"],
        hardware=common["hardware"],
        result=_result(experiment["runs"][0]),
        decided=experiment["number"],
        git_action="recorded",
        total_seconds=experiment["total_seconds"],
    )


def _result(run: dict[str, Any]) -> Result:
    common = data()["common"]
    bits = f"{int(run['correct'], 16):0{common['num_examples']}b}"
    return Result(
        run["seed"],
        Training(
            Outcome(run["outcome"]),
            run["steps"],
            run["training_seconds"],
            run["reward_mean"],
            run["peak_memory_gb"],
        ),
        Evaluation(
            eval_score=run["score"],
            eval_stderr=run["stderr"],
            scores=packed([float(bit) for bit in bits]),
            examples_sha256=common["examples_sha256"],
            truncated_share=run["truncated_share"],
            completion_tokens_mean=run["completion_tokens_mean"],
            weights=Weights(run["steps"], run["weights_sha256"]),
            seconds=run["evaluation_seconds"],
        ),
        startup_seconds=run["startup_seconds"],
        total_seconds=run["total_seconds"],
        hardware=common["hardware"],
        versions=common["versions"],
    )
