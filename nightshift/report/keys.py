"""What was learnt about each key: the values that were tried, and what each was worth against its incumbent."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nightshift.records import Verdict
from nightshift.report.data import Experiment

_GENERIC_LEAVES = ("type", "name", "enabled", "num")


@dataclass(frozen=True, slots=True)
class Trial:
    """One experiment that changed a key to `value`. `delta` is None for a crash; fractions.

    `is_alone`: no other key changed, so the difference is this key's.
    """

    number: int
    old: str
    value: str
    delta: float | None
    spread: float | None
    status: str
    is_alone: bool


@dataclass(frozen=True, slots=True)
class KeyStudy:
    """One key with its trials in order; `current` is the incumbent's value, None if the key never was kept."""

    key: str
    trials: tuple[Trial, ...]
    current: str | None

    @property
    def values(self) -> list[str]:
        """The distinct values tried, numbers in their order, then texts."""
        return sorted({trial.value for trial in self.trials}, key=_sort_key)

    @property
    def numbers(self) -> dict[str, float] | None:
        """The tried values as numbers; None if one is no number."""
        values = {trial.value: as_number(trial.value) for trial in self.trials}
        return None if None in values.values() else {text: n for text, n in values.items() if n is not None}


def study(experiments: Sequence[Experiment]) -> list[KeyStudy]:
    """The changed keys, those tried most first. Experiments without a verdict say nothing."""
    trials: dict[str, list[Trial]] = {}
    current: dict[str, str] = {}
    for experiment in experiments:
        if experiment.delta is None and experiment.record.status != Verdict.CRASH:
            continue
        for change in experiment.changes:
            value = change.new if change.new is not None else "unset"
            old = change.old if change.old is not None else "unset"
            trial = Trial(
                experiment.number,
                old,
                value,
                experiment.delta,
                experiment.delta_spread,
                experiment.record.status,
                len(experiment.changes) == 1,
            )
            trials.setdefault(change.key, []).append(trial)
            current.setdefault(change.key, old)  # before the first trial the incumbent had the old value
            if experiment.is_standing:
                current[change.key] = value
    studies = [KeyStudy(key, tuple(found), current.get(key)) for key, found in trials.items()]
    return sorted(studies, key=lambda s: (-len(s.trials), s.key))


def short_names(keys: Iterable[str]) -> dict[str, str]:
    """For each key the shortest ending that no other key shares, two segments where one says nothing (`type`)."""
    known = list(dict.fromkeys(keys))
    names = {}
    for key in known:
        segments = key.split(".")
        least = 2 if segments[-1] in _GENERIC_LEAVES else 1
        for length in range(min(least, len(segments)), len(segments) + 1):
            name = ".".join(segments[-length:])
            if not any(other != key and (other == name or other.endswith(f".{name}")) for other in known):
                break
        names[key] = name
    return names


def as_number(text: str) -> float | None:
    """The number that a recorded value is; None for text, true and false."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if abs(number) < float("inf") else None  # also false for nan


def _sort_key(value: str) -> tuple[bool, float, str]:
    number = as_number(value)
    return (number is None, number or 0.0, value)
