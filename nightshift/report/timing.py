"""Where the time went: every second of every run, and the pauses between experiments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from itertools import pairwise

from nightshift.metrics import Step
from nightshift.records import Record, Run
from nightshift.report.data import began_at, ended_at

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
    OTHER = "other"  # stopping, writing, a last step that the budget cut off, a crash's rest
    IDLE = "between experiments"


@dataclass(frozen=True, slots=True)
class Segment:
    """Seconds of one use."""

    use: Use
    seconds: float


@dataclass(frozen=True, slots=True)
class Night:
    """Experiments without a pause of NIGHT_GAP between them. `seconds` by use; they sum to its length, but
    for experiments whose duration is not recorded (`num_unknown`)."""

    began: datetime
    ended: datetime
    first: int
    last: int
    num_experiments: int
    num_unknown: int
    seconds: Mapping[Use, float] = field(default_factory=dict)

    @property
    def length_seconds(self) -> float:
        """From the start of the first experiment to the end of the last."""
        return (self.ended - self.began).total_seconds()


def split_run(run: Run, steps: Sequence[Step]) -> list[Segment]:
    """The seconds of one run in order. Without `steps` the training window is one piece."""
    training = run.training.training_seconds or 0.0
    evaluation = run.evaluation.seconds if run.evaluation else 0.0
    startup = run.startup_seconds or 0.0
    rest = max(run.total_seconds - startup - training - evaluation, 0.0)
    parts = [
        Segment(Use.STARTUP, startup),
        *_split_training(training, steps),
        Segment(Use.EVALUATION, evaluation),
        Segment(Use.OTHER, rest),
    ]
    return [part for part in parts if part.seconds > 0]


def _split_training(seconds: float, steps: Sequence[Step]) -> list[Segment]:
    """The training window from the trainer's side.

    Where generation runs beside training (prime-rl: the trainer reports what it waits for), it costs only the
    time that the trainer waits.
    """
    is_parallel = any(step.wait_for_rollouts_seconds is not None for step in steps)
    generation = 0.0 if is_parallel else _sum(step.generate_seconds for step in steps)
    parts = [
        Segment(Use.GENERATION, generation),
        Segment(Use.TRAINING, _sum(step.train_seconds for step in steps)),
        Segment(Use.TRANSFER, _sum(step.broadcast_seconds for step in steps)),
        Segment(Use.WAITING, _sum(step.wait_for_rollouts_seconds for step in steps)),
    ]
    known = sum(part.seconds for part in parts)
    if known == 0 or known > seconds * _ROUNDING:
        return [Segment(Use.UNSPLIT, seconds)]
    return [*parts, Segment(Use.OTHER, max(seconds - known, 0.0))]


def split_experiment(record: Record, steps: Mapping[int, Sequence[Step]]) -> list[Segment]:
    """All runs of an experiment in order, `steps` by run index, and what the harness itself took."""
    segments = [segment for run in record.runs for segment in split_run(run, steps.get(run.index, ()))]
    rest = (record.total_seconds or 0.0) - sum(segment.seconds for segment in segments)
    return [*segments, Segment(Use.OTHER, rest)] if rest > 0 else segments


def totals(segments: Sequence[Segment]) -> dict[Use, float]:
    """Seconds by use, in the order of Use; uses that took nothing are absent."""
    sums = {use: sum(s.seconds for s in segments if s.use is use) for use in Use}
    return {use: seconds for use, seconds in sums.items() if seconds > 0}


def nights(records: Sequence[Record], segments: Mapping[int, Sequence[Segment]]) -> list[Night]:
    """The experiments in groups, `segments` by experiment number. One without a readable start is in none."""
    groups: list[list[tuple[Record, datetime, datetime]]] = []
    for record in records:
        began, ended = began_at(record), ended_at(record)
        if began is None or ended is None:
            continue
        if groups and began - groups[-1][-1][2] <= NIGHT_GAP:
            groups[-1].append((record, began, ended))
        else:
            groups.append([(record, began, ended)])
    return [_night(group, segments) for group in groups]


def _night(group: Sequence[tuple[Record, datetime, datetime]], segments: Mapping[int, Sequence[Segment]]) -> Night:
    parts = [part for record, _, _ in group for part in segments.get(record.number, ())]
    for (_, _, ended), (_, began, _) in pairwise(group):
        parts.append(Segment(Use.IDLE, max((began - ended).total_seconds(), 0.0)))
    return Night(
        began=group[0][1],
        ended=max(ended for _, _, ended in group),
        first=group[0][0].number,
        last=group[-1][0].number,
        num_experiments=len(group),
        num_unknown=sum(record.total_seconds is None for record, _, _ in group),
        seconds=totals(parts),
    )


def _sum(values: Iterable[float | None]) -> float:
    return sum(value for value in values if value is not None)
