"""Student's t distribution, for real degrees of freedom. scipy would be a dependency of 100 MB for two numbers."""

import math

import numpy as np

SEED_DF = 8.0  # degrees of freedom that a `seed_sd` is worth which was measured on other runs
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(64)


def t_quantile(probability: float, df: float) -> float:
    """Return the quantile of Student's t for `probability` in 0.5..1 and real `df` (1 or more), to about 1e-9. With
    t = sqrt(df) tan(a) the density is that of cos(a)^(df - 1), smooth on a finite range."""
    low, high, df = 0.0, math.pi / 2, _bounded(df)
    for _ in range(52):  # of the bits of a float
        angle = (low + high) / 2
        low, high = (angle, high) if _area(angle, df) < probability - 0.5 else (low, angle)
    return math.sqrt(df) * math.tan(low)


def t_probability(t: float, df: float) -> float:
    """Of a value as far from 0 as `t` or farther, under Student's t for real `df` (1 or more)."""
    df = _bounded(df)
    return max(1 - 2 * _area(math.atan(abs(t) / math.sqrt(df)), df), 0.0)


def _area(angle: float, df: float) -> float:
    """Of the density from 0 to t = sqrt(df) tan(angle), by Gauss-Legendre integration."""
    total = math.sqrt(math.pi) * math.exp(math.lgamma(df / 2) - math.lgamma((df + 1) / 2))
    return angle / 2 * float(_WEIGHTS @ np.cos(angle / 2 * (_NODES + 1)) ** (df - 1)) / total


def _bounded(df: float) -> float:
    return min(max(df, 1.0), 1e6)
