"""Decide which changes of train.toml to keep, and what the next run measures (docs/decision-rule.md).

The baseline's score, the drift and the effect of each change have one joint Gaussian distribution. Every run updates
all of it, by the model

    score = baseline + drift * time + sum of the effects of the run's changes + noise

A change is a set of keys and values. If two changes set the same key, the later one wins. The rest of the earlier
change, m of its n keys, is a separate entry of the Gaussian: the sum of m of n independent parts of equal variance,
m / n * effect + N(0, m / n * (1 - m / n) * variance of an ordinary change). A change without a rest is not kept.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from statistics import NormalDist, fmean

import numpy as np
from numpy.typing import NDArray

from nightshift.campaign.records import Z95, Action, Change, Decision, Effect, Run, Settings, Stage, remaining
from nightshift.config.rules import RuleConstants

Array = NDArray[np.float64]
Factors = dict[int, float]  # a weighted sum of the Gaussian's entries: row -> factor
NIGHT_HOURS = 8.0  # the unit of time of the drift
_BASELINE, _DRIFT = 0, 1  # rows of the Gaussian
_NORMAL = NormalDist()
_RUNS_PER_FINAL_RUN = 5  # a night has final check runs if it has at least this many times as many runs in all
_TINY = 1e-14  # lower bound of a variance by which something is divided
SEED_DF = 8.0  # degrees of freedom of a `seed_sd` that was measured on other runs
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(64)


class Posterior:
    """The posterior of a campaign's changes. The first baseline run gives the score and its standard error over
    examples, sqrt(p (1 - p) / n). Set `stage` when a run starts: from the first final check run on no change is kept.
    Call `observe` when a run's score is known; a crash has no score."""

    def __init__(self, score: float, stderr: float, rules: RuleConstants) -> None:
        self.rules = rules
        self.stage = Stage.SEARCH
        self._changes: dict[Settings, Change] = {}  # every proposed change, as it was first proposed
        self._kept: dict[Settings, Settings] = {}  # the rest of each kept change, in the order in which they were kept
        self._setters: dict[str, Settings] = {}  # the kept change that sets a key
        self._fixed = set[Settings]()  # changes that the user decided, or that a guard forbids
        self._dropped = set[Settings]()  # configs with a run that was probably an accident
        self._final_scores: dict[Settings, tuple[float, ...]] = {}  # of the final check runs, by config
        self._rows: dict[Settings, int] = {}  # row of the Gaussian of each change, and of each rest of a change
        self._counts = rules.shares_worth * np.array([share for _, _, share in rules.kinds])
        factors, priors = np.array(rules.noises).T
        self._variances = (factors * rules.seed_sd) ** 2 + rules.examples_share * stderr**2
        self._expected_variance = rules.seed_sd**2 + rules.examples_share * stderr**2
        self._log_weights = np.log(priors)
        self._mean = np.array([score, 0.0])
        self._cov = np.diag([self.noise_variance, rules.drift_sd**2])

    @property
    def kept(self) -> tuple[Change, ...]:
        return tuple(self._changes[settings] for settings in self._kept)

    @property
    def noise_variance(self) -> float:
        """Variance of one run's noise: the mean over the factors f, weighted by how well each predicted the runs."""
        return float(np.average(self._variances, weights=np.exp(self._log_weights - self._log_weights.max())))

    def copy(self) -> Posterior:
        copied = copy.copy(self)
        vars(copied).update({n: v.copy() for n, v in vars(self).items() if isinstance(v, dict | set | np.ndarray)})
        return copied

    def known(self, change: Change) -> Change:
        """Return the change as it was first proposed. A change that was never proposed is returned as it is."""
        return self._changes.get(change.identity, change)

    def set_kept(self, kept: Sequence[Change]) -> None:
        """Set the incumbent's changes. This is needed if a decision could not be carried out."""
        self._set_kept([self._admitted(change) for change in kept])

    def effect(self, change: Change, changes: Iterable[Change] | None = None) -> Effect:
        """Return the effect of a change on the incumbent, or on the baseline with `changes`. KeyError if unknown."""
        kept = self._kept if changes is None else (change.identity for change in changes)
        return Effect(*self._moments(*self._added(change.identity, kept)))

    def predict(
        self, changes: Iterable[Change], time_hours: float = 0.0, without: Collection[str] = ()
    ) -> tuple[float, float]:
        """Return mean and sd of the true score of the baseline with `changes`, except for the keys in `without`."""
        return self._moments(*self._factors((change.identity for change in changes), 1.0, time_hours, without))

    def gain(self, num_slots: int = 1) -> tuple[float, float]:
        """Return the reported gain of the incumbent over the baseline, and half of its 95 % interval. This is the
        estimate, unless both configs have two final check runs and the estimate lies outside the interval of their
        difference (Student's t; the expected variance and the variance within both configs are pooled)."""
        estimate = self.estimated_gain(num_slots)
        sides = [self._final_scores.get(Settings().union(*kept), ()) for kept in (self._kept.values(), ())]
        if not self._kept or min(map(len, sides)) < 2:
            return estimate
        df = SEED_DF + sum(len(side) - 1 for side in sides)
        squares = sum((score - fmean(side)) ** 2 for side in sides for score in side)
        variance = (SEED_DF * self._expected_variance + squares) / df * sum(1 / len(side) for side in sides)
        difference, halfwidth = fmean(sides[0]) - fmean(sides[1]), t_quantile(0.975, df) * math.sqrt(variance)
        return (difference, halfwidth) if abs(estimate[0] - difference) > halfwidth else estimate

    def estimated_gain(self, num_slots: int = 1) -> tuple[float, float]:
        """Return the estimated gain of the incumbent over the baseline, and half of its 95 % interval. The best of many
        noisy scores is too high (winner's curse): the more changes, the lower the estimate."""
        mean, sd = self._moments(*self._factors(self._kept, 0.0))
        least, more, usual = self.rules.shrink
        shrink = least + more * max(math.log(max(len(self._changes), 1) / usual), 0.0)
        return max(mean - shrink * sd, min(mean, 0.0)), Z95 * self.rules.widen[0 if num_slots == 1 else 1] * sd

    def rider(
        self, new: Change, in_flight: Sequence[Run] = (), is_open: Callable[[str], bool] = lambda key: True
    ) -> Change | None:
        """Return the best discarded change to test again, by expected improvement. Runs in flight count as known."""
        noise = self.noise_variance + self.rules.kinds[0][1] ** 2  # variance of a run with a new change
        reductions: list[Array] = []  # the outer product of each with itself is subtracted from the covariance
        for run in in_flight:
            factors, _ = self._factors((change.identity for change in run.changes), 1.0)
            _, known, column = self._weighted(factors, reductions)
            reductions.append(column / math.sqrt(known + (self.noise_variance if run.new is None else noise)))
        _, known, column = self._weighted(self._factors(self._kept, 1.0)[0], reductions)
        variances = np.diagonal(self._cov) - sum((reduction**2 for reduction in reductions), 0.0)
        sds = np.abs(column + variances) / np.sqrt(known + 2 * column + variances + noise) + 1e-9
        keys_in_use = new.keys.keys() | self._setters.keys()
        best, most = None, self.rules.least_worth
        for settings, change in self._changes.items():
            if settings in self._fixed or any(key in keys_in_use or not is_open(key) for key, _ in settings):
                continue
            row = self._rows[settings]
            mean, sd = float(self._mean[row]), float(sds[row])
            worth = sd * _NORMAL.pdf(mean / sd) + mean * _NORMAL.cdf(mean / sd)
            if worth > most:
                best, most = change, worth
        return best

    def observe(self, run: Run, score: float, time_hours: float, *, decides: bool = True) -> tuple[Decision, ...]:
        """Update the Gaussian with the score of a run that began `time_hours` after the first baseline. Return the
        decisions in order. Pass `decides=False` if they are already recorded, because deciding takes most of the time.

        Each kind of the new change gives a Kalman update. The result is the Gaussian with mean and covariance of their
        mixture. All updates move along Px and u only, so one 2 x 2 matrix describes the change of the covariance. An
        accident of a run without a new change is treated as a new change that is forgotten after the update."""
        new = None if run.new is None else run.new.identity
        is_new = new is not None and new not in self._rows
        if run.new is not None and new not in self._changes:
            self._add(run.new)
        changes = [self._admitted(change) for change in run.changes]
        rests = remaining(changes)
        config = Settings().union(*(rest for _, rest in rests))
        if run.stage is not Stage.SEARCH:
            self._final_scores[config] = (*self._final_scores.get(config, ()), score)
        kinds = np.array(self.rules.kinds if is_new else self.rules.accidents)
        if not is_new and config in self._dropped:
            kinds = kinds[:1]
        mus, variances = kinds[:, 0], kinds[:, 1] ** 2
        shares = self._counts / self._counts.sum() if is_new else kinds[:, 2]
        for whole, rest in rests:
            if rest and rest not in self._rows:
                share = len(rest) / len(whole)
                self._add_row(rest, whole, share, share * (1 - share) * self.rules.kinds[0][1] ** 2)
        expected, known, column = self._weighted(self._factors(changes, 1.0, time_hours)[0])
        residuals = score - expected - mus
        score_variances = known + variances + self.noise_variance
        weights = shares * np.exp(-0.5 * residuals**2 / score_variances) / np.sqrt(score_variances) + 1e-300
        weights /= weights.sum()
        if not is_new and weights[0] < 0.5:
            self._dropped.add(config)
        # The weights of the noise factors are updated under the ordinary kind.
        by_factor = known + variances[0] + self._variances
        self._log_weights -= 0.5 * weights[0] * (np.log(by_factor) + residuals[0] ** 2 / by_factor)
        # The coefficients of Px and u under each kind: `steps` for the mean, `gains` for the covariance.
        steps = np.array([residuals / score_variances, mus + variances * residuals / score_variances])
        step = steps @ weights
        gains = np.array([np.ones_like(score_variances), variances])
        deviations = steps - step[:, None]
        matrix = (deviations * weights) @ deviations.T - (gains * (weights / score_variances)) @ gains.T
        self._mean += step[0] * column
        self._cov += np.outer(matrix[0, 0] * column, column)
        if is_new and new is not None:
            row = self._rows[new]
            self._mean[row] += step[1]
            self._cov[row] += matrix[0, 1] * column
            self._cov[:, row] += matrix[0, 1] * column
            self._cov[row, row] += matrix[1, 1] + weights @ variances
            self._counts += weights
        return self._decide(new) if decides else ()

    def decide_for_user(self, change: Change, is_kept: bool) -> None:
        """Keep or revert a change, as the user's commit did. The rule never reverses the user's decision."""
        settings = self._admitted(change)
        self._fixed.add(settings)
        before = self._kept
        self._set_kept([*(kept for kept in self._kept if kept != settings), *([settings] if is_kept else [])])
        if self._kept != before:
            self._final_scores.clear()

    def is_fixed(self, change: Change) -> bool:
        """Return True if the rule may not decide about a change any more."""
        return change.identity in self._fixed

    def _admitted(self, change: Change) -> Settings:
        """Add a change that no run proposed: the user made it, or its record is gone. Return its settings."""
        settings = change.identity
        if settings not in self._changes:
            second_moments = [mean**2 + sd**2 for mean, sd, _ in self.rules.kinds]  # the kind is unknown
            variance = 0.0 if settings in self._rows else float(np.average(second_moments, weights=self._counts))
            row = self._add(change)
            self._cov[row, row] += variance
        return settings

    def _decide(self, new: Settings | None) -> tuple[Decision, ...]:
        """Judge each change by its own effect. First changes are reverted, then kept, the largest effect first."""
        was_kept, decided = set(self._kept), []
        if self.stage is not Stage.LAST_INCUMBENTS:
            effects = {kept: self.effect(self._changes[kept]) for kept in self._kept if kept not in self._fixed}
            for settings, effect in effects.items():
                if effect.p_helps < self.rules.revert_below:
                    self._set_kept([kept for kept in self._kept if kept != settings])
                    decided.append((settings, Action.REVERT, effect))
        if self.stage is Stage.SEARCH:
            least = _NORMAL.inv_cdf(self.rules.keep_at)  # standard deviations
            settled = was_kept | self._fixed
            for settings in sorted(self._changes, key=lambda settings: -self._mean[self._rows[settings]]):
                sets_users_key = any(self._setters.get(key) in self._fixed for key, _ in settings)
                if settings in settled or (sets_users_key and settings != new):
                    continue
                factors, variance = self._added(settings, self._kept)
                if least >= 0 and sum(factor * self._mean[row] for row, factor in factors.items()) <= 0:
                    continue  # faster: most changes do not need a standard deviation
                effect = Effect(*self._moments(factors, variance))
                if effect.mean > least * effect.sd:
                    self._set_kept([*self._kept, settings])
                    decided.append((settings, Action.KEEP if settings == new else Action.ADOPT, effect))
        if new is not None and new not in was_kept and new not in self._kept:
            decided.append((new, Action.DISCARD, self.effect(self._changes[new])))
        return tuple(
            Decision(change=self._changes[settings], action=action, effect=effect.mean, effect_stderr=effect.sd)
            for settings, action, effect in decided
        )

    def _set_kept(self, kept: list[Settings]) -> None:
        """Set the incumbent's changes, except for changes without remaining keys."""
        before, self._kept = self._kept, {whole: rest for whole, rest in remaining(kept) if rest}
        if before != self._kept and self.stage is Stage.SEARCH:
            self._final_scores.clear()  # these are of an earlier night
        self._setters = {key: settings for settings, rest in self._kept.items() for key, _ in rest}

    def _added(self, settings: Settings, kept: Iterable[Settings]) -> tuple[Factors, float]:
        """Return the vector of a config with a change minus that without the change, and the additional variance."""
        factors, variance, kept = Factors(), 0.0, list(kept)
        row, others = self._rows[settings], [other for other in kept if other != settings]
        if {key for other in others for key, _ in other}.isdisjoint(key for key, _ in settings):  # most changes
            return {row: 1.0}, 0.0
        without = dict(remaining(others))
        for whole, rest in remaining(kept if settings in kept else [*kept, settings]):
            other = without.get(whole, frozenset())
            if rest != other:  # equal terms cancel
                variance += self._add_term(factors, 1.0, whole, rest)
                variance += self._add_term(factors, -1.0, whole, other)
        return factors, variance

    def _factors(
        self, changes: Iterable[Settings], baseline: float, hours: float = 0.0, without: Collection[str] = ()
    ) -> tuple[Factors, float]:
        """Return the vector of a config, without changes that no run measured, and the additional variance."""
        factors = {_BASELINE: baseline, _DRIFT: hours / NIGHT_HOURS}
        pairs = ((whole, frozenset(i for i in rest if i[0] not in without)) for whole, rest in remaining(changes))
        return factors, sum(self._add_term(factors, 1.0, whole, rest) for whole, rest in pairs)

    def _add_term(self, factors: Factors, sign: float, whole: Settings, rest: Settings) -> float:
        """Add the rest of a change to a vector. Return the additional variance of a rest that no run measured."""
        if not rest or whole not in self._rows:
            return 0.0
        share = 1.0 if rest in self._rows else len(rest) / len(whole)
        row = self._rows[rest if rest in self._rows else whole]
        factors[row] = factors.get(row, 0.0) + sign * share
        return share * (1 - share) * self.rules.kinds[0][1] ** 2

    def _moments(self, factors: Factors, variance: float) -> tuple[float, float]:
        """Return mean and standard deviation of a weighted sum of entries plus noise of this variance."""
        rows = list(factors)
        values = np.array(list(factors.values()))
        variance += float(values @ self._cov[np.ix_(rows, rows)] @ values)
        return float(values @ self._mean[rows]), math.sqrt(max(variance, _TINY))

    def _weighted(self, factors: Factors, reductions: Iterable[Array] = ()) -> tuple[float, float, Array]:
        """Return mean and variance of a weighted sum of entries, and its covariances with all entries."""
        rows = list(factors)
        values = np.array(list(factors.values()))
        column: Array = values @ self._cov[rows]
        for reduction in reductions:
            column -= reduction * (values @ reduction[rows])
        return float(values @ self._mean[rows]), float(values @ column[rows]), column

    def _add(self, change: Change) -> int:
        """Add a proposed change, starting from the kept or last value's effect of the same keys. Return its row."""
        settings = change.identity
        same = [other for other, known in self._changes.items() if known.keys.keys() == change.keys.keys()]
        kept = [other for other in same if other in self._kept]
        self._changes[settings] = change
        if settings not in self._rows:
            self._add_row(settings, next(reversed(kept or same), None), 1.0 if kept else self.rules.related)
        return self._rows[settings]

    def _add_row(self, settings: Settings, source: Settings | None, share: float, variance: float = 0.0) -> None:
        """Add an entry to the Gaussian: a share of the entry `source`, or 0, plus independent noise."""
        row = self._rows[settings] = len(self._mean)
        self._mean, self._cov = np.pad(self._mean, (0, 1)), np.pad(self._cov, (0, 1))
        if source is not None:
            start = self._rows[source]
            self._mean[row] = share * self._mean[start]
            self._cov[row, :row] = self._cov[:row, row] = share * self._cov[start, :row]
            self._cov[row, row] = share**2 * self._cov[start, start] + variance


