"""The posterior of a campaign: what a run teaches, which changes come in and go out, what rides."""

import math
from dataclasses import replace

import numpy as np
import pytest

from nightshift.campaign.posterior import NIGHT_HOURS, Posterior, measuring_run, next_stage
from nightshift.campaign.records import Change, Decision, Run, Stage
from nightshift.config.rules import RuleConstants

RULES = RuleConstants()
NUM, START = 1319, 0.475
STDERR = math.sqrt(START * (1 - START) / NUM)
# One Gaussian kind, no accidents, and one guess at the noise: every update is then exact.
GAUSSIAN = replace(RULES, kinds=((0.003, 0.02, 1.0),), accidents=((0.0, 0.0, 1.0),), noises=((1.0, 1.0),))


def start(rules: RuleConstants = RULES) -> Posterior:
    return Posterior(START, STDERR, rules)


def change(number: int, **keys: str | None) -> Change:
    return Change(experiment=number, keys=keys or {f"key_{number}": "1"})


def actions(decisions: tuple[Decision, ...]) -> list[tuple[str, int]]:
    return [(decision.action.value, decision.change.experiment) for decision in decisions]


def kept(posterior: Posterior) -> list[int]:
    return [each.experiment for each in posterior.kept]


def random_runs() -> list[tuple[Run, float, float]]:
    """Runs of random configs without a shared key: each with its score and its hours."""
    rng = np.random.default_rng(1)
    changes = [change(number) for number in range(12)]
    runs = [(Run(new=each), START + rng.normal(0, 0.02), float(hours)) for hours, each in enumerate(changes)]
    for _ in range(30):
        members = tuple(each for each in changes if rng.random() < 0.4)
        runs.append((Run(kept=members), START + rng.normal(0, 0.03), rng.uniform(0, 9)))
    return runs


@pytest.mark.parametrize("is_reversed", [False, True])
def test_one_gaussian_kind_with_known_noise_is_the_posterior_of_least_squares(is_reversed: bool) -> None:
    posterior, runs = start(GAUSSIAN), random_runs()
    if is_reversed:  # each change first runs alone
        runs = runs[11::-1] + runs[:11:-1]
    for run, score, hours in runs:
        posterior.observe(run, score, hours)
    noise = posterior.noise_variance
    assert noise == pytest.approx(0.0125**2 + 0.38 * STDERR**2)
    rows = [[1.0, 0.0, *np.zeros(12)]]
    rows += [
        [1.0, hours / NIGHT_HOURS, *(float(n in [c.experiment for c in run.changes]) for n in range(12))]
        for run, _, hours in runs
    ]
    x, y = np.array(rows), np.array([START, *(score for _, score, _ in runs)])
    prior_mean = np.array([0, 0, *[0.003] * 12])
    prior_precision = np.diag([0, 1 / 0.02**2, *[1 / 0.02**2] * 12])
    cov = np.linalg.inv(x.T @ x / noise + prior_precision)
    mean = cov @ (x.T @ y / noise + prior_precision @ prior_mean)
    for number in range(12):
        effect = posterior.predict([change(number)])[0] - posterior.predict([])[0]
        assert effect == pytest.approx(mean[2 + number], abs=1e-12)
        found = posterior.effect(change(number))
        assert found.sd == pytest.approx(math.sqrt(cov[2 + number, 2 + number]), rel=1e-9)
    assert posterior.predict([], NIGHT_HOURS) == pytest.approx(
        (mean[0] + mean[1], math.sqrt(cov[0, 0] + 2 * cov[0, 1] + cov[1, 1])), rel=1e-9
    )


def test_what_goes_out_comes_before_what_comes_in_the_largest_effect_first() -> None:
    posterior = start(GAUSSIAN)
    for number, score in ((1, 0.50), (2, 0.47), (3, 0.472)):
        posterior.observe(Run(new=change(number)), score, 0.0)
    assert kept(posterior) == [1]
    # Without the first change the score is far higher than with it.
    decisions = posterior.observe(Run(kept=(change(2), change(3)), new=change(4)), 0.60, 0.0)
    assert actions(decisions) == [("keep", 4), ("adopt", 3), ("adopt", 2)]
    decisions = posterior.observe(Run(kept=(change(1), change(2), change(3))), 0.35, 0.0)
    assert [action for action, _ in actions(decisions)] == ["revert"] * 3


