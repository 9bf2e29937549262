"""Seconds a step are learnt from the campaign's runs, and told with how sure that is."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nightshift.agents.throughput import Throughput
from nightshift.campaign.records import Contention, Result
from nightshift.config.toml_edit import set_values
from nightshift.config.train_toml import Config, parse
from tests.campaigns import a_result
from tests.recorded_nights import configs, records

ROOT = Path(__file__).parents[2]
SHIPPED = (ROOT / "train.toml").read_bytes()


def config(**values: object) -> Config:
    return parse(set_values(SHIPPED, {name.replace("__", "."): value for name, value in values.items()}))


def run(num_steps: int, seconds: float = 60.0, taken: float | None = None) -> Result:
    made = a_result()
    load = None if taken is None else Contention(2, others_share=taken)
    return replace(
        made, training=replace(made.training, num_steps=num_steps, training_seconds=seconds), contention=load
    )


def test_one_run_tells_how_many_steps_its_config_makes() -> None:
    found = Throughput.of([(config(), run(150))], budget_seconds=60.0)
    assert found.plan(config().resolved).num_steps == pytest.approx(150, rel=0.01)
    assert Throughput.of([(config(), run(75, 30.0))], 60.0).plan(config().resolved).num_steps == pytest.approx(
        150, rel=0.01
    )


def test_a_run_on_a_busy_machine_says_little() -> None:
    calm, busy = run(150, taken=0.01), run(60, taken=0.6)
    plan = Throughput.of([(config(), calm), (config(), busy)], 60.0).plan(config().resolved)
    assert plan.num_steps > 140


def test_what_made_no_step_says_nothing_and_a_plan_has_ten_at_least() -> None:
    nothing = replace(run(0), training=replace(run(0).training, training_seconds=None))
    found = Throughput.of([(config(), nothing)], 60.0)
    assert np.allclose(found.mean, Throughput.of([], 60.0).mean)
    assert Throughput.of([(config(), run(1))], 60.0).plan(config().resolved).num_steps == 10


def test_a_batch_in_tokens_and_groups_of_one_have_a_plan_too() -> None:
    found = Throughput.of([(config(), run(150))], 60.0)
    tokens = parse(SHIPPED.replace(b"batch_size = 256 ", b"token_batch_size = 100_000 "))
    alone = config(orchestrator__algo__type="rae", orchestrator__group_size=1)
    for each in (tokens, alone):
        assert math.isfinite(found.plan(each.resolved).num_steps)


@pytest.mark.parametrize("name", ["random-0", "tpe-0"])
def test_in_the_recorded_nights_it_predicts_each_run_from_those_before(name: str) -> None:
    """Every run there had another batch, group, optimizer and filter. Its own doubt is honest."""
    runs = [(configs(name)[record.number], record.result) for record in records(name) if record.result]
    errors, z = list[float](), list[float]()
    for place in range(10, len(runs)):
        configured, told = runs[place]
        plan = Throughput.of(runs[:place], 60.0).plan(configured.resolved)
        real = 60.0 * told.training.num_steps / told.training.training_seconds
        errors.append(math.log(real / plan.num_steps))
        z.append(errors[-1] / plan.log_sd)
    assert np.median(np.abs(errors)) < 0.10
    assert 0.4 < np.std(z) < 1.5
