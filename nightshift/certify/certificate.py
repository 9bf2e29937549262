"""The certificate: incumbent minus baseline on sealed examples, with an interval for seeds and examples.

Both configs are trained afresh, m0 and m1 times, every run with a seed of its own. Runs are crossed
with the same n examples: score[c, r, i] = mean[c] + example[c, i] + seed[c, r] + rest[c, r, i]. Then

    difference = mean of the incumbent's runs - mean of the baseline's
    variance   = V / n + k * max(s2, 0),  k = 1 / m0 + 1 / m1

V is the sample variance over examples of the paired difference (each config's mean over its runs): what
another draw of examples would change, and the runs' noise an example. s2 is the variance that a seed
adds to all examples of a run: R - E / n, with R the within-config variance of run scores and E the mean
square of what run and example leave unexplained (two-way analysis of variance). R and E are pooled over
both configs: they are trained alike, and three runs alone say little about a spread. The interval takes
the t quantile at Satterthwaite's (1946) degrees of freedom, variance^2 / ((k R)^2 / df + (V / n)^2 / (n - 1));
those of V alone where s2 is not above 0. The uncertainty of E, with df (n - 1) degrees, is left out.

With fewer than MIN_SEED_DF degrees of freedom for R (df = m0 + m1 - 2), or where all runs of a config scored alike,
s2 is the square of the rules' `seed_sd` with its `seed_df` degrees of freedom, and `note` says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from nightshift.decision_rules import DecisionRules
from nightshift.files import read_json

CERTIFICATE_NAME = "certificate.json"
LEVEL = 0.95
MIN_SEED_DF = 2  # with one, the t quantile is 12.7: an interval that says nothing

Scores = Sequence[float] | NDArray[np.float64]  # one an example, in the order of the set


@dataclass(frozen=True, slots=True)
class Estimate:
    """The difference in score, 0..1, and how sure it is. `note` is "" where everything was measured."""

    difference: float
    stderr: float
    df: float
    interval: tuple[float, float]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Difference:
    """Of one environment of several, as fractions 0..1; the interval is that of this comparison alone."""

    environment: str
    baseline_score: float
    incumbent_score: float
    difference: float
    interval: tuple[float, float]

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.difference:+.6f} (interval_95 {low:+.6f} {high:+.6f}, uncorrected for several comparisons)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Incumbent minus baseline, by fresh runs of both. Scores are fractions 0..1.

    `num_seeds` counts the runs that were evaluated, by config; `strict_scores` are those of baseline and incumbent,
    None where a run has none. `environments`: where there are several, of whose scores the others are weighted means.
    """

    created: str  # ISO 8601, UTC
    branch: str
    rules_hash: str
    baseline_score: float
    incumbent_score: float
    difference: float
    interval: tuple[float, float]
    num_seeds: dict[str, int]  # {"baseline": m0, "incumbent": m1}
    num_examples: int
    estimator: str
    notes: tuple[str, ...] = ()
    strict_scores: tuple[float, float] | None = None
    environments: tuple[Difference, ...] = ()
    stderr: float | None = None
    df: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate(Comparison):
    """What `runs/certificate.json` says. `sealed_looks` counts all looks up to this one."""

    sealed_looks: int
    chain: str = ""  # the head of the chain when its runs were made (campaign/chain.py)
    version: Literal[1] = 1


def estimate(baseline: Sequence[Scores], incumbent: Sequence[Scores], rules: DecisionRules) -> Estimate:
    """Paired difference and its interval; see the module's docstring. Each side needs a run, all the same examples."""
    sides = [np.asarray(runs, dtype=np.float64) for runs in (baseline, incumbent)]
    n = sides[0].shape[1]
    k = sum(1 / len(side) for side in sides)
    paired = sides[1].mean(axis=0) - sides[0].mean(axis=0)
    example_variance = float(paired.var(ddof=1)) / n
    means = [side.mean(axis=1) for side in sides]
    df = float(sum(len(side) - 1 for side in sides))
    squares = sum(float(((mean - mean.mean()) ** 2).sum()) for mean in means)
    if df >= MIN_SEED_DF and squares > 0:
        rest = [s - m[:, None] - s.mean(axis=0) + m.mean() for s, m in zip(sides, means, strict=True)]
        run_variance, rest_variance = squares / df, sum(float((r**2).sum()) for r in rest) / (df * (n - 1)) / n
        note = ""
    else:
        why = "too few runs to measure the spread of seeds" if df < MIN_SEED_DF else "all runs of a config scored alike"
        note = f"{why}: its prior was taken, sd {100 * rules.seed_sd:g} pp"
        run_variance, rest_variance, df = rules.seed_sd**2, 0.0, rules.seed_df
    variance, effective_df = example_variance, n - 1.0
    if run_variance > rest_variance:
        variance += k * (run_variance - rest_variance)
        effective_df = variance**2 / ((k * run_variance) ** 2 / df + example_variance**2 / (n - 1))
    stderr, difference = math.sqrt(variance), float(paired.mean())
    half = t_quantile((1 + LEVEL) / 2, effective_df) * stderr
    return Estimate(difference, stderr, effective_df, (difference - half, difference + half), note)


