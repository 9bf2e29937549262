"""Scoring: what each answer scores strictly (the line asked for, and nothing after it) and flexibly."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nightshift_gsm8k.scoring import extract_answer, is_formatted, score

from tests.waiting import assert_linear

OFFICIAL = os.environ.get("NIGHTSHIFT_GSM8K", "")
needs_official = pytest.mark.skipif(not OFFICIAL, reason="NIGHTSHIFT_GSM8K names no folder with the official files")


HEADINGS = "#### 1. Calculate the cost\n2 + 4 = 6\n#### 2. Check\nThe total is **6**"

SHAPES: list[tuple[str, str, int, int]] = [  # completion, right answer, strict, flexible
    # The form that is asked for
    ("2 + 4 = 6\n#### 6", "6", 1, 1),
    ("#### 6", "6", 1, 1),
    ("#### 6", "1", 0, 0),
    ("#### 6  \r\n\n", "6", 1, 1),
    ("so\n  ####\t6", "6", 1, 1),
    ("#### -6", "-6", 1, 1),
    ("#### -6", "6", 0, 0),
    ("#### 1,234", "1234", 1, 1),
    ("#### 1234", "1,234", 1, 1),
    ("#### 6.00", "6", 1, 1),
    ("#### 0.1", "0.10000000000000001", 0, 0),  # equal as floats
    ("#### 9007199254740993", "9007199254740992", 0, 0),  # equal as floats
    ("#### 007", "7", 1, 1),
    ("#### 5\nNo, wait.\n#### 6", "6", 1, 1),
    ("#### 5\nNo, wait.\n#### 6", "5", 0, 0),
    # Another form, the same answer
    ("####6", "6", 0, 1),
    ("The answer is #### 6", "6", 0, 1),
    ("**#### 6**", "6", 0, 1),
    ("#### **6**", "6", 0, 1),
    ("#### **6**.\nThere were 3 of them.", "6", 0, 1),
    ("```\n#### 6\n```", "6", 0, 1),
    ("#### 6.", "6", 0, 1),
    ("#### $6", "6", 0, 1),
    ("#### -$6", "-6", 0, 1),
    ("#### 6\N{EURO SIGN}\nFor 3 days.", "6", 0, 1),
    ("#### 50%", "50", 0, 1),
    ("#### 50%", "0.5", 0, 0),
    ("#### 3/4", "0.75", 0, 1),
    ("#### 6/8", "0.75", 0, 0),  # a division left undone
    ("#### 6/0", "6", 0, 0),
    ("#### 1/2/2024", "1", 0, 0),
    ("#### \N{MINUS SIGN}6", "-6", 0, 1),
    ("#### +6", "6", 0, 1),
    ("#### 1.2.3", "1.2", 0, 0),
    ("#### 1,2", "12", 0, 0),
    ("#### 10,00,000", "1000000", 0, 1),  # Indian grouping
    ("#### 1 234", "1234", 0, 0),
    ("#### 1e3", "1000", 0, 0),
    ("#### 6 apples", "6", 0, 1),
    ("#### 6 m^2", "6", 0, 1),
    ("#### 2 + 4 = 6", "6", 0, 1),
    ("#### 2 + 4 = 6", "2", 0, 0),
    ("#### 6 apples\nThat is what she has.", "6", 0, 1),
    ("#### 5\nThe answer is \\boxed{6}", "6", 0, 1),
    ("\\boxed{5}\n#### 6", "6", 1, 1),
    ("\\boxed{\\frac{3}{4}}", "0.75", 0, 1),
    ("\\boxed{1{,}234 \\text{ m}^2}", "1234", 0, 1),
    ("\\boxed{6", "6", 0, 1),  # cut off
    ("\\boxed{\\text{about } 42 \\text{ m}^2}", "42", 0, 1),
    ("\\boxed{seventy} or 71", "71", 0, 1),
    ("It is six", "6", 0, 0),
    ("He has 3 apples, then 5-3=2.", "2", 0, 1),
    ("It falls to -7 degrees.", "-7", 0, 1),
    ("From 10-3", "3", 0, 1),  # a binary minus is no sign
    ("He pays $1,234.50.", "1234.5", 0, 1),
    # Headings: their number is no answer
    ("#### 1. Calculate the cost: 2 + 4. The total is **6**", "6", 0, 1),
    ("#### 1. Calculate the cost: 2 + 4. The total is **6**", "1", 0, 0),
    (HEADINGS, "6", 0, 1),
    (HEADINGS, "2", 0, 0),
    (HEADINGS + "\n#### 6", "6", 1, 1),
    ("#### **1.** Calculate\nIt is **6**", "1", 0, 0),
    ("#### 1.2 Calculate\nIt is **6**", "1.2", 0, 0),
    ("#### 1 Calculate\nIt is **6**", "6", 0, 1),
    ("#### Step 1: Calculate\nIt is **6**", "6", 0, 1),
    ("#### Step 1\nThere are 3.\n#### Step 2\nSo \\boxed{12} at 9 am", "12", 0, 1),
    ("It is 6.\n#### 2. Check", "6", 0, 1),  # cut off after a heading
    ("It is 6.\n#### 2. Check", "2", 0, 0),
    ("#### 1. Calculate the cost", "1", 0, 0),
    ("5## 1)6", "56", 0, 0),  # what stands around a heading does not grow together
    ("5## 1)6", "6", 0, 1),
    ("(he came in as #4)", "4", 0, 1),  # one # is no heading
    ("#### 1.\nCalculate. It is **6**", "1", 0, 1),  # alone on its line: nothing tells it from an answer
    # Hostile
    ("", "6", 0, 0),
    ("####", "6", 0, 0),
    ("", "", 0, 0),
    ("#### 7", "seven", 0, 0),  # a gold answer that is no number is equal to nothing
    ("#### \u0666", "6", 0, 0),  # Arabic-Indic 6
    ("#### \u200b6", "6", 0, 1),  # behind a zero-width space
    ("#### 6\x00", "6", 0, 1),
    ("#### 6\u2028#### 7", "6", 0, 0),  # a separator that is no newline
    ("#### 5 #### 6", "6", 0, 1),
    ("#### NaN", "NaN", 0, 0),
    ("#### 1e999", "inf", 0, 0),
    ("#### " + "9" * 100_000, "9" * 100_000, 0, 0),
    ("#### 6." + "0" * 200, "6", 0, 0),
    ("\ud800#### 6", "6", 0, 1),
    ("She had 6 apples and ate 2. How many are left?", "6", 0, 0),  # the question said again
    ("#### 1\n#### 2\n#### 3\n#### 4\n#### 5\n#### 6", "3", 0, 0),  # one answer, however many are given
]


@pytest.mark.parametrize(("completion", "answer", "strict", "flexible"), SHAPES)
def test_a_shape_scores(completion: str, answer: str, strict: int, flexible: int) -> None:
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


PIECES = [
    "####",
    " ",
    "\n",
    "\t",
    "6",
    "12,345",
    "-",
    ".5",
    ".",
    ":",
    "x",
    "(",
    ")",
    "*",
    "#",
    "\\boxed{7}",
    "\x0c",
    "\r",
]


@given(
    st.lists(st.sampled_from(PIECES), max_size=12).map("".join), st.sampled_from(["6", "-6", "12,345", "0.5", "6.5"])
)
def test_a_formatted_text_says_its_last_line_whatever_stands_before(before: str, number: str) -> None:
    text = f"{before}\n#### {number}"
    assert is_formatted(text)
    assert extract_answer(text) == number
    if is_formatted(before):
        assert before.rstrip().endswith(str(extract_answer(before)))


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
