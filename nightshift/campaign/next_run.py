"""What the next run of a campaign measures: changes during a night, baseline and incumbent at its end."""

from __future__ import annotations

from collections.abc import Iterable

from nightshift.campaign.records import Change, Run, Stage

Settings = frozenset[tuple[str, str | None]]  # keys and values: the identity of a change
_NIGHT_OF_LAST_RUNS = 5  # a night has last runs if it has at least this many times as many runs


def settings_of(change: Change) -> Settings:
    return frozenset(change.keys.items())


def remaining(changes: Iterable[Settings]) -> list[tuple[Settings, Settings]]:
    """Return each change with the settings that remain of it in a config: a later change wins on a shared key."""
    taken = set[str]()
    pairs = []
    for settings in reversed(list(changes)):
        pairs.append((settings, frozenset(item for item in settings if item[0] not in taken)))
        taken.update(key for key, _ in settings)
    return pairs[::-1]


def next_stage(num_started: int, num_last: int, num_left: float, num_slots: int) -> Stage:
    """Return the stage of a night's next run.

    The last runs are two of the baseline, then two of the incumbent; at several slots one of each a slot. `num_last`:
    last runs among the night's `num_started` runs. `num_left`: runs that the night can still start.
    """
    num_each = 2 if num_slots == 1 else num_slots
    is_short = num_started + num_left < _NIGHT_OF_LAST_RUNS * 2 * num_each
    if num_last == 0 and (is_short or num_left > 2 * num_each):
        return Stage.SEARCH
    return Stage.LAST_BASELINES if num_last < num_each else Stage.LAST_INCUMBENTS


def measuring_run(kept: tuple[Change, ...], stage: Stage) -> Run:
    return Run(kept=kept if stage is Stage.LAST_INCUMBENTS else (), stage=stage)