def test_the_same_keys_with_the_same_values_are_the_same_change() -> None:
    posterior = start()
    posterior.observe(Run(new=change(1, lr="1e-5", beta="0.0")), 0.44, 0.1)
    first = posterior.effect(change(1, lr="1e-5", beta="0.0"))
    again = change(2, beta="0.0", lr="1e-5")
    assert actions(posterior.observe(Run(new=again), 0.44, 0.1)) == [("discard", 1)]
    second = posterior.effect(again)
    assert second.sd < first.sd


@pytest.mark.parametrize(("first_score", "share"), [(0.53, 1.0), (0.44, 0.5)])
def test_a_new_value_starts_from_the_last_values_effect(first_score: float, share: float) -> None:
    """With the whole effect where the last value is kept, with half of it where it was discarded."""
    rules = replace(GAUSSIAN, kinds=((0.0, 0.02, 1.0),), seed_sd=0.01)
    posterior = start(rules)
    posterior.observe(Run(new=change(1, lr="1")), first_score, 0.0)
    first = posterior.effect(change(1, lr="1"))
    expected = posterior.predict([])[0] + share * first.mean
    posterior.observe(Run(new=change(2, lr="2")), expected, 0.0)  # the score that was expected moves nothing
    second = posterior.predict([change(2, lr="2")])[0] - posterior.predict([])[0]
    assert second == pytest.approx(share * first.mean, abs=1e-4)


def test_a_change_replaces_the_shared_key_only() -> None:
    posterior = start(GAUSSIAN)
    whole, part, rest = change(1, lr="1", beta="1"), change(2, lr="2"), change(3, beta="1")
    posterior.observe(Run(new=whole), 0.55, 0.0)
    assert actions(posterior.observe(Run(kept=(whole,), new=part), 0.56, 0.0)) == [("keep", 2)]
    assert kept(posterior) == [1, 2]  # the incumbent is beta = 1 of the first and lr = 2 of the second
    baseline = posterior.predict([])[0]
    whole_effect = posterior.predict([whole])[0] - baseline
    rest_effect = posterior.predict([whole, part])[0] - posterior.predict([part])[0]
    assert 0 < rest_effect < whole_effect
    assert posterior.predict([whole, part]) == pytest.approx(posterior.predict([rest, part]))
    # The effect of the second is what it adds to the first as a whole.
    effect = posterior.effect(part)
    assert effect.mean == pytest.approx(posterior.predict([whole, part])[0] - posterior.predict([whole])[0])
    # Without the second the first has all its keys again.
    posterior.decide_for_user(part, False)
    assert posterior.predict(posterior.kept) == posterior.predict([whole])


def test_late_baselines_tell_drift_from_effects() -> None:
    """Eight changes that do nothing, on a machine whose scores rise by 4 pp in eight hours."""
    posterior = start()
    for number in range(1, 9):
        posterior.observe(Run(kept=posterior.kept, new=change(number)), START + 0.005 * number, number)
    before = posterior.gain()
    for _ in range(2):
        posterior.stage = Stage.LAST_BASELINES
        posterior.observe(Run(), START + 0.04, 8.0)
    assert posterior.predict([], 8.0)[0] - posterior.predict([])[0] > 0.02
    assert posterior.gain()[0] < before[0]
    assert posterior.gain()[1] < before[1]


def discards(scores: dict[int, float]) -> Posterior:
    posterior = start(replace(RULES, keep_at=0.9))
    for number, score in scores.items():
        assert actions(posterior.observe(Run(new=change(number)), score, 0.1)) == [("discard", number)]
    return posterior


def test_the_rider_is_the_most_promising_discarded_change() -> None:
    assert discards({1: 0.30}).rider(change(4)) is None  # nothing is expected of a disaster
    posterior = discards({1: 0.478, 2: 0.477, 3: 0.45})
    assert posterior.rider(change(4)) == change(1)
    assert posterior.rider(change(4, key_1="5")) != change(1)  # it sets a key of the rider
    in_flight = [Run(rider=change(1), new=change(3))] * 2
    assert posterior.rider(change(4), in_flight) == change(2)


def test_a_change_joins_at_60_percent_and_leaves_below_50() -> None:
    between = list[bool]()
    for score in np.linspace(START - 0.06, START + 0.06, 241):
        tried, again = start(), start()
        tried.observe(Run(new=change(1)), score, 0.1)
        again.observe(Run(new=change(1)), START + 0.04, 0.1)
        again.observe(Run(kept=(change(1),)), score, 0.1)
        p_tried, p_again = (each.effect(change(1)).p_helps for each in (tried, again))
        assert kept(tried) == [1] * (p_tried > RULES.keep_at)
        assert kept(again) == [1] * (p_again >= RULES.revert_below)
        between += [is_kept for p, is_kept in ((p_tried, False), (p_again, True)) if 0.5 < p < 0.6]
    assert {*between} == {False, True}


