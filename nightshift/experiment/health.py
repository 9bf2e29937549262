"""The health digest: what limits a run, in at most five lines with the keys to change.

A field of Step that is None gives no finding. A trend is a robust slope with its standard error, never one point.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean, median
from typing import Any, NamedTuple

import numpy as np

from nightshift.campaign.metrics import NO_GRADIENT_STEPS, Step, num_without_gradient
from nightshift.campaign.records import Z95, Outcome, Result
from nightshift.config.rules import Rules

Steps = Sequence[Step]
Values = Sequence[float]
Test = Callable[[Values, Steps, "Conditions"], str]
# Severities. HINT: to know for the next hypothesis; COSTLY: a good part of the budget or of the signal is lost;
# BROKEN: it learnt nothing, or lost what it had learnt. Findings are shown from the highest down.
NOTE, HINT, COSTLY, BROKEN = range(4)
SURE = 3.0  # standard errors for "it moved": not two, because a digest makes a dozen such tests


class Finding(NamedTuple):
    """One line with its figure, and the keys of train.toml to change."""

    text: str
    keys: tuple[str, ...]
    severity: int

    def __str__(self) -> str:
        return f"{self.text} [{', '.join(self.keys)}]" if self.keys else self.text


@dataclass(frozen=True, slots=True)
class Conditions:
    """A run beside its curves. `values`: the config's keys with defaults. `used_keys`: those that the engine uses,
    None for all. `remarks`: lines on its scores (Campaign.remarks)."""

    run: Result
    rules: Rules
    values: Mapping[str, Any]
    used_keys: Collection[str] | None = None
    remarks: Sequence[str] = ()


def digest(steps: Steps, conditions: Conditions) -> list[Finding]:
    """Return at most five findings, the worst first, with the keys that the engine uses; `healthy: ...` without any."""
    if not steps:
        return []
    by_name = dict[str, Finding]()
    for check in CHECKS:
        values = curve(steps, check.field)
        if values and check.name not in by_name and (text := check.test(values, steps, conditions)):
            by_name[check.name] = Finding(text, check.keys, check.severity)
    findings = [*by_name.values(), *(Finding(text, (), COSTLY) for text in conditions.remarks)]
    findings.sort(key=lambda finding: -finding.severity)  # stable: in the order of CHECKS within a severity
    findings.append(note(steps, is_healthy=not findings))
    used = conditions.used_keys
    return [
        Finding(text, tuple(key for key in keys if used is None or key in used)[:3], severity)
        for text, keys, severity in findings[:5]
    ]


def curve(steps: Steps, name: str) -> list[float]:
    """Return the measured values of a field; none of a trend's field with fewer than 8 points."""
    trends = ("reward_mean", "entropy", "completion_tokens_mean", "grad_norm")
    measured = (getattr(step, name) for step in steps)
    # A diverging run writes any finite number: sums and squares of these stay finite.
    values = [min(max(value, -1e30), 1e30) for value in measured if value is not None]
    return values if len(values) >= 8 or name not in trends else []


class Trend(NamedTuple):
    """The change of a curve from its first to its last point, and its standard error (its text: a 95 % interval)."""

    change: float
    stderr: float

    def __str__(self) -> str:
        return f"{self.change:+.3f} ± {Z95 * self.stderr:.3f}"


