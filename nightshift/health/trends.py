"""A noisy curve in a few robust numbers: its slope with an error, its noise, its levels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nightshift.campaign.standing import Z95

Curve = NDArray[np.float64]

MAX_POINTS = 200  # longer curves are averaged down to so many: the pairwise slopes grow with the square
_MAD = 1.4826  # standard deviation of a normal distribution, in median absolute deviations
_EFFICIENCY = 0.955  # of Theil's slope against least squares, for normal noise: 3 / pi
_MAX_AUTOCORRELATION = 0.9
_WINSOR = 3.0
_FEW_POINTS = 4.0


@dataclass(frozen=True, slots=True)
class Trend:
    """The change of a curve from its first to its last point, by its median slope, and the standard error."""

    change: float
    stderr: float

    def __str__(self) -> str:
        """`+0.133 ± 0.037`, the second half of its 95 % interval."""
        return f"{self.change:+.3f} ± {Z95 * self.stderr:.3f}"

    @property
    def z(self) -> float:
        """Change in standard errors; 0 where there is no change."""
        if self.change == 0:
            return 0.0
        return self.change / self.stderr if self.stderr > 0 else float("inf") * self.change


def trend(values: Sequence[float]) -> Trend:
    """Theil's slope (the median over all pairs of points) times the length of the curve. Needs 2 points or more.

    The error takes the scale of the residuals (outliers pulled in to three times their median absolute deviation)
    and the slope's variance as for least squares over Theil's efficiency. It is widened for few points, so that three
    standard errors mean what they do with many (Student's t: 4.9 of them for 8 points), and by sqrt((1 + r) / (1 - r))
    for residuals whose correlation from point to point is r: a curve that wanders is known less well than one that
    only jitters.
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
    scale = float(np.sqrt((residuals**2).sum() / max(len(y) - 2, 1))) * (1 + _FEW_POINTS / len(y))
    r = _autocorrelation(residuals)
    spread = float(np.sqrt(((x - x.mean()) ** 2).sum() * _EFFICIENCY))
    span = len(y) - 1
    return Trend(slope * span, scale / spread * span * float(np.sqrt((1 + r) / (1 - r))))


def noise(values: Sequence[float]) -> float:
    """Standard deviation from one point to the next, robust, blind to a trend: from first differences."""
    differences = np.diff(np.asarray(values, float))
    return _MAD * float(np.median(np.abs(differences - np.median(differences)))) / float(np.sqrt(2))


def levels(values: Sequence[float], num_parts: int) -> list[float]:
    """Medians of the equal stretches of a curve, in order."""
    return [float(np.median(part)) for part in np.array_split(np.asarray(values, float), num_parts) if len(part)]


def last_half(values: Sequence[float]) -> Sequence[float]:
    """The later half of a curve."""
    return values[len(values) // 2 :]


def ends(values: Sequence[float]) -> tuple[float, float]:
    """Levels of the first and the last tenth (two points at least)."""
    parts = levels(values, min(10, len(values) // 2))
    return parts[0], parts[-1]


def _autocorrelation(residuals: Curve) -> float:
    total = float((residuals**2).sum())
    if total == 0 or len(residuals) < 3:
        return 0.0
    return min(max(float((residuals[1:] * residuals[:-1]).sum()) / total, 0.0), _MAX_AUTOCORRELATION)
