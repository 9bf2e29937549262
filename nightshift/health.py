"""The RL health digest: what the curves of a run say is wrong, in five lines that an agent can act on.

Every check reads Steps, whichever engine wrote them; a field that is None gives no finding. A trend is a
robust slope with its standard error (trends.py), never a single point.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from enum import IntEnum
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from nightshift.metrics import Step
from nightshift.records import Outcome, Result
from nightshift.trends import levels, noise, trend

MAX_FINDINGS = 5
MAX_KEYS = 3  # a finding; more is no pointer
LIMIT = 1e30  # a diverging run writes any finite number: sums and squares of these stay finite
MIN_STEPS = 8  # fewer points carry no trend

# Reward. Noise of a step is 0.03 to 0.07 on the trl engine (256 rollouts in groups of 4): over 40 steps the change
# is known to about 0.03. Three standard errors, because a digest makes a dozen such tests.
SURE = 3.0  # standard errors for "it moved"
FLAT_REWARD = 0.05  # change within two standard errors of 0 and, with one added, below this
FALL_REWARD = 0.05  # from its best stretch to the end; the final weights are what is scored
COLLAPSE_SHARE = 0.5  # of the best level lost: measured on the trl engine at ten times the learning rate
RISE_REWARD = 0.02  # over the last half: smaller gains are not worth a longer run
SOLVED_REWARD = 0.95  # nothing left to learn: flat is fine

# Groups all right or all wrong have no gradient (DAPO, arXiv 2503.14476, section 3.2). The arithmetic task
# learns well at 0.78 to 0.87 in groups of 4 (measured), so that is a hint; at 0.95 one group in twenty teaches.
NO_GRADIENT_HINT = 0.8
NO_GRADIENT_COSTLY = 0.95

# A cut completion is scored wrong whatever it was coming to: noise in the reward (DAPO, section 3.4). Both
# engines' healthy recorded runs cut below 0.01.
TRUNCATED_SHARE = 0.05
LENGTH_RATIO = 1.5  # healthy recorded runs stay within 1.1

# Gains are paid with entropy and end with it (arXiv 2505.22617: a run has gained three quarters of what it will
# ever gain when a quarter of the entropy is left). Healthy recorded runs keep 0.6 to 0.9 of it.
ENTROPY_LEFT = 0.1
ENTROPY_RATIO = 2.0  # it never rises in a healthy run: the policy comes apart

# prime-rl only. Recorded runs: KL 1e-5 to 2e-4 a token when healthy, 0.003 to 0.04 at ten times that learning
# rate; "a sustained, growing mean is the early-warning sign" (prime-rl docs/training.md).
KL_MISMATCH = 0.01
KL_SHARE = 0.25  # of the steps of the last half: it comes in bursts
KL_GROWTH = 10.0
KL_FLOOR = 1e-3  # growth below it is numerical noise
MASKED_SHARE = 0.05  # of tokens: generated and trained on in vain; 0 in the recorded runs
OFF_POLICY_AGE = 4.0  # versions: prime-rl aims at 1 and drops beyond 8 by default; 1.1 recorded
ERROR_SHARE = 0.02  # of rollouts: these environments have no reason to fail; 0 recorded

# "Spikes precede divergence" (prime-rl docs/training.md). A healthy trl run of 192 steps has one of 14 medians, one
# in groups of 16 has five of up to 24 in 213 steps: a hint as long as max_norm clips them.
SPIKE_RATIO = 10.0
SPIKE_SHARE = 0.02  # of the steps, and two at least
CLIPPED_SHARE = 0.5  # of the steps: then max_norm and not lr sets the step

# Where the time goes: a fifth to a third of it is worth an experiment.
WAIT_SHARE = 0.3
BROADCAST_SHARE = 0.2
FIRST_STEP_SHARE = 0.1  # of the budget, when it is also three medians long
FIRST_STEP_RATIO = 3.0
UNUSED_SHARE = 0.2  # of the budget, when max_steps ends the run
SCHEDULE_SHARE = 0.9  # of max_steps reached: less, and the end of the schedule never came
FEW_STEPS = 10  # Adam's first steps are dominated by its start
OVERHEAD_RATIO = 1.0  # start-up and evaluation against training

_LR, _MAX_NORM = "trainer.optim.lr", "trainer.optim.max_norm"
_BATCH, _GROUP = "orchestrator.batch_size", "orchestrator.group_size"
_TEMPERATURE = "orchestrator.train.sampling.temperature"
_MAX_TOKENS = "orchestrator.train.sampling.max_completion_tokens"
_SAMPLER = "orchestrator.train.source.curriculum.sampler.type"
_PENALTY = "orchestrator.algo.length_penalty"
_KL_TAU, _AGE = "trainer.loss.kl_tau", "orchestrator.max_off_policy_steps"
_MASKS = ("trainer.loss.dppo_mask_low", "trainer.loss.dppo_mask_high")
_INFLIGHT = "orchestrator.concurrency.max_inflight"
_EAGER = "inference.vllm.enforce_eager"
_SPEED = ("trainer.model.optim_cpu_offload", "trainer.model.ac", "trainer.model.compile", "seq_len")
_SERVING = ("inference.vllm.max_num_seqs", "inference.vllm.gpu_memory_utilization", _INFLIGHT)


class Severity(IntEnum):
    """What is at stake; findings are shown from the highest down."""

    NOTE = 0  # a fact: where the time went
    HINT = 1  # something to know for the next hypothesis
    COSTLY = 2  # it learns, but a good part of the budget or of the signal is lost
    BROKEN = 3  # it learnt nothing, or lost again what it had learnt


@dataclass(frozen=True, slots=True)
class Finding:
    """One line with its number, and the train.toml keys that it points to."""

    text: str
    keys: tuple[str, ...]
    severity: Severity

    def __str__(self) -> str:
        return f"{self.text} [{', '.join(self.keys)}]" if self.keys else self.text


@dataclass(frozen=True, slots=True)
class Facts:
    """What the digest knows of a run beside its curves; None is not measured.

    `values`: the config's keys with defaults (Config.resolved). `used_keys`: what the engine uses, None for every
    key; a finding points to no other.
    """

    budget_seconds: float | None = None
    training_seconds: float | None = None
    startup_seconds: float | None = None
    evaluation_seconds: float | None = None
    evaluation_truncated_share: float | None = None
    outcome: Outcome | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    used_keys: AbstractSet[str] | None = None


def facts_of(
    run: Result, budget_seconds: float, values: Mapping[str, Any], used_keys: AbstractSet[str] | None = None
) -> Facts:
    """The facts of a recorded run under `values` (Config.resolved)."""
    evaluation = run.evaluation
    return Facts(
        budget_seconds=budget_seconds,
        training_seconds=run.training.training_seconds,
        startup_seconds=run.startup_seconds,
        evaluation_seconds=evaluation.seconds if evaluation else None,
        evaluation_truncated_share=evaluation.truncated_share if evaluation else None,
        outcome=run.training.outcome,
        values=values,
        used_keys=used_keys,
    )


def examine(steps: Sequence[Step], facts: Facts) -> list[Finding]:
    """At most five findings, the worst first; one line that says so when all is well; empty without steps."""
    if not steps:
        return []
    found = [finding for check in _CHECKS for finding in check(steps, facts)]
    found.sort(key=lambda finding: -finding.severity)  # stable: in the order of the checks within
    found = [*found, _time_note(steps, facts)] if found else [_healthy(steps, facts)]
    return [replace(f, keys=_used(f.keys, facts)) for f in found[:MAX_FINDINGS]]


def digest(steps: Sequence[Step], facts: Facts) -> str:
    """`examine` as plain text, one finding a line."""
    return "\n".join(map(str, examine(steps, facts)))


def _used(keys: tuple[str, ...], facts: Facts) -> tuple[str, ...]:
    return tuple(key for key in keys if facts.used_keys is None or key in facts.used_keys)[:MAX_KEYS]


def _curve(steps: Sequence[Step], name: str, at_least: int = MIN_STEPS) -> list[float]:
    """The measured values of a field; empty when there are too few to say anything."""
    found = (getattr(step, name) for step in steps)
    values = [min(max(value, -LIMIT), LIMIT) for value in found if value is not None]
    return values if len(values) >= at_least else []


def _last_half(values: Sequence[float]) -> Sequence[float]:
    return values[len(values) // 2 :]


def _ends(values: Sequence[float]) -> tuple[float, float]:
    """Levels of the first and the last tenth (two steps at least)."""
    parts = levels(values, min(10, len(values) // 2))
    return parts[0], parts[-1]


def _reward(steps: Sequence[Step], facts: Facts) -> Iterator[Finding]:
    """Collapsed, falling, flat or still rising: at most one of them."""
    values = _curve(steps, "reward_mean")
    if not values:
        return
    num_parts = min(10, len(values) // 4)
    parts = levels(values, num_parts)
    best, last = max(parts), parts[-1]
    # The best of several stretches is lucky: one more standard error than elsewhere.
    error = noise(values) * (2 * num_parts / len(values)) ** 0.5 * 1.25  # of a difference of two medians
    drop = best - last
    whole, late = trend(values), trend(_last_half(values))
    is_falling = late.z < -SURE and late.change < -FALL_REWARD
    if drop > FALL_REWARD and (is_falling or drop > (SURE + 1) * error):
        at = steps[int((parts.index(best) + 0.5) * len(values) / num_parts)].step
        word, severity = ("collapsed", Severity.BROKEN) if drop > COLLAPSE_SHARE * best else ("fell", Severity.COSTLY)
        text = f"reward {word} from {best:.2f} (about step {at}) to {last:.2f} at the end, error {error:.2f}"
        yield Finding(text, (_LR, _MAX_NORM, _KL_TAU, _AGE), severity)
    elif late.z > SURE and late.change > RISE_REWARD:
        text = f"reward still rising: {late.change:+.3f} +- {late.stderr:.3f} over the last half, {last:.2f} at the end"
        yield Finding(f"{text}: more or larger steps pay", (_LR, _BATCH, _GROUP), Severity.HINT)
    elif whole.change < 2 * whole.stderr and whole.change + whole.stderr < FLAT_REWARD and last < SOLVED_REWARD:
        text = (
            f"reward flat: {whole.change:+.3f} +- {whole.stderr:.3f} over {len(values)} steps, at {median(values):.2f}"
        )
        yield Finding(text, (_LR, _GROUP, _BATCH, _TEMPERATURE), Severity.BROKEN)


def _groups(steps: Sequence[Step], facts: Facts) -> Iterator[Finding]:
    """Groups without a gradient, and which way."""
    right, wrong = _curve(steps, "all_right_share", 1), _curve(steps, "all_wrong_share", 1)
    if not right or not wrong:
        return
    all_right, all_wrong = fmean(_last_half(right)), fmean(_last_half(wrong))
    share = all_right + all_wrong
    if share >= NO_GRADIENT_HINT:
        text = (
            f"{share:.0%} of the groups teach nothing in the last half "
            f"({all_right:.0%} all right, {all_wrong:.0%} all wrong)"
        )
        keys = (_SAMPLER, _GROUP, _TEMPERATURE) if all_right > all_wrong else (_GROUP, _TEMPERATURE, _SAMPLER)
        yield Finding(text, keys, Severity.COSTLY if share >= NO_GRADIENT_COSTLY else Severity.HINT)


def _truncation(steps: Sequence[Step], facts: Facts) -> Iterator[Finding]:
    values, limit = _curve(steps, "truncated_share", 1), facts.values.get(_MAX_TOKENS)
    shares = []
    if values:
        at = f" at {limit} tokens" if limit else ""
        shares.append((fmean(_last_half(values)), f"of the training completions{at} in the last half"))
    if facts.evaluation_truncated_share is not None:
        shares.append((facts.evaluation_truncated_share, "at evaluation"))
    if shares and max(shares)[0] >= TRUNCATED_SHARE:
        text = ", ".join(f"{share:.0%} {where}" for share, where in shares)
        yield Finding(f"cut and so scored 0: {text}", (_MAX_TOKENS, _PENALTY, "seq_len"), Severity.COSTLY)


def _length(steps: Sequence[Step], facts: Facts) -> Iterator[Finding]:
    values = _curve(steps, "completion_tokens_mean")
    if not values:
        return
    first, last = _ends(values)
    if min(first, last) <= 0 or 1 / LENGTH_RATIO < last / first < LENGTH_RATIO or abs(trend(values).z) < SURE:
        return
    rewards = _curve(steps, "reward_mean")
    pays = bool(rewards) and trend(rewards).z > SURE
    text = f"completions went from {first:.0f} to {last:.0f} tokens (x{last / first:.2g})"
    text += "" if pays else " without a gain in reward"
    yield Finding(text, (_PENALTY, _MAX_TOKENS, _LR), Severity.HINT if pays else Severity.COSTLY)


def _entropy(steps: Sequence[Step], facts: Facts) -> Iterator[Finding]:
    values = _curve(steps, "entropy")
    if not values:
        return
    first, last = _ends(values)
    if first <= 0:
        return
    rewards = _curve(steps, "reward_mean")
    solved = bool(rewards) and _ends(rewards)[1] >= SOLVED_REWARD
    if last < ENTROPY_LEFT * first and not solved:
        text = f"entropy collapsed from {first:.3g} to {last:.3g} ({last / first:.0%} left): exploration is used up"
        yield Finding(text, (_LR, _TEMPERATURE, _KL_TAU, _MASKS[1]), Severity.COSTLY)
    elif last > ENTROPY_RATIO * first and trend(values).z > SURE:
        text = f"entropy rose from {first:.3g} to {last:.3g} (x{last / first:.2g}): the policy comes apart"
        yield Finding(text, (_LR, _MAX_NORM, _TEMPERATURE), Severity.COSTLY)


def _mismatch(steps: Sequence[Step], facts: Facts) -> Iterator[Finding]:
    """Between the policy that trains and the one that sampled: KL, masked tokens, age."""
    if kl := _curve(steps, "kl", 2):
        early, late = median(kl[: max(2, len(kl) // 10)]), _last_half(kl)
        is_high = sum(value >= KL_MISMATCH for value in late) >= KL_SHARE * len(late)
        has_grown = len(kl) >= MIN_STEPS and median(late) > max(KL_FLOOR, KL_GROWTH * early)
        if is_high or has_grown:
            text = f"KL between trainer and server {fmean(late):.1e} in the last half, up to {max(kl):.1e}"
            yield Finding(text, (_LR, _AGE, _KL_TAU), Severity.COSTLY)
    if (masked := _curve(steps, "masked_share", 1)) and fmean(_last_half(masked)) >= MASKED_SHARE:
        text = f"{fmean(_last_half(masked)):.0%} of the tokens are masked out of the loss in the last half"
        yield Finding(text, (*_MASKS, "trainer.loss.ipo_threshold", _LR, _AGE), Severity.COSTLY)
    if (ages := _curve(steps, "off_policy_mean", 1)) and median(_last_half(ages)) >= OFF_POLICY_AGE:
        text = f"rollouts are {median(_last_half(ages)):.1f} policy versions old in the last half"
        yield Finding(text, (_AGE, _INFLIGHT, _BATCH), Severity.COSTLY)
    if (errors := _curve(steps, "error_share", 1)) and fmean(errors) >= ERROR_SHARE:
        yield Finding(f"{fmean(errors):.0%} of the rollouts failed", (_INFLIGHT, _MAX_TOKENS), Severity.COSTLY)


def _gradient(steps: Sequence[Step], facts: Facts) -> Iterator[Finding]:
    values = _curve(steps, "grad_norm")
    if not values:
        return
    middle, limit = median(values), facts.values.get(_MAX_NORM)
    spikes = [value for value in values if value > SPIKE_RATIO * middle > 0]
    if len(spikes) >= max(2, SPIKE_SHARE * len(values)):
        largest = f"the largest {max(spikes) / middle:.0f} times the median {middle:.2g}"
        text = f"{len(spikes)} gradient spikes in {len(values)} steps, {largest}"
        is_clipped = limit is not None and min(spikes) > limit
        text += f", all clipped to {limit:g}" if is_clipped else ", not all clipped"
        yield Finding(text, (_MAX_NORM, _LR), Severity.HINT if is_clipped else Severity.COSTLY)
    if limit is not None and (clipped := fmean(value > limit for value in values)) >= CLIPPED_SHARE:
        text = f"{clipped:.0%} of the steps are clipped (median norm {middle:.2g}, max_norm {limit:g})"
        yield Finding(f"{text}: max_norm sets the step", (_MAX_NORM, _LR), Severity.HINT)


def _waiting(steps: Sequence[Step], facts: Facts) -> Iterator[Finding]:
    """prime-rl: which side idles. The first step waits for the start and is left out."""
    idle = _curve(steps[1:], "wait_for_rollouts_seconds", 3)
    busy, broadcast = _curve(steps[1:], "train_seconds", 3), _curve(steps[1:], "broadcast_seconds", 3)
    if idle and busy:
        wait, train = median(idle), median(busy)
        seconds = wait + train + (median(broadcast) if broadcast else 0.0)
        if wait > WAIT_SHARE * seconds:
            text = f"generation is the bottleneck: the trainer waits {wait:.1f} of {seconds:.1f} s a step"
            yield Finding(text, (*_SERVING, _MAX_TOKENS), Severity.HINT)
        if broadcast and median(broadcast) > BROADCAST_SHARE * seconds:
            text = f"writing the weights takes {median(broadcast):.1f} of {seconds:.1f} s a step"
            yield Finding(text, (_BATCH, "trainer.model.lora"), Severity.HINT)
    waiting, generating = _curve(steps[1:], "wait_for_policy_seconds", 3), _curve(steps[1:], "generate_seconds", 3)
    if waiting and generating and median(waiting) > WAIT_SHARE * median(generating):
        text = (
            f"training is the bottleneck: generation waits {median(waiting):.1f} of {median(generating):.1f} s a step"
        )
        yield Finding(text, _SPEED, Severity.HINT)


def _budget(steps: Sequence[Step], facts: Facts) -> Iterator[Finding]:
    """What the budget was used for."""
    seconds, budget = facts.training_seconds, facts.budget_seconds or 0.0
    max_steps, ended = facts.values.get("max_steps"), facts.outcome is Outcome.BUDGET
    if facts.outcome is Outcome.FINISHED and seconds is not None and seconds < (1 - UNUSED_SHARE) * budget:
        unused = f"{budget - seconds:.0f} s of the budget unused"
        text = f"max_steps = {max_steps} ended training after {seconds:.0f} s: {unused}"
        yield Finding(text, ("max_steps",), Severity.COSTLY)
    has_schedule = facts.values.get("trainer.scheduler.type") in ("linear", "cosine")
    if ended and has_schedule and max_steps is not None and len(steps) < SCHEDULE_SHARE * max_steps:
        text = f"the budget ended at step {steps[-1].step} of max_steps {max_steps}: the schedule was cut off"
        yield Finding(text, ("max_steps", "trainer.scheduler.decay_steps"), Severity.HINT)
    if ended and len(steps) < FEW_STEPS:
        text = f"only {len(steps)} steps in {seconds or budget:.0f} s"
        yield Finding(text, (_BATCH, _MAX_TOKENS, *_SPEED), Severity.COSTLY)
    first, typical = steps[0].time or 0.0, _step_seconds(steps) or 0.0
    if steps[0].step == 1 and 0 < budget * FIRST_STEP_SHARE < first > FIRST_STEP_RATIO * typical > 0:
        text = f"the first step took {first:.0f} s, {first / budget:.0%} of the budget (later ones {typical:.1f} s)"
        keys = ("trainer.model.compile", "orchestrator.concurrency.initial_inflight", _EAGER)
        yield Finding(text, keys, Severity.COSTLY)
    overhead = sum(s for s in (facts.startup_seconds, facts.evaluation_seconds) if s is not None)
    if seconds and overhead > OVERHEAD_RATIO * seconds:
        text = f"start-up and evaluation took {overhead:.0f} s beside {seconds:.0f} s of training"
        yield Finding(text, (_EAGER, "trainer.model.compile"), Severity.HINT)


def _step_seconds(steps: Sequence[Step]) -> float | None:
    """The median time from one step to the next; None when it was not measured."""
    times = [step.time for step in steps if step.time is not None]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    return median(gaps) if gaps else None


def _pace(steps: Sequence[Step], facts: Facts) -> tuple[str, tuple[str, ...]]:
    """Number and length of the steps and what fills them, and the keys of the larger part."""
    typical = _step_seconds(steps)
    text = f"{len(steps)} steps" + (f" of {typical:.2g} s" if typical else "")
    generate, train = _curve(steps, "generate_seconds", 1), _curve(steps, "train_seconds", 1)
    if not generate or not train:
        return text, ()
    parts = f"generation {median(generate):.2g} s, training {median(train):.2g} s"
    keys = (_BATCH, _MAX_TOKENS) if median(generate) > median(train) else (_BATCH, *_SPEED)
    return f"{text} ({parts})", keys


def _time_note(steps: Sequence[Step], facts: Facts) -> Finding:
    text, keys = _pace(steps, facts)
    parts = (
        ("start-up", facts.startup_seconds),
        ("training", facts.training_seconds),
        ("evaluation", facts.evaluation_seconds),
    )
    spent = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in parts if seconds is not None)
    return Finding(f"time: {text}" + (f"; {spent}" if spent else ""), keys, Severity.NOTE)


def _healthy(steps: Sequence[Step], facts: Facts) -> Finding:
    """The one line when no check found anything."""
    parts = []
    if rewards := _curve(steps, "reward_mean"):
        first, last = _ends(rewards)
        parts.append(f"reward {first:.2f} -> {last:.2f} ({trend(rewards).change:+.2f} +- {trend(rewards).stderr:.2f})")
    for name, label in (("entropy", "entropy"), ("completion_tokens_mean", "length")):
        if values := _curve(steps, name):
            first, last = _ends(values)
            parts.append(f"{label} {first:.3g} -> {last:.3g}")
    return Finding(f"healthy: {', '.join([*parts, _pace(steps, facts)[0]])}", (), Severity.NOTE)


_CHECKS: tuple[Callable[[Sequence[Step], Facts], Iterator[Finding]], ...] = (
    _reward,
    _entropy,
    _mismatch,
    _gradient,
    _truncation,
    _length,
    _groups,
    _budget,
    _waiting,
)
