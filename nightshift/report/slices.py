"""Why does it lose? Which examples a candidate fixes and breaks against its incumbent, by what the examples are.

Scores are those of the records, not of evaluation.jsonl, which anybody may have written to since; the examples are
taken for the recorded ones only where they have the recorded hash.
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

MOST_VALUES = 12  # of one quantity: more are no groups
LEAST_EXAMPLES = 20  # of a slice that is called the weakest: the mean of fewer is noise
_AGAINST = "against_"  # begins the name of a game's figure: the mean score against an opponent

Posed = Sequence[tuple[Environment, Example]]


@dataclass(frozen=True, slots=True)
class Slice:
    """Some of the examples, of which so many have a higher (`fixed`) or lower (`broken`) score than before."""

    name: str
    num_examples: int
    fixed: int
    broken: int

    @property
    def spread(self) -> float:
        """Half of the 95 % interval of fixed less broken, if each were as likely as the other (McNemar 1947,
        Psychometrika 12, 153)."""
        return float(Z95 * (self.fixed + self.broken) ** 0.5)


@dataclass(frozen=True, slots=True)
class SelectionSet:
    """Its examples as the page tells them: `texts` by (package, key), the places in it of the `members` of a slice."""

    texts: Mapping[tuple[str, str], str]
    members: Mapping[str, Sequence[int]]
    digest: str  # Evaluation.examples_sha256

    def flips(self, candidate: Record, incumbent: Record) -> tuple[Slice, ...]:
        """By slice; none where `scores` of one are not known."""
        before, after = self.scores(incumbent), self.scores(candidate)
        if before is None or after is None:
            return ()
        change = np.sign(np.subtract(after, before))
        rows = ((name, change[places]) for name, places in self.members.items())
        return tuple(Slice(name, len(each), int((each > 0).sum()), int((each < 0).sum())) for name, each in rows)

    def scores(self, record: Record) -> tuple[float, ...] | None:
        """The score of each example in the run of an experiment; None where it was evaluated on others, or not."""
        if record.evaluation is None or record.evaluation.examples_sha256 != self.digest:
            return None
        return record.evaluation.example_scores


def weakest(record: Record, root: Path) -> str:
    """Describe where the policy of a run is weakest: of a game the opponent that wins most, else the slice of the
    validation split with the lowest mean score. Returns "" if that was not measured."""
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
    slices = {name: places for name, places in examples.members.items() if len(places) >= LEAST_EXAMPLES}
    if not scores.size or not slices:
        return ""
    means = {name: float(scores[places].mean()) for name, places in slices.items()}
    name = min(means, key=means.__getitem__)
    return f'The slice "{name}" has the lowest mean score: {100 * means[name]:.1f} % of {len(slices[name])} examples.'


@lru_cache(maxsize=1)  # for a night, which writes the page after every experiment
def shown_examples(names: tuple[str, ...], root: Path) -> SelectionSet:
    """The validation split of these environments; empty without its data."""
    posed: Posed = ()
    with suppress(NightshiftError, ImportError, OSError):  # the page says of each problem that its text is not there
        loaded = load(root, environments_named(root, names))
        posed = [(environment, example) for environment in loaded for example in environment.examples("validation")]
    texts = [chat[-1]["content"] if (chat := one.episode(example).ask()) else "" for one, example in posed]
    by_key = {(one.package, example.key): text for (one, example), text in zip(posed, texts, strict=True)}
    return SelectionSet(by_key, _members(posed, texts), examples_digest(posed))


def _members(posed: Posed, texts: Sequence[str]) -> dict[str, Sequence[int]]:
    """Return the places of each slice: an environment, a third of its problems by length, and its own groups."""
    members: dict[str, list[int]] = {}
    for name in dict.fromkeys(environment.name for environment, _ in posed):
        members[name] = places = [place for place, (environment, _) in enumerate(posed) if environment.name == name]
        lengths = sorted(len(texts[place]) for place in places)
        first, second = lengths[len(lengths) // 3], lengths[2 * len(lengths) // 3]
        groups = defaultdict[str, dict[str, list[int]]](lambda: defaultdict(list))
        for place in places:
            environment, example = posed[place]
            length = len(texts[place])
            band = f"up to {first}" if length <= first else f"up to {second}" if length <= second else "longer"
            for what, value in {"characters": band, **environment.slices(example)}.items():
                groups[what][value].append(place)
        for what, by_value in groups.items():
            for value in sorted(by_value, key=_rank) if len(by_value) <= MOST_VALUES else ():
                members[f"{name}, {what}: {value}"] = by_value[value]
    return {name: np.array(places) for name, places in members.items()}  # type: ignore[misc]


def _rank(value: str) -> tuple[bool, float, str]:
    """`up to 80`, `up to 120`, `longer`; `9`, `10`."""
    number = next((float(word) for word in value.split() if word.isdecimal()), None)
    return number is None, number or 0.0, value
