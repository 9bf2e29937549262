"""Several environments: one score, one vector for the decision, and what the mean hides."""

import json
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from nightshift.campaign import campaign as composite
from nightshift.campaign.records import (
    Completion,
    Part,
    Progress,
    Weights,
)
from nightshift.config.rules import Decoding, Rules
from nightshift.config.rules_toml import Chosen, rules_of
from nightshift.config.train_toml import parse
from nightshift.engines.mixture import ratios
from nightshift.engines.trl.engine import TrlEngine
from nightshift.errors import ConfigError, EngineError
from nightshift.evaluation.environment import Environment, Example, load
from nightshift.evaluation.evaluate import evaluate
from tests.campaigns import replace
from tests.rules import ARITHMETIC_TRL, ROOT

GROUPS = b"[orchestrator]\ngroup_size = 4\n"


def chosen(*names: str, **tables: dict[str, float]) -> Rules:
    found = msgspec.convert({"environments": names, "environment": tables}, Chosen)
    return rules_of(ROOT, found, "trl", 1)


def test_the_mean_of_the_vector_is_the_weighted_mean_of_the_environments() -> None:
    parts = Part("a", 4, 1.0, 0.25, math.sqrt(0.1875 / 4)), Part("b", 2, 3.0, 1.0, 0.0)
    vector = composite.weighted([1, 0, 0, 0, 1, 1], parts)
    assert vector.mean() == pytest.approx(0.25 * 0.25 + 0.75 * 1.0)
    assert vector.std() / math.sqrt(len(vector)) == pytest.approx(0.25 * parts[0].stderr)
    assert composite.weighted([1.0, 0.0], []).tolist() == [1.0, 0.0]
    with pytest.raises(ValueError, match="data point"):
        composite.weighted([1.0], parts)


def test_an_evaluation_weighs_what_it_measures() -> None:
    arithmetic = ARITHMETIC_TRL.environments[0]
    rules = replace(ARITHMETIC_TRL, environments=(arithmetic, replace(arithmetic, name="gsm8k", weight=3.0)))
    (first,) = load(ROOT, [arithmetic])
    second = SimpleNamespace(name="gsm8k", package=first.package, episodes=first.episodes, scorer=None)
    examples = first.examples("validation")[:6]
    both = [*((first, e) for e in examples[:4]), *((second, e) for e in examples[4:])]
    answers = [f"#### {examples[0].answer}", *("#### -1",) * 3, f"It is {examples[4].answer}.", "#### -1"]
    found = evaluate(Parrot(answers), both, rules, None, lambda reading: None)
    parts = [(p.environment, p.num_examples, p.weight, p.score) for p in found.parts]
    assert parts == [("arithmetic", 4, 1.0, 0.25), ("gsm8k", 2, 3.0, 0.5)]
    assert found.eval_score == pytest.approx(0.25 * 0.25 + 0.75 * 0.5)
    assert found.strict_score == pytest.approx(0.25 * 0.25)
    assert found.eval_stderr == pytest.approx(math.hypot(0.25 * math.sqrt(0.1875 / 4), 0.75 * math.sqrt(0.25 / 2)))
    assert list(found.example_scores) == [1, 0, 0, 0, 1, 0]
    other = [(first, replace(examples[0], answer="-1")), *both[1:]]
    assert evaluate(Parrot(answers), other, rules, None, lambda reading: None).examples_sha256 != found.examples_sha256


def test_training_takes_the_environments_by_their_ratio() -> None:
    rules = chosen("gsm8k", "arithmetic")
    config = parse(GROUPS + b"[orchestrator.train.ratio]\narithmetic = 3\n")
    assert ratios(config, rules) == {"gsm8k": 1.0, "arithmetic": 3.0}
    settings = TrlEngine(rules, ROOT, {}).validate(config).settings
    assert settings["ratio"] == {"gsm8k": 1.0, "arithmetic": 3.0}
    assert "ratio" not in TrlEngine(ARITHMETIC_TRL, ROOT, {}).validate(parse(GROUPS)).settings
    equal = parse(GROUPS + b"[orchestrator.train.ratio]\narithmetic = 1\n")
    assert equal.hash == parse(GROUPS).hash  # what holds without it


