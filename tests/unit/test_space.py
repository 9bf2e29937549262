"""Every draw is a valid train.toml, the comments stay, and the space covers the allow-list: no second list to keep."""

import math
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from nightshift.agents.space import DECAY, DECAYING, KIND, MAX_KEYS, STEPS, WARMUP, Dimension, Scale, SearchSpace
from nightshift.agents.throughput import Plan
from nightshift.config.toml_edit import ABSENT, set_values
from nightshift.config.train_toml import Config, changed_keys, parse
from nightshift.config.values import accept

LR = "trainer.optim.lr"
# Keys that give way to another one that was drawn.
FITTED = (
    "orchestrator.group_size",
    "orchestrator.train.sampling.max_completion_tokens",
    "orchestrator.concurrency.initial_inflight",
    "trainer.scheduler.min_lr",
)
FITTED_NAMES = frozenset(FITTED)
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


def space(
    used: frozenset[str] | None = TRL, name: str = "shipped", num_steps: float = 60.0, log_sd: float = 0.1
) -> SearchSpace:
    """Runs make as many steps as their batch is smaller than 256."""

    def plan(resolved: Mapping[str, Any]) -> Plan:
        return Plan(num_steps * 256 / (resolved.get("orchestrator.batch_size") or 256), log_sd)

    return SearchSpace.for_engine(used, incumbent(name), plan)


def change(found: SearchSpace, seed: int, begins_decay: bool = False) -> dict[str, Any]:
    """Parameters by chance, as the proposer `random` draws them."""
    rng = random.Random(seed)
    return found.change(rng, lambda dimension, now: dimension.at(rng.random()), begins_decay)


def sample(found: SearchSpace, seed: int, begins_decay: bool = False) -> Config:
    return parse(found.build(change(found, seed, begins_decay)))


def dimension(path: str, **kwargs: str) -> Dimension:
    return next(d for d in space(None, **kwargs).dimensions if d.name == path)


@pytest.mark.parametrize("name", INCUMBENTS)
@pytest.mark.parametrize(("used", "num_steps"), [(TRL, 150.0), (None, 47.0), (None, 4.0)])
def test_every_change_is_a_valid_config_of_few_keys(name: str, used: frozenset[str] | None, num_steps: float) -> None:
    found = space(used, name, num_steps)
    for seed in range(20):  # 780 in all
        params = change(found, seed, begins_decay=seed % 3 == 0)
        candidate = parse(found.build(params))
        touched = set(changed_keys(found.base, candidate))
        drawn = {d.key.path for d in found.dimensions if d.name in params}
        gone = {path for path in found.base.values if path not in candidate.resolved}
        assert 1 <= len(params) <= MAX_KEYS
        assert touched <= drawn | gone | {STEPS, WARMUP, DECAY, *FITTED}
        if used is not None:
            assert touched <= used | gone


def test_every_place_of_the_cube_lies_in_its_box_and_comes_back() -> None:
    for each in space(None).dimensions:
        for place in (0.0, 0.123, 0.5, 0.987, 1.0):
            param = each.at(place)
            value = each.value(param)
            if each.is_choice:
                assert value in each.box.choices
            else:
                assert isinstance(value, int | float)
                assert each.box.low * 0.99 <= value <= each.box.high * 1.01, each.name
            if each.box.scale is Scale.POWER_OF_TWO:
                assert isinstance(value, int)
                assert value & (value - 1) == 0
            if each.box.scale is not Scale.SHARE:
                accept(each.key, "None" if value is None else value)
            if not each.is_choice and not each.is_exponent:
                assert each.place(param) == pytest.approx(place)
            assert each.at(each.place(param)) == (param if each.is_choice or each.is_exponent else pytest.approx(param))


def test_a_box_follows_the_incumbent() -> None:
    plain, moved = dimension(LR).box, dimension(LR, name="sgd").box
    assert plain.low <= 1e-6 <= 9e-6 <= plain.high
    assert dimension(LR).at(0.5) == pytest.approx(math.sqrt(plain.low * plain.high)), "each order has as much room"
    best = SearchSpace.for_engine(TRL, parse(set_values(SHIPPED.read_bytes(), {LR: plain.high})), space().plan)
    assert next(d for d in best.dimensions if d.name == LR).box.high == pytest.approx(3 * plain.high)
    assert (moved.low, moved.high) == (pytest.approx(0.1 / 3), pytest.approx(0.3))
    assert "trainer.optim.type" not in space(None, "sgd").distributions
    assert dimension("orchestrator.batch_size", name="odd batch").box.low == 32
    assert dimension("orchestrator.algo.length_penalty.num_output_tokens_weight", name="penalty").box.high == 9.0


