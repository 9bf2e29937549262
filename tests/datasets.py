"""Small data sets in place of the official ones of gsm8k and math."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from nightshift_gsm8k import data as gsm8k
from nightshift_math import data as math

GSM8K = Path(__file__).parent / "fixtures" / "gsm8k"
SUBJECTS = ("algebra", "geometry")


@contextmanager
def small_gsm8k(folder: Path = GSM8K) -> Iterator[Path]:
    """Accept the two files of a folder, as they are, as the official ones."""
    digests = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in gsm8k.SHA256}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gsm8k, "SHA256", digests)
        patch.setenv(gsm8k.ENV_VAR, str(folder))
        yield folder


def math_problems(split: str, number: int) -> list[dict[str, str]]:
    """Return problems of our own, of all levels in turn."""
    return [
        {
            "problem": f"On {split} day {day} a baker sells ${day}$ of ${2 * day + 1}$ loaves. What share is that?",
            "level": f"Level {day % 5 + 1}",
            "type": SUBJECTS[day % 2].title(),
            "solution": f"It is $\\boxed{{0}}$ at first, and $\\boxed{{\\frac{{{day}}}{{{2 * day + 1}}}}}$ at last.",
        }
        for day in range(1, number + 1)
    ]


@contextmanager
def small_math(folder: Path) -> Iterator[Path]:
    """Write a tree of 60 problems below `folder`, and accept the tree as MATH: 9 problems each for validation and test.

    Yields: the tree, which `prepare` has not read yet.
    """
    numbers = {"train": 40, "test": 20}
    for split, number in numbers.items():
        for index, problem in enumerate(math_problems(split, number)):
            path = folder / "copy" / split / SUBJECTS[index % 2] / f"{index}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(problem))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(math, "NUM_OFFICIAL", numbers)
        patch.setattr(math, "NUM_VALIDATION", 9)
        patch.setenv(math.ENV_VAR, str(folder / "prepared"))
        yield folder / "copy"
