"""The health digest: at most five lines on what limits a run, with the keys to change."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean, median
from typing import Any, NamedTuple

import numpy as np

from nightshift.campaign.metrics import NO_GRADIENT_STEPS, Step, num_without_gradient
from nightshift.campaign.records import Z95, Outcome, Result
from nightshift.config.allowlist import LOSS
from nightshift.config.rules import Rules

Steps = Sequence[Step]
Values = Sequence[float]
# Severities; the highest is shown first. HINT: useful for the next hypothesis. COSTLY: a large part of the budget or of
# the signal is lost. BROKEN: the run learned nothing, or lost what it had learned.
NOTE, HINT, COSTLY, BROKEN = range(4)
SURE = 3.0  # standard errors of a significant change: three, because a digest makes about twelve such tests
TRENDS = ("reward_mean", "entropy")  # fields of Step that need 8 points

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


class Finding(NamedTuple):
    """One line of the digest, and the keys of train.toml to change."""

    text: str
    keys: tuple[str, ...]
    severity: int

    def __str__(self) -> str:
        return f"{self.text}; keys to try: {', '.join(self.keys)}" if self.keys else self.text


@dataclass(frozen=True)
class Conditions:
    """Everything about a run except for the curves."""

    run: Result
    rules: Rules
    values: Mapping[str, Any]  # of train.toml, with defaults
    used_keys: Collection[str] | None = None  # keys that the engine uses; None: all
    remarks: Sequence[str] = ()  # lines on the scores
    steps_without: int | None = None  # of a run of the same config without the new change
    new_keys: tuple[str, ...] = ()  # of the new change


def digest(steps: Steps, conditions: Conditions) -> list[Finding]:
    """Return at most five findings, the worst first, with keys that the engine uses. The last line begins with
    `healthy:` if there are no other findings and the run did not crash."""
    if not steps:
        return []
    checks = (test(values, steps, conditions) for field, test in CHECKS if (values := curve(steps, field)))
    findings = [*filter(None, checks), *(Finding(text, (), COSTLY) for text in conditions.remarks)]
    findings.sort(key=lambda finding: -finding.severity)  # stable: in the order of CHECKS within a severity
    findings.append(pace(steps, is_healthy=not findings and conditions.run.training.outcome.is_success))
    used, keys = conditions.used_keys, conditions.values.keys()
    closed = {KL_TAU, *MASKS} - keys if LOSS in keys else set()  # parameters of other losses
    return [
        f._replace(keys=tuple(key for key in f.keys if key not in closed and (used is None or key in used))[:3])
        for f in findings[:5]
    ]


def curve(steps: Steps, name: str) -> list[float]:
    """Return the measured values of a field. Fields in TRENDS need 8 values; else the result is empty."""
    measured = (getattr(step, name) for step in steps)
    # A diverging run may write any finite number. The limits keep sums and squares finite.
    values = [min(max(value, -1e30), 1e30) for value in measured if value is not None]
    return values if len(values) >= 8 or name not in TRENDS else []


def trend(values: Values) -> tuple[float, float, str]:
    """Return the change of a curve (4 points or more) from its start to its end, the standard error, and both as text:
    least squares over the medians of at most ten parts. The error is larger for few parts."""
    y = np.array(levels(values, 1))
    n, x = len(y), np.arange(len(y))
    slope, start = np.polyfit(x, y, 1)
    residuals = y - slope * x - start
    change, variance = n * float(slope), 12 * float(residuals @ residuals) / (n - 2) / (n**3 - n)
    stderr = n * math.sqrt(variance) * (1 + 4 / n)
    return change, stderr, f"{change:+.3f} ± {Z95 * stderr:.3f}"


def levels(values: Values, num_points: int) -> list[float]:
    """Return the medians of at most ten equal parts of a curve, in order. Each part has at least `num_points`."""
    num_parts = min(10, len(values) // num_points)
    return [float(np.median(part)) for part in np.array_split(values, num_parts)] if num_parts else []


def late(values: Values) -> Values:
    return values[len(values) // 2 :]


def no_gradient(_: Values, steps: Steps, conditions: Conditions) -> Finding | None:
    """Find the step after which there was no gradient, and why. An empty batch of prime-rl is not a step."""
    rows = steps[len(steps) - num_without_gradient(steps) :]
    if len(rows) >= min(NO_GRADIENT_STEPS, len(steps)):
        shares = {"all_right_share": "every answer is right", "all_wrong_share": "every answer is wrong"}
        shares["equal_share"] = "all rewards of each group are equal"
        causes = [cause for field, cause in shares.items() if fmean(curve(rows, field) or [0.0]) >= 0.95]
        text = f"from step {rows[0].step} on: {[*causes, 'the gradient norm is 0'][0]}"
    elif conditions.run.training.outcome is Outcome.NO_GRADIENT:
        text = f"after step {steps[-1].step}: {NO_GRADIENT_STEPS} batches in a row had equal rewards in every group"
    else:
        return None
    return Finding(f"no gradient {text}", (GROUP, TEMPERATURE, LR), BROKEN)


def reward(values: Values, steps: Steps, _: Conditions) -> Finding | None:
    """Compare the end, whose weights are scored, with the best part. Find a reward that still rises, or is flat."""
    parts = levels(values, 4)
    best, last = max(parts), parts[-1]
    # Standard error of a part's median, from the median difference of two steps, for normal noise. The best of several
    # noisy parts is too high (winner's curse): one standard error more is required.
    error = 1.85 * float(np.median(np.abs(np.diff(values)))) * math.sqrt(len(parts) / len(values))
    if best - last > max(0.05, (SURE + 1) * error):
        word, severity = ("collapsed", BROKEN) if best - last > 0.5 * best else ("fell", COSTLY)
        step = steps[int((parts.index(best) + 0.5) * len(values) / len(parts))].step
        text = f"from {best:.2f} (about step {step}) to {last:.2f} at the end, error {error:.2f}"
        return Finding(f"reward {word} {text}", (LR, MAX_NORM, KL_TAU, AGE), severity)
    change, stderr, text = trend(late(values))
    if change > max(SURE * stderr, 0.02):  # a smaller gain does not justify a longer run
        text = f"{text} over the last half, {last:.2f} at the end: more or larger steps may help"
        return Finding(f"reward still rising: {text}", (LR, BATCH, GROUP), HINT)
    change, stderr, text = trend(values)  # on the trl engine (256 rollouts) 40 steps show a change of about 0.03
    if change >= min(2 * stderr, 0.06 - stderr) or last >= 0.95:
        return None
    text = f"reward flat: {text} over {len(values)} steps, at {median(values):.2f}"
    return Finding(text, (LR, GROUP, BATCH, TEMPERATURE), BROKEN)


def entropy(values: Values, steps: Steps, _: Conditions) -> Finding | None:
    """Find an entropy that doubled or collapsed. Healthy recorded runs keep 0.6 to 0.9 of it (arXiv 2505.22617)."""
    parts, (change, stderr, _text) = levels(values, 2), trend(values)
    first, last = parts[0], parts[-1]
    text = f"from {first:.3g} to {last:.3g}"
    if last > 2 * first > 0 and change > SURE * stderr:  # never in a healthy run
        text = f"entropy rose {text}: the answers become random"
    elif last < 0.1 * first and (levels(curve(steps, "reward_mean"), 2) or [0.0])[-1] < 0.95:
        text = f"entropy collapsed {text}: almost no exploration is left"
    else:
        return None
    return Finding(text, (LR, TEMPERATURE, KL_TAU, MASKS[1]), COSTLY)


def above(limit: float, text: str, keys: tuple[str, ...], values: Values, *_: Any) -> Finding | None:
    """Find a curve whose mean over the last half is at least `limit`."""
    mean = fmean(late(values))
    return Finding(f"{text.format(mean)} in the last half", keys, COSTLY) if mean >= limit else None


def cut(_: Values, steps: Steps, conditions: Conditions) -> Finding | None:
    """Find answers that reach the token limit. In healthy recorded runs of both engines they are below 0.01."""
    evaluation, texts, worst = conditions.run.evaluation, list[str](), 0.0
    if training := curve(steps, "truncated_share"):
        limit = min(conditions.values.get(MAX_TOKENS) or math.inf, conditions.rules.max_completion_tokens)
        worst = fmean(late(training))
        texts.append(f"{worst:.0%} of the training completions at {limit} tokens in the last half")
    if evaluation is not None and (share := evaluation.cut_wrong_share) is not None:
        worst = max(worst, share)
        texts.append(f"{share:.0%} of the answers at evaluation, which scored 0")
    keys = (MAX_TOKENS, "orchestrator.algo.length_penalty", "seq_len")
    return Finding(f"truncated: {', '.join(texts)}", keys, COSTLY) if worst >= 0.05 else None


def groups(values: Values, steps: Steps, conditions: Conditions) -> Finding | None:
    """Find many groups that are all right or all wrong: they have no gradient (DAPO, arXiv 2503.14476, section 3.2).
    The arithmetic task learns well at 0.78 to 0.87 in groups of 4; at 0.95 one group in twenty has a gradient."""
    wrong_shares = curve(steps, "all_wrong_share")
    if not wrong_shares or no_gradient(values, steps, conditions):
        return None
    right, wrong = fmean(late(values)), fmean(late(wrong_shares))
    severity, parts = COSTLY if right + wrong >= 0.95 else HINT, f"({right:.0%} all right, {wrong:.0%} all wrong)"
    text = f"{right + wrong:.0%} of the groups have no gradient in the last half {parts}"
    return Finding(text, (GROUP, TEMPERATURE, SAMPLER), severity) if right + wrong >= 0.8 else None


def unused(_: Values, steps: Steps, conditions: Conditions) -> Finding | None:
    """Find a run that `max_steps` ended long before the budget."""
    used, whole = steps[-1].time, conditions.rules.budget_seconds
    if conditions.run.training.outcome is not Outcome.FINISHED or used is None or used >= 0.8 * whole:
        return None
    return Finding(f"max_steps ended the training after {used:.0f} s of {whole:.0f} s", ("max_steps",), COSTLY)


def slow(_: Values, __: Steps, conditions: Conditions) -> Finding | None:
    """Find a budget that was used up after fewer than 70 % of the steps of a run without the new change."""
    before, run = conditions.steps_without or 0, conditions.run.training
    text = f"{run.num_steps} steps in the budget; without the new change, a run made {before}"
    is_slow = run.outcome is Outcome.BUDGET and run.num_steps < 0.7 * before
    return Finding(text, conditions.new_keys, HINT) if is_slow else None


# A field of Step and the test of its curve. "step" stands for tests that read several fields.
CHECKS: tuple[tuple[str, Callable[[Values, Steps, Conditions], Finding | None]], ...] = (
    ("step", no_gradient),
    ("reward_mean", reward),
    ("entropy", entropy),
    # Recorded KL per token: 1e-5 to 2e-4 in healthy runs; 0.003 to 0.04, in bursts, at ten times their learning rate.
    ("kl", partial(above, 0.003, "KL between trainer and server {:.1e}", (LR, AGE, KL_TAU))),
    ("masked_share", partial(above, 0.05, "{:.0%} of the tokens are masked out of the loss", MASKS)),
    # prime-rl aims at an age of 1 and drops rollouts beyond 8 by default; recorded: 1.1.
    ("off_policy_mean", partial(above, 4, "rollouts are {:.1f} policy versions old", (AGE, INFLIGHT))),
    ("error_share", partial(above, 0.02, "{:.0%} of the rollouts failed, see inference.log", (INFLIGHT, MAX_TOKENS))),
    ("step", cut),
    ("all_right_share", groups),
    ("step", unused),
    ("step", slow),
)


def pace(steps: Steps, is_healthy: bool) -> Finding:
    """Return the last line: number, duration and parts of the steps, and the keys of the longest part."""
    later = steps[1:] or steps  # the first step includes compilation
    gaps, train = np.diff(curve(steps, "time")), curve(later, "train_seconds")
    text, keys = f"{len(steps)} steps", tuple[str, ...]()
    if np.any(gaps):
        text += f" of {np.median(gaps):.2g} s"
    generate, wait = curve(later, "generate_seconds"), curve(later, "wait_for_rollouts_seconds")
    if train and (other := generate or wait):
        part = "generation" if generate else "waiting for rollouts"
        text += f" ({part} {median(other):.2g} s, training {median(train):.2g} s)"
        keys = (BATCH, *SPEED) if median(train) >= median(other) else (BATCH, MAX_TOKENS) if generate else SERVING
    return Finding(f"healthy: {text}", (), NOTE) if is_healthy else Finding(f"time: {text}", keys, NOTE)
