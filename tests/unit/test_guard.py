"""A guard: an environment that every run is scored on and that never trains. A change that lowers it is not kept."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from nightshift.campaign.records import Change, Guard, Record, Run, Verdict
from nightshift.cli.output import summary
from nightshift.config.rules import Rules
from nightshift.config.rules_toml import Chosen, rules_elsewhere, rules_of
from nightshift.config.train_toml import parse
from nightshift.engines.prime_rl.engine import PrimeRlEngine
from nightshift.engines.trl.engine import TrlEngine
from nightshift.errors import UsageError
from nightshift.evaluation.environment import load
from nightshift.evaluation.evaluate import evaluate, examples_of
from tests.campaigns import BASELINE, a_change, a_record, a_result, folded, replace
from tests.rules import ROOT
from tests.unit.test_composite import Parrot

LIMIT = 0.02


def chosen(*names: str, **tables: dict[str, Any]) -> Rules:
    return rules_of(ROOT, msgspec.convert({"environments": names, "environment": tables}, Chosen), "trl", 0)


def guarded() -> Rules:
    return chosen("arithmetic", countdown={"guard": 2.0})


def measured(number: int, score: float, guard: float, run: Run) -> Record:
    result = a_result(score, 400, 1000 + number)
    assert result.evaluation is not None
    evaluation = replace(result.evaluation, guards=(Guard("countdown", LIMIT, guard, 0.01),))
    changes = {"decided": number, "decided_before": number - 1, "parent": 1 if number > 1 else None}
    return a_record(number=number, run=run, result=replace(result, evaluation=evaluation), **changes)


def night(*scores: tuple[float, float]) -> list[Record]:
    """Records of a baseline and of runs that each propose a new change, from their scores and their guards' scores."""
    records = list[Record]()
    for number, (score, guard) in enumerate(scores, 1):
        campaign = folded(records)
        run = Run(kept=campaign.kept, new=a_change(number)) if records else Run()
        records.append(campaign.judge(measured(number, score, guard, run), parse(BASELINE)))
    return records


def test_a_guard_is_scored_and_never_trained() -> None:
    rules = guarded()
    assert [rule.name for rule in rules.scored] == ["arithmetic", "countdown"]
    assert rules.environment_names == ("arithmetic",)
    assert rules.name == "arithmetic-trl"
    assert "environments/countdown/" in rules.measuring
    engine = TrlEngine(rules, ROOT, {})
    spec = engine.spec(engine.validate(parse(BASELINE)).settings, 1, ROOT)
    assert [environment["name"] for environment in spec["environments"]] == ["arithmetic"]
    names = [environment.name for environment, _ in examples_of("validation", rules, ROOT)]
    assert set(names) == {"arithmetic", "countdown"}
    assert rules_elsewhere(ROOT, rules, ["countdown"], 0).guards == ()
    (arithmetic,), (guard,) = rules.environments, rules.guards
    usual = chosen("arithmetic").evaluation_seconds * (1 + guard.num_validation / arithmetic.num_validation)
    assert rules.evaluation_seconds == usual
    settings = PrimeRlEngine(replace(rules, engine="prime-rl"), ROOT, {}).validate(parse(BASELINE)).settings
    assert [source["name"] for source in settings["orchestrator"]["train"]["source"]] == ["arithmetic"]


@pytest.mark.parametrize(
    ("names", "tables", "words"),
    [
        (["countdown"], {"countdown": {"guard": 2.0}}, "a guard is no game, and does not train"),
        (["arithmetic"], {"tictactoe": {"guard": 2.0}}, "a guard is no game, and does not train"),
        (["arithmetic"], {"gsm8k": {"guard": 2.0}}, "cannot answer arithmetic and gsm8k"),
    ],
)
def test_what_cannot_be_a_guard_is_refused(names: list[str], tables: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        chosen(*names, **tables)


def test_the_score_of_a_guard_stands_beside_the_score_and_is_no_part_of_it() -> None:
    rules = guarded()
    (arithmetic,) = load(ROOT, rules.environments)
    guard = SimpleNamespace(name="countdown", package="x", episodes=arithmetic.episodes, scorer=None)
    examples = arithmetic.examples("validation")[:6]
    tasks = [*((arithmetic, e) for e in examples[:2]), *((guard, e) for e in examples[2:])]
    answers = [f"#### {examples[0].answer}", "#### -1", f"It is {examples[2].answer}.", *("#### -1",) * 3]
    evaluation = evaluate(Parrot(answers), tasks, rules, None, lambda reading: None)
    assert (evaluation.eval_score, evaluation.example_scores, evaluation.strict_score) == (0.5, (1, 0), 0.5)
    assert [(g.environment, g.limit, g.score) for g in evaluation.guards] == [("countdown", LIMIT, 0.25)]
    record = a_record(status="keep", result=replace(a_result(), evaluation=evaluation))
    assert "\ncountdown_score:" in summary(record)
    assert "\narithmetic_score:" not in summary(record), "it is the eval_score"


def test_a_change_that_raises_the_score_and_ruins_the_guard_is_not_kept_and_the_verdict_says_why() -> None:
    _, ruined = night((0.40, 0.50), (0.55, 0.20))
    assert ruined.status == Verdict.DISCARD
    assert "; 0002 not kept: guard countdown falls: -30.0 ± " in ruined.why
    assert "P(by more than 2 pp)" in ruined.why
    assert ruined.judgement.steps == ruined.judgement.kept == ()
    assert night((0.40, 0.50), (0.55, 0.49))[-1].status == Verdict.KEEP
    assert night((0.40, 0.50), (0.38, 0.20))[-1].why.count("guard") == 0, "what the rule discards needs no guard"


def test_a_change_that_a_guard_stopped_is_neither_adopted_later_nor_tested_again() -> None:
    records = night((0.40, 0.50), (0.60, 0.20), (0.41, 0.50), (0.39, 0.50))
    campaign = folded(records)
    assert all(decision.change.experiment != 2 for record in records[2:] for decision in record.judgement.decisions)
    assert campaign.kept == ()
    assert campaign.posterior.rider(Change()) != a_change(2)


def test_a_kept_change_leaves_once_its_guard_has_fallen_for_sure() -> None:
    records = night((0.40, 0.50), (0.60, 0.485))
    assert records[-1].status == Verdict.KEEP
    for number in (3, 4, 5):
        campaign = folded(records)
        again = measured(number, 0.60, 0.30, Run(kept=campaign.kept))
        records.append(campaign.judge(replace(again, parent=2), parse(BASELINE)))
    reverts = [step.name for record in records for step in record.judgement.steps if step.name.startswith("revert")]
    assert reverts == ["revert 0002"]
    assert any("0002 reverted: guard countdown falls" in record.why for record in records)
    assert folded(records).kept == ()
