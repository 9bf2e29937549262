"""Slices of the validation split: where a policy is weak, and how many examples a run fixes and breaks.

The scores come from the records, because an agent can overwrite evaluation.jsonl. Scores and split are matched only if
the split has the hash that the record contains.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from nightshift.campaign.records import Z95, Record
from nightshift.config.rules_toml import environments_named
from nightshift.errors import NightshiftError
from nightshift.evaluation.environment import Environment, Example, load
from nightshift.evaluation.evaluate import examples_digest

MOST_VALUES = 12  # a quantity of the examples, such as their length, with more values gets no slices
LEAST_EXAMPLES = 20  # smaller slices are never the weakest: their mean score is noise
_AGAINST = "against_"  # the prefix of a figure: the mean score against the opponent that the rest of the name names
Tasks = Sequence[tuple[Environment, Example]]


@dataclass(frozen=True, slots=True)
class Slice:
    """A group of examples, and how many score higher (`fixed`) or lower (`broken`) in one run than in another."""

    name: str
    num_examples: int
    fixed: int
    broken: int

    @property
    def spread(self) -> float:
        """95 % half-width of fixed - broken if fixes and breaks are equally likely (McNemar, Psychometrika 12, 153)."""
        return float(Z95 * (self.fixed + self.broken) ** 0.5)


@dataclass(frozen=True, slots=True)
class SelectionSet:
    """The examples of the validation split, and their slices."""

    texts: Mapping[tuple[str, str], str]  # the problem of each (package, key), in the order of the split
    members: Mapping[str, Sequence[int]]  # the positions in the split of each slice's examples
    digest: str  # the hash of the split, as in Evaluation.examples_sha256

    def flips(self, candidate: Record, incumbent: Record) -> tuple[Slice, ...]:
        """Count the fixed and broken examples of the candidate by slice; empty if a run has no `scores`."""
        before, after = self.scores(incumbent), self.scores(candidate)
        if before is None or after is None:
            return ()
        change = np.sign(np.subtract(after, before))
        rows = ((name, change[positions]) for name, positions in self.members.items())
        return tuple(Slice(name, len(signs), int((signs > 0).sum()), int((signs < 0).sum())) for name, signs in rows)

    def scores(self, record: Record) -> tuple[float, ...] | None:
        """Return the score of each example in a run; None if the run was not evaluated on these examples."""
        if record.evaluation is None or record.evaluation.examples_sha256 != self.digest:
            return None
        return record.evaluation.example_scores


def weakest(record: Record, root: Path) -> str:
    """Return a sentence on where the policy of a run is weakest: in a game the opponent that wins most, else the slice
    with the lowest mean score. "" without scores, or if all slices are small."""
    if record.evaluation is None:
        return ""
    against = [
        (score, name.removeprefix(_AGAINST), environment)
        for environment, figures in record.evaluation.figures.items()
        for name, score in figures.items()
        if name.startswith(_AGAINST)
    ]
    if against:
        score, opponent, environment = min(against)
        return f"In {environment} the opponent {opponent} wins most: the mean score against it is {100 * score:.1f} %."
    examples = shown_examples(record.environments, root)
    scores = np.array(examples.scores(record) or ())
    slices = {name: positions for name, positions in examples.members.items() if len(positions) >= LEAST_EXAMPLES}
    if not scores.size or not slices:
        return ""
    means = {name: float(scores[positions].mean()) for name, positions in slices.items()}
    name = min(means, key=means.__getitem__)
    return f'The slice "{name}" has the lowest mean score: {100 * means[name]:.1f} % of {len(slices[name])} examples.'


@lru_cache(maxsize=1)  # a night writes the page after every experiment
def shown_examples(names: tuple[str, ...], root: Path) -> SelectionSet:
    """Return the validation split of these environments; without examples if the data cannot be loaded."""
    tasks: Tasks = ()
    with suppress(NightshiftError, ImportError, OSError):  # then the page shows scores without texts
        loaded = load(root, environments_named(root, names))
        tasks = [(environment, example) for environment in loaded for example in environment.examples("validation")]
    chats = [environment.episode(example).ask() for environment, example in tasks]
    texts = [chat[-1]["content"] if chat else "" for chat in chats]
    keys = [(environment.package, example.key) for environment, example in tasks]
    return SelectionSet(dict(zip(keys, texts, strict=True)), _members(tasks, texts), examples_digest(tasks))


def _members(tasks: Tasks, texts: Sequence[str]) -> dict[str, Sequence[int]]:
    """Return the positions of each slice's examples. An environment is a slice, and so are the thirds of its problems
    by length and the groups of `Environment.slices`."""
    members: dict[str, list[int]] = {}
    for name in dict.fromkeys(environment.name for environment, _ in tasks):
        members[name] = positions = [i for i, (environment, _) in enumerate(tasks) if environment.name == name]
        lengths = sorted(len(texts[i]) for i in positions)
        first, second = lengths[len(lengths) // 3], lengths[2 * len(lengths) // 3]
        groups = defaultdict[str, dict[str, list[int]]](lambda: defaultdict(list))
        for i in positions:
            environment, example = tasks[i]
            length = len(texts[i])
            band = f"up to {first}" if length <= first else f"up to {second}" if length <= second else "longer"
            for quantity, value in {"characters": band, **environment.slices(example)}.items():
                groups[quantity][value].append(i)
        for quantity, by_value in groups.items():
            for value in sorted(by_value, key=_rank) if len(by_value) <= MOST_VALUES else ():
                members[f"{name}, {quantity}: {value}"] = by_value[value]
    return {name: np.array(positions) for name, positions in members.items()}  # type: ignore[misc]


def _rank(value: str) -> tuple[bool, float, str]:
    """Return the sort key of a value: `up to 80` before `up to 120` before `longer`, and `9` before `10`."""
    number = next((float(word) for word in value.split() if word.isdecimal()), None)
    return number is None, number or 0.0, value
