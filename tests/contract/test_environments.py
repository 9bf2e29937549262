"""The contract of environments, for every environment of this checkout."""

import random
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nightshift_arithmetic import data as arithmetic
from nightshift_math import data as math
from nightshift_tictactoe.data import Example as Opening
from nightshift_tictactoe.game import Match
from nightshift_tictactoe.players import POOL

from nightshift.evaluation.environment import Environment, Example
from tests.contract.environments import PackageContract
from tests.datasets import small_gsm8k, small_math


class TestArithmetic(PackageContract):
    name, num_validation, num_train = "arithmetic", 1000, 1000
    digest = "e41c68e8a30801b1"

    def problem(self, environment: Environment, example: Example) -> str:
        """Return the question with all names, items and verbs alike."""
        question = re.sub("|".join(arithmetic._NAMES), "N", example.question)
        question = re.sub("|".join(arithmetic._ITEMS), "I", question)
        return re.sub("|".join(arithmetic._VERBS[-1]), "-", re.sub("|".join(arithmetic._VERBS[+1]), "+", question))

    def right_answer(self, example: Example, episode: object) -> str:
        return example.solution


class TestCountdown(PackageContract):
    name, num_validation, num_train = "countdown", 2500, 4000  # in the test split, all but 138 that there are
    digest = "2a98f4e2d6891fb4"

    def problem(self, environment: Environment, example: Example) -> tuple[int, ...]:
        """Return the target and the numbers in ascending order."""
        target, *numbers = map(int, re.findall(r"\d+", example.question))
        return (target, *sorted(numbers))


class TestGsm8k(PackageContract):
    name, num_validation = "gsm8k", 2
    digest = "a3eafa2644f0920f"

    @classmethod
    @contextmanager
    def opened(cls) -> Iterator[Environment]:
        with small_gsm8k(), super().opened() as environment:
            yield environment


class TestMath(PackageContract):
    name, num_validation = "math", 9
    digest = "045d0ca592a43097"

    @classmethod
    @contextmanager
    def opened(cls) -> Iterator[Environment]:
        with tempfile.TemporaryDirectory() as folder, small_math(Path(folder)) as copy, super().opened() as environment:
            math.prepare(copy)
            yield environment


class TestTictactoe(PackageContract):
    """The right answers are those of the perfect player, which get at least what the opening is worth."""

    name, num_scored = "tictactoe", 20  # ten games each
    digest = "601729be47f72aec"

    def right_answer(self, example: Example, episode: Match) -> str:
        return POOL["perfect"](episode.board, random.Random(0))

    def least_score(self, example: Opening, episode: Match) -> float:
        return {f"{episode.seat} wins": 1.0, "draw": 0.5}.get(example.answer, 0.0)
