"""The digest finds each known fault, says nothing about healthy curves, and reads both engines' real metrics."""

import math
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from random import Random

import numpy as np
import pytest

from nightshift.campaign.metrics import Step, read_steps
from nightshift.campaign.records import Outcome, Result, Training
from nightshift.config.allowlist import LOSS
from nightshift.experiment.health import BROKEN, COSTLY, HINT, KL_TAU, Conditions, Finding, digest
from tests.rules import ARITHMETIC_TRL

FIXTURES = Path(__file__).parents[1] / "fixtures" / "metrics"
VALUES = {"trainer.optim.max_norm": 1.0, "orchestrator.train.sampling.max_completion_tokens": 64}
RULES = replace(ARITHMETIC_TRL, budget_seconds=60.0)
USUAL = Conditions(Result(1000, Training(Outcome.BUDGET, 100, training_seconds=60.2)), RULES, VALUES)


def healthy(seed: int, num_steps: int | None = None) -> list[Step]:
    """A run that learns, with the noise that was measured on the trl engine (256 rollouts a step, groups of 4).

    Reward: saturating, from 0.3..0.6, gains 0.1..0.35, noise 0.03..0.07 a step. Entropy halves at most, noise 10 %.
    Length within 10 %, noise 3 %. Gradient norm log-normal (0.5), one step in 200 ten times as large.
    """
    random = np.random.default_rng(seed)
    n = num_steps or int(random.integers(30, 300))
    x = np.arange(n) / n
    gain = random.uniform(0.1, 0.35)
    rise = (1 - np.exp(-x / random.uniform(0.2, 1.5))) * gain
    reward = random.uniform(0.3, 0.6) + rise + random.normal(0, random.uniform(0.03, 0.07), n)
    entropy = 0.065 * np.exp(-x * random.uniform(0, 0.7)) * random.lognormal(0, 0.1, n)
    length = 21 * (1 + x * random.uniform(-0.1, 0.1)) * random.lognormal(0, 0.03, n)
    norm = random.uniform(0.1, 0.4) * random.lognormal(0, 0.5, n) * np.where(random.random(n) < 0.005, 10, 1)
    seconds = 60 / n * random.lognormal(0, 0.1, n)
    right = np.clip(reward * 0.7 + random.normal(0, 0.04, n), 0, 1)
    wrong = np.clip((1 - reward) * 0.6 + random.normal(0, 0.04, n), 0, 1 - right)
    return [
        Step(
            step=i + 1, time=float(seconds[: i + 1].sum()), reward_mean=float(np.clip(reward[i], 0, 1)),
            all_right_share=float(right[i]), all_wrong_share=float(wrong[i]), entropy=float(entropy[i]),
            completion_tokens_mean=float(length[i]), truncated_share=float(random.choice([0, 0, 0.004])),
            grad_norm=float(norm[i]), generate_seconds=float(0.4 * seconds[i]), train_seconds=float(0.6 * seconds[i]),
            lr=3e-4, loss=0.0, tokens_per_second=3e4,
        )
        for i in range(n)
    ]  # fmt: skip


def changed(steps: list[Step], **curves: Callable[[float], float]) -> list[Step]:
    """The same run with fields as functions of the share of the run that is over, 0..1."""
    n = len(steps)
    return [replace(step, **{name: curve(i / n) for name, curve in curves.items()}) for i, step in enumerate(steps)]


def text(steps: list[Step], conditions: Conditions = USUAL) -> str:
    return "\n".join(map(str, digest(steps, conditions)))


def alarms(steps: list[Step], conditions: Conditions = USUAL) -> list[Finding]:
    return [finding for finding in digest(steps, conditions) if finding.severity >= COSTLY]


def found(steps: list[Step], words: str, conditions: Conditions = USUAL) -> Finding:
    """The one finding with `words`; the assertion shows the whole digest."""
    matches = [finding for finding in digest(steps, conditions) if words in finding.text]
    assert len(matches) == 1, text(steps, conditions)
    return matches[0]


