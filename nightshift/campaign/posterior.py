"""Decide which changes of train.toml to keep, and plan re-tests and final check runs (docs/decision-rule.md).

The baseline's score, the drift and the effect of each change have one joint Gaussian distribution. The settings of a
change that no later change of the config sets are its rest.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from statistics import NormalDist, fmean

import numpy as np
from numpy.typing import NDArray

from nightshift.campaign.records import Z95, Action, Change, Decision, Effect, Run, Settings, Stage, remaining
from nightshift.config.rules import RuleConstants

Array = NDArray[np.float64]
Vector = dict[int, float]  # a sparse vector over the entries of the Gaussian: row -> coefficient
NIGHT_HOURS = 8.0  # the drift is the change of the score in this time
_BASELINE, _DRIFT = 0, 1  # rows of the Gaussian
_NORMAL = NormalDist()
_RUNS_PER_FINAL_RUN = 5  # least number of a night's runs for each of its final check runs
_TINY = 1e-14  # lower bound of an effect's variance: P(it helps) divides by the standard deviation
SEED_DF = 8.0  # degrees of freedom of `rules.seed_sd` in Student's t: it was measured on earlier runs
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(64)  # for integrals over -1..1


class Posterior:
    """The posterior of the effects of a campaign's changes. `score` and `stderr` are those of the first baseline run;
    `stderr` is over examples, sqrt(p (1 - p) / n). Set `stage` when a run starts: the rule keeps changes in the stage
    SEARCH only. Call `observe` when a run's score is known; a crash has no score."""

    def __init__(self, score: float, stderr: float, rules: RuleConstants) -> None:
        self.rules = rules
        self.stage = Stage.SEARCH
        self._changes: dict[Settings, Change] = {}  # every proposed change, as it was first proposed
        self._kept: dict[Settings, Settings] = {}  # kept change -> its rest, in the order of the keeps
        self._kept_by_key: dict[str, Settings] = {}  # key -> the kept change that sets it
        self._fixed = set[Settings]()  # changes that the user kept or reverted, or that a guard forbids
        self._accident_configs = set[Settings]()  # configs of runs that were probably accidents
        self._final_scores = defaultdict[Settings, list[float]](list)  # config -> scores of its final check runs
        self._rows: dict[Settings, int] = {}  # change, or rest of a change -> its row of the Gaussian
        self._kind_counts = rules.shares_worth * np.array([share for _, _, share in rules.kinds])  # number of changes
        factors, priors = np.array(rules.noises).T
        self._noise_variances = (factors * rules.seed_sd) ** 2 + rules.examples_share * stderr**2
        self._expected_variance = rules.seed_sd**2 + rules.examples_share * stderr**2  # for factor 1
        self._log_weights = np.log(priors)
        self._mean = np.array([score, 0.0])
        self._cov = np.diag([self.noise_variance, rules.drift_sd**2])

    @property
    def kept(self) -> tuple[Change, ...]:
        return tuple(self._changes[settings] for settings in self._kept)

    @property
    def noise_variance(self) -> float:
        """Variance of one run's noise: the mean over the factors in `rules.noises`, by their posterior weights."""
        return float(np.average(self._noise_variances, weights=np.exp(self._log_weights - self._log_weights.max())))

    def known(self, change: Change) -> Change:
        """Return the change as it was first proposed. A change that was never proposed is returned as it is."""
        return self._changes.get(change.identity, change)

    def set_kept(self, kept: Sequence[Change]) -> None:
        """Set the incumbent's changes, for example after git or a guard refused one of the rule's decisions."""
        self._set_kept([self._add(change) for change in kept])

    def effect(self, change: Change, changes: Iterable[Change] | None = None) -> Effect:
        """Return what a change adds to the other changes of the incumbent, or of `changes`."""
        kept = self._kept if changes is None else (change.identity for change in changes)
        return Effect(*self._mean_and_sd(*self._effect_vector(change.identity, kept)))

    def predict(
        self, changes: Iterable[Change], time_hours: float = 0.0, without: Collection[str] = ()
    ) -> tuple[float, float]:
        """Return mean and sd of the true score of the baseline with `changes`, leaving out the keys in `without`."""
        return self._mean_and_sd(*self._vector((change.identity for change in changes), 1.0, time_hours, without))

    def gain(self, num_slots: int = 1) -> tuple[float, float]:
        """Return the reported gain of the incumbent over the baseline, and half of its 95 % interval: those of
        `estimated_gain`, or of the final check runs if the estimate lies outside of their interval (Student's t)."""
        estimate = self.estimated_gain(num_slots)
        incumbent = self._final_scores.get(Settings().union(*self._kept.values()), [])
        baseline = self._final_scores.get(Settings(), [])
        if not self._kept or min(len(incumbent), len(baseline)) < 2:
            return estimate
        df = SEED_DF + len(incumbent) + len(baseline) - 2
        squares = sum((score - fmean(scores)) ** 2 for scores in (incumbent, baseline) for score in scores)
        variance = (SEED_DF * self._expected_variance + squares) / df * (1 / len(incumbent) + 1 / len(baseline))
        difference, halfwidth = fmean(incumbent) - fmean(baseline), t_quantile(0.975, df) * math.sqrt(variance)
        return (difference, halfwidth) if abs(estimate[0] - difference) > halfwidth else estimate

    def estimated_gain(self, num_slots: int = 1) -> tuple[float, float]:
        """Return the estimated gain of the incumbent over the baseline, and half of its 95 % interval. It lies
        below the posterior mean, because the best of many noisy scores is too high (winner's curse)."""
        mean, sd = self._mean_and_sd(*self._vector(self._kept, 0.0))
        base, per_e_fold, usual_changes = self.rules.shrink
        shrink = base + per_e_fold * max(math.log(max(len(self._changes), 1) / usual_changes), 0.0)
        return max(mean - shrink * sd, min(mean, 0.0)), Z95 * self.rules.widen[0 if num_slots == 1 else 1] * sd

    def rider(
        self, new: Change, in_flight: Sequence[Run] = (), is_open: Callable[[str], bool] = lambda key: True
    ) -> Change | None:
        """Return the discarded change with the largest expected improvement, to re-test it in the run of `new`; None if
        none is worth it. The covariance is that after the runs in flight. `is_open`: whether a change may set a key."""
        noise_with_new = self.noise_variance + self.rules.kinds[0][1] ** 2  # variance of noise plus a new change
        reductions: list[Array] = []  # each run in flight reduces the covariance by the outer product r r'
        for run in in_flight:
            vector, _ = self._vector((change.identity for change in run.changes), 1.0)
            _, variance, px = self._products(vector, reductions)
            reductions.append(px / math.sqrt(variance + (self.noise_variance if run.new is None else noise_with_new)))
        _, variance, px = self._products(self._vector(self._kept, 1.0)[0], reductions)
        effect_variances = np.diagonal(self._cov) - sum((reduction**2 for reduction in reductions), 0.0)
        # |cov(effect, score)| / sd(score), if the run re-tests the change of this row
        sds = np.abs(px + effect_variances) / np.sqrt(variance + 2 * px + effect_variances + noise_with_new) + 1e-9
        keys_in_use = new.keys.keys() | self._kept_by_key.keys()
        best, best_improvement = None, self.rules.least_worth
        for settings, change in self._changes.items():
            if settings in self._fixed or any(key in keys_in_use or not is_open(key) for key, _ in settings):
                continue
            row = self._rows[settings]
            mean, sd = float(self._mean[row]), float(sds[row])
            improvement = sd * _NORMAL.pdf(mean / sd) + mean * _NORMAL.cdf(mean / sd)
            if improvement > best_improvement:
                best, best_improvement = change, improvement
        return best

    def observe(self, run: Run, score: float, time_hours: float, *, decides: bool = True) -> tuple[Decision, ...]:
        """Update the Gaussian with the score of a run that began `time_hours` after the first baseline. Return the
        decisions in order; none unless `decides`. x, u and P are those of docs/decision-rule.md, "Update". A 2 x 2
        matrix, along Px and u, describes the change of the covariance. Without a new change, the kinds are those of an
        accident, whose effect is not stored."""
        new = None if run.new is None else run.new.identity
        is_new = new is not None and new not in self._rows
        changes = [self._add(change, is_proposed=change is run.new) for change in run.changes]
        rests = remaining(changes)
        config = Settings().union(*(rest for _, rest in rests))
        if run.stage is not Stage.SEARCH:
            self._final_scores[config].append(score)
        kinds = np.array(self.rules.kinds if is_new else self.rules.accidents)
        if not is_new and config in self._accident_configs:
            kinds = kinds[:1]
        mus, kind_variances = kinds[:, 0], kinds[:, 1] ** 2
        shares = self._kind_counts / self._kind_counts.sum() if is_new else kinds[:, 2]
        for whole, rest in rests:
            if rest and rest not in self._rows:
                share = len(rest) / len(whole)
                self._add_row(rest, whole, share, share * (1 - share) * self.rules.kinds[0][1] ** 2)
        expected, predicted_variance, px = self._products(self._vector(changes, 1.0, time_hours)[0])
        residuals = score - expected - mus
        score_variances = predicted_variance + kind_variances + self.noise_variance
        weights = shares * np.exp(-0.5 * residuals**2 / score_variances) / np.sqrt(score_variances) + 1e-300
        weights /= weights.sum()
        if not is_new and weights[0] < 0.5:
            self._accident_configs.add(config)
        # Multiply each noise factor's weight by the score's density under the ordinary kind ** weight of this kind.
        variances_by_factor = predicted_variance + kind_variances[0] + self._noise_variances
        self._log_weights -= 0.5 * weights[0] * (np.log(variances_by_factor) + residuals[0] ** 2 / variances_by_factor)
        # Coefficients of Px and u (rows) for each kind (columns): of the mean's step, and of the Kalman gain times S.
        steps = np.array([residuals / score_variances, mus + kind_variances * residuals / score_variances])
        step = steps @ weights
        gains = np.array([np.ones_like(score_variances), kind_variances])
        deviations = steps - step[:, None]
        matrix = (deviations * weights) @ deviations.T - (gains * (weights / score_variances)) @ gains.T
        self._mean += step[0] * px
        self._cov += np.outer(matrix[0, 0] * px, px)
        if is_new and new is not None:
            row = self._rows[new]
            self._mean[row] += step[1]
            self._cov[row] += matrix[0, 1] * px
            self._cov[:, row] += matrix[0, 1] * px
            self._cov[row, row] += matrix[1, 1] + weights @ kind_variances
            self._kind_counts += weights
        return self._decide(new) if decides else ()

    def decide_for_user(self, change: Change, is_kept: bool) -> None:
        """Keep or revert a change, as the user's commit or a guard did. The rule never reverses this decision."""
        settings = self._add(change)
        self._fixed.add(settings)
        before = self._kept
        self._set_kept([*(kept for kept in self._kept if kept != settings), *([settings] if is_kept else [])])
        if self._kept != before:
            self._final_scores.clear()

    def is_fixed(self, change: Change) -> bool:
        """Return True if `decide_for_user` decided about a change, so that the rule does not."""
        return change.identity in self._fixed

    def _decide(self, new: Settings | None) -> tuple[Decision, ...]:
        """Judge each change by its own effect: reverts first, then keeps (largest effect first), then the discard."""
        was_kept, decisions = set(self._kept), []
        if self.stage is not Stage.LAST_INCUMBENTS:
            effects = {kept: self.effect(self._changes[kept]) for kept in self._kept if kept not in self._fixed}
            for settings, effect in effects.items():
                if effect.p_helps < self.rules.revert_below:
                    self._set_kept([kept for kept in self._kept if kept != settings])
                    decisions.append((settings, Action.REVERT, effect))
        if self.stage is Stage.SEARCH:
            min_z = _NORMAL.inv_cdf(self.rules.keep_at)  # P(it helps) is above keep_at if mean / sd is above min_z
            for settings in sorted(self._changes, key=lambda settings: -self._mean[self._rows[settings]]):
                sets_fixed_key = any(self._kept_by_key.get(key) in self._fixed for key, _ in settings)
                if settings in was_kept or settings in self._fixed or (sets_fixed_key and settings != new):
                    continue
                effect = self.effect(self._changes[settings])
                if effect.mean > min_z * effect.sd:
                    self._set_kept([*self._kept, settings])
                    decisions.append((settings, Action.KEEP if settings == new else Action.ADOPT, effect))
        if new is not None and new not in was_kept and new not in self._kept:
            decisions.append((new, Action.DISCARD, self.effect(self._changes[new])))
        return tuple(
            Decision(change=self._changes[settings], action=action, effect=effect.mean, effect_stderr=effect.sd)
            for settings, action, effect in decisions
        )

    def _set_kept(self, kept: list[Settings]) -> None:
        """Set the incumbent's changes. A change is left out if later ones set all of its keys."""
        before, self._kept = self._kept, {whole: rest for whole, rest in remaining(kept) if rest}
        if before != self._kept and self.stage is Stage.SEARCH:
            self._final_scores.clear()  # they are from an earlier night: this night still searches
        self._kept_by_key = {key: settings for settings, rest in self._kept.items() for key, _ in rest}

    def _effect_vector(self, settings: Settings, kept: Iterable[Settings]) -> tuple[Vector, float]:
        """Return the vector of a config with a change minus that of the config without it; variance as in `_vector`."""
        vector, variance, kept = Vector(), 0.0, list(kept)
        without = dict(remaining(other for other in kept if other != settings))
        for whole, rest in remaining(kept if settings in kept else [*kept, settings]):
            other = without.get(whole, frozenset())
            if rest != other:  # equal terms cancel
                variance += self._add_term(vector, 1.0, whole, rest)
                variance += self._add_term(vector, -1.0, whole, other)
        return vector, variance

    def _vector(
        self, changes: Iterable[Settings], baseline: float, hours: float = 0.0, without: Collection[str] = ()
    ) -> tuple[Vector, float]:
        """Return the vector of a config, and the variance of rests without a row. Changes without a row count as 0."""
        vector = {_BASELINE: baseline, _DRIFT: hours / NIGHT_HOURS}
        pairs = ((whole, frozenset(i for i in rest if i[0] not in without)) for whole, rest in remaining(changes))
        return vector, sum(self._add_term(vector, 1.0, whole, rest) for whole, rest in pairs)

    def _add_term(self, vector: Vector, sign: float, whole: Settings, rest: Settings) -> float:
        """Add a rest to a vector: its row, or a share of its change's row plus noise. Return the noise's variance."""
        if not rest or whole not in self._rows:
            return 0.0
        share = 1.0 if rest in self._rows else len(rest) / len(whole)
        row = self._rows[rest if rest in self._rows else whole]
        vector[row] = vector.get(row, 0.0) + sign * share
        return share * (1 - share) * self.rules.kinds[0][1] ** 2

    def _mean_and_sd(self, vector: Vector, variance: float) -> tuple[float, float]:
        """Return mean and standard deviation of x'(entries of the Gaussian) + independent noise of `variance`."""
        rows = list(vector)
        x = np.array(list(vector.values()))
        variance += float(x @ self._cov[np.ix_(rows, rows)] @ x)
        return float(x @ self._mean[rows]), math.sqrt(max(variance, _TINY))

    def _products(self, vector: Vector, reductions: Iterable[Array] = ()) -> tuple[float, float, Array]:
        """Return x'm, x'Px and Px, with mean m and covariance P. Each reduction r replaces P by P - r r'."""
        rows = list(vector)
        x = np.array(list(vector.values()))
        px: Array = x @ self._cov[rows]
        for reduction in reductions:
            px -= reduction * (x @ reduction[rows])
        return float(x @ self._mean[rows]), float(x @ px[rows]), px

    def _add(self, change: Change, *, is_proposed: bool = False) -> Settings:
        """Add a change, and return its settings. Its prior starts from the kept, else the last change of the same keys.
        The kind is unknown if no run proposed the change, as for a commit of the user."""
        settings = change.identity
        if settings not in self._changes:
            same = [other for other, known in self._changes.items() if known.keys.keys() == change.keys.keys()]
            kept = [other for other in same if other in self._kept]
            self._changes[settings] = change
            if settings not in self._rows:
                self._add_row(settings, next(reversed(kept or same), None), 1.0 if kept else self.rules.related)
                if not is_proposed:
                    second_moments = [mean**2 + sd**2 for mean, sd, _ in self.rules.kinds]
                    row = self._rows[settings]
                    self._cov[row, row] += float(np.average(second_moments, weights=self._kind_counts))
        return settings

    def _add_row(self, settings: Settings, source: Settings | None, share: float, variance: float = 0.0) -> None:
        """Add an entry to the Gaussian: `share` * entry of `source` + noise of `variance`; 0 if `source` is None."""
        row = self._rows[settings] = len(self._mean)
        self._mean, self._cov = np.pad(self._mean, (0, 1)), np.pad(self._cov, (0, 1))
        if source is not None:
            start = self._rows[source]
            self._mean[row] = share * self._mean[start]
            self._cov[row, :row] = self._cov[:row, row] = share * self._cov[start, :row]
            self._cov[row, row] = share**2 * self._cov[start, start] + variance


