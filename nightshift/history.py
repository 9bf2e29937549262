"""The memory of ideas: what a campaign has tried, by the keys that it touched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from nightshift.config import Config
from nightshift.ledger import Ledger
from nightshift.records import Record, Verdict
from nightshift.values import Value


@dataclass(frozen=True, slots=True)
class Trial:
    """What one experiment did to one key; `before` is the incumbent's value of that time.

    None is "None" in train.toml; a value is "absent" where the key did not apply.
    """

    number: int
    before: str  # as train.toml spells it
    after: str
    value: Value  # `after`, parsed
    verdict: Verdict
    delta: float | None  # posterior mean and its standard error, fractions; None for a crash
    delta_stderr: float | None
    others: tuple[str, ...]  # keys that changed with it
    description: str
    lesson: str | None

    @property
    def is_near_miss(self) -> bool:
        """Discarded, but within one standard error of no difference."""
        return (
            self.verdict is Verdict.DISCARD
            and self.delta is not None
            and self.delta_stderr is not None
            and self.delta + self.delta_stderr >= 0
        )


@dataclass(frozen=True, slots=True)
class Span:
    """Values between two tried and rejected ones, all other keys equal: covered.

    `around` is the kept value between them, if there is one: the best lies near it.
    """

    low: float
    high: float
    around: str | None = None


@dataclass(frozen=True, slots=True)
class KeyHistory:
    """Everything tried with one key, in order of the experiments."""

    key: str
    now: str  # the incumbent's value, as train.toml spells it
    trials: tuple[Trial, ...]
    covered: tuple[Span, ...]
    is_dead_end: bool

    def is_covered(self, value: float) -> bool:
        """True if the value lies strictly inside a covered span."""
        return any(span.low < value < span.high for span in self.covered)


def load_configs(ledger: Ledger, records: Sequence[Record]) -> dict[int, Config]:
    """The submitted configs by experiment number; those that today's allow-list refuses are left out."""
    raise NotImplementedError


def history(records: Sequence[Record], configs: Mapping[int, Config]) -> list[KeyHistory]:
    """Decided experiments of one campaign (Campaign.decided), grouped by key: the most tried first."""
    raise NotImplementedError


def untried(histories: Sequence[KeyHistory], incumbent: Config, used_keys: AbstractSet[str] | None) -> list[str]:
    """Open keys that the engine uses (None: all), that apply under the incumbent, and that nobody has touched."""
    raise NotImplementedError


def describe(histories: Sequence[KeyHistory], untried_keys: Sequence[str], max_lines: int = 80) -> str:
    """Aligned plain text for a person."""
    raise NotImplementedError


def brief_lines(histories: Sequence[KeyHistory], untried_keys: Sequence[str], max_characters: int = 2000) -> list[str]:
    """The same for an agent's brief: dead ends, covered spans, near misses and untried keys first."""
    raise NotImplementedError
