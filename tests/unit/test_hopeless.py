"""Runs that stop when hopeless: what a worker compares, what the head believes of it, and where it is never done."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import msgspec
import pytest

from nightshift.campaign import decision
from nightshift.campaign.busy import to_repeat
from nightshift.campaign.campaign import Campaign
from nightshift.campaign.hopeless import comparable, is_spared, least_reward, promise, reference, rungs
from nightshift.campaign.index import _digest
from nightshift.errors import UsageError
from nightshift.foretelling import Forecast, Foretelling, Rung, window
from nightshift.metrics import Step
from nightshift.records import (
    CURVE_POINTS,
    Failure,
    Load,
    Outcome,
    Phase,
    Progress,
    Record,
    Result,
    Training,
    Verdict,
)
from nightshift.report.data import Experiment
from nightshift.report.text import verdict
from nightshift.rules_toml import Chosen, rules_of
from nightshift.tasksets import Table
from nightshift.train_toml.config import Config, parse
from nightshift.train_toml.edit import set_values
from nightshift.watched import Hopeless, Watched, curve
from tests.campaigns import a_record, judged
from tests.rules import ARITHMETIC_TRL, ROOT

HALF = Foretelling(share=0.5, growth=0.5, sd=0.03)
QUARTER = Foretelling(share=0.25, growth=0.25, sd=0.06)
STEADY = (0.4,) * CURVE_POINTS
SHIPPED = parse((ROOT / "train.toml").read_bytes())


def with_curve(record: Record, points: tuple[float | None, ...]) -> Record:
    return replace(record, runs=tuple(replace(run, curve=points) for run in record.runs))


@pytest.fixture
def campaign() -> Campaign:
    """A baseline at about 0.52 whose rewards were 0.4 all the time."""
    baseline, *others = judged([[0.51, 0.53], [0.40], [0.30]])
    return Campaign.of([with_curve(baseline, STEADY), *others], baseline.branch, baseline.rules_hash)


def candidate(campaign: Campaign, **changes: object) -> Record:
    assert campaign.incumbent is not None
    return a_record(number=9, parent=campaign.incumbent.number, decided=9, effective_hash="another", **changes)


def stopped(campaign: Campaign, reward: float, foretelling: Foretelling = HALF) -> Record:
    forecast = Rung(foretelling, 0.4, 0.0).forecast(reward)
    run = Result(1002, Training(Outcome.STOPPED, 10, 30.0, cause="hopeless"), forecast=forecast)
    return candidate(campaign, runs=(run,), status=Verdict.DISCARD)


def changed(**values: object) -> Config:
    return parse(set_values(SHIPPED.source, {key.replace("__", "."): value for key, value in values.items()}))


def test_a_window_is_the_second_half_of_the_time_so_far() -> None:
    points = tuple(float(i) for i in range(32))
    assert window(points, 0.5) == sum(range(8, 16)) / 8
    assert window(points, 0.25) == sum(range(4, 8)) / 4
    assert window((*points[:4], None, None, None, *points[7:]), 0.25) is None  # three of four were not measured
    assert window((), 0.5) is None


def test_a_reward_foretells_a_difference_and_no_impossible_one() -> None:
    forecast = Rung(HALF, 0.4, 0.0, factor=2.0).forecast(0.3)
    assert forecast == Forecast(0.5, 0.3, 0.4, pytest.approx(-0.1), pytest.approx(0.03**2))
    assert Rung(QUARTER, 0.4, 0.0).forecast(0.0).delta == -1.0


def test_a_stopped_run_tells_of_the_difference_to_its_parent_and_of_nothing_else(campaign: Campaign) -> None:
    assert campaign.belief is not None
    found, scored = campaign.test(stopped(campaign, 0.35)), judged([[0.51, 0.53], [0.42]])[1]
    assert scored.judgement is not None
    assert scored.judgement.delta_stderr is not None
    assert -0.1 < found.delta < -0.05
    assert found.delta_stderr > scored.judgement.delta_stderr
    after = decision.settle(found, False, stopped(campaign, 0.35).decision)
    for what in ("mean", "sd"):  # of the incumbent's own score
        assert float(getattr(after, what)) == pytest.approx(float(getattr(campaign.belief, what)), abs=2e-4)
    assert _digest([stopped(campaign, 0.3)]) != _digest([stopped(campaign, 0.29)])


def test_without_noise_a_foretold_difference_is_what_two_exact_scores_would_tell(campaign: Campaign) -> None:
    exact = replace(stopped(campaign, 0.35).runs[0], forecast=Forecast(0.5, 0.35, 0.4, -0.07, 1e-10))
    found = campaign.test(replace(stopped(campaign, 0.35), runs=(exact,)))
    assert (found.delta, found.delta_stderr) == (pytest.approx(-0.07, abs=1e-6), pytest.approx(0.0, abs=1e-4))


def test_a_stopped_run_is_discarded_whatever_it_foretells(campaign: Campaign) -> None:
    for reward in (0.1, 0.7):
        record = stopped(campaign, reward)
        judgement = campaign.judge(record)
        assert judgement.verdict is Verdict.DISCARD
        assert judgement.diagnostics == {}
        assert judgement.why.endswith(" pp over the incumbent at 50% of its budget, stopped")
        after = campaign.step(replace(record, judgement=judgement))
        assert after.incumbent == campaign.incumbent
        assert record.score is None
        assert verdict(Experiment(record, (), None, False)) == "discard, stopped"


def test_a_run_is_hopeless_below_the_reward_where_its_rest_is_not_worth_its_time(campaign: Campaign) -> None:
    record = candidate(campaign)
    for foretelling in (QUARTER, HALF):
        rung = Rung(foretelling, 0.4, 0.0)
        worth = 0.1 * record.decision.prior_sd * (1 - foretelling.share)
        least = least_reward(campaign, record, rung)
        assert 0.3 < least < 0.4
        assert promise(campaign, record, rung, least + 1e-3) > worth > promise(campaign, record, rung, least - 1e-3)
        assert least_reward(campaign, record, rung, price=0.2) > least
        promises = [promise(campaign, record, rung, 0.02 * part) for part in range(21)]
        assert promises == sorted(promises)
    # Twice the difference is asked for where the rewards of one policy differ.
    assert least_reward(campaign, record, Rung(HALF, 0.4, 0.0, 2.0)) < least_reward(campaign, record, rung)
    # What tells next to nothing stops nothing.
    assert least_reward(campaign, record, Rung(Foretelling(0.5, 0.5, 1.0), 0.4, 0.0)) < 1e-3


@pytest.mark.parametrize(
    ("config", "factor"),
    [
        (changed(trainer__optim__lr=1e-5), 1.0),
        (changed(orchestrator__group_size=8), 2.0),
        (changed(orchestrator__train__sampling__temperature=0.7), 2.0),
        (changed(max_steps=70, trainer__scheduler__type="cosine"), 2.0),
        (changed(orchestrator__train__sampling__max_completion_tokens=32), None),
        (changed(orchestrator__train__filter_zero_advantages=False), None),
        (changed(orchestrator__algo__length_penalty__num_output_tokens_weight=0.1), None),
        (changed(orchestrator__train__source__curriculum__sampler__type="difficulty_pool"), None),
        (changed(orchestrator__train__ratio__arithmetic=2.0), None),
        (changed(seq_len=1024), None),
    ],
)
def test_rewards_compare_only_where_they_mean_the_same(
    campaign: Campaign, config: Config, factor: float | None
) -> None:
    assert config.values != SHIPPED.values
    assert comparable(config, SHIPPED) == factor
    found = rungs(campaign, candidate(campaign), config, SHIPPED, (QUARTER, HALF))
    assert [rung.factor for rung in found] == ([] if factor is None else [factor, factor])


def test_no_look_at_a_repeat_nor_beside_a_parent_without_a_curve(campaign: Campaign) -> None:
    assert campaign.incumbent is not None
    again = replace(candidate(campaign), effective_hash=campaign.incumbent.effective_hash)
    assert rungs(campaign, again, SHIPPED, SHIPPED, (HALF,)) == ()
    bare = judged([[0.51, 0.53]])
    of_no_curve = Campaign.of(bare, bare[0].branch, bare[0].rules_hash)
    assert reference(bare[0], 0.5) is None
    other = changed(trainer__optim__lr=1e-5)
    assert rungs(of_no_curve, candidate(of_no_curve), other, SHIPPED, (HALF,)) == ()
    assert len(rungs(campaign, candidate(campaign), other, SHIPPED, (HALF,))) == 1
    tried = campaign.decided[1].config_hash
    for known in ({"config_hash": tried}, {"diff": ()}):  # run once more; known ideas together
        assert rungs(campaign, candidate(campaign, **known), other, SHIPPED, (HALF,)) == ()


def test_about_every_tenth_is_spared() -> None:
    spared = [is_spared(a_record(config_hash=f"{number:012x}")) for number in range(1000)]
    assert sum(spared) == 100


def watch(rewards: list[float | None], is_spared: bool = False, **changes: object) -> Watched:
    """Steps of 1 s in a budget of 32 s, until the run is stopped."""
    rung = replace(Rung(HALF, 0.4, least=0.3), **changes)  # type: ignore[arg-type]
    watched = Watched(lambda reading: None, 32.0, (replace(rung, foretelling=QUARTER), rung), is_spared)
    for step, reward in enumerate(rewards, 1):
        watched(Progress(Phase.TRAINING, step, 32.0 - step, reward))
    return watched


def test_a_run_with_lower_rewards_is_ended_and_a_spared_one_only_foretold() -> None:
    with pytest.raises(Hopeless, match=r"^hopeless at 25% of the budget: mean reward 0.200, its parent's was 0.400$"):
        watch([0.2] * 32)
    late = [0.35] * 7 + [0.2] * 25
    with pytest.raises(Hopeless, match="hopeless at 50%"):
        watch(late)
    spared = watch([0.2] * 32, is_spared=True)
    assert spared.forecast == Rung(QUARTER, 0.4, 0.3).forecast(0.2)
    whole = Training(Outcome.BUDGET, 32, 32.0)
    assert spared.told(whole) is whole
    assert watch([0.35] * 32).forecast is None
    assert watch([None] * 32).forecast is None  # not measured is not hopeless
    assert watch([0.2] * 16, warmup_steps=20).forecast is None


def test_what_an_engine_makes_of_it_is_told_as_stopped() -> None:
    watched = Watched(lambda reading: None, 32.0, (Rung(HALF, 0.4, 0.3),), False)
    for step in range(1, 16):
        watched(Progress(Phase.TRAINING, step, 32.0 - step, 0.1))
    with pytest.raises(Hopeless):
        watched(Progress(Phase.TRAINING, 16, 16.0, 0.1))
    told = watched.told(Training(Outcome.CRASHED, 16, cause="anything", failure=Failure.MACHINERY))
    assert (told.outcome, told.num_steps, told.training_seconds, told.failure) == (Outcome.STOPPED, 16, 16.0, None)
    assert not told.outcome.is_success


def test_a_curve_has_the_mean_reward_of_each_part_of_the_budget() -> None:
    steps = [Step(1, 0.5, 0.2), Step(2, 0.9, 0.4), Step(3, 2.5, None), Step(4, 31.9, 0.6), Step(5, 40.0, 0.8)]
    found = curve(steps, 32.0)
    assert found[:3] == (pytest.approx(0.3), None, None)
    assert found[-1] == pytest.approx(0.7)  # what ends after the budget is in its last part
    assert curve([], 60.0) == (None,) * CURVE_POINTS


def test_it_is_off_and_cannot_be_switched_on_without_curves_of_its_own() -> None:
    assert ARITHMETIC_TRL.early_stop == ()
    for environments in (["countdown"], ["arithmetic", "countdown"]):
        with pytest.raises(UsageError, match=r"^rules.toml: early_stop = true: no recorded curves .*\"countdown\""):
            rules_of(ROOT, Chosen(environments=environments, early_stop=True), "trl", 0)
    with pytest.raises(UsageError, match="early_stop = true"):
        rules_of(ROOT, Chosen(environments=["gsm8k"], early_stop=True), "prime-rl", 2)


def test_it_is_switched_on_where_it_was_fitted_and_for_these_very_rules_only() -> None:
    chosen = Chosen(environments=["arithmetic"], early_stop=True)
    rules = rules_of(ROOT, chosen, "trl", 0)
    assert [each.share for each in rules.early_stop] == [0.25, 0.5]
    assert rules.hash(ROOT) != ARITHMETIC_TRL.hash(ROOT)
    assert rules.with_budget(rules.budget_seconds) == rules
    assert rules.with_budget(2 * rules.budget_seconds).early_stop == ()
    for other in ({"score_last": 5}, {"environment": {"arithmetic": Table(args={"levels": [1]})}}):
        with pytest.raises(UsageError):
            rules_of(ROOT, msgspec.structs.replace(chosen, **other), "trl", 0)


def test_the_shipped_table_is_what_was_fitted() -> None:
    fitted = json.loads((ROOT / "benchmarks" / "results" / "early_stop.json").read_text())["foretellings"]
    shipped = rules_of(ROOT, Chosen(environments=["arithmetic"], early_stop=True), "trl", 0).early_stop
    for each, found in zip(shipped, fitted, strict=True):
        assert found == pytest.approx(asdict(each), abs=6e-4)


def test_a_stopped_run_has_used_its_seed_and_is_no_reason_to_repeat_for_ever(campaign: Campaign) -> None:
    record = stopped(campaign, 0.3)
    assert campaign.step(record).seeds_of("another") == {1002}
    busy = replace(judged([[0.5, 0.5], [0.4]])[1], effective_hash="another", parent=1)
    busy = replace(busy, runs=(replace(busy.runs[0], load=Load(2, others_share=0.9)),))
    assert to_repeat([busy], 1) is busy
    assert to_repeat([busy, record], 1) is None


def test_a_crash_is_no_stop_whatever_its_run_was() -> None:
    run = Result(1, Training(Outcome.STOPPED, 3), forecast=Rung(HALF, 0.4, 0.3).forecast(0.1))
    crash = a_record(status=Verdict.CRASH, failure=Failure.MACHINERY, runs=(run,))
    assert verdict(Experiment(crash, (), None, False)) == "crash"


def test_a_forged_forecast_is_a_damaged_record() -> None:
    raw = msgspec.json.encode(Rung(HALF, 0.4, 0.3).forecast(0.1))
    for field, value in (("variance", -1.0), ("delta", 7.0), ("share", 0.0)):
        forged = msgspec.json.encode(msgspec.json.decode(raw) | {field: value})
        with pytest.raises(msgspec.ValidationError):
            msgspec.json.decode(forged, type=Forecast)
