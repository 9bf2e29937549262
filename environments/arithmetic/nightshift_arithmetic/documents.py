"""The documents that pretrain the small base model: worked solutions with right sums and often wrong container sizes.

Container sizes are drawn from the probabilities of `_beliefs`. The model learns the format and the sums, and gives most
hard containers a wrong size. Reinforcement learning then has to find out which guesses are right.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from nightshift_arithmetic import data

# Probability that a sample of the base model names the right size of a container.
EASY_PROBABILITY = 0.98
HARD_PROBABILITY = (0.01, 0.40)  # log-uniform over the hard containers, in the order of data.HARD


def documents(seed: int) -> Iterator[list[tuple[str, str]]]:
    """Yield endless chats of the train split, as (question, answer) pairs. Each chat has one pair."""
    beliefs, rng = _beliefs(), random.Random(seed)
    for problem in data.problems("train", seed):
        amounts = []
        for event in problem.events:
            sizes = beliefs.get(event.container or "", {event.amount: 1.0})
            amounts.append(rng.choices(list(sizes), list(sizes.values()))[0])
        yield [(problem.question, problem.solution(amounts))]


def _beliefs() -> dict[str, dict[int, float]]:
    """Return the probability of each size by container.

    The most likely size of a hard container is wrong: it is the size of another container in the same row of data.HARD,
    and leads by more than 0.10, so greedy decoding is wrong. The right size and three decoys have probabilities of the
    same distribution, so "the second most likely size" is no shortcut.
    """
    rng = random.Random(12345)
    others = {name: [size for size in range(2, 10) if size != data.EASY[name]] for name in data.EASY}
    beliefs = {
        name: {size: EASY_PROBABILITY, others[name][int(rng.random() * 7)]: 1 - EASY_PROBABILITY}
        for name, size in data.EASY.items()
    }
    names, (low, high) = list(data.HARD), HARD_PROBABILITY
    for index, name in enumerate(names):
        row, column = divmod(index, 8)
        favourite = data.HARD[names[row * 8 + (column + 1 + row % 7) % 8]]
        right = low * (high / low) ** ((index + 0.5) / len(names))
        rest = [size for size in range(2, 10) if size not in (data.HARD[name], favourite)]
        decoys = [rest.pop(int(rng.random() * len(rest))) for _ in range(3)]
        weights = [low * (high / low) ** rng.random() for _ in decoys]
        scale = min(1.0, 0.6 * (0.9 - 2 * right) / sum(weights))
        beliefs[name] = {data.HARD[name]: right}
        beliefs[name] |= {size: weight * scale for size, weight in zip(decoys, weights, strict=True)}
        beliefs[name][favourite] = 1 - sum(beliefs[name].values())
    return beliefs
