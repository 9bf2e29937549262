"""What was learnt about each key: the values that were tried, and what each was worth against its incumbent."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nightshift.report.data import Experiment

_GENERIC_LEAVES = ("type", "name", "enabled", "num")


@dataclass(frozen=True, slots=True)
class Trial:
    """One experiment that changed a key to `value`."""

    experiment: Experiment
    old: str
    value: str


@dataclass(frozen=True, slots=True)
class KeyStudy:
    """One key with its trials in order; `current` is the incumbent's value."""

    key: str
    trials: tuple[Trial, ...]
    current: str


def study(experiments: Sequence[Experiment]) -> list[KeyStudy]:
    """The changed keys, those tried most first. Experiments without a verdict say nothing."""
    trials: dict[str, list[Trial]] = {}
    current: dict[str, str] = {}
    for experiment in experiments:
        if experiment.delta is None and not experiment.is_crash:
            continue
        for change in experiment.changes:
            old, value = change.old or "unset", change.new or "unset"
            trials.setdefault(change.key, []).append(Trial(experiment, old, value))
            current.setdefault(change.key, old)  # before the first trial the incumbent had the old value
            if experiment.is_standing:
                current[change.key] = value
    studies = [KeyStudy(key, tuple(found), current[key]) for key, found in trials.items()]
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


def by_value(value: str) -> tuple[bool, float, str]:
    """Sorts numbers in their order, then texts."""
    number = as_number(value)
    return (number is None, number or 0.0, value)
