"""Several worlds at once: what a run says of them, what disasters say of their parent, and a run without an idea."""

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from nightshift.campaign import decision
from nightshift.campaign.worlds import UNUSED, Posterior
from nightshift.config.decision_rules import DecisionRules
from tests.rules import ONE_WORLD

Floats = NDArray[np.float64]
RULES = DecisionRules()
NUM, START = 1319, 0.475
E2 = 0.4 * 0.25 / NUM
NUM_CAMPAIGNS = 2000


def start(score: float | Floats = START, rules: DecisionRules = RULES) -> Posterior:
    """A baseline that was run twice, both times with this score."""
    belief = decision.baseline(score, NUM, rules)
    again = decision.observe(belief, 0, score, E2, rules.of_a_repeat, number=UNUSED)
    return decision.settle(again, np.False_, rules)


def tried(belief: Posterior, *scores: float, rules: DecisionRules = RULES) -> Posterior:
    """After children of the baseline that were not kept, whatever they scored."""
    for score in scores:
        belief = decision.settle(decision.observe(belief, 0, score, E2, rules), np.False_, rules)
    return belief


def by_prior(belief: Posterior) -> Floats:
    return belief.weights.reshape(len(RULES.priors), -1).sum(axis=1)


def by_noise(belief: Posterior) -> Floats:
    return belief.weights.reshape(len(RULES.priors), -1).sum(axis=0)


def test_before_any_run_of_an_idea_worlds_weigh_what_the_constants_say() -> None:
    belief = decision.baseline(START, NUM, RULES)
    assert belief.weights.sum() == pytest.approx(1)
    np.testing.assert_allclose(by_prior(belief), np.array([share for share, _ in RULES.priors]) / 1.0)
    np.testing.assert_allclose(by_noise(belief), [share for share, _ in RULES.noises])
    assert (belief.sd, belief.mean) == pytest.approx((np.sqrt(belief.weights @ belief.covariance[:, 0, 0]), START))


def test_runs_that_scatter_make_noisy_worlds_weigh_more_and_calm_runs_less() -> None:
    """Twelve scores around one mean. Ideas scatter too, so it is the small differences that tell."""
    before = by_noise(start())
    calm = by_noise(tried(start(), *([0.474, 0.476] * 6)))
    noisy = by_noise(tried(start(), *([0.452, 0.498] * 6)))
    assert calm[0] > before[0] > noisy[0]
    assert noisy[2] > before[2] > calm[2]


@pytest.mark.parametrize(("score", "prior"), [(0.481, 1), (0.42, 2), (0.355, 3), (0.225, 4)])
def test_what_ideas_do_tells_what_world_it_is(score: float, prior: int) -> None:
    """Eight children each like the ideas that the prior makes frequent."""
    belief = tried(start(), *([score] * 8))
    gain = by_prior(belief) / by_prior(start())
    assert gain.argmax() == prior, gain


def test_a_batch_of_disasters_rules_no_world_out_and_a_campaign_that_turns_is_believed_again() -> None:
    rng = np.random.default_rng(0)
    belief = tried(start(), *np.clip(rng.normal(0.225, 0.15, 60), 0, 1).tolist())
    assert belief.weights.min() >= 1e-10
    assert np.isfinite(np.log(belief.weights)).all()
    assert by_prior(belief)[4] > 0.99
    turned = tried(belief, *rng.normal(float(belief.mean), 0.01, 60).tolist())
    assert by_prior(turned)[4] < 0.01


@pytest.mark.parametrize("score", [0.02, 0.40, 0.5])
def test_a_share_of_0_divides_nothing_and_is_as_good_as_none(score: float) -> None:
    def with_share(share: float) -> decision.Tested:
        kinds = (*RULES.kinds[:3], (-25.0, 15.0))
        rules = replace(RULES, kinds=kinds, priors=((1.0, (0.3, 0.4, 0.3, share)),))
        return decision.observe(start(rules=rules), 0, score, E2, rules)

    none, tiny, some = (with_share(share) for share in (0.0, 1e-9, 0.1))
    for what in ("delta", "delta_stderr", "p_better"):
        assert getattr(none, what) == getattr(tiny, what)
        assert np.isfinite(getattr(none, what))
    if score > 0.1:  # what but one kind explains is of that kind, however rare
        assert none.delta != pytest.approx(float(some.delta), abs=1e-5), "the share decides nothing"
    only = replace(RULES, kinds=((0.0, 0.1), (1.0, 1.0)), priors=((1.0, (1.0, 0.0)),))
    assert abs(decision.observe(start(rules=only), 0, 0.49, E2, only).delta) < 1e-4


@pytest.mark.parametrize("rules", [RULES, ONE_WORLD], ids=["today", "one world"])
@pytest.mark.parametrize("score", [0.02, 0.45, 0.475, 0.50, 0.775])
def test_a_run_without_an_idea_differs_from_its_parent_by_nothing(score: float, rules: DecisionRules) -> None:
    again = rules.of_a_repeat
    assert len(again.priors) == len(rules.priors)
    assert [weight for weight, _ in again.priors] == [weight for weight, _ in rules.priors]
    belief = tried(start(rules=rules), 0.46, rules=rules)
    tested = decision.observe(belief, 0, score, E2, again)
    assert (tested.delta, tested.delta_stderr) == (0, 0)
    assert tested.p_better == pytest.approx(0.5, abs=1e-12)
    assert not tested.keep
    assert tested.expected == pytest.approx(tested.belief.expected[0], abs=1e-15)


def scores(rng: np.random.Generator, truth: Floats) -> Floats:
    """Of one run each: seeds, and the examples' own luck that two runs of a config do not share."""
    variance = RULES.seed_sd**2 + 0.35 * truth * (1 - truth) / NUM
    return np.clip(truth + rng.normal(0, 1, len(truth)) * np.sqrt(variance), 0, 1)


def incumbent_moments(belief: Posterior, config: int) -> tuple[Floats, Floats]:
    of = replace(belief, incumbent=np.full(NUM_CAMPAIGNS, config))
    return of.mean, of.sd


@pytest.mark.parametrize("parent", [0, 1], ids=["baseline", "keep of +3 pp"])
def test_twelve_disasters_say_next_to_nothing_of_their_parent(parent: int) -> None:
    """Children drawn from N(-25, 10) pp: less than 0.5 pp on average, and no narrower by more than a tenth."""
    rng = np.random.default_rng(0)
    runs = np.full(NUM_CAMPAIGNS, START)
    belief = start(runs)
    if parent:
        e2 = np.full(NUM_CAMPAIGNS, E2)
        tested = decision.observe(belief, belief.incumbent, runs + 0.03, e2, RULES)
        belief = decision.settle(tested, tested.keep, RULES)
        assert (belief.incumbent == 1).all()
    mean, sd = incumbent_moments(belief, parent)
    at = np.full(NUM_CAMPAIGNS, parent)
    for _ in range(12):
        truth = np.clip(mean + rng.normal(-0.25, 0.10, NUM_CAMPAIGNS), 0.005, 0.995)
        e2 = 0.2 * (truth * (1 - truth) + mean * (1 - mean)) / NUM
        tested = decision.observe(belief, at, scores(rng, truth), e2, RULES)
        belief = decision.settle(tested, np.zeros(NUM_CAMPAIGNS, bool), RULES)
    after, after_sd = incumbent_moments(belief, parent)
    assert abs(100 * (after - mean).mean()) < 0.5
    assert (after_sd / sd).mean() > 0.9
    assert (belief.incumbent == parent).mean() > 0.95, "what was kept is taken back for them"
