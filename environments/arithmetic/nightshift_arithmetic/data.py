"""Generated word problems with containers of hidden size: "Mia buys a crate of pens."

A question has 1 to 3 events. An event adds or takes away a written number ("Mia buys 4 pens.") or the contents of a
container ("Mia buys a crate of pens."). No text contains the size of a container, only the table CONTAINERS. The base
model knows the sizes of EASY, and each size of HARD with a small probability only. Reinforcement learning has 48 facts
to discover, from easy to nearly impossible. Solutions are in GSM8K's style; all numbers are within 3..96. The three
splits use the same containers and share no problem: a hash of numbers, signs and containers decides the split.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from nightshift_gsm8k.data import Example
from nightshift_gsm8k.shared import Split, check, digest, distinct, generate, messages, pick, shuffled

__all__ = ["messages"]

PROMPT_TOKENS = 448  # the 512 positions of the shipped model without its longest answer; no question needs as many
MAX_SIZE: dict[str, int] = {"train": 200_000, "validation": 20_000, "test": 20_000}  # of many more wordings

_SIZES = range(2, 10)  # written numbers and container sizes
_STARTS = range(30, 70)  # 30 - 3 * 9 = 3 and 69 + 3 * 9 = 96
_NAMES = ("Ada", "Ben", "Eva", "Finn", "Lea", "Max", "Mia", "Noah", "Tom", "Zoe")
_ITEMS = ("books", "cards", "coins", "nuts", "pens", "shells", "stamps", "toys")
_VERBS = {+1: ("buys", "finds", "wins", "gets"), -1: ("sells", "loses", "drops", "uses")}
_NUM_EVENTS = [1] * 8 + [2] * 9 + [3] * 3  # 40, 45 and 15 %
_NUM_HARD = [0] * 2 + [1] * 2 + [2]

EASY: dict[str, int] = {
    "bag": 5, "basket": 8, "bowl": 3, "box": 6, "bunch": 4, "bundle": 9,
    "cup": 2, "jar": 7, "pack": 3, "packet": 4, "pile": 8, "tray": 6,
}  # fmt: skip
# From hardest to easiest for the base model. Each row contains every size once, so that rarity and size are
# independent: with random sizes, a size that was rare by chance was never learned.
HARD: dict[str, int] = {
    "crate": 7, "tin": 4, "barrel": 9, "carton": 2, "sack": 5, "pouch": 8, "bucket": 3, "tub": 6,
    "chest": 3, "drum": 8, "case": 6, "flask": 5, "jug": 2, "vase": 9, "pot": 7, "pan": 4,
    "can": 5, "cask": 2, "keg": 7, "vat": 6, "hamper": 9, "trunk": 4, "locker": 8, "satchel": 3,
    "wallet": 8, "purse": 6, "sleeve": 4, "shelf": 3, "rack": 7, "stack": 2, "heap": 5, "mound": 9,
    "batch": 2, "cluster": 9, "bale": 3, "roll": 8, "reel": 4, "coil": 7, "strip": 6, "sheet": 5,
    "block": 6, "slab": 3, "wedge": 8, "drawer": 7, "cabinet": 5, "trolley": 2, "cart": 9, "wagon": 4,
}  # fmt: skip
CONTAINERS: dict[str, int] = {**EASY, **HARD}


@dataclass(frozen=True, slots=True)
class Event:
    """A sentence that adds (`sign` = 1) or takes away (-1) `amount` items."""

    sign: int
    verb: str
    amount: int
    container: str | None  # None: the text has the amount as a number


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem without its wording."""

    name: str
    item: str
    start: int
    events: tuple[Event, ...]

    @property
    def question(self) -> str:
        """The text of the prompt."""
        text = f"{self.name} has {self.start} {self.item}."
        for event in self.events:
            quantity = f"a {event.container} of" if event.container else event.amount
            text += f" {self.name} {event.verb} {quantity} {self.item}."
        return f"{text} How many {self.item} now?"

    @property
    def split(self) -> Split:
        """The only split that may contain this problem, in any wording: 80 % train, 10 % each for the others."""
        identity = [str(self.start), *(f"{event.sign:+d} {event.container or event.amount}" for event in self.events)]
        bucket = int(digest(";".join(identity)), 16) % 10
        return "test" if bucket == 0 else "validation" if bucket == 1 else "train"

    def solution(self, amounts: Sequence[int] | None = None) -> str:
        """Return a line for each event, then the answer. `amounts`: replace the true amounts."""
        total, lines = self.start, []
        for event, amount in zip(self.events, amounts or [event.amount for event in self.events], strict=True):
            result = total + event.sign * amount
            lines.append(f"<<{total}{'+' if event.sign > 0 else '-'}{amount}={result}>>")
            total = result
        return "\n".join([*lines, f"#### {total}"])


def load(split: Split, size: int | None = None, seed: int = 0) -> list[Example]:
    """Return the first `size` different problems of one split, the same for the same seed on every Python.

    None: MAX_SIZE. ValueError: the split or the size does not exist.
    """
    check(split, size, MAX_SIZE)
    chosen = distinct(problems(split, seed), lambda problem: problem.question, size or MAX_SIZE[split])
    pairs = [(problem.question, problem.solution()) for problem in chosen]
    return [Example(digest(text)[:16], text, solution, solution.rpartition("#### ")[2]) for text, solution in pairs]


def slices(example: Example) -> dict[str, str]:
    """Group problems by the numbers of events and of hard containers."""
    num_hard = sum(f" a {name} of " in example.question for name in HARD)
    return {"events": str(example.question.count(". ") - 1), "hard containers": str(num_hard)}


def _draw(rng: random.Random) -> Problem:
    num_events = num_hard = 0
    while num_events < max(1, num_hard):
        num_events, num_hard = pick(rng, _NUM_EVENTS), pick(rng, _NUM_HARD)
    pools = [HARD] * num_hard + [EASY if rng.random() < 0.5 else None for _ in range(num_events - num_hard)]
    events: list[Event] = []
    for pool in shuffled(rng, pools):
        sign = +1 if rng.random() < 0.5 else -1
        used = {event.container for event in events}
        container = pick(rng, [name for name in pool if name not in used]) if pool else None
        amount = CONTAINERS[container] if container else pick(rng, _SIZES)
        events.append(Event(sign, pick(rng, _VERBS[sign]), amount, container))
    return Problem(pick(rng, _NAMES), pick(rng, _ITEMS), pick(rng, _STARTS), tuple(events))


problems = partial(generate, _draw)  # endless problems of a split and a seed, which may repeat
