"""The health digest: what is wrong with the curves of a run, in at most five lines with the keys to change.

Every check reads Steps, whichever engine wrote them. A field that is None gives no finding. A trend is a robust slope
with its standard error, never a single point.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import pairwise
from statistics import fmean, median
from typing import Any

import numpy as np

from nightshift.campaign.metrics import NO_GRADIENT_STEPS, Step, num_without_gradient
from nightshift.campaign.records import Z95, Outcome, Result
from nightshift.config.allowlist import find_key
from nightshift.config.rules import Rules

Steps = Sequence[Step]
MAX_FINDINGS = 5
MAX_KEYS = 3  # of one finding: more would point nowhere


def digest(steps: Steps, conditions: Conditions) -> str:
    """Return the findings as lines of text."""
    return "\n".join(map(str, examine(steps, conditions)))


def examine(steps: Steps, conditions: Conditions) -> list[Finding]:
    """Return at most five findings, the worst first; `healthy: ...` if there is none; nothing without steps.

    A finding points only to keys that the engine uses.
    """
    if not steps:
        return []
    findings = [finding for check in CHECKS for finding in check(steps, conditions)]
    findings += [Finding(text, (), Severity.COSTLY) for text in conditions.remarks]
    findings.sort(key=lambda finding: -finding.severity)  # stable: in the order of CHECKS within a severity
    findings = [*findings, note(steps, conditions)] if findings else [healthy(steps)]
    used = conditions.used_keys
    return [
        replace(finding, keys=tuple(key for key in finding.keys if used is None or key in used)[:MAX_KEYS])
        for finding in findings[:MAX_FINDINGS]
    ]


MAX_POINTS = 200  # longer curves are averaged down to as many: the number of pairs grows with the square
_MAD = 1.4826  # standard deviation of a normal distribution, in median absolute deviations
_EFFICIENCY = 0.955  # of Theil's slope against least squares, for normal noise: 3 / pi
_MAX_AUTOCORRELATION = 0.9
_WINSOR = 3.0
_FEW_POINTS = 4.0


@dataclass(frozen=True, slots=True)
class Trend:
    """The change of a curve from its first to its last point, with its standard error."""

    change: float
    stderr: float

    def __str__(self) -> str:
        """`+0.133 ± 0.037`, the second half of its 95 % interval."""
        return f"{self.change:+.3f} ± {Z95 * self.stderr:.3f}"

    @property
    def z(self) -> float:
        """The change in standard errors; 0 without a change."""
        if self.stderr > 0:
            return self.change / self.stderr
        return float("inf") * self.change if self.change else 0.0


def trend(values: Sequence[float]) -> Trend:
    """Return Theil's slope (the median over all pairs of points) times the length of the curve. Needs 2 points.

    The error takes the scale of the residuals (outliers clipped at three times their median absolute deviation) and
    the slope's variance as for least squares, over Theil's efficiency. It is widened for few points, so that three
    standard errors mean what they do with many (Student's t: 4.9 of them for 8 points), and by sqrt((1 + r) / (1 - r))
    for residuals whose correlation from point to point is r.
    """
    y = np.asarray(values, float)
    if len(y) > MAX_POINTS:
        y = np.array([part.mean() for part in np.array_split(y, MAX_POINTS)])
    x = np.arange(len(y), dtype=float)
    first, second = np.triu_indices(len(y), k=1)
    slope = float(np.median((y[second] - y[first]) / (x[second] - x[first])))
    residuals = y - slope * x
    residuals -= np.median(residuals)
    robust = _MAD * float(np.median(np.abs(residuals)))
    residuals = np.clip(residuals, -_WINSOR * robust, _WINSOR * robust)
    total, r = float((residuals**2).sum()), 0.0
    scale = float(np.sqrt(total / max(len(y) - 2, 1))) * (1 + _FEW_POINTS / len(y))
    if total > 0 and len(residuals) > 2:
        autocorrelation = float((residuals[1:] * residuals[:-1]).sum()) / total
        r = min(max(autocorrelation, 0.0), _MAX_AUTOCORRELATION)
    spread = float(np.sqrt(((x - x.mean()) ** 2).sum() * _EFFICIENCY))
    span = len(y) - 1
    return Trend(slope * span, scale / spread * span * float(np.sqrt((1 + r) / (1 - r))))


def noise(values: Sequence[float]) -> float:
    """Return the robust standard deviation of a point, from first differences: a trend does not count."""
    differences = np.diff(np.asarray(values, float))
    return _MAD * float(np.median(np.abs(differences - np.median(differences)))) / float(np.sqrt(2))


def levels(values: Sequence[float], num_parts: int) -> list[float]:
    """Return the medians of equal parts of a curve, in order."""
    return [float(np.median(part)) for part in np.array_split(np.asarray(values, float), num_parts) if len(part)]


def last_half(values: Sequence[float]) -> Sequence[float]:
    return values[len(values) // 2 :]


def ends(values: Sequence[float]) -> tuple[float, float]:
    """Return the levels of the first and the last tenth (two points at least)."""
    parts = levels(values, min(10, len(values) // 2))
    return parts[0], parts[-1]


class Severity(IntEnum):
    """How much is lost. Findings are shown from the highest down."""

    NOTE = 0  # where the time went
    HINT = 1  # something to know for the next hypothesis
    COSTLY = 2  # it learns, but a good part of the budget or of the signal is lost
    BROKEN = 3  # it learnt nothing, or lost what it had learnt


@dataclass(frozen=True, slots=True)
class Finding:
    """One line with its figure, and the keys of train.toml to change."""

    text: str
    keys: tuple[str, ...]
    severity: Severity

    def __str__(self) -> str:
        return f"{self.text} [{', '.join(self.keys)}]" if self.keys else self.text


@dataclass(frozen=True, slots=True)
class Conditions:
    """A run beside its curves. `values`: the config's keys with defaults. `used_keys`: those that the engine uses,
    None for all. `remarks`: lines on its scores (Campaign.remarks)."""

    run: Result
    rules: Rules
    values: Mapping[str, Any]
    used_keys: AbstractSet[str] | None = None
    remarks: Sequence[str] = ()

    @property
    def completion_limit(self) -> str:
        """` at 64 tokens`: the limit of a training completion that was in force. A shorter seq_len may cut earlier."""
        limit = min(self.values.get(_MAX_TOKENS) or math.inf, self.rules.max_completion_tokens)
        seq_len, row = self.values.get("seq_len"), find_key("seq_len")
        is_shorter = seq_len is not None and row is not None and seq_len < row.default
        return f" at {limit} tokens" + (f" or at seq_len = {seq_len}" if is_shorter else "")


Findings = Iterator[Finding]
LIMIT = 1e30  # a diverging run writes any finite number: sums and squares of these stay finite
MIN_STEPS = 8  # fewer points carry no trend
SURE = 3.0  # standard errors for "it moved": not two, because a digest makes a dozen such tests

# Reward. Noise of a step is 0.03 to 0.07 on the trl engine (256 rollouts in groups of 4): over 40 steps the change
# is known to about 0.03.
FLAT_REWARD = 0.05  # change within two standard errors of 0 and, with one added, below this
FALL_REWARD = 0.05  # from its best part to the end, whose weights are scored
COLLAPSE_SHARE = 0.5  # of the best level lost: measured on the trl engine at ten times the learning rate
RISE_REWARD = 0.02  # over the last half: smaller gains are not worth a longer run
SOLVED_REWARD = 0.95  # nothing left to learn: flat is fine

# Groups all right or all wrong have no gradient (DAPO, arXiv 2503.14476, section 3.2). The arithmetic task
# learns well at 0.78 to 0.87 in groups of 4 (measured), so that is a hint; at 0.95 one group in twenty teaches.
NO_GRADIENT_HINT = 0.8
NO_GRADIENT_COSTLY = 0.95

# A cut completion is scored as wrong: noise in the reward (DAPO, section 3.4). Both engines' healthy recorded runs cut
# below 0.01.
TRUNCATED_SHARE = 0.05

# Gains are paid with entropy and end with it (arXiv 2505.22617: a run has gained three quarters of what it will
# ever gain when a quarter of the entropy is left). Healthy recorded runs keep 0.6 to 0.9 of it.
ENTROPY_LEFT = 0.1
ENTROPY_RATIO = 2.0  # it never rises in a healthy run: the policy comes apart

# prime-rl only. Recorded runs: KL 1e-5 to 2e-4 a token when healthy, 0.003 to 0.04 at ten times that learning
# rate; "a sustained, growing mean is the early-warning sign" (prime-rl docs/training.md).
KL_MISMATCH = 0.01
KL_SHARE = 0.25  # of the steps of the last half: it comes in bursts
KL_GROWTH = 10.0  # of the level at the start, at the end: what a server that computes with stale weights looks like
KL_FLOOR = 1e-3  # growth below it is numerical noise
MASKED_SHARE = 0.05  # of tokens: generated and trained on in vain; 0 in the recorded runs
OFF_POLICY_AGE = 4.0  # versions: prime-rl aims at 1 and drops beyond 8 by default; 1.1 recorded
ERROR_SHARE = 0.02  # of rollouts: these environments have no reason to fail; 0 recorded

# "Spikes precede divergence" (prime-rl docs/training.md). A healthy trl run of 192 steps has one of 14 medians, one
# in groups of 16 has five of up to 24 in 213 steps: a hint as long as max_norm clips them.
SPIKE_RATIO = 10.0
SPIKE_SHARE = 0.02  # of the steps, and two at least
CLIPPED_SHARE = 0.5  # of the steps: then max_norm and not lr sets the step

UNUSED_SHARE = 0.2  # of the budget, when max_steps ends the run
SCHEDULE_SHARE = 0.9  # of max_steps reached: less, and the end of the schedule never came
FEW_STEPS = 10  # Adam's first steps are dominated by its start

_LR, _MAX_NORM = "trainer.optim.lr", "trainer.optim.max_norm"
_BATCH, _GROUP = "orchestrator.batch_size", "orchestrator.group_size"
_TEMPERATURE = "orchestrator.train.sampling.temperature"
_MAX_TOKENS = "orchestrator.train.sampling.max_completion_tokens"
_SAMPLER = "orchestrator.train.source.curriculum.sampler.type"
_PENALTY = "orchestrator.algo.length_penalty"
_KL_TAU, _AGE = "trainer.loss.kl_tau", "orchestrator.max_off_policy_steps"
_MASKS = ("trainer.loss.dppo_mask_low", "trainer.loss.dppo_mask_high")
_INFLIGHT = "orchestrator.concurrency.max_inflight"
_SPEED = ("trainer.model.optim_cpu_offload", "trainer.model.ac", "trainer.model.compile", "seq_len")
_SERVING = ("inference.vllm.max_num_seqs", "inference.vllm.gpu_memory_utilization", _INFLIGHT)


def reward(steps: Steps, _: Conditions) -> Findings:
    """Find a reward that collapsed, fell, is flat or still rising: at most one of them."""
    values = _curve(steps, "reward_mean")
    if not values:
        return
    num_parts = min(10, len(values) // 4)
    parts = levels(values, num_parts)
    best, last = max(parts), parts[-1]
    # The best of several noisy parts is too high (winner's curse): one more standard error than elsewhere.
    error = noise(values) * (2 * num_parts / len(values)) ** 0.5 * 1.25  # of a difference of two medians
    drop = best - last
    whole, late = trend(values), trend(last_half(values))
    is_falling = late.z < -SURE and late.change < -FALL_REWARD
    if drop > FALL_REWARD and (is_falling or drop > (SURE + 1) * error):
        at = steps[int((parts.index(best) + 0.5) * len(values) / num_parts)].step
        word, severity = ("collapsed", Severity.BROKEN) if drop > COLLAPSE_SHARE * best else ("fell", Severity.COSTLY)
        text = f"reward {word} from {best:.2f} (about step {at}) to {last:.2f} at the end, error {error:.2f}"
        yield Finding(text, (_LR, _MAX_NORM, _KL_TAU, _AGE), severity)
    elif late.z > SURE and late.change > RISE_REWARD:
        text = f"reward still rising: {late} over the last half, {last:.2f} at the end"
        yield Finding(f"{text}: more or larger steps pay", (_LR, _BATCH, _GROUP), Severity.HINT)
    elif whole.change < 2 * whole.stderr and whole.change + whole.stderr < FLAT_REWARD and last < SOLVED_REWARD:
        text = f"reward flat: {whole} over {len(values)} steps, at {median(values):.2f}"
        yield Finding(text, (_LR, _GROUP, _BATCH, _TEMPERATURE), Severity.BROKEN)


def entropy(steps: Steps, _: Conditions) -> Findings:
    values, rewards = _curve(steps, "entropy"), _curve(steps, "reward_mean")
    first, last = ends(values) if values else (0.0, 0.0)
    if first <= 0:
        return
    solved = bool(rewards) and ends(rewards)[1] >= SOLVED_REWARD
    if last < ENTROPY_LEFT * first and not solved:
        text = f"entropy collapsed from {first:.3g} to {last:.3g} ({last / first:.0%} left): exploration is used up"
        yield Finding(text, (_LR, _TEMPERATURE, _KL_TAU, _MASKS[1]), Severity.COSTLY)
    elif last > ENTROPY_RATIO * first and trend(values).z > SURE:
        text = f"entropy rose from {first:.3g} to {last:.3g} (x{last / first:.2g}): the policy comes apart"
        yield Finding(text, (_LR, _MAX_NORM, _TEMPERATURE), Severity.COSTLY)


def truncation(steps: Steps, conditions: Conditions) -> Findings:
    shares = []
    if values := _curve(steps, "truncated_share", 1):
        cut = f"of the training completions{conditions.completion_limit} in the last half"
        shares.append((fmean(last_half(values)), cut))
    if (evaluation := conditions.run.evaluation) is not None:
        shares.append((evaluation.truncated_share, "at evaluation"))
    if shares and max(shares)[0] >= TRUNCATED_SHARE:
        text = ", ".join(f"{share:.0%} {where}" for share, where in shares)
        yield Finding(f"cut and so scored 0: {text}", (_MAX_TOKENS, _PENALTY, "seq_len"), Severity.COSTLY)


def groups(steps: Steps, _: Conditions) -> Findings:
    right, wrong = _curve(steps, "all_right_share", 1), _curve(steps, "all_wrong_share", 1)
    if not right or not wrong or _num_dead(steps):  # no_gradient says it
        return
    all_right, all_wrong = fmean(last_half(right)), fmean(last_half(wrong))
    share = all_right + all_wrong
    if share >= NO_GRADIENT_HINT:
        text = f"{share:.0%} of the groups teach nothing in the last half"
        text += f" ({all_right:.0%} all right, {all_wrong:.0%} all wrong)"
        keys = (_SAMPLER, _GROUP, _TEMPERATURE) if all_right > all_wrong else (_GROUP, _TEMPERATURE, _SAMPLER)
        yield Finding(text, keys, Severity.COSTLY if share >= NO_GRADIENT_COSTLY else Severity.HINT)


def no_gradient(steps: Steps, conditions: Conditions) -> Findings:
    """Find the step from which on there was no gradient, and why. prime-rl's own empty batches are no steps."""
    num_steps = _num_dead(steps)
    if not num_steps:
        if conditions.run.training.outcome is Outcome.NO_GRADIENT:
            text = f"no gradient after step {steps[-1].step}: {NO_GRADIENT_STEPS} batches in a row had equal rewards"
            yield Finding(f"{text} in every group", (_GROUP, _TEMPERATURE, _SAMPLER), Severity.BROKEN)
        return
    rows, severity, keys = steps[-num_steps:], Severity.BROKEN, (_LR, _MAX_NORM, _TEMPERATURE)
    right, wrong, equal = (_mean(rows, f"{which}_share") for which in ("all_right", "all_wrong", "equal"))
    if (right or 0.0) >= NO_GRADIENT_COSTLY:
        why, keys, severity = "every answer is right", (_SAMPLER, _TEMPERATURE, _GROUP), Severity.COSTLY
    elif (equal or 0.0) >= NO_GRADIENT_COSTLY > (wrong or 0.0):
        why, keys = "all rewards of each group are equal", (_TEMPERATURE, _GROUP, _LR)
    elif (wrong or 0.0) < NO_GRADIENT_COSTLY:
        why = "the gradient norm is 0"
    elif num_steps < len(steps):
        why = "every answer is wrong, unlike before"
    else:
        why, keys = "every answer is wrong", (_GROUP, _TEMPERATURE, _MAX_TOKENS)
    yield Finding(f"no gradient from step {rows[0].step} on: {why}", keys, severity)


def mismatch(steps: Steps, _: Conditions) -> Findings:
    """Find a mismatch between the policy that trains and the one that sampled: KL, masked tokens, age."""
    if kl := _curve(steps, "kl", 2):
        (first, last), late = ends(kl), last_half(kl)
        where = f"in the last half, up to {max(kl):.1e}"
        if len(kl) >= MIN_STEPS and last > max(KL_FLOOR, KL_GROWTH * first):
            text = f"mismatch KL grows over the run, from {first:.1e} to {last:.1e}: trainer and server come apart"
            yield Finding(f"{text} ({fmean(late):.1e} {where})", (_LR, _AGE, _KL_TAU), Severity.COSTLY)
        elif sum(value >= KL_MISMATCH for value in late) >= KL_SHARE * len(late):
            text = f"KL between trainer and server {fmean(late):.1e} {where}"
            yield Finding(text, (_LR, _AGE, _KL_TAU), Severity.COSTLY)
    if (masked := _curve(steps, "masked_share", 1)) and (share := fmean(last_half(masked))) >= MASKED_SHARE:
        keys = (*_MASKS, "trainer.loss.ipo_threshold", _LR, _AGE)
        yield Finding(f"{share:.0%} of the tokens are masked out of the loss in the last half", keys, Severity.COSTLY)
    if (ages := _curve(steps, "off_policy_mean", 1)) and (age := median(last_half(ages))) >= OFF_POLICY_AGE:
        text = f"rollouts are {age:.1f} policy versions old in the last half"
        yield Finding(text, (_AGE, _INFLIGHT, _BATCH), Severity.COSTLY)
    if (errors := _curve(steps, "error_share", 1)) and fmean(errors) >= ERROR_SHARE:
        yield Finding(f"{fmean(errors):.0%} of the rollouts failed", (_INFLIGHT, _MAX_TOKENS), Severity.COSTLY)


def gradient(steps: Steps, conditions: Conditions) -> Findings:
    values = _curve(steps, "grad_norm")
    if not values:
        return
    middle, limit = median(values), conditions.values.get(_MAX_NORM)
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


def budget(steps: Steps, conditions: Conditions) -> Findings:
    outcome, used, whole = conditions.run.training.outcome, steps[-1].time, conditions.rules.budget_seconds
    max_steps, ended = conditions.values.get("max_steps"), outcome is Outcome.BUDGET
    if outcome is Outcome.FINISHED and used is not None and used < (1 - UNUSED_SHARE) * whole:
        text = f"max_steps = {max_steps} ended training after {used:.0f} s: {whole - used:.0f} s of the budget unused"
        yield Finding(text, ("max_steps",), Severity.COSTLY)
    has_schedule = conditions.values.get("trainer.scheduler.type") in ("linear", "cosine")
    if ended and has_schedule and max_steps is not None and len(steps) < SCHEDULE_SHARE * max_steps:
        text = f"the budget ended at step {steps[-1].step} of max_steps {max_steps}: the schedule was cut off"
        yield Finding(text, ("max_steps", "trainer.scheduler.decay_steps"), Severity.HINT)
    if ended and len(steps) < FEW_STEPS:
        yield Finding(f"only {len(steps)} steps in {whole:.0f} s", (_BATCH, _MAX_TOKENS, *_SPEED), Severity.COSTLY)


CHECKS = (no_gradient, reward, entropy, mismatch, gradient, truncation, groups, budget)


def pace(steps: Steps) -> tuple[str, tuple[str, ...]]:
    """Return number, length and parts of the steps in words, and the keys of the longest part."""
    typical = _step_seconds(steps)
    text = f"{len(steps)} steps" + (f" of {typical:.2g} s" if typical else "")
    train = _curve(steps, "train_seconds", 1)
    for name, what, keys in (
        ("generate", "generation", (_BATCH, _MAX_TOKENS)),
        ("wait_for_rollouts", "waiting for rollouts", _SERVING),
    ):
        if train and (other := _curve(steps, f"{name}_seconds", 1)):
            parts = f"{what} {median(other):.2g} s, training {median(train):.2g} s"
            return f"{text} ({parts})", keys if median(other) > median(train) else (_BATCH, *_SPEED)
    return text, ()


def note(steps: Steps, conditions: Conditions) -> Finding:
    """Return how the time was spent."""
    (text, keys), run = pace(steps), conditions.run
    parts = (
        ("start-up", run.startup_seconds),
        ("training", run.training.training_seconds),
        ("evaluation", run.evaluation.seconds if run.evaluation else None),
    )
    spent = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in parts if seconds is not None)
    return Finding(f"time: {text}" + (f"; {spent}" if spent else ""), keys, Severity.NOTE)


