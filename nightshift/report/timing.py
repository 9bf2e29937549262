"""Where the time went: every second of every run, and the pauses between experiments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import StrEnum

from nightshift.metrics import Step
from nightshift.records import Record, Result
from nightshift.report.data import span_of
from nightshift.report.slots import num_at_once

# A longer pause ends a night: nobody was working. Shorter ones are the proposer's time, and idle.
NIGHT_GAP = timedelta(hours=2)
_ROUNDING = 1.02  # parts measured by several clocks may exceed their whole by so much


class Use(StrEnum):
    """What a second was used for, in the order of a run."""

    STARTUP = "start-up"
    GENERATION = "generation"
    TRAINING = "training"
    TRANSFER = "weight transfer"
    WAITING = "trainer idle"  # it waits for rollouts that the other GPU generates
    UNSPLIT = "training, not split"  # the window of training where no steps say more
    EVALUATION = "evaluation"
    OTHER = "other"  # stopping, writing, a last step that was cut off, a crash's rest, what neighbours took of a CPU
    IDLE = "between experiments"


@dataclass(frozen=True, slots=True)
class Night:
    """Experiments without a pause of NIGHT_GAP between them. `seconds` by use; they sum to its length, times the most
    runs that were under way at once, but for experiments whose duration is not recorded (`num_unknown`)."""

    began: datetime
    ended: datetime
    num_experiments: int
    num_unknown: int
    seconds: Mapping[Use, float]

    @property
    def length_seconds(self) -> float:
        """From the start of the first experiment to the end of the last."""
        return (self.ended - self.began).total_seconds()


def split_run(run: Result, steps: Sequence[Step]) -> dict[Use, float]:
    """The seconds of one run by use; the window of training, in one piece without `steps`, from the trainer's side.

    Where generation runs beside training (prime-rl), it costs only the time that the trainer waits for rollouts.
    """
    window = run.training.training_seconds or 0.0
    training = {
        Use.GENERATION: sum(step.generate_seconds or 0.0 for step in steps),
        Use.TRAINING: sum(step.train_seconds or 0.0 for step in steps),
        Use.TRANSFER: sum(step.broadcast_seconds or 0.0 for step in steps),
        Use.WAITING: sum(step.wait_for_rollouts_seconds or 0.0 for step in steps),
    }
    if not 0 < sum(training.values()) <= window * _ROUNDING:
        training = {Use.UNSPLIT: window}
    evaluation = run.evaluation.seconds if run.evaluation else 0.0
    uses = {Use.STARTUP: run.startup_seconds or 0.0, **training, Use.EVALUATION: evaluation}
    return total([uses, {Use.OTHER: run.total_seconds - sum(uses.values())}])


def split_experiment(record: Record, steps: Sequence[Sequence[Step]]) -> dict[Use, float]:
    """The seconds of an experiment by use: its runs, `steps` of each, and what the harness itself took."""
    runs = [split_run(run, found) for run, found in zip(record.runs, steps, strict=True)]
    rest = (record.total_seconds or 0.0) - sum(sum(uses.values()) for uses in runs)
    return total([*runs, {Use.OTHER: rest}])


def total(parts: Iterable[Mapping[Use, float]]) -> dict[Use, float]:
    """Seconds by use, in the order of Use; uses that took nothing are absent, and no part takes less than nothing."""
    known = list(parts)
    sums = {use: sum(max(part.get(use, 0.0), 0.0) for part in known) for use in Use}
    return {use: seconds for use, seconds in sums.items() if seconds > 0}


def nights(experiments: Iterable[tuple[Record, Mapping[Use, float]]]) -> list[Night]:
    """The experiments, each with its seconds by use, in groups. One without a readable start is in none."""
    found, members = list[Night](), list[list[Record]]()
    for record, uses in experiments:
        if (span := span_of(record)) is None:
            continue
        night = Night(*span, 1, int(record.total_seconds is None), total([uses]))
        members.append([record])
        if found and night.began - found[-1].ended <= NIGHT_GAP:
            last = found.pop()
            members[-2:] = [members[-2] + members[-1]]
            idle = {Use.IDLE: (night.began - last.ended).total_seconds()}
            night = Night(
                began=last.began,
                ended=max(last.ended, night.ended),
                num_experiments=last.num_experiments + 1,
                num_unknown=last.num_unknown + night.num_unknown,
                seconds=total([last.seconds, uses, idle]),
            )
        found.append(night)
    return [_side_by_side(night, num_at_once(own)) for night, own in zip(found, members, strict=True)]


def _side_by_side(night: Night, num_slots: int) -> Night:
    """With what slots stood idle for, where several runs were under way at once."""
    if num_slots < 2:
        return night
    used: dict[Use, float] = {use: seconds for use, seconds in night.seconds.items() if use is not Use.IDLE}
    idle = num_slots * night.length_seconds - sum(used.values())
    return replace(night, seconds=total([used, {Use.IDLE: idle}]))