def next_stage(num_started: int, num_last: int, num_left: float, num_slots: int) -> Stage:
    """Return the stage of a night's next run. The final check runs are two of the baseline, then two of the incumbent;
    with several slots, each slot runs each of the two once. `num_last`: the final check runs among `num_started`."""
    num_each = 2 if num_slots == 1 else num_slots
    is_short = num_started + num_left < _RUNS_PER_FINAL_RUN * 2 * num_each
    if num_last == 0 and (is_short or num_left > 2 * num_each):
        return Stage.SEARCH
    return Stage.LAST_BASELINES if num_last < num_each else Stage.LAST_INCUMBENTS


def measuring_run(kept: tuple[Change, ...], stage: Stage) -> Run:
    """Return a final check run."""
    return Run(kept=kept if stage is Stage.LAST_INCUMBENTS else (), stage=stage)


# Student's t distribution for real degrees of freedom. scipy, for these two functions, would add 100 MB.


def t_quantile(probability: float, df: float) -> float:
    """Return the quantile of Student's t for `probability` in 0.5..1 and real `df` (1 or more), to about 1e-9. With
    t = sqrt(df) tan(a) the density of a is proportional to cos(a)^(df - 1), which is smooth on a finite range."""
    low, high, df = 0.0, math.pi / 2, _bounded(df)
    for _ in range(52):  # the bits of a float
        angle = (low + high) / 2
        low, high = (angle, high) if _area(angle, df) < probability - 0.5 else (low, angle)
    return math.sqrt(df) * math.tan(low)


def t_probability(t: float, df: float) -> float:
    """Return P(|T| >= |t|) under Student's t distribution with real `df` (1 or more)."""
    df = _bounded(df)
    return max(1 - 2 * _area(math.atan(abs(t) / math.sqrt(df)), df), 0.0)


def _area(angle: float, df: float) -> float:
    """Return the integral of the density from 0 to t = sqrt(df) tan(angle), by Gauss-Legendre quadrature."""
    total = math.sqrt(math.pi) * math.exp(math.lgamma(df / 2) - math.lgamma((df + 1) / 2))
    return angle / 2 * float(_WEIGHTS @ np.cos(angle / 2 * (_NODES + 1)) ** (df - 1)) / total


def _bounded(df: float) -> float:
    return min(max(df, 1.0), 1e6)
