"""What the rewards of a run foretell of its score long before its end: constants, a comparison, and its outcome."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Annotated

from msgspec import Meta


def window(curve: Sequence[float | None], share: float) -> float | None:
    """Mean of a curve over equal parts of the budget, in the second half of the time until `share` of it; None where
    most of that was not measured."""
    parts = curve[round(len(curve) * share / 2) : round(len(curve) * share)]
    found = [part for part in parts if part is not None]
    return fmean(found) if parts and len(found) > len(parts) / 2 else None


@dataclass(frozen=True, slots=True)
class Foretelling:
    """What the rewards of a run say of its score once `share` of its budget is used, beside its parent's then: of the
    final difference `growth` shows by that time, which read the other way round is wrong by a standard deviation of
    `sd`, the noise of both scores included. Fractions. Fitted on recorded runs: benchmarks/early_stop.py."""

    share: Annotated[float, Meta(gt=0, lt=1)]
    growth: Annotated[float, Meta(ge=1e-3, le=1e3)]
    sd: Annotated[float, Meta(ge=1e-9, le=1.0)]

    def forecast(self, difference: float) -> tuple[float, float]:
        """The final difference of the scores, -1..1, and the variance of its error, for one of the rewards."""
        return min(max(difference / self.growth, -1.0), 1.0), self.sd**2


@dataclass(frozen=True, slots=True)
class Forecast:
    """Of a run that was hopeless when `share` of its budget was used: its mean `reward` of then, its parent's, and what
    both foretell of its score less its parent's, with the variance of the error."""

    share: Annotated[float, Meta(gt=0, lt=1)]
    reward: float
    parent_reward: float
    delta: Annotated[float, Meta(ge=-1, le=1)]
    variance: Annotated[float, Meta(ge=0, le=1)]


@dataclass(frozen=True, slots=True)
class Rung:
    """One comparison of a run with its parent while it trains, a rung as in successive halving (Li et al. 2018,
    arXiv:1810.05934): hopeless with a mean reward below `least`. `factor`: how
    many times the difference has to be as large as between runs that differ in nothing else; `warmup_steps`: of the
    learning rate, where rewards do not compare yet."""

    foretelling: Foretelling
    parent_reward: float
    least: float
    factor: float = 1.0
    warmup_steps: int = 0

    def forecast(self, reward: float) -> Forecast:
        """What a mean reward foretells."""
        difference = (reward - self.parent_reward) / self.factor
        return Forecast(self.foretelling.share, reward, self.parent_reward, *self.foretelling.forecast(difference))
