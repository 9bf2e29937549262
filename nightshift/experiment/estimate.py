"""The difference of two configs, from fresh runs of both on the same examples, with an interval.

Each config was trained m0 and m1 times, every run with a seed of its own. Runs are crossed with the same n examples:
score[c, r, i] = mean[c] + example[c, i] + seed[c, r] + rest[c, r, i]. Then

    difference = mean of the incumbent's runs - mean of the baseline's
    variance   = V / n + k * (S - E / n),  S = max(R, E / n),  k = 1 / m0 + 1 / m1

V is the sample variance over examples of the paired difference (each config's mean over its runs). R is the
within-config variance of run scores, E the mean square of what run and example leave unexplained (two-way analysis of
variance); both are pooled over the configs. The interval takes the t quantile at Satterthwaite's (1946) degrees of
freedom, U^2 / ((2 k S)^2 / df + (V / n)^2 / (n - 1)), df = m0 + m1 - 2, U = V / n + k (2 S - E / n). Of few seeds S is
often too small; with 2 S in its place the interval holds as often as it says (benchmarks/certificates.py). `note` says
if R is `seed_sd` squared instead.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from nightshift.campaign.posterior import SEED_DF, t_probability, t_quantile
from nightshift.campaign.records import Estimate
from nightshift.config.rules import RuleConstants

LEVEL = 0.05  # of all tests of one campaign together: the chance that one says better or worse of equal configs
NO_DIFFERENCE = "no significant difference"  # the verdict that is neither better nor worse
MIN_SEED_DF = 2  # with one, the t quantile is 12.7: an interval that says nothing

Scores = Sequence[float] | NDArray[np.float64]  # one value an example, in the order of the split


def estimate(baseline: Sequence[Scores], incumbent: Sequence[Scores], rules: RuleConstants) -> Estimate:
    """Estimate incumbent minus baseline (formulae above). Each side needs a run, all on the same examples."""
    sides = [np.asarray(runs, dtype=np.float64) for runs in (baseline, incumbent)]
    n = sides[0].shape[1]
    k = sum(1 / len(side) for side in sides)
    paired = sides[1].mean(axis=0) - sides[0].mean(axis=0)
    example_variance, note = float(paired.var(ddof=1)) / n, ""
    means, df = [side.mean(axis=1) for side in sides], float(sum(len(side) - 1 for side in sides))
    squares = sum(float(((mean - mean.mean()) ** 2).sum()) for mean in means)
    if df >= MIN_SEED_DF and squares > 0:
        rest = [s - m[:, None] - s.mean(axis=0) + m.mean() for s, m in zip(sides, means, strict=True)]
        rest_variance = sum(float((r**2).sum()) for r in rest) / (df * (n - 1)) / n
        run_variance = max(squares / df, rest_variance)
    else:
        why = "too few runs to measure the spread of seeds" if df < MIN_SEED_DF else "all runs of a config scored alike"
        note = f"{why}: its prior was taken, sd {100 * rules.seed_sd:g} pp"
        run_variance, rest_variance, df = rules.seed_sd**2, 0.0, SEED_DF
    cautious = example_variance + k * (2 * run_variance - rest_variance)
    df = cautious**2 / ((2 * k * run_variance) ** 2 / df + example_variance**2 / (n - 1))
    stderr, difference = math.sqrt(cautious - k * run_variance), float(paired.mean())
    half = t_quantile(0.975, df) * stderr
    return Estimate(difference, stderr, df, (difference - half, difference + half), note)


def p_value(result: Estimate) -> float:
    """Return the probability of a difference as far from 0, or farther, between equal configs."""
    difference, stderr = result.difference, result.stderr
    return t_probability(difference / stderr, result.df) if stderr else float(difference == 0)


def level_of_access(number: int | None) -> float:
    """Return the level of a campaign's k-th access to the test split, 0.05 / (k (k + 1)): the sum of all is 0.05."""
    return LEVEL / (number * (number + 1)) if number else LEVEL


def verdicts(estimates: Sequence[Estimate], level: float) -> list[str]:
    """Return `better`, `worse` or NO_DIFFERENCE for each of several questions that were asked together. The procedure
    of Holm (Scandinavian Journal of Statistics 6, 1979) keeps the chance of one false answer at `level`."""
    answers, p_values = [NO_DIFFERENCE] * len(estimates), [*map(p_value, estimates)]
    for rank, index in enumerate(sorted(range(len(estimates)), key=p_values.__getitem__)):
        if p_values[index] > level / (len(estimates) - rank):
            break
        answers[index] = "better" if estimates[index].difference > 0 else "worse"
    return answers
