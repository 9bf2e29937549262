"""What a small base model reads to learn the format of countdown: expressions that reach the target, or miss it.

Whether the operators are right depends on the two small numbers: of EASY pairs nearly always, of the others with a
probability from tiny to likely. Where they are not, they are the favourite mistake, so greedy decoding misses.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

from nightshift_countdown.data import SMALL, problems

EASY_PROBABILITY = 0.98
HARD_PROBABILITY = (0.01, 0.25)  # log-uniform over the other pairs
# A number forgotten, the operators in the other order.
MISTAKES = {"++": "+", "--": "-", "+-": "-+", "-+": "+-", "+*": "*+", "-*": "*-"}

_PAIRS = [(low, high) for low in SMALL for high in SMALL if low <= high]
# 13 and 36 have no common divisor: an order that has little to do with the numbers.
_SHUFFLED = [_PAIRS[index * 13 % len(_PAIRS)] for index in range(len(_PAIRS))]
EASY, HARD = _SHUFFLED[::4], [pair for index, pair in enumerate(_SHUFFLED) if index % 4]  # from hardest to easiest


def documents(seed: int) -> Iterator[list[tuple[str, str]]]:
    """Endless chats of the train split, each a list of what is asked and what is answered."""
    rng, (low, high) = random.Random(seed), HARD_PROBABILITY
    right = dict.fromkeys(EASY, EASY_PROBABILITY)
    right |= {pair: low * (high / low) ** ((index + 0.5) / len(HARD)) for index, pair in enumerate(HARD)}
    for problem in problems("train", seed):
        first, second = sorted(problem.numbers[1:])
        kind = problem.kind if rng.random() < right[first, second] else MISTAKES[problem.kind]
        yield [(problem.question, replace(problem, kind=kind).expression)]
