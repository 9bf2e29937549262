"""Every draw is a valid train.toml, the comments stay, and the space covers the allow-list: no second list to keep."""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from recorded import configs, records

from nightshift.agents.search import (
    DECAY,
    FACTORS,
    KIND,
    STEPS,
    WARMUP,
    Dimension,
    SearchSpace,
    planner,
)
from nightshift.campaign.records import Result
from nightshift.config.allowlist import KEYS, Key, accept
from nightshift.config.train_toml import ABSENT, Config, parse, set_values
from nightshift.errors import ConfigError
from tests.campaigns import a_result
from tests.train_tomls import SHIPPED

LR = "trainer.optim.lr"
PENALTY = "orchestrator.algo.length_penalty"
TRL = tuple(key for key in KEYS if "trl" in key.engines)
# Incumbents that an agent may have left behind.
INCUMBENTS = {
    "shipped": {},
    "cosine": {"max_steps": 40, "trainer.scheduler.type": "cosine", "trainer.scheduler.min_lr": 2e-6},
    "long warm-up": {"max_steps": 30, "trainer.scheduler.type": "linear", "trainer.scheduler.warmup_steps": 19},
    "odd batch": {"orchestrator.batch_size": 96, "orchestrator.group_size": 6},
    "few in flight": {"orchestrator.concurrency.initial_inflight": 16, "orchestrator.concurrency.max_inflight": 32},
    "short rows": {"seq_len": 300, "orchestrator.train.sampling.max_completion_tokens": 256},
    "muon": {"trainer.optim.type": "muon", "trainer.optim.mu": 0.97},
    "sgd": {"trainer.optim.type": "sgd", "trainer.optim.lr": 0.1, "trainer.optim.momentum": 0.5},
    "rae": {"orchestrator.algo.type": "rae", "orchestrator.group_size": 1, "orchestrator.algo.decay": 0.8},
    "penalty": {PENALTY: {}, f"{PENALTY}.num_output_tokens_weight": 3.0},
    "adapters": {"trainer.model.lora": {}, "trainer.model.lora.rank": 24},
    "unset": {"trainer.optim.max_norm": None, "orchestrator.train.sampling.max_completion_tokens": None},
    "tokens": {"orchestrator.batch_size": ABSENT, "orchestrator.token_batch_size": 100_000},
}  # fmt: skip


def incumbent(name: str = "shipped") -> Config:
    return parse(set_values(SHIPPED, INCUMBENTS[name]))


def space(
    keys: Sequence[Key] = TRL, name: str = "shipped", num_steps: float = 60.0, log_sd: float = 0.1
) -> SearchSpace:
    """Runs make as many steps as their batch is smaller than 256."""

    def plan(resolved: Mapping[str, Any]) -> tuple[float, float]:
        return (num_steps * 256 / (resolved.get("orchestrator.batch_size") or 256), log_sd)

    return SearchSpace.of(keys, incumbent(name), plan)


def change(found: SearchSpace, seed: int) -> dict[str, Any]:
    """Steps by chance, as the proposer `random` draws them."""
    rng = random.Random(seed)
    return found.change(rng, {name: rng.random() for name in found.dimensions})


def dimension(path: str, name: str = "shipped") -> Dimension:
    return space(KEYS, name).dimensions[path]


def built(found: SearchSpace, **values: Any) -> Config:
    """The config with the values of batch, type, lr."""
    paths = {"batch": "orchestrator.batch_size", "type": KIND, "lr": LR}
    return parse(found.build({paths[name]: value for name, value in values.items()}))


@pytest.mark.parametrize("name", INCUMBENTS)
def test_every_step_is_a_factor_of_two_or_three_another_choice_or_a_third_of_a_linear_box(name: str) -> None:
    for path, each in space(KEYS, name).dimensions.items():
        now = incumbent(name).resolved.get(path)
        assert now not in each.steps
        for value in each.steps:
            accept(each.key, "None" if value is None else value)
            place = each.place(value)
            assert each.step(place) == value
            if each.search.scale == "choice":
                assert value in each.search.choices
            elif not isinstance(now, int | float):
                assert each.search.low * 0.99 <= value <= each.search.high * 1.01, "unset: the whole box"
            elif each.search.scale == "linear":
                third = (each.search.high - each.search.low) / 3
                assert abs(value - now) >= 0.99 * third
            else:
                assert min(abs(math.log(value / now / factor)) for factor in FACTORS) < 0.01, path
                assert isinstance(value, int) == (each.search.scale == "power of two")


def test_steps_go_in_both_directions_wherever_the_incumbent_is() -> None:
    for rate in (3e-6, 2e-5, 4e-7):
        base = parse(set_values(SHIPPED, {LR: rate}))
        found = SearchSpace.of(TRL, base, space().plan).dimensions[LR]
        assert found.place(rate) == pytest.approx(0.5)
        assert found.steps == pytest.approx([rate / 3, rate / 2, 2 * rate, 3 * rate], rel=0.01)
        ups = [found.step(n / 100) > rate for n in range(100)]
        assert ups.count(True) == pytest.approx(50, abs=2)
    assert dimension("orchestrator.batch_size").steps == (128, 512)
    assert dimension("orchestrator.batch_size", name="odd batch").steps == (48, 192)
    assert dimension("orchestrator.train.sampling.temperature").steps == (0.6, 0.8, 1.2)
    assert dimension("trainer.optim.max_norm", name="unset").steps[0] == 0.05
    assert "trainer.optim.type" not in space(KEYS, "sgd").places(incumbent("sgd"))


