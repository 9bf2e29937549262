"""Slices of the validation split: where a policy is weak, and how many examples a run fixes and breaks.

The scores come from the records, because an agent can overwrite evaluation.jsonl.
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
from nightshift.text import counted

LEAST_EXAMPLES = 20  # smaller slices are never the weakest: their mean score is noise


@dataclass(frozen=True)
class SelectionSet:
    """The examples of the validation split, and their slices."""

    texts: Mapping[tuple[str, str], str]  # the problem of each (package, key), in the order of the split
    members: Mapping[str, Sequence[int]]  # the positions in the split of each slice's examples
    digest: str  # the hash of the split, as in Evaluation.examples_sha256

    def flips(self, candidate: Record, incumbent: Record) -> list[str]:
        """Return a line for each slice: how many examples score higher (fixed) or lower (broken) in the candidate's
        run. [] if a run has no `scores`."""
        before, after = self.scores(incumbent), self.scores(candidate)
        if not before or not after:
            return []
        lines, gains = [], np.subtract(after, before)
        for name, positions in self.members.items():
            fixed, broken = int((gains[positions] > 0).sum()), int((gains[positions] < 0).sum())
            # 95 % half-width of fixed - broken if both are equally likely (McNemar, Psychometrika 12, 153).
            net = f"net {fixed - broken:+d} ± {Z95 * (fixed + broken) ** 0.5:.0f}"
            lines.append(f"{name}: {counted(len(positions), 'example')}, {fixed} fixed, {broken} broken, {net}")
        return lines

    def scores(self, record: Record) -> tuple[float, ...]:
        """Return the score of each example in a run; () if the run was not evaluated on these examples."""
        evaluation = record.evaluation
        return evaluation.example_scores if evaluation and evaluation.examples_sha256 == self.digest else ()


def weakest(record: Record, root: Path) -> str:
    """Return a sentence on the slice with the lowest mean score; "" without scores, or if all slices are small."""
    examples = shown_examples(record.environments, root)
    scores = np.array(examples.scores(record))
    members = {name: at for name, at in examples.members.items() if scores.size and len(at) >= LEAST_EXAMPLES}
    if not members:
        return ""
    mean, name = min((float(scores[positions].mean()), name) for name, positions in members.items())
    return f'The slice "{name}" has the lowest mean score: {100 * mean:.1f} % of {len(members[name])} examples.'


@lru_cache(maxsize=1)  # a night writes the page after every experiment
def shown_examples(names: tuple[str, ...], root: Path) -> SelectionSet:
    """Return the validation split of these environments; without examples if the data cannot be loaded. An environment
    is a slice, and so are the groups of `Environment.slices`."""
    tasks = list[tuple[Environment, Example]]()
    with suppress(NightshiftError, ImportError, OSError):  # then the page shows scores without texts
        loaded = load(root, environments_named(root, names))
        tasks = [(environment, example) for environment in loaded for example in environment.examples("validation")]
    texts, members = dict[tuple[str, str], str](), defaultdict[str, list[int]](list)
    for place, (environment, example) in enumerate(tasks):
        chat = environment.episode(example).ask()
        texts[environment.package, example.key] = chat[-1]["content"] if chat else ""
        groups = [f"{environment.name}, {name}: {value}" for name, value in environment.slices(example).items()]
        for name in (environment.name, *groups):
            members[name].append(place)
    return SelectionSet(texts, dict(sorted(members.items())), examples_digest(tasks))