def trend(values: Values) -> Trend:
    """Return Theil's slope (the median over all pairs of points) times the length of the curve. Needs 2 points.

    The error is that of least squares over Theil's efficiency, from residuals clipped at three deviations. It is wider
    for few points (Student's t: 4.9 standard errors for 8 points) and for residuals that correlate from point to point.
    """
    y = np.asarray(values, float)
    if len(y) > 200:  # the number of pairs grows with the square
        y = np.array([part.mean() for part in np.array_split(y, 200)])
    x = np.arange(len(y), dtype=float)
    first, second = np.triu_indices(len(y), k=1)
    slope = float(np.median((y[second] - y[first]) / (x[second] - x[first])))
    residuals = y - slope * x
    residuals -= np.median(residuals)
    limit = 3 * deviation(residuals)
    residuals = np.clip(residuals, -limit, limit)
    total = float((residuals**2).sum())
    r = min(max(float((residuals[1:] * residuals[:-1]).sum()) / total, 0.0), 0.9) if total > 0 else 0.0
    scale = math.sqrt(total / max(len(y) - 2, 1)) * (1 + 4 / len(y))
    spread = math.sqrt(((x - x.mean()) ** 2).sum() * 0.955)  # 3 / pi: Theil's efficiency for normal noise
    span = len(y) - 1
    return Trend(slope * span, scale / spread * span * math.sqrt((1 + r) / (1 - r)))


def deviation(values: np.ndarray) -> float:
    """Return the standard deviation as the median absolute deviation gives it for normal noise."""
    return 1.4826 * float(np.median(np.abs(values - np.median(values))))


