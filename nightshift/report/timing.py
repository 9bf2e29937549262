"""Where the time went: the seconds of every run by use, and the pauses between experiments."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from itertools import accumulate

from nightshift.campaign.metrics import Step
from nightshift.campaign.records import Record, Result

NIGHT_GAP = timedelta(hours=2)  # a longer pause ends a night; shorter pauses are the proposer's time, and idle
Seconds = Mapping["Use", float]


class Use(StrEnum):
    """What a second was used for, in the order of a run."""

    STARTUP = "start-up"
    GENERATION = "generation"
    TRAINING = "training"
    TRANSFER = "weight transfer"
    WAITING = "trainer idle"  # it waits for rollouts that the other GPU generates
    UNSPLIT = "training, not split"  # the window of training where no steps say more
    EVALUATION = "evaluation"
    OTHER = "other"  # stopping, writing, a last step that was cut off, a crash's rest
    IDLE = "between experiments"


@dataclass(frozen=True, slots=True)
class Night:
    """Experiments without a pause of NIGHT_GAP between them. `seconds` by use; they sum to its length, times the most
    runs that were under way at once, but for experiments whose duration is not recorded (`num_unknown`)."""

    began: datetime
    ended: datetime
    num_experiments: int
    num_unknown: int
    seconds: Seconds

    @property
    def length_seconds(self) -> float:
        return (self.ended - self.began).total_seconds()


def split_experiment(record: Record, steps: Sequence[Step]) -> Seconds:
    """Return the seconds of an experiment by use: of its run with its `steps`, and of the controller itself."""
    run = record.result
    uses = _split_run(run, steps) if run else {}
    run_seconds = run.total_seconds if run else 0.0
    return _in_order({**uses, Use.OTHER: max(run_seconds, record.total_seconds or 0.0) - sum(uses.values())})


def _split_run(run: Result, steps: Sequence[Step]) -> Seconds:
    """Split the window of training by its steps, or leave it in one piece if they do not fit into it.

    Where generation runs beside training (prime-rl), it costs only the time that the trainer waits for rollouts.
    """
    window = run.training.training_seconds or 0.0
    training = {
        Use.GENERATION: sum(step.generate_seconds or 0.0 for step in steps),
        Use.TRAINING: sum(step.train_seconds or 0.0 for step in steps),
        Use.TRANSFER: sum(step.broadcast_seconds or 0.0 for step in steps),
        Use.WAITING: sum(step.wait_for_rollouts_seconds or 0.0 for step in steps),
    }
    if not 0 < sum(training.values()) <= window * 1.02:  # several clocks measured the parts
        training = {Use.UNSPLIT: window}
    evaluation = run.evaluation.seconds if run.evaluation else 0.0
    return {Use.STARTUP: run.startup_seconds or 0.0, **training, Use.EVALUATION: evaluation}


def _in_order(seconds: Seconds) -> Seconds:
    """Return the uses that took any time, in the order of Use."""
    return {use: seconds[use] for use in Use if seconds.get(use, 0.0) > 0}


def nights(experiments: Iterable[tuple[Record, Seconds]]) -> list[Night]:
    """Return the nights of experiments that are in their order, each with its seconds by use."""
    groups, latest = list[list[tuple[Record, Seconds]]](), None
    for record, uses in experiments:
        began, ended = span(record.started, record.total_seconds)
        if latest is None or began - latest > NIGHT_GAP:
            groups.append([])
        groups[-1].append((record, uses))
        latest = max(latest or ended, ended)
    return [_night([record for record, _ in group], [uses for _, uses in group]) for group in groups]


def _night(records: Sequence[Record], uses: Sequence[Seconds]) -> Night:
    """Add up the seconds by use; what is left of the night in as many slots as were in use at once was idle."""
    spans = [span(record.started, record.total_seconds) for record in records]
    began, ended = spans[0][0], max(ended for _, ended in spans)
    seconds = {use: sum(part.get(use, 0.0) for part in uses) for use in Use}
    seconds[Use.IDLE] = num_at_once(records) * (ended - began).total_seconds() - sum(seconds.values())
    num_unknown = sum(record.total_seconds is None for record in records)
    return Night(began, ended, len(records), num_unknown, _in_order(seconds))


def num_at_once(records: Iterable[Record]) -> int:
    """Return how many runs were under way at once, at most; 1 without runs."""
    runs = [run for record in records if (run := record.result) and run.started]
    spans = [span(run.started, run.total_seconds) for run in runs]
    changes = sorted([(began, 1) for began, _ in spans] + [(ended, -1) for _, ended in spans])
    return max([1, *accumulate(change for _, change in changes)])


def span(began: str, seconds: float | None = None) -> tuple[datetime, datetime]:
    """Return when a run began and ended; an interrupted one ended at once."""
    start = datetime.fromisoformat(began)
    return start, start + timedelta(seconds=seconds or 0.0)
