"""The documents that teach the small base model the format of countdown: expressions that reach or miss the target.

The probability of the right operators depends on the pair of small numbers: it is high for EASY pairs, and from tiny to
likely for the others. Wrong operators are always the same mistake of MISTAKES, so greedy decoding misses the target.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

from nightshift_countdown.data import SMALL, problems

EASY_PROBABILITY = 0.98
HARD_PROBABILITY = (0.01, 0.25)  # log-uniform over the other pairs
# Leave out a number, or swap the operators.
MISTAKES = {"++": "+", "--": "-", "+-": "-+", "-+": "+-", "+*": "*+", "-*": "*-"}

_PAIRS = [(low, high) for low in SMALL for high in SMALL if low <= high]
# An order that has little to do with the numbers: 13 and 36 have no common divisor.
_SHUFFLED = [_PAIRS[index * 13 % len(_PAIRS)] for index in range(len(_PAIRS))]
EASY, HARD = _SHUFFLED[::4], [pair for index, pair in enumerate(_SHUFFLED) if index % 4]  # from hardest to easiest


def documents(seed: int) -> Iterator[list[tuple[str, str]]]:
    """Yield endless chats of the train split, as (question, answer) pairs."""
    rng, (low, high) = random.Random(seed), HARD_PROBABILITY
    right = dict.fromkeys(EASY, EASY_PROBABILITY)
    right |= {pair: low * (high / low) ** ((index + 0.5) / len(HARD)) for index, pair in enumerate(HARD)}
    for problem in problems("train", seed):
        first, second = sorted(problem.numbers[1:])
        kind = problem.kind if rng.random() < right[first, second] else MISTAKES[problem.kind]
        yield [(problem.question, replace(problem, kind=kind).expression)]
