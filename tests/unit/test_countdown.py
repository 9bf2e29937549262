"""Countdown: every problem has a solution, and answers are read strictly, whoever writes them."""

import pytest
from nightshift_countdown.scoring import MAX_CHARS, score

GOLD = "(13-4)*6=54"


@pytest.mark.parametrize(
    "text",
    [
        "#### (13-4)*6",
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
        "#### 54",
        "#### 6*13-6*4",  # a number twice
        "#### 9*6",  # not given
        "#### (13-4)*6 or so",
        "#### (13-4)*6 = 541",
        "#### 13-4*6",
        "#### (13-4)**6",
        "#### -(4-13)*6",
        "#### (13-4)(6)",
        "#### (13-4)*06",
        "#### 1_3-4*6",
        "#### 13/(4-4)",
        "#### (13-4)*\u0666",  # a digit of another script
        "#### (13-4)*6" + " " * MAX_CHARS + "*1",
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
