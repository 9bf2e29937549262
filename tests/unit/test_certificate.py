"""The certificate's estimator: what its interval covers, what it says where little was measured, its file."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from nightshift.certify import certificate
from nightshift.certify.certificate import Certificate, estimate, t_probability, t_quantile
from nightshift.decision_rules import DecisionRules
from nightshift.errors import UsageError
from nightshift.files import write_json

RULES = DecisionRules()
SLOPE = 0.39894  # of the score in the latent shift, at a score of one half
Runs = NDArray[np.int8]


def draw(
    rng: np.random.Generator, num_runs: tuple[int, int], n: int, seed_sd: float, within: float, between: float,
    gain: float = 0.0, incumbent_seed_sd: float | None = None,
) -> tuple[Runs, Runs]:  # fmt: skip
    """Baseline's and incumbent's runs of 0/1 scores, the baseline's expected score one half, on new examples.

    Latent correlation of one example's answers: `within` two runs of a config, `between` the configs.
    """
    difficulty = rng.standard_normal((1, n), dtype=np.float32)
    sides = []
    for m, sd, shift in zip(num_runs, (seed_sd, incumbent_seed_sd or seed_sd), (0.0, gain), strict=True):
        own = rng.standard_normal((1, n), dtype=np.float32)
        seed = (rng.standard_normal((m, 1), dtype=np.float32) * sd + shift) / SLOPE
        noise = rng.standard_normal((m, n), dtype=np.float32)
        latent = math.sqrt(between) * difficulty + math.sqrt(within - between) * own + math.sqrt(1 - within) * noise
        sides.append((latent + seed > 0).astype(np.int8))
    return sides[0], sides[1]


# (runs, examples, seed sd, latent correlation within and between configs). A latent 0.85 / 0.80 is a 0/1
# correlation of 0.65 / 0.59, as decision-rule.md assumes for GSM8K.
COVERED = [
    ((3, 3), 1319, 0.0125, 0.85, 0.80),
    ((3, 3), 1319, 0.0, 0.85, 0.80),
    ((3, 3), 1319, 0.02, 0.85, 0.80),
    ((3, 3), 1000, 0.03, 0.85, 0.50),
    ((3, 2), 1319, 0.0125, 0.85, 0.80),
    ((5, 5), 1319, 0.005, 0.60, 0.30),
]


@pytest.mark.parametrize(("num_runs", "n", "seed_sd", "within", "between"), COVERED)
def test_the_interval_covers_the_truth_in_93_to_97_percent(
    num_runs: tuple[int, int], n: int, seed_sd: float, within: float, between: float
) -> None:
    """1,000 repetitions; both configs are equally good, so the truth is 0 exactly. Standard error 0.7 %."""
    rng = np.random.default_rng(20)
    covered = 0
    for _ in range(1000):
        low, high = estimate(*draw(rng, num_runs, n, seed_sd, within, between), RULES).interval
        covered += low <= 0 <= high
    assert 0.93 <= covered / 1000 <= 0.97


def test_with_one_seed_each_the_interval_covers_if_the_prior_is_right() -> None:
    rng = np.random.default_rng(6)
    covered = 0
    for _ in range(500):
        # The prior says: sd^2 is seed_df seed_sd^2 / chi2.
        sd = RULES.seed_sd * math.sqrt(RULES.seed_df / rng.chisquare(RULES.seed_df))
        result = estimate(*draw(rng, (1, 1), 1319, sd, 0.85, 0.80), RULES)
        covered += result.interval[0] <= 0 <= result.interval[1]
        assert "too few runs to measure the spread of seeds: its prior was taken, sd 1.25 pp" in result.note
    assert 0.92 <= covered / 500 <= 0.98


def test_the_difference_is_between_means_and_the_interval_around_it() -> None:
    baseline, incumbent = draw(np.random.default_rng(1), (3, 4), 400, 0.01, 0.85, 0.8, gain=0.05)
    result = estimate(baseline, incumbent, RULES)
    assert result.difference == pytest.approx(incumbent.mean() - baseline.mean())
    assert sum(result.interval) / 2 == pytest.approx(result.difference)
    assert result.note == ""
    assert "prior" in estimate(baseline[:2], incumbent[:1], RULES).note  # of too few runs


def test_the_variance_is_the_one_of_the_docstring() -> None:
    """By hand, with plain loops, for three runs against two."""
    baseline, incumbent = draw(np.random.default_rng(2), (3, 2), 50, 0.1, 0.85, 0.5)
    n, k, squares, rest = 50, 1 / 3 + 1 / 2, 0.0, 0.0
    for side in (baseline.astype(float), incumbent.astype(float)):
        for run in side:
            squares += (run.mean() - side.mean()) ** 2
            for i in range(n):
                rest += (run[i] - run.mean() - side[:, i].mean() + side.mean()) ** 2
    paired = incumbent.mean(axis=0) - baseline.mean(axis=0)
    r, e, v = squares / 3, rest / (3 * 49), paired.var(ddof=1)
    result = estimate(baseline, incumbent, RULES)
    assert r > e / n, "the case does not show the seeds' part"
    assert result.stderr**2 == pytest.approx(v / n + k * (r - e / n))
    assert result.df == pytest.approx(result.stderr**4 / ((k * r) ** 2 / 3 + (v / n) ** 2 / 49))


@pytest.mark.parametrize("answer", [0.0, 1.0])
def test_all_ties_are_no_proof_of_equality(answer: float) -> None:
    result = estimate([[answer] * 100] * 3, [[answer] * 100] * 3, RULES)
    assert result.difference == 0
    assert "all runs of a config scored alike" in result.note
    assert result.interval[1] == pytest.approx(t_quantile(0.975, 8) * RULES.seed_sd * math.sqrt(2 / 3))


@pytest.mark.parametrize(
    ("probability", "df", "quantile"),  # tables of Student's t
    [(0.975, 1, 12.706205), (0.975, 4, 2.776445), (0.8, 4, 0.940965), (0.975, 30, 2.042272), (0.5, 3, 0.0)],
)
def test_t_quantile_is_that_of_the_tables(probability: float, df: float, quantile: float) -> None:
    assert t_quantile(probability, df) == pytest.approx(quantile, abs=1e-6)


def test_t_quantile_ends_in_the_normal() -> None:
    assert t_quantile(0.975, 1e9) == pytest.approx(1.959964, abs=1e-5)


MADE = Certificate(
    created="2026-11-21T00:00:00+00:00",
    branch="autoresearch/x",
    rules_hash="abc",
    baseline_score=0.5,
    incumbent_score=0.52,
    difference=0.02,
    interval=(-0.01, 0.05),
    num_seeds={"baseline": 3, "incumbent": 2},
    num_examples=1319,
    estimator="as it says",
    sealed_looks=2,
    notes=("one crashed",),
)


@pytest.mark.parametrize(
    ("t", "df", "p"), [(2.228139, 10, 0.05), (-1.959964, 1e9, 0.05), (0.0, 3, 1.0), (63.657, 1, 0.01)]
)
def test_the_chance_of_a_t_as_large(t: float, df: float, p: float) -> None:
    assert t_probability(t, df) == pytest.approx(p, abs=1e-5)


def test_the_file_is_read_back_and_has_the_promised_fields(tmp_path: Path) -> None:
    write_json(tmp_path / certificate.CERTIFICATE_NAME, MADE)
    assert certificate.read(tmp_path) == MADE
    data = json.loads((tmp_path / "certificate.json").read_text())
    assert data["version"] == 1
    assert data["interval"] == [-0.01, 0.05]
    assert data["num_seeds"] == {"baseline": 3, "incumbent": 2}


def test_no_file_is_no_certificate_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    assert certificate.read(tmp_path) is None
    for text in ("", "[]", '{"version": 2}', '{"version": 1}', '{"version": 1, "interval": 3}'):
        (tmp_path / "certificate.json").write_text(text)
        with pytest.raises(UsageError, match=r"certificate\.json is damaged"):
            certificate.read(tmp_path)


@pytest.mark.parametrize(
    ("interval", "verdict"), [((0.01, 0.03), "better"), ((-0.01, 0.03), "not told apart"), ((-0.03, -0.01), "worse")]
)
def test_the_summary_says_what_the_interval_says(interval: tuple[float, float], verdict: str) -> None:
    text = certificate.summary(replace(MADE, interval=interval))
    assert f"verdict:          {verdict}\n" in text
    assert "note:             one crashed" in text
