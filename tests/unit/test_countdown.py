"""Countdown: problems that are solvable, reproducible and in one split; answers read strictly, whoever writes them."""

import re
import time
from itertools import islice
from typing import get_args

import pytest
from nightshift_countdown import data
from nightshift_countdown.scoring import MAX_CHARS, is_formatted, score

SPLITS = get_args(data.Split)
GOLD = "(13-4)*6=54"


@pytest.fixture(scope="module")
def examples() -> dict[str, list[data.Example]]:
    return {split: data.load(split, 1000) for split in SPLITS}


def identity(question: str) -> tuple[int, ...]:
    target, *numbers = map(int, re.findall(r"\d+", question))
    return (target, *sorted(numbers))


@pytest.mark.parametrize("seed", [0, 100])
def test_no_problem_is_in_two_splits_in_any_order_of_its_numbers(examples, seed):
    sets = {split: {identity(example.question) for example in examples[split]} for split in SPLITS}
    sets["train"] = {identity(problem.question) for problem in islice(data.problems("train", seed), 3000)}
    assert not sets["train"] & sets["validation"]
    assert not sets["train"] & sets["test"]
    assert not sets["validation"] & sets["test"]
    assert [len(sets[split]) for split in ("validation", "test")] == [1000, 1000], "one problem once"


def test_every_problem_is_solved_by_its_answer_which_uses_every_number(examples: dict[str, list[data.Example]]) -> None:
    for example in examples["validation"]:
        target, *numbers = identity(example.question)
        expression, _, result = example.answer.partition("=")
        assert sorted(map(int, re.findall(r"\d+", expression))) == numbers
        assert target not in numbers, "it would be its own answer"
        large, first, left, second, right = re.fullmatch(r"(\d+)([+-])(\d)([-+*])(\d)", expression).groups()
        rest = int(left) * int(right) if second == "*" else int(left) + (1 if second == first else -1) * int(right)
        total = int(large) + (rest if first == "+" else -rest)
        assert total == target == int(result)
        assert score(expression, example.answer) == 1.0
        assert is_formatted(expression)


@pytest.mark.parametrize(
    "text",
    [
        "#### (13-4)*6",
        "####(13 - 4) * 6 = 54",
        "I try 13*4.\n#### 13*4\nNo.\n#### 6*13-6*4 = 54\n#### (13-4)*6\n",
        "So \\boxed{(13-4)\u00d76}.",
        "#### (13\u22124)\u00b76",
        "#### **(13-4)*6**",
    ],
)
def test_any_way_to_write_a_right_expression_counts(text: str) -> None:
    assert score(text, GOLD) == 1.0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "#### 54",
        "#### 6*13-6*4",  # a number twice
        "#### 9*6",  # not given
        "#### 13*4+2",
        "#### (13-4)*6 or so",
        "#### (13-4)*6 = 541",
        "#### 54=(13-4)*6",
        "#### 13-4*6",
        "#### (13-4)**6",
        "#### (13-4)//6",
        "#### -(4-13)*6",
        "#### (13-4)(6)",
        "#### (13-4)*06",
        "#### 1_3-4*6",
        "#### 13/(4-4)",
        "#### (13-4)*\u0666",  # a digit of another script
        "#### (13-4)*6" + " " * MAX_CHARS + "*1",
        "#### __import__('os').system('true')",
        "#### " + "(" * 40 + "54" + ")" * 40,
        "#### " + "(" * (MAX_CHARS - 1) + "1",
        "#### " + "9" * MAX_CHARS,
    ],
)
def test_nothing_else_does(text: str) -> None:
    assert score(text, GOLD) == 0.0


def test_numbers_count_as_often_as_they_are_given_and_division_is_exact() -> None:
    assert score("#### 9+9+11", "9+9+11=29") == 1.0
    assert score("#### 9+9+9+11", "9+9+11=38") == 0.0
    assert score("#### 7/2*4", "7*4/2=14") == 1.0, "a step may be a fraction"
    assert score("#### 7/2*4", "7+2*4=15") == 0.0
    assert score("#### 20", "20*3-40=20") == 1.0, "not every number need be used"


@pytest.mark.parametrize("piece", ["#", "####", "#### (", "1", "(", "1+", "\\boxed{", "\n", "=", "-", "\u00d7"])
def test_hostile_text_of_any_length_is_answered_at_once(piece: str) -> None:
    began = time.process_time()
    text = piece * (2_000_000 // len(piece))
    assert score(text, GOLD) == 0.0
    is_formatted(text)
    assert time.process_time() - began < 5, "linear: about 0.1 s"
