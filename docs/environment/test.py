"""What every environment promises: run it with `uv run --group dev pytest environments/NAME`."""

import sys
from pathlib import Path

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "gsm8k")]

from nightshift_NAME import data, scoring

SETS = {split: data.load(split, None) for split in ("train", "validation", "test")}


def test_the_sets_share_no_problem_and_a_smaller_one_is_part_of_a_larger() -> None:
    keys = [example.key for examples in SETS.values() for example in examples]
    questions = [str(data.messages(example)) for examples in SETS.values() for example in examples]
    assert len(keys) == len({*keys}) == len({*questions})
    for split, examples in SETS.items():
        assert data.load(split, None) == examples
        assert {example.key for example in data.load(split, 3)} <= {example.key for example in examples}


def test_right_answers_pay_and_nothing_else_does() -> None:
    for example in SETS["validation"]:
        assert scoring.score(example.answer, example.answer) == 1.0
        for text in ("", " ", f"{example.answer}1", "\x00", "a" * 100_000, "1" * 100_000):
            assert scoring.score(text, example.answer) == 0.0