def test_a_scope_takes_the_other_keys_out_of_the_space() -> None:
    def within(*scope: str, name: str = "shipped") -> SearchSpace:
        return SearchSpace.of(TRL, incumbent(name), space().plan, scope)

    assert {*within("trainer.optim.lr", "orchestrator.algo").dimensions} == {LR, "orchestrator.algo.type"}
    schedule = within("trainer.scheduler")
    assert {*schedule.dimensions} == {KIND}
    assert built(schedule, type="linear").get(STEPS), "the steps of a schedule belong to it"
    batch = within("orchestrator.batch_size", name="cosine")
    assert built(batch, batch=128).get(STEPS) == incumbent("cosine").get(STEPS), "max_steps is outside"
    with pytest.raises(ConfigError, match="the search has no key to change within seq_len"):
        within("seq_len").change(random.Random(0), {})


def test_only_keys_that_apply_are_changed_and_a_choice_takes_the_rest_out() -> None:
    found = space()
    seen = set[str]().union(*(change(found, seed) for seed in range(300)))
    assert {"trainer.optim.type", "trainer.optim.betas2"} <= seen
    assert "trainer.optim.mu" not in seen
    choice = {"orchestrator.algo.type": "max_rl", "orchestrator.algo.length_penalty": {}}
    made = parse(space(KEYS).build(choice))
    assert (made.get("orchestrator.algo.type"), made.get("orchestrator.algo.length_penalty")) == ("max_rl", None)


@pytest.mark.parametrize(("batch", "steps"), [(256, 60), (512, 30), (64, 240)])
def test_a_schedule_ends_with_the_budget_whatever_batch_it_goes_with(batch: int, steps: int) -> None:
    made = built(space(log_sd=0.0), batch=batch, type="linear")
    assert (made.get(STEPS), made.get(DECAY)) == (steps, steps / 2)
    assert made.get(WARMUP) == pytest.approx(steps / 20, abs=0.51)


def test_a_change_of_batch_takes_the_schedule_along_and_another_change_leaves_it() -> None:
    found = space(name="long warm-up", num_steps=30.0, log_sd=0.01)
    assert found.base.get(WARMUP) == 19
    longer = built(found, batch=128)
    assert longer.get(STEPS) == 60
    assert longer.get(WARMUP) == pytest.approx(60 - 1 - longer.get(DECAY), abs=1), "as long as the decay allows"
    assert built(found, lr=4e-6).get(STEPS) == 30
    assert built(space(name="cosine", num_steps=90.0), lr=4e-6).get(STEPS) > 80, "the budget was half used"


def test_a_constant_schedule_has_no_max_steps() -> None:
    assert built(space(name="cosine"), type="constant").get(STEPS) is None
    fixed = parse(set_values(SHIPPED, {STEPS: 30}))
    assert built(SearchSpace.of(TRL, fixed, space().plan), lr=4e-6).get(STEPS) is None


@pytest.mark.parametrize("log_sd", [0.05, 0.2, 0.5, 2.0])
def test_the_less_is_known_of_the_steps_the_earlier_a_decay_begins(log_sd: float) -> None:
    """So that it is begun where a run is 3.5 sd slower than expected."""
    made = built(space(log_sd=log_sd), type="linear")
    slow = 60.0 * math.exp(-3.5 * log_sd)
    assert made.get(STEPS) - made.get(DECAY) <= max(slow * math.exp(0.5 * log_sd), 1) + 1
    assert made.get(DECAY) >= round(0.5 * made.get(STEPS)) - 1


def config(**values: object) -> Config:
    return parse(set_values(SHIPPED, {name.replace("__", "."): value for name, value in values.items()}))


def run(num_steps: int, seconds: float = 60.0) -> Result:
    made = a_result()
    return structs.replace(made, training=replace(made.training, num_steps=num_steps, training_seconds=seconds))


@pytest.mark.parametrize(("num_steps", "seconds"), [(150, 60.0), (75, 30.0), (150, 95.0)])  # of CPU time: 60 s
def test_one_run_tells_how_many_steps_its_config_makes(num_steps: int, seconds: float) -> None:
    found = planner([(config(), run(num_steps, seconds))], budget_seconds=60.0)
    assert found(config().resolved)[0] == pytest.approx(150, rel=0.01)


@pytest.mark.parametrize("name", ["random-0", "tpe-0"])
def test_in_the_recorded_nights_it_predicts_each_run_from_those_before(name: str) -> None:
    """Every run there had another batch, group, optimizer and filter. Its own doubt is honest."""
    runs = [(configs(name)[record.number], record.result) for record in records(name) if record.result]
    errors, z = list[float](), list[float]()
    for place in range(10, len(runs)):
        configured, told = runs[place]
        plan = planner(runs[:place], 60.0)(configured.resolved)
        real = 60.0 * told.training.num_steps / told.training.training_seconds
        errors.append(math.log(real / plan[0]))
        z.append(errors[-1] / plan[1])
    assert np.median(np.abs(errors)) < 0.10
    assert 0.4 < np.std(z) < 1.5
