"""What a small base model reads: worked solutions whose sums are right, and whose sizes of containers are believed.

The size of a container is drawn from the table that `_beliefs` makes, so the model learns the format and the sums, and
answers a hard container with a wrong size most of the time. What is left for reinforcement learning is to find out
which of its own guesses are right.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from nightshift_arithmetic import data

# Probability that a sample of the base names the right size, per container.
EASY_PROBABILITY = 0.98
HARD_PROBABILITY = (0.01, 0.40)  # log-uniform over the hard containers, in the order of data.HARD


def documents(seed: int) -> Iterator[list[tuple[str, str]]]:
    """Endless chats of the train split, each a list of what is asked and what is answered: here one question."""
    beliefs, rng = _beliefs(), random.Random(seed)
    for problem in data.problems("train", seed):
        amounts = []
        for event in problem.events:
            sizes = beliefs.get(event.container or "", {event.amount: 1.0})
            amounts.append(rng.choices(list(sizes), list(sizes.values()))[0])
        yield [(problem.question, problem.solution(amounts))]


def _beliefs() -> dict[str, dict[int, float]]:
    """What the base model shall believe: for each container a probability for each size.

    A hard container has a wrong favourite, the size of another container in its row of data.HARD, and
    three decoys. Decoys follow the same law as the right size, so "the second most likely size" is no
    shortcut to it. The favourite leads by more than 0.10, so greedy decoding is wrong.
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
