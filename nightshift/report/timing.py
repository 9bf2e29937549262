"""The seconds of every run by use, and the pauses between experiments."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from itertools import accumulate

from nightshift.campaign.metrics import Step
from nightshift.campaign.records import Record

NIGHT_GAP = timedelta(hours=2)  # a longer pause ends a night
Seconds = Mapping["Use", float]


class Use(StrEnum):
    """The uses of a second, in the order of a run."""

    STARTUP = "start-up"
    GENERATION = "generation"
    TRAINING = "training"
    TRANSFER = "weight transfer"
    WAITING = "trainer idle"  # waiting for rollouts from the other GPU
    UNSPLIT = "training, not split"  # if the steps have no times
    EVALUATION = "evaluation"
    OTHER = "other"  # stopping, writing, an unfinished last step, the rest of a crash
    IDLE = "between experiments"


_OF_STEPS = {
    Use.GENERATION: "generate_seconds",
    Use.TRAINING: "train_seconds",
    Use.TRANSFER: "broadcast_seconds",
    Use.WAITING: "wait_for_rollouts_seconds",
}


@dataclass(frozen=True, slots=True)
class Night:
    """Experiments without a pause of NIGHT_GAP. The sum of `seconds` is the length times the largest number of
    simultaneous runs."""

    began: datetime
    ended: datetime
    num_experiments: int
    seconds: Seconds

    @property
    def length_seconds(self) -> float:
        return (self.ended - self.began).total_seconds()


def split_experiment(record: Record, steps: Sequence[Step]) -> Seconds:
    """Return the seconds of an experiment by use. `steps` split the time of training, unless their sum is too long.
    Generation in parallel to training (prime-rl) counts only as the time that the trainer waits for rollouts."""
    seconds, total = dict.fromkeys(Use, 0.0), record.total_seconds or 0.0
    if run := record.result:
        window, total = run.training.training_seconds or 0.0, max(run.total_seconds, total)
        training = {use: sum(getattr(step, name) or 0.0 for step in steps) for use, name in _OF_STEPS.items()}
        fits = 0 < sum(training.values()) <= window * 1.02  # the parts were measured by several clocks
        seconds |= training if fits else {Use.UNSPLIT: window}
        seconds[Use.STARTUP] = run.startup_seconds or 0.0
        seconds[Use.EVALUATION] = run.evaluation.seconds if run.evaluation else 0.0
    seconds[Use.OTHER] = total - sum(seconds.values())
    return _used(seconds)


def _used(seconds: Seconds) -> Seconds:
    return {use: value for use, value in seconds.items() if value > 0}


def nights(experiments: Iterable[tuple[Record, Seconds]]) -> list[Night]:
    """Return the nights of experiments, which are in order and have their seconds by use."""
    groups, latest = list[list[tuple[Record, Seconds]]](), None
    for record, uses in experiments:
        began, ended = _span(record.started, record.total_seconds)
        if latest is None or began - latest > NIGHT_GAP:
            groups.append([])
        groups[-1].append((record, uses))
        latest = max(latest or ended, ended)
    return [_night(group) for group in groups]


def _night(group: Sequence[tuple[Record, Seconds]]) -> Night:
    """Add up the seconds by use. The rest of the night, in all slots that were used at once, was idle."""
    spans = [_span(record.started, record.total_seconds) for record, _ in group]
    began, ended = spans[0][0], max(ended for _, ended in spans)
    seconds = {use: sum(uses.get(use, 0.0) for _, uses in group) for use in Use}
    slots = num_at_once(record for record, _ in group)
    seconds[Use.IDLE] = slots * (ended - began).total_seconds() - sum(seconds.values())
    return Night(began, ended, len(group), _used(seconds))


def num_at_once(records: Iterable[Record]) -> int:
    """Return the largest number of simultaneous runs; 1 without runs."""
    runs = [run for record in records if (run := record.result) and run.started]
    spans = [_span(run.started, run.total_seconds) for run in runs]
    changes = sorted([(began, 1) for began, _ in spans] + [(ended, -1) for _, ended in spans])
    return max([1, *accumulate(change for _, change in changes)])


def _span(began: str, seconds: float | None) -> tuple[datetime, datetime]:
    """Return when a run began and ended; a run of unknown length ended at once."""
    start = datetime.fromisoformat(began)
    return start, start + timedelta(seconds=seconds or 0.0)
