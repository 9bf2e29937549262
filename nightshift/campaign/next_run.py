"""What the next run of a campaign measures: changes while a night searches, baseline and incumbent at its end."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum

import msgspec

from nightshift.campaign.records import Change

Settings = frozenset[tuple[str, str | None]]  # keys and values: the identity of a change
_NIGHT_OF_LAST_RUNS = 5  # a night has last runs if it has at least this many times as many runs


def settings_of(change: Change) -> Settings:
    """Return the identity of a change."""
    return frozenset(change.keys.items())


def remaining(changes: Iterable[Settings]) -> list[tuple[Settings, Settings]]:
    """Return each change with what it still sets in a config; a later change wins on a shared key."""
    taken = set[str]()
    pairs = []
    for settings in reversed(list(changes)):
        pairs.append((settings, frozenset(item for item in settings if item[0] not in taken)))
        taken.update(key for key, _ in settings)
    return pairs[::-1]


class Stage(IntEnum):
    """The part of a night in which a run starts."""

    SEARCH = 0  # changes come in and go out
    LAST_BASELINES = 1  # the run measures the baseline: kept changes may still go out
    LAST_INCUMBENTS = 2  # the run measures the incumbent, which is fixed


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """What one run measures. `kept`: the incumbent's changes in the order of adoption, or every change of a config that
    is run again; none for the baseline. `rider`: a discarded change that is measured again. `new`: the proposed change,
    None if it has no keys. A later change wins on a shared key; `new` is the last."""

    kept: tuple[Change, ...] = ()
    rider: Change | None = None
    new: Change | None = None
    stage: Stage = Stage.SEARCH

    @property
    def changes(self) -> Iterable[Change]:
        """The changes of the run's config, in the order in which they apply."""
        return (*self.kept, *(change for change in (self.rider, self.new) if change is not None))


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
    """Return one of a night's last runs, given the incumbent's changes."""
    return Run(kept=kept if stage is Stage.LAST_INCUMBENTS else (), stage=stage)