def test_what_a_choice_selects_is_drawn_with_it_and_with_nothing_else() -> None:
    found, seen = space(), set[str]()
    for seed in range(300):
        params = change(found, seed)
        if params.get("trainer.optim.type") == "muon":
            seen |= params.keys()
        else:
            assert "trainer.optim.mu" not in params
    assert "trainer.optim.mu" in seen


def test_a_schedule_ends_with_the_budget_whatever_batch_it_goes_with() -> None:
    for batch, expected in ((8, 60), (9, 30), (6, 240)):
        made = parse(
            space(log_sd=0.0).build({"orchestrator.batch_size": batch, KIND: "linear", DECAY: 0.5, WARMUP: 0.1})
        )
        assert (made.get(STEPS), made.get(DECAY), made.get(WARMUP)) == (expected, expected / 2, expected / 10)


def test_a_change_of_batch_takes_the_schedule_along_and_another_change_leaves_it() -> None:
    found = space(name="cosine", num_steps=40.0)
    assert parse(found.build({"orchestrator.batch_size": 7})).get(STEPS) > 75
    assert parse(found.build({LR: 4e-6})).get(STEPS) == 40
    assert parse(space(name="cosine", num_steps=90.0).build({LR: 4e-6})).get(STEPS) > 80, "the budget was half used"


def test_a_constant_schedule_has_no_max_steps() -> None:
    assert parse(space(name="cosine").build({KIND: "constant"})).get(STEPS) is None
    fixed = parse(set_values(SHIPPED.read_bytes(), {STEPS: 30}))
    found = SearchSpace.for_engine(TRL, fixed, space().plan)
    assert parse(found.build({LR: 4e-6})).get(STEPS) is None
    assert all(sample(space(), seed).get(KIND) in DECAYING for seed in range(40) if sample(space(), seed).get(STEPS))


@pytest.mark.parametrize("log_sd", [0.05, 0.2, 0.5, 2.0])
def test_the_less_is_known_of_the_steps_the_earlier_a_decay_begins(log_sd: float) -> None:
    """So that it is begun where a run is 3.5 sd slower than expected."""
    for share in (0.2, 0.5, 0.8):
        made = parse(space(log_sd=log_sd).build({KIND: "linear", DECAY: share}))
        slow = 60.0 * math.exp(-3.5 * log_sd)
        assert made.get(STEPS) - made.get(DECAY) <= max(slow * math.exp(0.5 * log_sd), 1) + 1
        assert made.get(DECAY) >= round(share * made.get(STEPS)) - 1


def test_some_proposals_begin_a_decay_where_there_is_none() -> None:
    found = space()
    begun = [found.begins_decay(random.Random(seed)) for seed in range(500)]
    assert 0.33 < sum(begun) / 500 < 0.47
    assert not any(space(name="cosine").begins_decay(random.Random(seed)) for seed in range(50))
    assert all(sample(found, seed, begins_decay=True).get(KIND) in DECAYING for seed in range(50))
    assert not space(frozenset({LR})).begins_decay(random.Random(2))


@pytest.mark.parametrize("used", [TRL, None])
def test_params_of_a_change_are_those_that_it_was_made_with(used: frozenset[str] | None) -> None:
    found = space(used)
    for seed in range(30):
        params = change(found, seed)
        known = found.params(parse(found.build(params)))
        assert known is not None
        applied = {name: param for name, param in params.items() if name in known and name not in FITTED_NAMES}
        for name, param in applied.items():
            loose = {"abs": 0.35} if name in (DECAY, WARMUP) else {"rel": 1e-2}  # a decay may begin earlier
            assert known[name] == (pytest.approx(param, **loose) if isinstance(param, float) else param)


@pytest.mark.parametrize("num_steps", [0.7, 2.5, 9.99, 59.5, 340.25])
def test_params_of_any_config_lie_in_the_boxes(num_steps: float) -> None:
    """Optuna refuses a parameter beyond its distribution."""
    elsewhere, found = space(name="cosine", num_steps=200.0), space(name="cosine", num_steps=num_steps)
    boxes, num_checked = found.distributions, 0
    for seed in range(50):
        for name, value in (found.params(sample(elsewhere, seed)) or {}).items():
            assert boxes[name]._contains(boxes[name].to_internal_repr(value)), (name, value, boxes[name])
            num_checked += 1
    assert num_checked > 200


def test_params_of_a_config_beyond_the_space() -> None:
    found = space()
    far = parse(set_values(SHIPPED.read_bytes(), {LR: 0.5, "orchestrator.group_size": 64}))
    params = found.params(far)
    assert params[LR] == dimension(LR).box.high
    assert params["orchestrator.group_size"] == 4  # the exponent of 16
    assert found.params(incumbent("sgd")) is None
    assert found.params(incumbent("unset")) is None
    assert len(found.places(incumbent("sgd"))) == len(found.dimensions)