def describe(result: Estimate) -> str:
    """The estimator in one sentence, as the certificate carries it."""
    text = (
        f"difference of mean scores over runs and examples; {LEVEL:.0%} interval from the variance between seeds "
        f"(pooled over both configs) and of the paired difference between examples; "
        f"t with {result.df:.1f} degrees of freedom"
    )
    return f"{text}; {result.note}" if result.note else text


def verdict(comparison: Comparison) -> str:
    """In words, by the interval."""
    low, high = comparison.interval
    return "better" if low > 0 else "worse" if high < 0 else "not told apart"


def summary(certificate: Certificate) -> str:
    """The block that `nightshift certify` prints: `key: value` lines, scores as fractions."""
    measured = lines(certificate, verdict(certificate))
    looks = (("sealed_looks", str(certificate.sealed_looks)), ("chain", certificate.chain))
    return block((*measured, *looks, *(("note", note) for note in certificate.notes)))


def lines(comparison: Comparison, verdict: str) -> list[tuple[str, str]]:
    """What every comparison says of itself."""
    low, high = comparison.interval
    return [
        ("difference", f"{comparison.difference:+.6f}"),
        ("interval_95", f"{low:+.6f} {high:+.6f}"),
        ("verdict", verdict),
        ("baseline_score", f"{comparison.baseline_score:.6f}"),
        ("incumbent_score", f"{comparison.incumbent_score:.6f}"),
        ("strict_scores", " ".join(f"{value:.6f}" for value in comparison.strict_scores or ())),
        *((f"{d.environment}_difference", str(d)) for d in comparison.environments),
        ("num_seeds", " ".join(f"{side} {count}" for side, count in comparison.num_seeds.items())),
        ("num_examples", str(comparison.num_examples)),
        ("estimator", comparison.estimator),
    ]


def block(lines: Iterable[tuple[str, str]]) -> str:
    """As run.py prints it."""
    return "---\n" + "\n".join(f"{key + ':':18}{value}" for key, value in lines)


def t_quantile(probability: float, df: float) -> float:
    """Quantile of Student's t for `probability` in 0.5..1 and real `df` (1 or more), to about 1e-9.

    With t = sqrt(df) tan(a) the density is that of cos(a)^(df - 1), smooth on a finite range: Gauss-Legendre
    integration and bisection. scipy would be a dependency of 100 MB for this one number.
    """
    low, high = 0.0, math.pi / 2
    for _ in range(52):  # of the bits of a float
        angle = (low + high) / 2
        low, high = (angle, high) if _area(angle, df) < probability - 0.5 else (low, angle)
    return math.sqrt(_bounded(df)) * math.tan(low)


def t_probability(t: float, df: float) -> float:
    """Of a value as far from 0 as `t` or farther, under Student's t for real `df` (1 or more)."""
    return max(1 - 2 * _area(math.atan(abs(t) / math.sqrt(_bounded(df))), df), 0.0)


def _area(angle: float, df: float) -> float:
    """Of the density from 0 to t = sqrt(df) tan(angle)."""
    nodes, weights = _legendre()
    df = _bounded(df)
    total = math.sqrt(math.pi) * math.exp(math.lgamma(df / 2) - math.lgamma((df + 1) / 2))
    return angle / 2 * float(weights @ np.cos(angle / 2 * (nodes + 1)) ** (df - 1)) / total


def _bounded(df: float) -> float:
    return min(max(df, 1.0), 1e6)


@cache
def _legendre() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    return np.polynomial.legendre.leggauss(64)


def read(runs_dir: Path) -> Certificate | None:
    """The certificate of this checkout; None if there is none. UsageError when its text is damaged."""
    return read_json(runs_dir / CERTIFICATE_NAME, Certificate, "Move it away, then certify again.")