Curves = dict[str, Callable[[float], float]]
LR, GROUP, LAG = "trainer.optim.lr", "orchestrator.group_size", "orchestrator.max_off_policy_steps"
TEMPERATURE = "orchestrator.train.sampling.temperature"
LENGTH = "orchestrator.train.sampling.max_completion_tokens"
INFLIGHT = "orchestrator.concurrency.max_inflight"
# fault: text of its finding, severity, a key that it must point to, the faulty curves
FAULTS: dict[str, tuple[str, int, str, Curves]] = {
    "flat": ("reward flat", BROKEN, LR, {"reward_mean": lambda x: 0.43}),
    "collapsed": ("reward collapsed", BROKEN, LR, {"reward_mean": lambda x: 0.45 + 0.4 * x if x < 0.6 else 0.05}),
    "falling": ("reward fell", COSTLY, LR, {"reward_mean": lambda x: 0.45 + min(0.6 * x, 0.6 - 0.6 * x)}),
    "rising": ("still rising", HINT, LR, {"reward_mean": lambda x: 0.35 + 0.4 * x}),
    "hard": ("95% all wrong", COSTLY, GROUP, {"all_right_share": lambda x: 0.02, "all_wrong_share": lambda x: 0.95}),
    "mixed": ("60% all right", HINT, GROUP, {"all_right_share": lambda x: 0.6, "all_wrong_share": lambda x: 0.28}),
    "truncated": ("of the training completions at 64 tokens", COSTLY, LENGTH, {"truncated_share": lambda x: 0.3 * x}),
    "no entropy left": ("entropy collapsed", COSTLY, TEMPERATURE, {"entropy": lambda x: 0.3 * math.exp(-5 * x)}),
    "entropy explodes": ("entropy rose", COSTLY, LR, {"entropy": lambda x: 0.06 * math.exp(2 * x)}),
    # As of a server that computes with keys and values of older weights.
    "mismatch late": ("KL between trainer and server", COSTLY, LAG, {"kl": lambda x: 1e-4 if x < 0.85 else 0.05}),
    "masked": ("10% of the tokens are masked", COSTLY, "trainer.loss.dppo_mask_low", {"masked_share": lambda x: 0.1}),
    "stale": ("5.0 policy versions old", COSTLY, LAG, {"off_policy_mean": lambda x: min(10 * x, 5.0)}),
    "failing": ("10% of the rollouts failed", COSTLY, INFLIGHT, {"error_share": lambda x: 0.1}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_found(fault: str) -> None:
    words, severity, key, curves = FAULTS[fault]
    for seed in range(5):
        finding = found(changed(healthy(seed, 60), **curves), words)
        assert (finding.severity, key in finding.keys) == (severity, True)


def test_healthy_curves_give_no_alarm() -> None:
    alarmed = {seed: text(healthy(seed), USUAL) for seed in range(100) if alarms(healthy(seed))}
    assert len(alarmed) <= 1, alarmed  # measured: 0 of 600


@pytest.mark.parametrize("name", [field.name for field in fields(Step) if field.name != "step"])
def test_a_field_that_was_not_measured_is_never_an_alarm(name: str) -> None:
    assert not alarms([replace(step, **{name: None}) for step in healthy(1, 100)])


def test_five_lines_the_worst_first_and_the_time_last_if_there_is_room() -> None:
    names = ("collapsed", "no entropy left", "truncated", "masked", "stale", "failing")
    curves = {name: curve for fault in names for name, curve in FAULTS[fault][3].items()}
    findings = digest(changed(healthy(0, 100), **curves), USUAL)
    severities = [finding.severity for finding in findings]
    assert len(findings) == 5
    assert severities == sorted(severities, reverse=True)
    assert "reward collapsed" in findings[0].text
    two = digest(changed(healthy(0, 100), **FAULTS["masked"][3]), USUAL)
    assert two[-1].text.startswith("time: 100 steps of")


@pytest.mark.parametrize(("loss", "is_open"), [("ipo", True), ("clipped", False)])
def test_keys_of_another_loss_are_not_pointed_to(loss: str, is_open: bool) -> None:
    steps = changed(healthy(0, 100), kl=lambda x: 0.05)
    values = {LOSS: loss} | ({KL_TAU: 0.001} if is_open else {})
    keys = found(steps, "KL between", replace(USUAL, values=values)).keys
    assert (LR in keys, KL_TAU in keys) == (True, is_open)


@pytest.mark.parametrize(("written", "limit"), [(512, "at 64 tokens in"), (32, "at 32 tokens in")])
def test_a_cut_names_the_limit_that_was_in_force(written: int | None, limit: str) -> None:
    """512 is above what these rules allow, which is 64."""
    values = VALUES | {"orchestrator.train.sampling.max_completion_tokens": written}
    steps = changed(healthy(4, 100), truncated_share=lambda x: 0.5)
    assert limit in found(steps, "truncated: 50% of", replace(USUAL, values=values)).text


def test_real_trl_metrics() -> None:
    steps = read_steps(FIXTURES / "trl-default.jsonl")  # 200 steps of a default run
    assert not alarms(steps)
    assert "54% all right, 32% all wrong" in found(steps, "have no gradient").text
    cold = read_steps(FIXTURES / "trl-temperature-0.7.jsonl")  # the last 200 of 456 steps: it has stopped learning
    assert [finding.text[:11] for finding in alarms(cold)] == ["reward flat", "98% of the "]
    hot = digest(read_steps(FIXTURES / "trl-lr-x10.jsonl"), USUAL)  # scored 0.023, the base model 0.426
    assert hot[0].text.startswith("reward collapsed from 0.30 (about step 3) to 0.02")
    assert (hot[0].keys[0], hot[0].severity) == ("trainer.optim.lr", BROKEN)
    assert hot[1].text.startswith("entropy rose from 0.0672 to 0.247")


def test_real_prime_rl_metrics() -> None:
    conditions = replace(USUAL, run=Result(1000, Training(Outcome.FINISHED, 40)))
    steps = read_steps(FIXTURES / "prime-rl-40-steps.jsonl")
    assert not alarms(steps, conditions)
    # What beside generation takes a trainer's time, by its own clock; the orchestrator's is that of whole batches.
    assert "40 steps of 3.8 s (waiting for rollouts 2.7 s, training 0.73 s)" in text(steps, conditions)
    hot = read_steps(FIXTURES / "prime-rl-lr-x10.jsonl")
    assert [finding.text[:10] for finding in alarms(hot, conditions)] == ["KL between"]


@pytest.mark.parametrize("outcome", Outcome)
def test_no_numbers_break_it(outcome: Outcome) -> None:
    """A killed or diverging engine leaves anything finite in its file."""
    random = Random(str(outcome))
    nasty = [None, 0.0, -0.0, 1e308, -1e308, 5e-324, 1.0, 0.5, -1.0, 1e-9, 64]
    names = [field.name for field in fields(Step) if field.name != "step"]
    conditions = replace(USUAL, run=Result(1000, Training(outcome, 40, training_seconds=60.2), startup_seconds=1.0))
    for _ in range(60):
        values = random.choices(nasty, k=random.randint(1, len(nasty)))
        steps = [
            Step(step, **{name: random.choice(values) for name in names})
            for step in sorted(random.sample(range(1000), random.randint(1, 40)))
        ]
        assert 1 <= len(text(steps, conditions).splitlines()) <= 5


@pytest.mark.parametrize(
    ("first", "figures", "cause", "key"),
    [
        (1, {"all_wrong_share": 1.0}, "every answer is wrong; keys to try", "orchestrator.group_size"),
        (60, {"all_right_share": 1.0}, "every answer is right; keys to try", "orchestrator.group_size"),
        (60, {"all_right_share": 0.5, "equal_share": 0.6}, "the gradient norm is 0; keys to try", "optim.lr"),
    ],
)
def test_no_gradient_is_told_first_with_its_step_and_key(first, figures, cause, key):
    """Also of a baseline, which trains on."""
    steps = [replace(step, all_right_share=0.3, all_wrong_share=0.3, equal_share=0.6) for step in healthy(1, 100)]
    flat = {"grad_norm": 0.0, "equal_share": 1.0, "reward_mean": 0.0, "all_right_share": 0.0, "all_wrong_share": 0.0}
    dead = [replace(step, **(flat | figures)) for step in steps[first - 1 :]]
    line, *others = map(str, digest([*steps[: first - 1], *dead], USUAL))
    assert line.startswith(f"no gradient from step {first} on: {cause}")
    assert key in line
    assert not any("have no gradient" in each for each in others)


def test_empty_batches_that_ended_a_run_are_told_with_the_last_step() -> None:
    ended = replace(USUAL, run=Result(1000, Training(Outcome.NO_GRADIENT, 100)))
    line = str(digest(healthy(1, 100), ended)[0])
    assert line.startswith(
        "no gradient after step 100: 10 batches in a row had equal rewards in every group; keys to try"
    )