def test_a_ratio_of_nothing_is_refused() -> None:
    cause = r":4: orchestrator\.train\.ratio\.arithmetik = 2\.0: these rules train on gsm8k and arithmetic\. Delete it"
    with pytest.raises(ConfigError, match=cause):
        ratios(parse(GROUPS + b"[orchestrator.train.ratio]\narithmetik = 2\n"), chosen("gsm8k", "arithmetic"))


class Parrot:
    """A stand-in for a session: it says what it was told to say."""

    def __init__(self, answers: Sequence[str]) -> None:
        self._answers = answers

    def load_final_weights(self) -> Weights:
        return Weights(1, "0" * 64)

    def complete(self, chats: Sequence[Any], decoding: Decoding, progress: Any) -> list[Completion]:
        progress(Progress(phase="evaluating", num_steps=1))
        return [Completion(text, 1, False) for text in self._answers]


def posed(num_examples: int) -> list[tuple[Environment, Example]]:
    (environment,) = load(ROOT, ARITHMETIC_TRL.environments)
    return [(environment, example) for example in environment.examples("validation")[:num_examples]]


def test_an_evaluation_scores_both_ways_and_an_environment_without_a_form_only_one(tmp_path, monkeypatch):
    examples = posed(4)
    right = [example.answer for _, example in examples]
    answers = [f"#### {right[0]}", f"It is {right[1]}.", "#### 1000", "no idea"]
    path = tmp_path / "evaluation.jsonl"
    found = evaluate(Parrot(answers), examples, ARITHMETIC_TRL, path, lambda reading: None)
    assert (found.eval_score, found.strict_score) == (0.5, 0.25)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["formatted"] for line in lines] == [True, False, True, False]
    monkeypatch.delattr("nightshift_arithmetic.scoring.is_formatted")
    found = evaluate(Parrot(answers), examples, ARITHMETIC_TRL, path, lambda reading: None)
    assert (found.eval_score, found.strict_score) == (0.5, None)
    assert "formatted" not in json.loads(path.read_text().splitlines()[0])


def test_of_what_a_reward_raises_nothing_but_its_type_is_kept_where_no_answer_is_written(tmp_path, monkeypatch):
    """The test split has no file of answers, and a cause stands in runs/certify."""
    examples = posed(1)

    def fails(text: str, answer: str) -> float:
        raise LookupError(f"the answer is {answer}")

    monkeypatch.setattr("nightshift_arithmetic.scoring.score", fails)
    said = {}
    for path in (None, tmp_path / "evaluation.jsonl"):
        with pytest.raises(EngineError) as raised:
            evaluate(Parrot(["7"]), examples, ARITHMETIC_TRL, path, lambda reading: None)
        said[path is None] = str(raised.value)
    assert f"LookupError: the answer is {examples[0][1].answer}" in said[False]
    monkeypatch.setattr("nightshift_arithmetic.scoring.score", lambda text, answer: float("nan"))
    with pytest.raises(EngineError, match=r"scoring: score nan is not 0\.\.1"):
        evaluate(Parrot(["7"]), examples, ARITHMETIC_TRL, path, lambda reading: None)
    assert said[True].startswith("rewards of the test split fail or are refused: LookupError. Check other splits")


def test_an_example_of_several_answers_is_cut_off_if_one_of_them_was_and_failed_rewards_stay_secret(tmp_path) -> None:
    """`path`: of the answers; without it the text of an exception may hold a right answer of the test split."""
    (first,) = load(ROOT, ARITHMETIC_TRL.environments)
    scorer = SimpleNamespace(close=lambda: None)
    scorer.failures = lambda: "failed" if scorer.is_secret else "failed: 42"
    twice = SimpleNamespace(
        name=first.name, package=first.package, scorer=scorer, episodes=lambda example: 2 * first.episodes(example)
    )
    both = [(twice, example) for example in first.examples("validation")[:2]]
    session = Parrot(["#### 1"] * 4)
    for answer, wrong in (("-1", 0.5), (both[0][1].answer, 0.0)):
        session.complete = lambda *asked, text=f"#### {answer}": [Completion(text, 1, index == 1) for index in range(4)]
        for path, line in ((None, "failed"), (tmp_path / "answers", "failed: 42")):
            evaluation = evaluate(session, both, ARITHMETIC_TRL, path, lambda reading: None)
            assert (evaluation.truncated_share, evaluation.cut_wrong_share, evaluation.unscored) == (
                0.5,
                wrong,
                (line,),
            )
