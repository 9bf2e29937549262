"""Generated countdown problems: reach a target from one large and two small numbers, each at most once.

A problem is made from its solution, which needs every number: `47+8-3` or `47+3*8`. The question says which operators
are enough: told "+ - * /" instead, a model of 0.4 M parameters learned nothing of the target, neither from 600 steps of
documents nor from a minute of rewards (0.17 to 0.19). An answer may be any expression of + - * / and brackets.

The three splits share no problem: a hash of the target and the numbers, whatever their order, decides.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

T = TypeVar("T")
Split = Literal["train", "validation", "test"]

PROMPT_TOKENS = 448  # far more than any question has

# A bound that the generator reaches quickly; 8,172, 2,612 and 2,638 are all that there are.
MAX_SIZE: dict[str, int] = {"train": 5000, "validation": 2500, "test": 2500}
# They seed the generator: another word would generate other problems.
_SEED_WORDS: dict[str, str] = {"train": "train", "validation": "selection", "test": "sealed"}

LARGE = range(10, 90)
SMALL = range(2, 10)
# The operators of `47+8-3` and `47+3*8`, from left to right.
KINDS = ("++", "+-", "-+", "--", "+*", "-*")
TARGETS = range(10, 100)


@dataclass(frozen=True, slots=True)
class Example:
    """One problem. `answer` is an equation that uses every given number: `47+8-3=52`."""

    key: str
    question: str
    answer: str


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem before it is put into words: its numbers in the order of the solution, and that one's operators."""

    numbers: tuple[int, int, int]
    kind: str

    @property
    def target(self) -> int:
        """What is to be reached."""
        large, left, right = self.numbers
        sign = {"+": 1, "-": -1}
        if self.kind[1] == "*":
            return large + sign[self.kind[0]] * left * right
        return large + sign[self.kind[0]] * left + sign[self.kind[1]] * right

    @property
    def expression(self) -> str:
        """The solution."""
        large, *small = self.numbers
        return str(large) + "".join(f"{operator}{number}" for operator, number in zip(self.kind, small, strict=False))

    @property
    def question(self) -> str:
        """The text that the model sees."""
        operators = " ".join(sorted({*self.kind}, key="+-*".index))
        return f"Make {self.target} from {' '.join(map(str, self.numbers))} with {operators}, each number at most once."

    @property
    def split(self) -> Split:
        """The one split that may hold this problem, whatever the order of its numbers: 60 % train, 20 % each other."""
        bucket = int(_digest(f"{self.target}={sorted(self.numbers)}"), 16) % 5
        return "test" if bucket == 0 else "validation" if bucket == 1 else "train"


def load(split: Split, size: int, seed: int = 0) -> list[Example]:
    """`size` different problems of one split, the same ones for the same seed on every Python.

    A smaller size is a prefix of a larger one. Raises ValueError for an unknown split or a size that
    the split does not hold.
    """
    if split not in MAX_SIZE:
        raise ValueError(f"split = {split!r} does not exist. Use one of: {', '.join(MAX_SIZE)}")
    if not 0 < size <= MAX_SIZE[split]:
        raise ValueError(f"size = {size} is not available in {split}. Use 1 to {MAX_SIZE[split]}")
    seen: dict[tuple[int, ...], Problem] = {}
    for problem in problems(split, seed):
        seen.setdefault((problem.target, *sorted(problem.numbers)), problem)
        if len(seen) == size:
            break
    return [_example(problem) for problem in seen.values()]


def messages(example: Example) -> list[dict[str, str]]:
    """The chat that asks the question: one user message."""
    return [{"role": "user", "content": example.question}]


def problems(split: Split, seed: int) -> Iterator[Problem]:
    """Endless problems of one split; they repeat."""
    # Only `Random.random()` is promised to be the same on every Python, so nothing else is used.
    rng = random.Random(int(_digest(f"{_SEED_WORDS[split]} {seed}"), 16))
    while True:
        problem = _draw(rng)
        if problem.split == split:
            yield problem


def _draw(rng: random.Random) -> Problem:
    kind = _pick(rng, KINDS)  # before the numbers: none is rare
    while True:
        problem = Problem((_pick(rng, LARGE), _pick(rng, SMALL), _pick(rng, SMALL)), kind)
        if problem.target in TARGETS and problem.target != problem.numbers[0]:
            return problem


def _example(problem: Problem) -> Example:
    question = problem.question
    return Example(_digest(question)[:16], question, f"{problem.expression}={problem.target}")


def _pick(rng: random.Random, values: Sequence[T]) -> T:
    return values[int(rng.random() * len(values))]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
