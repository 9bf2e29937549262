"""Student's t distribution, for real degrees of freedom. scipy would be a dependency of 100 MB for two numbers."""

import math
from functools import cache

import numpy as np
from numpy.typing import NDArray

SEED_DF = 8.0  # degrees of freedom that a `seed_sd` is worth which was measured on other runs


def t_quantile(probability: float, df: float) -> float:
    """Quantile of Student's t for `probability` in 0.5..1 and real `df` (1 or more), to about 1e-9.

    With t = sqrt(df) tan(a) the density is that of cos(a)^(df - 1), smooth on a finite range: Gauss-Legendre
    integration and bisection.
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