def healthy(steps: Steps) -> Finding:
    """Return the line of a run without findings."""
    parts = []
    if rewards := _curve(steps, "reward_mean"):
        first, last = ends(rewards)
        parts.append(f"reward {first:.2f} -> {last:.2f} ({trend(rewards)})")
    for name, label in (("entropy", "entropy"), ("completion_tokens_mean", "length")):
        if values := _curve(steps, name):
            first, last = ends(values)
            parts.append(f"{label} {first:.3g} -> {last:.3g}")
    return Finding(f"healthy: {', '.join([*parts, pace(steps)[0]])}", (), Severity.NOTE)


def _num_dead(steps: Steps) -> int:
    """Return the number of last steps without a gradient; 0 unless they are NO_GRADIENT_STEPS or the whole run."""
    num_steps = num_without_gradient(steps)
    return num_steps if num_steps >= min(NO_GRADIENT_STEPS, len(steps)) else 0


def _step_seconds(steps: Steps) -> float | None:
    """Return the median time from one step to the next; None if it was not measured."""
    times = [step.time for step in steps if step.time is not None]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    return median(gaps) if gaps else None


def _mean(steps: Steps, name: str) -> float | None:
    values = _curve(steps, name, 1)
    return fmean(values) if values else None


def _curve(steps: Steps, name: str, at_least: int = MIN_STEPS) -> list[float]:
    """Return the measured values of a field; empty if there are fewer than `at_least`."""
    measured = (getattr(step, name) for step in steps)
    values = [min(max(value, -LIMIT), LIMIT) for value in measured if value is not None]
    return values if len(values) >= at_least else []
