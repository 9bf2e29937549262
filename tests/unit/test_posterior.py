"""The baseline beside incumbent and candidate: the same belief as an exact Gaussian computation over all configs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from nightshift.campaign.posterior import Standing, follow

from nightshift.campaign import decision
from nightshift.records import (
    DecisionRules,
    Evaluation,
    Judgement,
    Outcome,
    Record,
    Run,
    Side,
    Training,
    Verdict,
    Weights,
)
from tests.unit.test_ledger import a_record

# One kind of idea: the joint belief is a Gaussian, so the textbook has it exactly.
RULES = DecisionRules(prior_sd=0.05, ideas=((1.0, -0.2, 1.0),), seed_sd=0.02)
N = 400


def a_run(index: int, side: Side, scores: tuple[float, ...]) -> Run:
    evaluation = Evaluation(float(np.mean(scores)), 0.02, scores, "e" * 64, 0.0, 12.0, Weights(1, "f" * 64), 3.0)
    return Run(index, side, 1000 + index, Training(Outcome.BUDGET, 40), evaluation, 9.0, 75.0)


def exact(mean: float) -> tuple[float, ...]:
    right = round(mean * N)
    return (1.0,) * right + (0.0,) * (N - right)


# Means of the runs of each experiment: the baseline's two, then a candidate's, with replicates of both sides.
STORY: list[list[tuple[Side, float]]] = [
    [(Side.CANDIDATE, 0.50), (Side.CANDIDATE, 0.53)],
    [(Side.CANDIDATE, 0.48)],
    [(Side.CANDIDATE, 0.56), (Side.CANDIDATE, 0.54)],
    [(Side.CANDIDATE, 0.53), (Side.INCUMBENT, 0.57)],
    [(Side.CANDIDATE, 0.60), (Side.INCUMBENT, 0.53), (Side.CANDIDATE, 0.58)],
    [(Side.CANDIDATE, 0.55)],
]


def campaign(story: list[list[tuple[Side, float]]], rules: DecisionRules = RULES) -> list[Record]:
    """Records as experiment.py writes them."""
    records: list[Record] = []
    belief, kept = None, [0]
    for number, runs in enumerate(story, 1):
        record = a_record(number=number, parent=belief and kept[belief.incumbent])
        made = tuple(a_run(i, side, exact(mean)) for i, (side, mean) in enumerate(runs, 1))
        if belief is None:
            belief, kept = decision.baseline([exact(mean) for _, mean in runs], rules), [number]
            judgement = Judgement(Verdict.KEEP, "baseline", incumbent_score=belief.mean)
        else:
            comparison = decision.compare(belief, rules)
            for side, mean in runs:
                comparison = decision.observe(comparison, side, exact(mean), rules)
            choice = decision.decide(comparison, rules, can_replicate=False)
            judgement, keep = decision.judge(comparison, choice), choice.keep
            belief = decision.settle(comparison, keep, RULES)
            kept += [number] * keep
            if not keep:  # as experiment.taken_back writes it
                judgement = replace(judgement, taken_back_score=belief.mean)
        records.append(replace(record, status=str(judgement.verdict), judgement=judgement, runs=made))
    return records


def by_regression(story: list[list[tuple[Side, float]]], records: list[Record]) -> Standing:
    """Prior precision over [baseline, candidate 1, ...] plus one observation a run; each run has the variance
    that the rule gave it at its time."""
    precision = np.zeros((len(story), len(story)))
    information = np.zeros(len(story))
    belief = decision.baseline([exact(mean) for _, mean in story[0]], RULES)
    precision[0, 0] += 1 / belief.variance
    information[0] += belief.mean / belief.variance
    kept = [0]
    for i, runs in enumerate(story[1:], 1):
        child, incumbent = np.zeros(len(story)), kept[belief.incumbent]
        child[i], child[incumbent] = 1, -1
        precision += np.outer(child, child) / RULES.prior_sd**2
        information += child * -0.01 / RULES.prior_sd**2
        comparison = decision.compare(belief, RULES)
        for side, mean in runs:
            comparison = decision.observe(comparison, side, exact(mean), RULES)
            s2 = comparison.noise.variance(RULES)
            j = i if side is Side.CANDIDATE else incumbent
            precision[j, j] += 1 / s2
            information[j] += round(mean * N) / N / s2
        keep = records[i].status == "keep"
        belief = decision.settle(comparison, keep, RULES)
        kept += [i] * keep
    incumbent = kept[belief.incumbent]
    covariance = np.linalg.inv(precision)
    mean = covariance @ information
    contrast = np.zeros(len(story))
    contrast[incumbent] += 1
    contrast[0] -= 1
    return Standing(
        incumbent=mean[incumbent],
        baseline=mean[0],
        incumbent_sd=covariance[incumbent, incumbent] ** 0.5,
        difference_sd=float(contrast @ covariance @ contrast) ** 0.5,
    )


def test_the_story_has_keeps_discards_and_replicates_of_both_sides() -> None:
    records = campaign(STORY)
    assert [r.status for r in records].count("keep") >= 3
    assert [r.status for r in records].count("discard") >= 2


def test_incumbent_and_baseline_are_those_of_an_exact_computation_over_all_configs() -> None:
    records = campaign(STORY)
    found, wanted = follow(records, RULES)[len(STORY)], by_regression(STORY, records)
    for name in ("incumbent", "baseline", "incumbent_sd", "difference_sd"):
        assert getattr(found, name) == pytest.approx(getattr(wanted, name), rel=1e-6), name


def test_without_a_keep_the_difference_is_nothing_and_certain() -> None:
    standing = follow(campaign(STORY[:2]), RULES)[2]
    assert standing.difference == pytest.approx(0.0, abs=1e-12)
    assert standing.difference_sd == pytest.approx(0.0, abs=1e-9)


def test_an_incumbent_run_that_was_set_aside_changes_nothing() -> None:
    story = [*STORY[:1], [(Side.CANDIDATE, 0.52), (Side.INCUMBENT, 0.02)]]
    without = [*STORY[:1], [(Side.CANDIDATE, 0.52)]]
    assert follow(campaign(story), RULES)[2].baseline == follow(campaign(without), RULES)[2].baseline


def test_other_constants_leave_the_recorded_means_and_no_interval() -> None:
    records = campaign(STORY)
    standing = follow(records, DecisionRules(prior_sd=0.3))[len(STORY)]
    assert standing.difference_sd is None
    assert standing.incumbent == pytest.approx(follow(records, RULES)[len(STORY)].incumbent)
    assert follow(records, None)[len(STORY)] == standing


def test_scores_of_another_length_leave_the_recorded_means() -> None:
    records = campaign(STORY)
    torn = replace(records[2], runs=(a_run(1, Side.CANDIDATE, (1.0, 0.0)),))
    assert follow([*records[:2], torn, *records[3:]], RULES)[3].difference_sd is None


def test_crashes_and_nothing_at_all() -> None:
    crash = a_record(number=1, status="crash", judgement=Judgement(Verdict.CRASH, "loss is nan"))
    assert follow([crash], RULES) == {}
    assert follow([], RULES) == {}
