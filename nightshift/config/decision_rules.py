"""The constants of the rule in campaign/decision.py: what is thought of ideas and of noise before any run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from msgspec import Meta

Scale = Annotated[float, Meta(ge=1e-9, le=1e6)]  # nothing that the rule could not divide by
Fraction = Annotated[float, Meta(ge=0, le=1)]  # a score
_Units = Annotated[float, Meta(ge=-1e6, le=1e6)]
_Share = Annotated[float, Meta(ge=0, le=1)]
_Some = Meta(min_length=1)


@dataclass(frozen=True, slots=True)
class DecisionRules:
    """As fractions of 1. Found by simulation for GSM8K at 1,319 examples (benchmarks/decision_rules.py).

    `prior_sd` is the scale of what ideas do, `kinds` what they do on that scale, as (mean, sd): helpful, neutral,
    harmful, bad, awful, wild, disastrous, bold. Nobody knows a campaign's ideas and noise in advance: `priors` are what
    the shares of those kinds may be, `noises` by what `seed_sd` may be wrong, each after its own weight. A keep is
    taken back for an earlier config that is expected to be better by `take_back`: at 0 twice as many are, for no more
    gain. `calibration` draws p_better towards a half, for luck on the examples that no run of the same ones can see.
    `shrinkage`: the best of many is lucky by selection, so of a believed gain on the baseline people are told its mean
    less the first in standard deviations, and the second of its standard deviation. `many`: beyond so many experiments,
    as several runs side by side make, for each e-fold of them so much more is left unsaid.
    `agreement`: the correlation of two configs' answers to one example, until pairs tell (benchmarks/agreement.py).
    """

    prior_sd: Scale = 0.0100
    kinds: Annotated[tuple[tuple[_Units, Scale], ...], _Some] = (
        (0.7, 0.6),
        (0.0, 0.15),
        (-1.5, 1.5),
        (-4.0, 2.5),
        (-12.0, 7.0),
        (0.0, 10.0),
        (-25.0, 15.0),
        (0.0, 4.0),
    )
    priors: Annotated[tuple[tuple[Scale, tuple[_Share, ...]], ...], _Some] = (
        (0.37, (0.27, 0.33, 0.36, 0.00, 0.005, 0.01, 0.025, 0.00)),
        (0.18, (0.45, 0.30, 0.21, 0.00, 0.005, 0.01, 0.025, 0.00)),
        (0.12, (0.08, 0.10, 0.15, 0.57, 0.05, 0.01, 0.04, 0.00)),
        (0.12, (0.20, 0.075, 0.075, 0.08, 0.42, 0.01, 0.09, 0.05)),
        (0.13, (0.20, 0.075, 0.075, 0.05, 0.03, 0.01, 0.51, 0.05)),
        (0.08, (0.22, 0.15, 0.13, 0.00, 0.02, 0.01, 0.02, 0.45)),
    )
    noises: Annotated[tuple[tuple[Scale, Scale], ...], _Some] = ((0.25, 0.6), (0.5, 1.0), (0.25, 1.6))
    seed_sd: Scale = 0.0125
    seed_df: Scale = 8.0
    take_back: float = 0.0010
    calibration: Scale = 0.8
    agreement: _Share = 0.60
    shrinkage: tuple[_Units, Scale] = (0.3, 0.95)
    many: tuple[Scale, _Units] = (47.0, 0.25)

    def __post_init__(self) -> None:
        """ValueError for shares that are not one a kind: records lie where agents can write."""
        if counts := {len(shares) for _, shares in self.priors} - {len(self.kinds)}:
            raise ValueError(f"priors have {min(counts)} shares of {len(self.kinds)} kinds")

    @property
    def of_a_repeat(self) -> DecisionRules:
        """The same for one more run of a config: no idea, no effect."""
        return replace(self, kinds=((0.0, 0.0),), priors=tuple((weight, (1.0,)) for weight, _ in self.priors))
