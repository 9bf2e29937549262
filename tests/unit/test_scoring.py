"""Scoring: what counts as the answer, which numbers are equal, and that no text can break or stall it."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nightshift_arithmetic import scoring as arithmetic_scoring
from nightshift_gsm8k.scoring import extract_answer, is_formatted, score

from tests.waiting import assert_linear

OFFICIAL = os.environ.get("NIGHTSHIFT_GSM8K", "")
needs_official = pytest.mark.skipif(not OFFICIAL, reason="NIGHTSHIFT_GSM8K names no folder with the official files")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("2 + 3 = 5\n#### 5", "5"),
        ("#### 5\nNo, wait.\n#### 6", "6"),
        ("#### 5, which is \\boxed{7}, or 8", "7"),
        ("#### Step 1\nThere are 3.\n#### Step 2\nSo \\boxed{12} at 9 am", "12"),
        ("The answer is \\boxed{\\text{about } 42 \\text{ m}^2}", "42"),
        ("\\boxed{1} and then \\boxed{\\frac{3}{4}}", "3/4"),
        ("\\boxed{1{,}234}", "1,234"),
        ("\\boxed{seventy} or 71", "71"),
        ("\\boxed{ 5", "5"),  # cut off inside the box
        ("He has 3 apples, then 5-3=2.", "2"),
        ("It falls to -7 degrees.", "-7"),
        ("From 10-3", "3"),  # a binary minus is no sign
        ("He pays $1,234.50.", "$1,234.50"),
        ("**#### 72**", "72"),
        ("#### **72**", "72"),
        ("####72", "72"),
        ("#### - 4", "- 4"),
        ("##### 9\n", "9"),
        ("#### no number\n", None),
        ("", None),
        ("the answer is \u0663", None),  # only ASCII digits are digits
    ],
)
def test_answer_is_the_last_hashes_or_box_else_the_last_number(text: str, answer: str | None) -> None:
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("1,234", "1234"),
        ("$1,234.00", "1234"),
        ("-$5", "-5"),
        ("$-5", "-5"),
        ("\u22125", "-5"),
        ("+5", "5"),
        ("-0", "0"),
        ("50%", "50"),
        ("3/4", "0.75"),
        (".5", "0.50"),
        ("007", "7"),
        ("10,00,000", "1000000"),  # Indian grouping
        ("999,999,999", "999999999"),
    ],
)
def test_equal_numbers_score_one_however_they_are_written(left: str, right: str) -> None:
    for completion, gold in ((left, right), (right, left)):
        assert score(f"#### {completion}", gold) == 1.0
        assert score(f"so \\boxed{{{completion}}}.", gold) == 1.0
        assert score(f"so it is {completion}.", gold) == 1.0


@pytest.mark.parametrize(
    ("completion", "gold"),
    [
        ("#### 5", "-5"),
        ("#### 0.1", "0.10000000000000001"),  # equal as floats
        ("#### 9007199254740993", "9007199254740992"),  # equal as floats
        ("#### 48/2", "24"),  # a division left undone
        ("#### 6/8", "0.75"),
        ("#### 5/1", "5"),
        ("#### 5/0", "5"),
        ("#### 1,2", "12"),  # a list, not a number
        ("#### 1,2", "1"),
        ("#### 1.2.3", "1.2"),
        ("#### 7", "seven"),  # a gold answer that is no number is equal to nothing
        ("seven", "seven"),
        ("", ""),
        ("#### " + "1" * 200, "1" * 200),
    ],
)
def test_other_numbers_score_zero(completion: str, gold: str) -> None:
    assert score(completion, gold) == 0.0


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


NUMBERS, SPACES = (
    ("1", "1,", "1.", "1/", "1 ", "-$"),
    (" ", "#", "# ", "#### ", "#### -", "####\t", "#### 1 (", "#### 1. ", "#### 1\n", "#### 1 \n "),
)


@pytest.mark.parametrize("unit", [*NUMBERS, *SPACES, "{", "}", "{}", "\\boxed{", "\\boxed{{}"])
@pytest.mark.parametrize(("start", "end"), [("", ""), ("\\boxed{", "}"), ("#### ", ""), ("5", "")])
def test_the_time_grows_with_the_text_and_not_faster(unit: str, start: str, end: str) -> None:
    texts = {size: start + unit * (size // len(unit)) + end for size in (60_000, 240_000)}

    def both_ways(size: int) -> None:
        assert score(texts[size], "5") in (0.0, 1.0)
        assert score("#### 5", texts[size]) == 0.0
        assert is_formatted(texts[size]) in (True, False)

    assert_linear(both_ways, 60_000)


def test_arithmetic_shares_the_scoring() -> None:
    assert arithmetic_scoring.score is score
    assert arithmetic_scoring.extract_answer is extract_answer
    assert arithmetic_scoring.is_formatted is is_formatted


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
