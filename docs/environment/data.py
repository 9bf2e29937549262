"""The problems: add or remove the contents of a container whose size the model must learn.

Replace SIZES, `_problems` and `Example` by your own task. Keep `load` and `messages`. The `key` of a problem must not
depend on the order, and no two of the three sets may share a problem, not even in other words.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass

PROMPT_TOKENS = 64  # the maximum length of a prompt, in tokens of the model
SIZES = {
    "block": 6, "slab": 3, "wedge": 8, "drawer": 7, "cabinet": 5, "trolley": 2, "cart": 9, "wagon": 4,
    "batch": 2, "cluster": 9, "bale": 3, "roll": 8, "reel": 4, "coil": 7, "strip": 6, "sheet": 5,
    "wallet": 8, "purse": 6, "sleeve": 4, "shelf": 3, "rack": 7, "stack": 2, "heap": 5, "mound": 9,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Example:
    """One problem."""

    key: str
    question: str
    answer: str


def load(split: str, size: int | None, seed: int = 0) -> list[Example]:
    """Return the first `size` problems of `train`, `validation` or `test`. `seed` sets the order of the training set.

    Raises ValueError, one line with the remedy, for a split or a size that does not exist.
    """
    if split not in ("train", "validation", "test"):
        raise ValueError(f"split = {split!r} does not exist. Use train, validation or test")
    examples = [example for example in _problems() if _split(example.key) == split]
    if size is not None and not 0 < size <= len(examples):
        raise ValueError(f"size = {size} is not available in {split}. Use 1 to {len(examples)}")
    examples.sort(key=lambda example: example.key)
    examples = examples[:size]
    if split == "train":
        random.Random(seed).shuffle(examples)
    return examples


def messages(example: Example) -> list[dict[str, str]]:
    """Return the chat that asks the question."""
    return [{"role": "user", "content": example.question}]


def _problems() -> Iterator[Example]:
    for name, size in SIZES.items():
        for start in range(30, 70):
            for verb, sign in (("buys", 1), ("loses", -1)):
                question = f"Mia has {start} pens. Mia {verb} a {name} of pens. How many pens now?"
                yield Example(_digest(f"{name} {start} {sign}"), question, str(start + sign * size))


def _split(key: str) -> str:
    return ("test", "validation", "train")[min(int(_digest(key), 16) % 4, 2)]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
