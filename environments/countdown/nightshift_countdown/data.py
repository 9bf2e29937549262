"""Generated countdown problems: reach a target from one large and two small numbers, each at most once.

A problem is made from its solution, which needs every number: `47+8-3` or `47+3*8`. The question names the operators
that are enough: from questions with "+ - * /" a model of 0.4 M parameters did not learn to reach the target. An answer
may be any expression of + - * / and brackets. A hash of the target and the sorted numbers decides the split.
"""

import random
from dataclasses import dataclass
from functools import partial

from nightshift_gsm8k.data import Example
from nightshift_gsm8k.shared import Split, check, digest, distinct, generate, messages, pick

__all__ = ["messages"]

PROMPT_TOKENS = 448  # far more than any question needs
MAX_SIZE: dict[str, int] = {"train": 5000, "validation": 2500, "test": 2500}  # of 8,172, 2,612 and 2,638 problems
LARGE, SMALL, TARGETS = range(10, 90), range(2, 10), range(10, 100)
KINDS = ("++", "+-", "-+", "--", "+*", "-*")  # the operators of `47+8-3` and `47+3*8`, from left to right


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem: its numbers in the order of the solution, and `kind`, the operators of the solution."""

    numbers: tuple[int, int, int]
    kind: str

    @property
    def target(self) -> int:
        """The number to reach."""
        large, left, right = self.numbers
        first, second = self.kind
        change = left * right if second == "*" else left + right if first == second else left - right
        return large + change if first == "+" else large - change

    @property
    def expression(self) -> str:
        """The solution, `47+8-3`."""
        return "{}{kind[0]}{}{kind[1]}{}".format(*self.numbers, kind=self.kind)

    @property
    def question(self) -> str:
        """The text of the prompt."""
        operators = " ".join(sorted({*self.kind}, key="+-*".index))
        return f"Make {self.target} from {' '.join(map(str, self.numbers))} with {operators}, each number at most once."

    @property
    def split(self) -> Split:
        """The only split that may contain this problem, with its numbers in any order: 60 % train, 20 % each other."""
        bucket = int(digest(f"{self.target}={sorted(self.numbers)}"), 16) % 5
        return "test" if bucket == 0 else "validation" if bucket == 1 else "train"


def load(split: Split, size: int | None = None, seed: int = 0) -> list[Example]:
    """Return the first `size` different problems of one split, the same for the same seed on every Python.

    None: MAX_SIZE. ValueError: the split or the size does not exist.
    """
    check(split, size, MAX_SIZE)
    chosen = distinct(problems(split, seed), lambda p: (p.target, *sorted(p.numbers)), size or MAX_SIZE[split])
    return [Example(digest(p.question)[:16], p.question, p.expression, f"{p.expression}={p.target}") for p in chosen]


def _draw(rng: random.Random) -> Problem:
    kind = pick(rng, KINDS)  # before the numbers, so that no kind is rare
    while True:
        problem = Problem((pick(rng, LARGE), pick(rng, SMALL), pick(rng, SMALL)), kind)
        if problem.target in TARGETS and problem.target != problem.numbers[0]:
            return problem


problems = partial(generate, _draw)  # endless problems of a split and a seed, which may repeat