def next_stage(num_started: int, num_last: int, num_left: float, num_slots: int) -> Stage:
    """Return the stage of a night's next run. A night ends with final check runs: two of the baseline, then two of the
    incumbent; with several slots, one of each per slot. `num_last` of the `num_started` runs are final check runs."""
    num_per_config = 2 if num_slots == 1 else num_slots
    is_short = num_started + num_left < _RUNS_PER_FINAL_RUN * 2 * num_per_config
    if num_last == 0 and (is_short or num_left > 2 * num_per_config):
        return Stage.SEARCH
    return Stage.LAST_BASELINES if num_last < num_per_config else Stage.LAST_INCUMBENTS


def measuring_run(kept: tuple[Change, ...], stage: Stage) -> Run:
    """Return a final check run of the incumbent, whose changes are `kept`, or of the baseline."""
    return Run(kept=kept if stage is Stage.LAST_INCUMBENTS else (), stage=stage)


# scipy would add 100 MB for t_quantile and t_probability.
def t_quantile(probability: float, df: float) -> float:
    """Return the quantile of Student's t for `probability` in 0.5..1 and real `df` (1 or more), to about 1e-9. The
    angle a, with t = sqrt(df) tan(a), has a density proportional to cos(a)^(df - 1), so a quadrature is accurate."""
    low, high, df = 0.0, math.pi / 2, _clip_df(df)
    for _ in range(52):  # bisections; a float has 52 bits
        angle = (low + high) / 2
        low, high = (angle, high) if _area(angle, df) < probability - 0.5 else (low, angle)
    return math.sqrt(df) * math.tan(low)


def t_probability(t: float, df: float) -> float:
    """Return P(|T| >= |t|) under Student's t distribution with real `df` (1 or more)."""
    df = _clip_df(df)
    return max(1 - 2 * _area(math.atan(abs(t) / math.sqrt(df)), df), 0.0)


def _area(angle: float, df: float) -> float:
    """Return P(0 < T < sqrt(df) tan(angle)), by Gauss-Legendre quadrature over the angle."""
    total = math.sqrt(math.pi) * math.exp(math.lgamma(df / 2) - math.lgamma((df + 1) / 2))
    return angle / 2 * float(_WEIGHTS @ np.cos(angle / 2 * (_NODES + 1)) ** (df - 1)) / total


def _clip_df(df: float) -> float:
    return min(max(df, 1.0), 1e6)  # _area is inaccurate outside this range
