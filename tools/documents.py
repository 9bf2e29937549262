"""The documents that pretrain the small base models (tools/base_model.py): endless chats as (question, answer) pairs.

The chats have the right form and are often wrong, with probabilities that are fixed below. Reinforcement learning then
has to find out which of the model's guesses are right.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

from nightshift_arithmetic import data
from nightshift_countdown.data import SMALL, problems
from nightshift_tictactoe.board import LINES, START, mover, moves, play, threats, written

Chat = list[tuple[str, str]]
EASY_PROBABILITY = 0.98  # that a sample of the base model names the right size of a container, or the right operators
HARD_SIZE = (0.01, 0.40)  # log-uniform over the hard containers, in the order of data.HARD
HARD_PAIR = (0.01, 0.25)  # log-uniform over the hard pairs of small numbers


def arithmetic(seed: int) -> Iterator[Chat]:
    """Yield worked solutions of arithmetic's train split, with right sums and often wrong container sizes."""
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
    names, (low, high) = list(data.HARD), HARD_SIZE
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


# Leave out a number, or swap the operators: a wrong answer is always the same, so greedy decoding misses the target.
MISTAKES = {"++": "+", "--": "-", "+-": "-+", "-+": "+-", "+*": "*+", "-*": "*-"}

_PAIRS = [(low, high) for low in SMALL for high in SMALL if low <= high]
# An order that has little to do with the numbers: 13 and 36 have no common divisor.
_SHUFFLED = [_PAIRS[index * 13 % len(_PAIRS)] for index in range(len(_PAIRS))]
EASY_PAIRS = _SHUFFLED[::4]
HARD_PAIRS = [pair for index, pair in enumerate(_SHUFFLED) if index % 4]  # from hardest to easiest


def countdown(seed: int) -> Iterator[Chat]:
    """Yield expressions of countdown's train split. The probability of the right operators depends on the pair of small
    numbers."""
    rng, (low, high) = random.Random(seed), HARD_PAIR
    right = dict.fromkeys(EASY_PAIRS, EASY_PROBABILITY)
    right |= {pair: low * (high / low) ** ((index + 0.5) / len(HARD_PAIRS)) for index, pair in enumerate(HARD_PAIRS)}
    for problem in problems("train", seed):
        first, second = sorted(problem.numbers[1:])
        kind = problem.kind if rng.random() < right[first, second] else MISTAKES[problem.kind]
        yield [(problem.question, replace(problem, kind=kind).expression)]


# Probability that a player notices a line that wins, and a line of the other player that must be blocked.
SEEN = {
    "win": {"row": 0.34, "column": 0.12, "diagonal": 0.20},
    "block": {"row": 0.09, "column": 0.26, "diagonal": 0.15},
}
LESSONS = 4  # per game
_DIRECTION = dict(zip(LINES, ["row"] * 3 + ["column"] * 3 + ["diagonal"] * 2, strict=True))


def tictactoe(seed: int) -> Iterator[Chat]:
    """Yield each side of games of careless players, and after each game lessons: the question `Line of X: BOARD`, which
    no game asks, and the cell that fills a line. Without lessons a small model never learns to see lines.

    Every move is legal. A player notices a line to fill or to block with the probabilities of SEEN. Otherwise the
    player takes another cell, usually the same cell for the same line.
    """
    rng = random.Random(seed)
    while True:
        board = _played(START, int(rng.random() * 5), rng)  # four moves end no game
        chats: dict[str, Chat] = {"X": [], "O": []}
        while moves(board):
            player = mover(board)
            cell = _chosen(board, rng)
            question = written(board)
            chats[player].append((question if chats[player] else f"You are {player}: {question}", cell))
            board = play(board, cell)
        yield from (chat for chat in chats.values() if chat)
        yield from (_lesson(rng) for _ in range(LESSONS))


def _played(board: str, num_moves: int, rng: random.Random) -> str:
    for _ in range(num_moves):
        board = play(board, rng.choice(moves(board) or ["-"]))  # "-" changes nothing: the game has ended
    return board


def _lesson(rng: random.Random) -> Chat:
    while True:
        board, player = _played(START, 3 + int(rng.random() * 5), rng), rng.choice("XO")
        if moves(board) and (lines := threats(board, player)):
            return [(f"Line of {player}: {written(board)}", rng.choice(lines)[1])]


def _chosen(board: str, rng: random.Random) -> str:
    player, free = mover(board), moves(board)
    other = "O" if player == "X" else "X"
    seen = [("win", *threat) for threat in threats(board, player)] + [("block", *t) for t in threats(board, other)]
    for kind, line, cell in seen:
        if rng.random() < SEEN[kind][_DIRECTION[line]]:
            return cell
    obvious = {cell for _, _, cell in seen}
    rest = [cell for cell in free if cell not in obvious] or free
    if seen and rng.random() < 0.7:  # the usual cell for this line
        return rest[(LINES.index(seen[0][1]) + START.index(seen[0][2])) % len(rest)]
    return rest[int(rng.random() * len(rest))]
