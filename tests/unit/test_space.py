"""Every draw is a valid train.toml, the comments stay, and the space covers the allow-list: no second list to keep."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from nightshift.proposers.boxes import BOXES, Scale, box_of
from nightshift.proposers.space import Dimension, SearchSpace
from nightshift.train_toml.config import Config, changed_keys, parse
from nightshift.train_toml.edit import ABSENT, set_values
from nightshift.train_toml.keys import KEYS
from nightshift.train_toml.values import Kind, accept

PENALTY = "orchestrator.algo.length_penalty"
SHIPPED = Path(__file__).parents[2] / "train.toml"
TRL = frozenset(
    ["max_steps", "seq_len", "orchestrator.algo.type", "orchestrator.train.filter_zero_advantages"]
    + [f"orchestrator.{name}" for name in ("batch_size", "group_size")]
    + [f"orchestrator.train.sampling.{name}" for name in ("temperature", "max_completion_tokens")]
    + [f"trainer.scheduler.{name}" for name in ("type", "warmup_steps", "decay_steps", "min_lr")]
    + [f"trainer.optim.{name}" for name in ("type", "lr", "weight_decay", "max_norm", "betas1", "betas2")]
    + [f"trainer.optim.{name}" for name in ("mu", "momentum", "nesterov")]
)
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
    return parse(set_values(SHIPPED.read_bytes(), INCUMBENTS[name]))


def draws(found: SearchSpace, seed: int) -> Callable[[], dict[str, Any]]:
    """Parameters of all dimensions at random, as the proposer `random` draws them."""
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed))
    return lambda: study.ask(found.distributions).params


def sample(found: SearchSpace, seed: int) -> bytes:
    return found.build(draws(found, seed)())


def dimension(path: str, **kwargs: str) -> Dimension:
    found = SearchSpace.for_engine(None, incumbent(**kwargs), 50)
    return next(d for d in found.dimensions if d.name == path)


@pytest.mark.parametrize("name", INCUMBENTS)
@pytest.mark.parametrize(("used", "num_steps"), [(TRL, 150.0), (None, 47.0), (TRL, None), (None, 4.0)])
def test_every_draw_is_a_valid_config(name: str, used: frozenset[str] | None, num_steps: float | None) -> None:
    found = SearchSpace.for_engine(used, incumbent(name), num_steps)
    drawn = draws(found, len(name))
    for _ in range(10):  # 520 in all
        candidate = parse(found.build(drawn()))
        touched = set(changed_keys(found.incumbent, candidate))
        searched = {d.key.path for d in found.dimensions} | set(found.incumbent.values)
        searched.add("trainer.scheduler.decay_steps")  # 0 for a warm-up without an end
        assert touched <= searched
        if used is not None:
            assert touched <= used | {path for path in found.incumbent.values if path not in candidate.resolved}


def test_draws_follow_the_random_source_only() -> None:
    found = SearchSpace.for_engine(TRL, incumbent(), 100)
    assert sample(found, 7) == sample(found, 7)
    assert len({sample(found, seed) for seed in range(5)}) == 5


def test_comments_and_keys_that_are_not_searched_stay() -> None:
    found = SearchSpace.for_engine(TRL, incumbent(), 100)
    text = sample(found, 1).decode()
    assert "# The one file to edit." in text
    assert "# peak learning rate" in text
    assert "seq_len = 2048                   # tokens of a packed" in text


def test_every_draw_stays_in_its_box() -> None:
    found = SearchSpace.for_engine(None, incumbent(), 50)
    drawn = draws(found, 3)
    for _ in range(100):
        params = drawn()
        for each in found.dimensions:
            value = each.value(params[each.name])
            if each.box.scale is Scale.CHOICE:
                assert value in each.box.choices
            else:
                assert isinstance(value, int | float)
                assert each.box.low * 0.99 <= value <= each.box.high * 1.01, each.name
            if each.box.scale is Scale.POWER_OF_TWO:
                assert isinstance(value, int)
                assert value & (value - 1) == 0
            accept(each.key, "None" if value is None else value)


def test_log_dimensions_are_drawn_evenly_over_orders_of_magnitude() -> None:
    lr = dimension("trainer.optim.lr")
    drawn = draws(SearchSpace((lr,), incumbent()), 0)
    values = [lr.value(drawn()[lr.name]) for _ in range(1000)]
    middle = (lr.box.low * lr.box.high) ** 0.5
    assert 0.45 < sum(isinstance(v, float) and v < middle for v in values) / len(values) < 0.55


def test_boxes_are_of_open_keys_and_lie_in_their_ranges() -> None:
    assert BOXES.keys() <= {key.path for key in KEYS}
    for key in KEYS:
        if (box := box_of(key, 100)) is not None:
            for end in box.choices or (box.low, box.high):
                is_whole = key.kind is Kind.INT and isinstance(end, int | float)
                accept(key, int(end) if is_whole else "None" if end is None else end)


def test_a_box_follows_the_incumbent() -> None:
    plain, moved = dimension("trainer.optim.lr").box, dimension("trainer.optim.lr", name="sgd").box
    assert plain.low <= 1e-6 <= 9e-6 <= plain.high
    assert (moved.low, moved.high) == (pytest.approx(0.1 / 3), pytest.approx(0.3))
    assert "trainer.optim.type" not in SearchSpace.for_engine(None, incumbent("sgd"), 50).distributions
    assert dimension("orchestrator.batch_size", name="odd batch").box.low == 32
    assert dimension("orchestrator.algo.length_penalty.num_output_tokens_weight", name="penalty").box.high == 9.0


def test_each_variant_of_a_key_is_a_dimension_of_its_own() -> None:
    names = SearchSpace.for_engine(None, incumbent(), 50).distributions
    assert {"trainer.optim.betas2 (adamw)", "trainer.optim.betas2 (muon)"} <= set(names)


def test_without_a_number_of_steps_no_schedule_needs_an_end() -> None:
    found = SearchSpace.for_engine(TRL, incumbent())
    seen = set()
    for seed in range(20):
        candidate = parse(sample(found, seed))
        assert candidate.get("max_steps") is None
        seen.add(candidate.get("trainer.scheduler.type"))
    assert seen == {"constant", "linear"}


def test_a_schedule_that_ends_takes_its_max_steps_along() -> None:
    found = SearchSpace.for_engine(TRL, incumbent("cosine"), 40)
    constant = {**draws(found, 0)(), "trainer.scheduler.type": "constant"}
    assert parse(found.build(constant)).get("max_steps") is None


@pytest.mark.parametrize("used", [TRL, None])
def test_params_of_a_draw_give_the_same_config_again(used: frozenset[str] | None) -> None:
    found = SearchSpace.for_engine(used, incumbent(), 60)
    for seed in range(10):
        drawn = parse(sample(found, seed))
        params = found.params(drawn)
        assert set(params) <= set(found.distributions)
        assert parse(found.build(params)).hash == drawn.hash


@pytest.mark.parametrize("num_steps", [0.7, 1.0, 2.5, 9.99, 59.5, 117.3, 118.0, 340.25])
def test_params_of_any_config_lie_in_the_boxes_of_any_run_length(num_steps: float) -> None:
    """Optuna refuses a parameter beyond its distribution, and the boxes in steps move with the incumbent's run."""
    elsewhere = SearchSpace.for_engine(TRL, incumbent("cosine"), 200)
    found = SearchSpace.for_engine(TRL, incumbent("cosine"), num_steps)
    boxes = found.distributions
    drawn, num_checked = draws(elsewhere, 1), 0
    for _ in range(50):
        params = found.params(parse(elsewhere.build(drawn())))
        for name, value in (params or {}).items():
            assert boxes[name]._contains(boxes[name].to_internal_repr(value)), (name, value, boxes[name])
            num_checked += 1
    assert num_checked > 200
    drawn = draws(found, 1)
    for _ in range(20):
        parse(found.build(drawn()))


def test_params_of_a_config_beyond_the_space() -> None:
    found = SearchSpace.for_engine(TRL, incumbent(), 60)
    far = parse(set_values(SHIPPED.read_bytes(), {"trainer.optim.lr": 0.5, "orchestrator.group_size": 64}))
    params = found.params(far)
    assert params["trainer.optim.lr"] == dimension("trainer.optim.lr").box.high
    assert params["orchestrator.group_size"] == 4  # the exponent of 16
    assert found.params(incumbent("sgd")) is None
    assert found.params(incumbent("unset")) is None


def test_distributions_are_optunas_and_hold_the_incumbent() -> None:
    found = SearchSpace.for_engine(None, incumbent(), 60)
    boxes = found.distributions
    assert boxes["trainer.optim.lr"] == FloatDistribution(5e-7, 2e-5, log=True)
    assert boxes["orchestrator.batch_size"] == IntDistribution(5, 9)
    assert boxes["orchestrator.algo.length_penalty"] == CategoricalDistribution([None, "on"])
    params = found.params(incumbent())
    assert [name for name in params if not boxes[name]._contains(boxes[name].to_internal_repr(params[name]))] == []