def levels(values: Values, num_points: int) -> list[float]:
    """Return the medians of at most ten equal parts of a curve, in order, each of `num_points` at least."""
    num_parts = min(10, len(values) // num_points)
    return [float(np.median(part)) for part in np.array_split(values, num_parts)] if num_parts else []


def late_mean(values: Values) -> float:
    return fmean(values[len(values) // 2 :])


def no_gradient(_: Values, steps: Steps, conditions: Conditions) -> str:
    """Find the step from which on there was no gradient, and why. In prime-rl, empty batches are no steps."""
    num_steps = num_without_gradient(steps)
    if num_steps >= min(NO_GRADIENT_STEPS, len(steps)):
        shares = {"all_right_share": "every answer is right", "all_wrong_share": "every answer is wrong"}
        shares["equal_share"] = "all rewards of each group are equal"
        rows = steps[-num_steps:]
        causes = [cause for field, cause in shares.items() if fmean(curve(rows, field) or [0.0]) >= 0.95]
        return f"no gradient from step {rows[0].step} on: {[*causes, 'the gradient norm is 0'][0]}"
    if conditions.run.training.outcome is not Outcome.NO_GRADIENT:
        return ""
    text = f"no gradient after step {steps[-1].step}: {NO_GRADIENT_STEPS} batches in a row had equal rewards"
    return f"{text} in every group"


def fell(word: str, share: float, values: Values, steps: Steps, _: Conditions) -> str:
    """Compare the end, whose weights are scored, with the best part, of which `share` has to be lost."""
    parts, late = levels(values, 4), trend(values[len(values) // 2 :])
    best, last = max(parts), parts[-1]
    # The best of several noisy parts is too high (winner's curse): one more standard error than elsewhere.
    error = deviation(np.diff(values)) / math.sqrt(2) * (2 * len(parts) / len(values)) ** 0.5 * 1.25
    is_falling = late.change < min(-SURE * late.stderr, -0.05)
    if best - last <= max(0.05, share * best) or not (is_falling or best - last > (SURE + 1) * error):
        return ""
    step = steps[int((parts.index(best) + 0.5) * len(values) / len(parts))].step
    return f"reward {word} from {best:.2f} (about step {step}) to {last:.2f} at the end, error {error:.2f}"


def rising(values: Values, *_: Any) -> str:
    late, last = trend(values[len(values) // 2 :]), levels(values, 4)[-1]
    if late.change <= max(SURE * late.stderr, 0.02):  # smaller gains are not worth a longer run
        return ""
    return f"reward still rising: {late} over the last half, {last:.2f} at the end: more or larger steps pay"


def flat(values: Values, *_: Any) -> str:
    """Find a reward that did not move. On the trl engine (256 rollouts) 40 steps tell a change of about 0.03."""
    whole = trend(values)
    if whole.change >= min(2 * whole.stderr, 0.05 - whole.stderr) or levels(values, 4)[-1] >= 0.95:
        return ""
    return f"reward flat: {whole} over {len(values)} steps, at {median(values):.2f}"


def entropy(values: Values, steps: Steps, _: Conditions) -> str:
    """Gains are paid with entropy (arXiv 2505.22617); healthy recorded runs keep 0.6 to 0.9 of it."""
    first, *_parts, last = levels(values, 2)
    if last > 2 * first > 0 and trend(values).change > SURE * trend(values).stderr:  # never in a healthy run
        return f"entropy rose from {first:.3g} to {last:.3g} (x{last / first:.2g}): the policy comes apart"
    if first <= 0 or last >= 0.1 * first or (levels(curve(steps, "reward_mean"), 2) or [0.0])[-1] >= 0.95:
        return ""
    return f"entropy collapsed from {first:.3g} to {last:.3g} ({last / first:.0%} left): exploration is used up"


def above(limit: float, text: str) -> Test:
    """Return the test whether the mean of the last half reaches a limit."""
    text += " in the last half"
    return lambda values, *_: text.format(late_mean(values)) if late_mean(values) >= limit else ""


def spikes(values: Values, *_: Any) -> str:
    """Healthy trl runs have up to five in 213 steps."""
    middle = median(values)
    spikes = [value for value in values if value > 10 * middle > 0]
    if len(spikes) < max(2, 0.02 * len(values)):
        return ""
    times = f"the largest {max(spikes) / middle:.0f} times the median {middle:.2g}"
    return f"{len(spikes)} gradient spikes in {len(values)} steps, {times}"


def cut(_: Values, steps: Steps, conditions: Conditions) -> str:
    """Both engines' healthy recorded runs cut below 0.01."""
    evaluation, shares = conditions.run.evaluation, dict[str, float]()
    if training := curve(steps, "truncated_share"):
        limit = min(conditions.values.get(MAX_TOKENS) or math.inf, conditions.rules.max_completion_tokens)
        shares[f"of the training completions at {limit} tokens in the last half"] = late_mean(training)
    if evaluation is not None:
        shares["at evaluation"] = evaluation.truncated_share
    is_high = max(shares.values(), default=0.0) >= 0.05
    return "cut: " + ", ".join(f"{share:.0%} {where}" for where, share in shares.items()) if is_high else ""


def groups(limit: float, right: Values, steps: Steps, _: Conditions) -> str:
    """Groups all right or all wrong have no gradient (DAPO, arXiv 2503.14476, section 3.2). The arithmetic task learns
    well at 0.78 to 0.87 in groups of 4; at 0.95 one group in twenty teaches."""
    wrong = curve(steps, "all_wrong_share")
    if not wrong or (share := late_mean(right) + late_mean(wrong)) < limit:
        return ""
    parts = f"{late_mean(right):.0%} all right, {late_mean(wrong):.0%} all wrong"
    return f"{share:.0%} of the groups teach nothing in the last half ({parts})"


def unused(_: Values, steps: Steps, conditions: Conditions) -> str:
    used, whole = steps[-1].time, conditions.rules.budget_seconds
    if conditions.run.training.outcome is not Outcome.FINISHED or used is None or used >= 0.8 * whole:
        return ""
    end = f"max_steps = {conditions.values.get('max_steps')} ended training after {used:.0f} s"
    return f"{end}: {whole - used:.0f} s of the budget unused"


LR, MAX_NORM = "trainer.optim.lr", "trainer.optim.max_norm"
BATCH, GROUP = "orchestrator.batch_size", "orchestrator.group_size"
TEMPERATURE = "orchestrator.train.sampling.temperature"
MAX_TOKENS = "orchestrator.train.sampling.max_completion_tokens"
SAMPLER = "orchestrator.train.source.curriculum.sampler.type"
KL_TAU, AGE = "trainer.loss.kl_tau", "orchestrator.max_off_policy_steps"
MASKS = ("trainer.loss.dppo_mask_low", "trainer.loss.dppo_mask_high", "trainer.loss.ipo_threshold")
INFLIGHT = "orchestrator.concurrency.max_inflight"
SPEED = ("trainer.model.optim_cpu_offload", "trainer.model.ac", "trainer.model.compile", "seq_len")
SERVING = ("inference.vllm.max_num_seqs", "inference.vllm.gpu_memory_utilization", INFLIGHT)


class Check(NamedTuple):
    """`test` returns the text of a finding, or "". Of the rows of one name only the first finding counts."""

    name: str
    field: str  # of Step; "step" for what reads several
    test: Test
    keys: tuple[str, ...]
    severity: int


CHECKS = (
    Check("groups", "step", no_gradient, (GROUP, TEMPERATURE, LR), BROKEN),
    Check("reward", "reward_mean", partial(fell, "collapsed", 0.5), (LR, MAX_NORM, KL_TAU, AGE), BROKEN),
    Check("reward", "reward_mean", partial(fell, "fell", 0.0), (LR, MAX_NORM, KL_TAU, AGE), COSTLY),
    Check("reward", "reward_mean", rising, (LR, BATCH, GROUP), HINT),
    Check("reward", "reward_mean", flat, (LR, GROUP, BATCH, TEMPERATURE), BROKEN),
    Check("entropy", "entropy", entropy, (LR, TEMPERATURE, KL_TAU, MASKS[1]), COSTLY),
    # Recorded: KL 1e-5 to 2e-4 a token when healthy, 0.003 to 0.04, in bursts, at ten times that learning rate.
    Check("KL", "kl", above(0.003, "KL between trainer and server {:.1e}"), (LR, AGE, KL_TAU), COSTLY),
    Check("masked", "masked_share", above(0.05, "{:.0%} of the tokens are masked out of the loss"), MASKS, COSTLY),
    # prime-rl aims at an age of 1 and drops rollouts beyond 8 by default; recorded: 1.1.
    Check("age", "off_policy_mean", above(4, "rollouts are {:.1f} policy versions old"), (AGE, INFLIGHT), COSTLY),
    Check("failed", "error_share", above(0.02, "{:.0%} of the rollouts failed"), (INFLIGHT, MAX_TOKENS), COSTLY),
    Check("spikes", "grad_norm", spikes, (MAX_NORM, LR), HINT),
    Check("cut", "step", cut, (MAX_TOKENS, "orchestrator.algo.length_penalty", "seq_len"), COSTLY),
    Check("groups", "all_right_share", partial(groups, 0.95), (GROUP, TEMPERATURE, SAMPLER), COSTLY),
    Check("groups", "all_right_share", partial(groups, 0.8), (GROUP, TEMPERATURE, SAMPLER), HINT),
    Check("budget", "step", unused, ("max_steps",), COSTLY),
)


def note(steps: Steps, is_healthy: bool) -> Finding:
    """Return the last line: number, length and parts of the steps, and the keys of the longest part."""
    gaps, train = np.diff(curve(steps, "time")), curve(steps, "train_seconds")
    pace = f"{len(steps)} steps" + (f" of {np.median(gaps):.2g} s" if np.any(gaps) else "")
    keys = tuple[str, ...]()
    generate, wait = curve(steps, "generate_seconds"), curve(steps, "wait_for_rollouts_seconds")
    if train and (other := generate or wait):
        pace += f" ({'generation' if generate else 'waiting for rollouts'} {median(other):.2g} s, "
        pace += f"training {median(train):.2g} s)"
        keys = (BATCH, *SPEED) if median(train) >= median(other) else (BATCH, MAX_TOKENS) if generate else SERVING
    if not is_healthy:
        return Finding(f"time: {pace}", keys, NOTE)
    labels = {"reward": "reward_mean", "entropy": "entropy", "length": "completion_tokens_mean"}
    curves = {label: levels(curve(steps, field), 2) for label, field in labels.items()}
    ends = [f"{label} {parts[0]:.3g} -> {parts[-1]:.3g}" for label, parts in curves.items() if parts]
    return Finding(f"healthy: {', '.join([*ends, pace])}", (), NOTE)
