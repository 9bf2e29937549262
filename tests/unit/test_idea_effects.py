"""benchmarks/idea_effects.py: the belief over effects of ideas, and that it is compared with the chain on the same."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import idea_effects  # noqa: E402
from idea_effects import BEST, RULES, VARIANTS, Bools, Chain, Floats, IdeaEffects, RecombinedNights  # noqa: E402
from simulated_nights import Player, ShippedRule, World, simulate  # noqa: E402

# One kind of idea and one noise: the belief is exactly Gaussian.
PLAIN = replace(RULES, kinds=((0.5, 1.0),), priors=((1.0, (1.0,)),), noises=((1.0, 1.0),))
ONE, ACTIVE = np.ones(1), np.ones(1, bool)


def conditioned(rows: list[list[float]], scores: list[float], s2: list[float]) -> tuple[Floats, Floats]:
    """The textbook: base known by two runs of 0.47, effects N(0.5, 1) pp, all runs at once."""
    x, size = np.array(rows), len(rows[0])
    prior, precision = np.array([0.47] + [0.005] * (size - 1)), np.diag([2 / s2[0]] + [1e4] * (size - 1))
    covariance = np.linalg.inv(precision + x.T @ np.diag(1 / np.array(s2[1:])) @ x)
    return covariance @ (precision @ prior + x.T @ (np.array(scores) / s2[1:])), covariance


def test_the_belief_is_the_textbook_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an idea on the baseline, another on the first, and a third on the second without the first."""
    monkeypatch.setattr(idea_effects, "RULES", PLAIN)
    rule = IdeaEffects(0.0, seed=1)
    rule.begin(np.full((1, 2), 0.47), 1319)
    s2 = [float(rule.belief.run_variance(PLAIN)[0, 0])]
    tried = [([1], 0.49), ([1, 1], 0.50), ([1, 0, 1], 0.465)]
    for n, (chosen, score) in enumerate(tried, start=1):
        rule.test_set(ACTIVE, np.array([chosen], float), score * ONE, 1e-4 * ONE)
        s2.append(float(rule.belief.run_variance(PLAIN)[0, 0]))
        rows = [[*x, 1, *[0] * (n - len(x))] for x, _ in tried[:n]]
        means, covariance = conditioned(rows, [y for _, y in tried[:n]], s2)
        assert rule.belief.means[0, 0] == pytest.approx(means, abs=1e-12)
        assert rule.belief.covariance[0, 0] == pytest.approx(covariance, abs=1e-12)
    runs = np.array([[1, 0, 0, 0], *rows])
    assert rule.incumbent == [(runs @ means).argmax()]
    assert rule.reported == pytest.approx((runs @ means).max(), abs=1e-12)
    best = runs[rule.incumbent[0]] - runs[0]
    assert rule.gain[0] == pytest.approx(best @ means, abs=1e-12)
    assert rule.gain[1] == pytest.approx((best @ covariance @ best) ** 0.5, abs=1e-12)


def test_on_the_first_idea_it_believes_what_the_chain_believes() -> None:
    rng, chain, rule = np.random.default_rng(0), ShippedRule(RULES), IdeaEffects(0.0, seed=1)
    first, score, e2 = rng.normal(0.475, 0.02, (50, 2)), rng.normal(0.48, 0.05, 50), np.full(50, 1e-4)
    chain.begin(first, 1319)
    rule.begin(first, 1319)
    keep, _ = chain.test(np.ones(50, bool), score, e2, score)
    rule.test_set(np.ones(50, bool), np.ones((50, 1)), score, e2)
    assert (rule.incumbent == keep).all()
    assert rule.reported == pytest.approx(chain.reported, abs=1e-12)
    assert rule.belief.weights == pytest.approx(chain.belief.weights, abs=1e-12)


@pytest.mark.parametrize("world", [World(), World(helpful=0.1, neutral=0.0, bad=(-0.12, 0.06))])
def test_told_as_sets_the_chain_has_the_same_nights(world: World) -> None:
    """So the two rules meet the same ideas, crashes, clocks and luck, and a set is worth what a chain of it is."""
    chain = simulate(Player(ShippedRule(RULES)), world, 20, 7)
    sets = RecombinedNights(Chain(RULES), world, 20, 7).play()
    assert sets.gain == pytest.approx(chain.gain, abs=1e-12)
    assert sets.believed == pytest.approx(chain.believed, abs=1e-12)
    assert sets.delta == pytest.approx(chain.delta, abs=1e-12)
    assert (sets.kept == chain.kept).all()
    assert sets.ideas == chain.ideas


def test_the_incumbent_was_run_and_the_gain_is_its() -> None:
    rule = IdeaEffects(VARIANTS[BEST], 3)
    nights = RecombinedNights(rule, World(), 40, 3)
    ran: list[set[bytes]] = [{b""} for _ in range(40)]
    test_set = rule.test_set

    def spied(active: Bools, chosen: Floats, score: Floats, e2: Floats) -> None:
        test_set(active, chosen, score, e2)
        for i in np.flatnonzero(active):
            ran[i].add(bytes([*np.flatnonzero(chosen[i, 1:]), chosen.shape[1] - 1]))
        for i, run in enumerate(rule.incumbent):
            assert bytes(np.flatnonzero(rule.sets[i, run, 1:]).tolist()) in ran[i]

    rule.test_set = spied
    night = nights.play()
    for i, run in enumerate(rule.incumbent):
        truth = nights.truth(np.repeat(rule.sets[i : i + 1, run, 1:], 40, axis=0))[0][i]
        assert night.gain[i] == pytest.approx(truth - 0.475, abs=1e-12)
    assert (rule.incumbent > 0).mean() > 0.9


def test_the_command_prints_the_table_and_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idea_effects, "JUDGED", {name: idea_effects.JUDGED[name] for name in ("default", "hard")})
    monkeypatch.setattr(idea_effects, "MORE", {"interactions": World()})
    output = tmp_path / "result.json"
    arguments = ["--nights", "16", "--output", str(output)]
    done = CliRunner().invoke(idea_effects.main, arguments)
    assert done.exit_code == 0, done.output
    result = json.loads(output.read_text())
    assert set(result["worlds"]) == {*idea_effects.JUDGED, *idea_effects.MORE}
    assert "interactions, " + BEST in done.stdout
    del result["worlds"]["hard"]
    output.write_text(json.dumps(result))
    again = CliRunner().invoke(idea_effects.main, arguments)
    assert "hard: " in again.stderr
    assert "default: " not in again.stderr
    assert json.loads(output.read_text())["worlds"]["hard"][BEST]["nights"] == 16
