"""Ideas: the keys that an experiment set, and sets of them, by the numbers of the experiments that they came with."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Idea:
    """`keys` of train.toml, with the values of its experiment's; none where they are not known, and it joins no set.
    `replaced`: ideas of which it took the place, because it sets a key of theirs; their other keys are its own then."""

    keys: frozenset[str]
    replaced: frozenset[int] = frozenset()

    def over(self, held: Mapping[int, Idea]) -> Idea:
        """The same, tried on a config that held these."""
        gone = {number: idea for number, idea in held.items() if idea.keys & self.keys}
        keys = self.keys.union(*(idea.keys for idea in gone.values()))
        return Idea(keys, frozenset(gone).union(*(idea.replaced for idea in gone.values())))


def is_set(ideas: Mapping[int, Idea], numbers: Collection[int] | None) -> bool:
    """Whether these are remembered, and can stand in one file: each sets keys, and no two the same."""
    found = [ideas[number].keys for number in numbers or () if number in ideas]
    is_whole = numbers is not None and len(found) == len(numbers) and all(found)
    return is_whole and len(frozenset().union(*found)) == sum(map(len, found))


def difference(own: Collection[int], ideas: Collection[int] | None) -> str:
    """In words, how a set of ideas differs from a config's own; empty where it does not, or is not known."""
    if ideas is None:
        return ""
    changes = {"less": {*own} - {*ideas}, "plus": {*ideas} - {*own}}
    return " ".join(f"{word} {number:04d}" for word, numbers in changes.items() for number in sorted(numbers))
