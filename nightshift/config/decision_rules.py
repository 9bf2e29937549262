"""The constants of the decision rule: what is thought of changes and of noise before any run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from msgspec import Meta

Scale = Annotated[float, Meta(ge=1e-9, le=1e6)]  # nothing that the rule could not divide by
Fraction = Annotated[float, Meta(ge=0, le=1)]  # a score
_Units = Annotated[float, Meta(ge=-1e6, le=1e6)]
_Share = Annotated[float, Meta(ge=0, le=1)]
_Probability = Annotated[float, Meta(gt=0, lt=1)]
_Some = Meta(min_length=1)
GSM8K_PRIOR_SD = 0.008  # scale of effects for which the constants of RuleConstants were chosen


@dataclass(frozen=True, slots=True)
class RuleConstants:
    """The constants of the rule in campaign/posterior.py, as fractions of 1 at GSM8K's scale.

    Chosen by simulation, on other random numbers than the figures of benchmarks/decision_rules.py. A kind of
    change is (mean, sd, share): how its effects are distributed, and the share of all changes that are of this kind.
    """

    # Ordinary, bad, bold and disastrous changes.
    kinds: Annotated[tuple[tuple[_Units, Scale, _Share], ...], _Some] = (
        (0.003, 0.007, 0.50),
        (-0.03, 0.025, 0.35),
        (0.0, 0.05, 0.05),
        (-0.14, 0.10, 0.10),
    )
    # The shares above count as much as this many measured changes: a campaign of 46 changes learns its own shares.
    shares_worth: Scale = 5.0
    # What may go wrong in a run that has no new change: nothing in 97 % of the runs, else a training that collapsed.
    accidents: Annotated[tuple[tuple[_Units, Annotated[float, Meta(ge=0, le=1e6)], _Share], ...], _Some] = (
        (0.0, 0.0, 0.97),
        (-0.12, 0.10, 0.03),
    )
    # Standard deviation of the score over seeds, and guesses at its error: (factor, prior probability). The guesses
    # are weighted by how well they predict the runs, so that no second run of the baseline is needed.
    seed_sd: Scale = 0.0125
    noises: Annotated[tuple[tuple[Scale, Scale], ...], _Some] = (
        (0.5, 0.08),
        (0.7, 0.17),
        (1.0, 0.27),
        (1.4, 0.20),
        (2.0, 0.16),
        (2.8, 0.12),
    )
    # Part of the variance over examples, p (1 - p) / n, that differs between two runs on the same examples.
    examples_share: _Share = 0.38
    # Standard deviation of the drift in eight hours. The rule of 0.2.0 has no drift: its interval held in 35 % of the
    # nights that drifted by 3 pp.
    drift_sd: Scale = 0.02
    # P(it helps) at which a change comes in. At four slots 0.65 makes 0.3 pp less with 30 % fewer commits, 0.7 makes
    # 0.7 pp less with half of them.
    keep_at: _Probability = 0.6
    # P(it helps) below which a kept change goes out. The gap to `keep_at` prevents a commit for every new run.
    revert_below: _Probability = 0.5
    # P(it helps) above which a kept change is confirmed.
    confirmed_above: _Share = 0.95
    # Least expected improvement of a rider: less is not worth a less certain result of the new change.
    least_worth: Scale = 0.0005
    # A new value of the keys of a discarded change starts at this share of the last value's effect.
    related: _Share = 0.5
    # Standard deviations off the reported gain, and more for each e-fold of changes beyond the third: the best of many
    # noisy scores is too high.
    shrink: tuple[_Units, _Units, Scale] = (0.5, 0.25, 47.0)
    # Factor of the reported interval at one slot, and at several: effects do not add up exactly.
    widen: tuple[Scale, Scale] = (1.1, 1.3)

    def __post_init__(self) -> None:
        """ValueError for shares that sum to 0: records lie where agents can write."""
        for name in ("kinds", "accidents"):
            if not sum(share for _, _, share in getattr(self, name)) > 0:
                raise ValueError(f"the shares of {name} sum to 0")

    def scaled(self, prior_sd: float, seed_sd: float) -> RuleConstants:
        """Return the constants for another environment: `prior_sd` scales effects, `seed_sd` is the noise of seeds."""
        factor = prior_sd / GSM8K_PRIOR_SD
        kinds = tuple((factor * mean, factor * sd, share) for mean, sd, share in self.kinds)
        return replace(self, kinds=kinds, seed_sd=seed_sd, least_worth=factor * self.least_worth)
