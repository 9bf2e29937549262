"""Strict and flexible scores: measured side by side, and a gain in form only is told as one, wherever it is told."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from nightshift.campaign.metrics import Step
from nightshift.campaign.records import Completion, Progress, Record, Run, Weights
from nightshift.campaign.scores import compare
from nightshift.config.rules import Decoding
from nightshift.config.train_toml import parse
from nightshift.errors import EngineError
from nightshift.evaluation.environment import load
from nightshift.evaluation.evaluate import evaluate
from nightshift.experiment.health import Conditions, digest
from nightshift.report.data import gather
from nightshift.report.text import headline
from tests.campaigns import BASELINE, a_change, a_record, a_result, folded, replace, stored
from tests.rules import ARITHMETIC_TRL

ROOT = Path(__file__).parents[2]
NUM = 1000
Scores = tuple[float, float | None, float | None]  # eval_score, strict_score, format_rate


def measured(number: int, scores: Scores, parent: int | None = None) -> Record:
    score, strict, share = scores
    result = a_result(score, NUM, 1000)
    result = replace(result, evaluation=replace(result.evaluation, strict_score=strict, format_rate=share))
    run = Run() if parent is None else Run(new=a_change(number))
    return a_record(number=number, decided=number, decided_before=number - 1, parent=parent, run=run, result=result)


def pair(before: Scores, after: Scores) -> list[Record]:
    """A baseline and one change, decided."""
    records = list[Record]()
    for record in (measured(1, before), measured(2, after, parent=1)):
        records.append(folded(records).judge(record, parse(BASELINE)))
    return records


# Before, after, and what is said of it.
ONLY_FORM = ((0.40, 0.10, 0.12), (0.50, 0.45, 0.90), "a gain in form only")
SAME_SCORE = ((0.50, 0.10, 0.20), (0.50, 0.45, 0.90), "written better, not right more often")
LOWER = ((0.50, 0.10, 0.20), (0.40, 0.36, 0.90), "written better, not right more often")
FROM_NONE = ((0.40, 0.00, 0.00), (0.405, 0.405, 1.00), "written better, not right more often")
MORE_THAN_FORM = ((0.40, 0.20, 0.50), (0.60, 0.54, 0.90), None)
FORMATTED_BEFORE = ((0.40, 0.38, 0.95), (0.50, 0.48, 0.96), None)
FORM_LOST = ((0.50, 0.45, 0.90), (0.55, 0.10, 0.20), None)
NOT_BEFORE = ((0.40, None, None), (0.50, 0.45, 0.90), None)
NOT_AFTER = ((0.40, 0.10, 0.12), (0.50, None, None), None)


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [ONLY_FORM, SAME_SCORE, LOWER, FROM_NONE, MORE_THAN_FORM, FORMATTED_BEFORE, FORM_LOST, NOT_BEFORE, NOT_AFTER],
)
def test_a_gain_in_form_is_told_from_one_in_right_answers(before: Scores, after: Scores, said: str | None) -> None:
    found = compare(measured(2, after), measured(1, before))
    assert (found.conclusion if found else None) == said
    record = pair(before, after)[1]
    assert record.judgement.why.endswith(f": {record.status}" + (f"; {said}" if said else ""))
    assert record.is_keep == (after[0] > before[0])


def test_the_parts_of_a_gain_add_up_to_it_and_the_digest_says_them() -> None:
    """Every formatted answer is right as often as before, and so is every other: all of the gain is form."""
    found = compare(measured(2, (0.7, 0.64, 0.8)), measured(1, (0.5, 0.32, 0.4)))
    assert found.by_form == pytest.approx(found.gain) == pytest.approx(0.2)
    nothing = compare(measured(2, (0.6, 0.48, 0.8)), measured(1, (0.5, 0.2, 0.4)))  # as often right in either form
    assert nothing.by_form == pytest.approx(0, abs=1e-12)
    run = measured(2, ONLY_FORM[1])
    form = (
        "form: 90% of the answers end as asked, 12% before: strict_score +35.0 pp, eval_score +10.0 pp, "
        "the form alone is worth +19.2 pp: a gain in form only"
    )
    assert compare(run, measured(1, ONLY_FORM[0])).line == form
    assert form in map(str, digest([Step(step=1)], Conditions(run.result, ARITHMETIC_TRL, {}, None, (form,))))


def test_a_gain_within_the_noise_of_a_few_answers_is_no_form() -> None:
    few = replace(a_result(0.5, 4), evaluation=None)
    assert compare(measured(2, ONLY_FORM[1]), a_record(result=few)) is None
    assert compare(a_record(), measured(1, ONLY_FORM[0])) is None
    assert compare(measured(2, (0.5, 0.45, 0.51)), measured(1, (0.5, 0.44, 0.50))) is None


def test_the_headline_says_that_a_gain_is_one_in_form_only(tmp_path: Path) -> None:
    ledger = stored(tmp_path, pair(*ONLY_FORM[:2]))
    sentence = headline(gather(ledger, None)).sentence
    assert "strict score 0.100 \N{RIGHTWARDS ARROW} 0.450, score +10.0 pp: a gain in form only." in sentence


class Parrot:
    """A stand-in for a session: it says what it was told to say."""

    def __init__(self, answers: Sequence[str]) -> None:
        self._answers = answers

    def load_final_weights(self) -> Weights:
        return Weights(1, "0" * 64)

    def complete(self, chats: Sequence[Any], decoding: Decoding, progress: Any) -> list[Completion]:
        progress(Progress(phase="evaluating", num_steps=1))
        return [Completion(text, 1, False) for text in self._answers]


def test_an_evaluation_scores_both_ways_and_an_environment_without_a_form_only_one(tmp_path, monkeypatch):
    (environment,) = load(ROOT, ARITHMETIC_TRL.environments)
    examples = [(environment, example) for example in environment.examples("validation")[:4]]
    right = [example.answer for _, example in examples]
    answers = [f"#### {right[0]}", f"It is {right[1]}.", "#### 1000", "no idea"]
    path = tmp_path / "evaluation.jsonl"
    found = evaluate(Parrot(answers), examples, ARITHMETIC_TRL, path, lambda reading: None)
    assert (found.eval_score, found.strict_score, found.format_rate) == (0.5, 0.25, 0.5)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["formatted"] for line in lines] == [True, False, True, False]
    monkeypatch.delattr("nightshift_arithmetic.scoring.is_formatted")
    found = evaluate(Parrot(answers), examples, ARITHMETIC_TRL, path, lambda reading: None)
    assert (found.eval_score, found.strict_score, found.format_rate) == (0.5, None, None)
    assert "formatted" not in json.loads(path.read_text().splitlines()[0])


def test_of_what_a_reward_raises_nothing_but_its_type_is_kept_where_no_answer_is_written(tmp_path, monkeypatch):
    """The test split has no file of answers, and a cause stands in runs/certify."""
    (environment,) = load(ROOT, ARITHMETIC_TRL.environments)
    examples = [(environment, example) for example in environment.examples("validation")[:1]]

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
    assert said[True].startswith("rewards of the test split fail or are refused: LookupError. Look at others")


def test_a_policy_that_answers_another_number_of_questions_is_refused() -> None:
    (environment,) = load(ROOT, ARITHMETIC_TRL.environments)
    examples = [(environment, example) for example in environment.examples("validation")[:2]]
    with pytest.raises(EngineError, match="the policy completed 4 of 2 examples"):
        evaluate(Parrot(["7"] * 4), examples, ARITHMETIC_TRL, None, lambda reading: None)