def test_no_change_rides_that_is_kept_that_would_replace_one_or_that_the_user_took_out() -> None:
    posterior = start()
    posterior.observe(Run(new=change(1, lr="2")), 0.47, 0.1)
    posterior.observe(Run(new=change(2, lr="1")), 0.53, 0.1)
    assert kept(posterior) == [2]
    assert posterior.rider(change(3)) is None
    by_user = discards({1: 0.478})
    assert by_user.rider(change(4)) == change(1)
    by_user.decide_for_user(change(1), False)
    assert by_user.rider(change(4)) is None


@pytest.mark.parametrize(("num_slots", "num_runs", "num_each"), [(1, 19, 0), (1, 20, 2), (4, 39, 0), (8, 80, 8)])
def test_a_night_that_is_long_ends_with_baselines_and_then_incumbents(num_slots, num_runs, num_each):
    stages = []
    for number in range(num_runs):
        num_last = sum(stage is not Stage.SEARCH for stage in stages)
        stages.append(next_stage(number, num_last, num_runs - number, num_slots))
    num_search = num_runs - 2 * num_each
    ending = [Stage.LAST_BASELINES] * num_each + [Stage.LAST_INCUMBENTS] * num_each
    assert stages == [Stage.SEARCH] * num_search + ending


def test_the_last_runs_of_the_incumbent_revert_nothing() -> None:
    posterior = start()
    posterior.observe(Run(new=change(1)), 0.50, 0.1)
    incumbent = posterior.kept
    assert measuring_run(incumbent, Stage.LAST_BASELINES).changes == ()
    run = measuring_run(incumbent, Stage.LAST_INCUMBENTS)
    assert run.changes == incumbent
    posterior.stage = run.stage
    assert posterior.observe(run, 0.40, 8.0) == ()
    assert posterior.kept == incumbent


def test_no_earlier_change_takes_a_key_of_a_change_that_the_user_keeps() -> None:
    posterior = start()
    posterior.observe(Run(new=change(1, lr="2")), 0.53, 0.1)
    assert kept(posterior) == [1]
    posterior.decide_for_user(change(2, lr="1"), True)
    assert actions(posterior.observe(Run(kept=posterior.kept), 0.40, 0.1)) == []
    assert actions(posterior.observe(Run(kept=posterior.kept, new=change(3, lr="4")), 0.60, 0.1)) == [("keep", 3)]


def test_the_reported_gain_is_below_the_mean_and_lower_after_more_changes() -> None:
    posterior = start()
    posterior.observe(Run(new=change(0)), 0.60, 0.1)
    mean = posterior.predict(posterior.kept)[0] - posterior.predict([])[0]
    few, half = posterior.gain()
    assert 0 < few < mean
    assert posterior.gain(num_slots=4)[1] == pytest.approx(half * RULES.widen[1] / RULES.widen[0])
    for number in range(1, 150):
        posterior.observe(Run(new=change(number)), 0.40, 0.1)
    many, wider = posterior.gain()
    later = posterior.predict(posterior.kept)[0] - posterior.predict([])[0]
    assert (later - many) / wider == pytest.approx((mean - few) / half * (0.5 + 0.25 * math.log(150 / 47)) / 0.5)


def test_a_drop_is_an_accident_once_and_the_same_drop_again_is_the_configs() -> None:
    """A bad incumbent that is measured again must not be a series of accidents (a drop of 10 pp, six times)."""
    posterior = start()
    kept_changes = tuple(change(number) for number in range(8))
    for number, new in enumerate(kept_changes):
        posterior.observe(Run(kept=kept_changes[:number], new=new), START + 0.01 * (number + 1), 0.1 * number)
    posterior.set_kept(kept_changes)
    gains = [posterior.gain()[0]]
    for hours in range(6):
        posterior.observe(Run(kept=kept_changes, stage=Stage.LAST_INCUMBENTS), START - 0.05, 1.0 + hours)
        gains.append(posterior.gain()[0])
    assert gains[0] > 0.02
    assert gains[1] > gains[0] - 0.01, "one drop may be an accident"
    assert gains[2] < gains[0] - 0.01, "two drops are no accident"
    assert gains[-1] < gains[0] / 2
