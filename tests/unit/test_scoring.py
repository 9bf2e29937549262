"""Scoring: what each answer scores strictly (the line asked for, and nothing after it) and flexibly."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nightshift_countdown import scoring as countdown
from nightshift_countdown.scoring import MAX_CHARS
from nightshift_gsm8k.scoring import extract_answer, is_formatted, score

FIXTURES = Path(__file__).parents[1] / "fixtures" / "scoring"
OFFICIAL = os.environ.get("NIGHTSHIFT_GSM8K", "")
needs_official = pytest.mark.skipif(not OFFICIAL, reason="NIGHTSHIFT_GSM8K names no folder with the official files")


# By what they show: completion, right answer, strict and flexible score, and sometimes why.
SHAPES: dict[str, list[list[Any]]] = json.loads((FIXTURES / "gsm8k.json").read_text())
SHAPES["long"] = [["#### " + "9" * 100_000, "9" * 100_000, 0, 0]]


@pytest.mark.parametrize("shape", [shape for shapes in SHAPES.values() for shape in shapes])
def test_a_shape_scores(shape: list[Any]) -> None:
    completion, answer, strict, flexible, *_ = shape
    flexibly = score(completion, answer)
    assert (flexibly * is_formatted(completion), flexibly) == (strict, flexible), extract_answer(completion)


@given(st.text(alphabet=st.sampled_from(list("0123456789.,/%$#-+ \n\t\\{}boxedfrac\u2212\u0663\ud800x")), max_size=60))
def test_no_text_raises(text: str) -> None:
    answer = extract_answer(text)
    assert answer is None or any(digit in answer for digit in "0123456789")
    assert score(text, text) in (0.0, 1.0)


@given(st.integers(-(10**12), 10**12), st.integers(-(10**12), 10**12))
def test_integers_score_one_exactly_when_equal(left: int, right: int) -> None:
    for written in (str(left), f"{left:,}", f"{left}.0"):
        assert score(f"#### {written}", str(left)) == 1.0
        assert score(f"#### {written}", str(right)) == float(left == right)


@given(st.integers(1, 999), st.integers(0, 999999), st.sampled_from([",", " ", "'", "_", "{,}", "\\,", "\u202f"]))
def test_a_number_may_be_printed_in_any_way(millions: int, rest: int, gap: str) -> None:
    number = str(millions * 10**6 + rest)
    full_width = number.translate({ord(digit): ord(digit) + 0xFEE0 for digit in "0123456789"})
    grouped, decimals = f"{millions}{gap}{rest // 1000:03}{gap}{rest % 1000:03}", f"{millions}.{rest:06}"
    for written in (full_width, grouped, f"{decimals} million", f"{decimals}M", f"{decimals}e6"):
        assert score(f"#### {written}", number) == 1.0, written


@pytest.mark.slow
@needs_official
def test_every_official_answer_scores_one_and_a_perturbed_one_zero() -> None:
    lines = [line for name in ("train", "test") for line in Path(OFFICIAL, f"{name}.jsonl").read_text().splitlines()]
    assert len(lines) == 8792
    for solution in (json.loads(line)["answer"] for line in lines):
        gold = solution.rpartition("#### ")[2]
        wrong = str(int(gold.replace(",", "")) + 1)
        assert is_formatted(solution), gold
        assert score(gold, gold) == score(f"\\boxed{{{gold}}}", gold) == score(solution, gold) == 1.0, gold
        assert score(wrong, gold) == score(solution, wrong) == score(f"{solution}\n#### {wrong}", gold) == 0.0, gold
        worked = solution.rpartition("\n####")[0]
        said = f"#### 1. Work it out\n{worked}\n\n#### 2. Conclude\nThe total is **{gold}**"
        assert (score(said, gold), is_formatted(said)) == (1.0, False), gold
        assert score(said, "2") == float(gold in ("2", "2.00")), gold
        assert score(solution, f"-{gold}") == float(gold == "0"), gold


# Countdown: expressions are read strictly, whoever writes them

GOLD = "(13-4)*6=54"
RIGHT = ["#### (13-4)*6", "So \\boxed{(13-4)\u00d76}.", "#### (13\u22124)\u00b76", "#### **(13-4)*6**"]
CORRECTED = "I try 13*4.\n#### 13*4\nNo.\n#### 6*13-6*4 = 54\n#### (13-4)*6\n"
# The result alone, a number twice, one that is not given, another value, none.
NOT_IT = ["54", "6*13-6*4", "9*6", "13-4*6", "13/(4-4)"]
# Words, a wrong result, a power, a sign, a product without one, an octal, a separator, a digit of another script.
NOT_IT += ["(13-4)*6 or so", "(13-4)*6 = 541", "(13-4)**6", "-(4-13)*6"]
NOT_IT += ["(13-4)(6)", "(13-4)*06", "1_3-4*6", "(13-4)*\u0666"]
LONG = ["(13-4)*6" + " " * MAX_CHARS + "*1", "(" * 40 + "54" + ")" * 40, "(" * (MAX_CHARS - 1) + "1", "9" * MAX_CHARS]


@pytest.mark.parametrize("text", [*RIGHT, CORRECTED])
def test_any_way_to_write_a_right_expression_counts(text: str) -> None:
    assert countdown.score(text, GOLD) == 1.0


@pytest.mark.parametrize("text", [*NOT_IT, *LONG])
def test_nothing_else_does(text: str) -> None:
    assert countdown.score(f"#### {text}", GOLD) == 0.0


def test_numbers_count_as_often_as_they_are_given_and_division_is_exact() -> None:
    assert countdown.score("#### 9+9+11", "9+9+11=29") == 1.0
    assert countdown.score("#### 9+9+9+11", "9+9+11=38") == 0.0
    assert countdown.score("#### 7/2*4", "7*4/2=14") == 1.0, "a step may be a fraction"
    assert countdown.score("#### 7/2*4", "7+2*4=15") == 0.0
    assert countdown.score("#### 20", "20*3-40=20") == 1.0, "not every number need be used"
