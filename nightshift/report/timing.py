"""Where the time went: every second of every run, the pauses between experiments, and what ran beside what.

Runs side by side are drawn as lanes: in which slot and when, and how much of the time each was in use.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from itertools import accumulate, count

from nightshift.campaign.cost import own_run
from nightshift.campaign.metrics import Step
from nightshift.campaign.records import Record, Result
from nightshift.report.charts import Text
from nightshift.report.data import Span, counted, span

# A longer pause ends a night: nobody was working. Shorter ones are the proposer's time, and idle.
NIGHT_GAP = timedelta(hours=2)
_ROUNDING = 1.02  # parts measured by several clocks may exceed their whole by so much
WIDTH, LEFT, LANE_HEIGHT = 720.0, 70.0, 18.0  # of the drawing of slots, in pixels
_NUM_TICKS = 6

_Member = tuple[Record, Span, Mapping["Use", float]]  # of a night


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
    seconds: Mapping[Use, float]

    @property
    def length_seconds(self) -> float:
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


def split_experiment(record: Record, steps: Sequence[Step]) -> dict[Use, float]:
    """The seconds of an experiment by use: its own run with its `steps`, and what the controller itself took."""
    run = own_run(record)
    uses = split_run(run, steps) if run else {}
    rest = (record.total_seconds or 0.0) - sum(uses.values())
    return total([uses, {Use.OTHER: rest}])


def total(parts: Iterable[Mapping[Use, float]]) -> dict[Use, float]:
    """Seconds by use, in the order of Use; uses that took nothing are absent, and no part takes less than nothing."""
    known = list(parts)
    sums = {use: sum(max(part.get(use, 0.0), 0.0) for part in known) for use in Use}
    return {use: seconds for use, seconds in sums.items() if seconds > 0}


def nights(experiments: Iterable[tuple[Record, Mapping[Use, float]]]) -> list[Night]:
    """The experiments, each with its seconds by use, in groups."""
    groups, latest = list[list[_Member]](), None
    for record, uses in experiments:
        ran = span(record.started, record.total_seconds)
        if latest is None or ran[0] - latest > NIGHT_GAP:
            groups.append([])
        groups[-1].append((record, ran, uses))
        latest = max(latest or ran[1], ran[1])
    return [_night(group) for group in groups]


def _night(group: Sequence[_Member]) -> Night:
    """With the pauses between its experiments, or, where several runs were under way at once, what slots stood idle."""
    records, spans, uses = zip(*group, strict=True)
    began, ends = spans[0][0], list(accumulate((ended for _, ended in spans), max))
    seconds, num_slots = total(uses), num_at_once(records)
    pauses = ((start - end).total_seconds() for (start, _), end in zip(spans[1:], ends, strict=False))
    idle = sum(max(pause, 0.0) for pause in pauses)
    if num_slots > 1:
        idle = num_slots * (ends[-1] - began).total_seconds() - sum(seconds.values())
    num_unknown = sum(record.total_seconds is None for record in records)
    return Night(began, ends[-1], len(group), num_unknown, total([seconds, {Use.IDLE: idle}]))


@dataclass(frozen=True, slots=True)
class Bar:
    number: int
    x: float
    width: float
    kind: str  # its experiment's verdict
    title: str


@dataclass(frozen=True, slots=True)
class Lane:
    """One slot, or node. `used`: share of the time, 0..1."""

    place: str
    y: float
    bars: tuple[Bar, ...]
    used: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """All lanes over one axis of time. `zone`: of the clock's times."""

    lanes: tuple[Lane, ...]
    ticks: tuple[Text, ...]
    zone: str
    height: float


def timeline(records: Sequence[Record]) -> Timeline | None:
    """Of the runs that say where and when they were made; None where none does."""
    placed = ((record, run) for record in records if (run := own_run(record)) and run.slot)
    runs = [(record, run, span(run.started, run.total_seconds)) for record, run in placed]
    if not runs:
        return None
    began, ended = min(ran[0] for *_, ran in runs), max(ran[1] for *_, ran in runs)
    seconds = max((ended - began).total_seconds(), 1.0)
    scale = (WIDTH - LEFT) / seconds
    found = defaultdict[str, list[tuple[Record, Result, Span]]](list)
    for one in sorted(runs, key=lambda one: one[2]):  # a node may hold several at once
        names = (f"{one[1].slot} ({n})" if n > 1 else one[1].slot for n in count(1))
        found[next(name for name in names if not found[name] or found[name][-1][2][1] <= one[2][0])].append(one)
    lanes = []
    for index, place in enumerate(sorted(found)):
        bars = [
            Bar(
                record.number,
                LEFT + scale * (ran[0] - began).total_seconds(),
                max(scale * run.total_seconds, 1.0),
                record.status,
                f"{record.number:04d} {record.status}, {run.total_seconds:.0f} s, "
                f"{counted(run.training.num_steps, 'step')}",
            )
            for record, run, ran in found[place]
        ]
        used = min(sum(run.total_seconds for _, run, _ in found[place]) / seconds, 1.0)
        lanes.append(Lane(place, index * LANE_HEIGHT, tuple(bars), used))
    bottom = len(lanes) * LANE_HEIGHT
    ticks, zone = tuple(_ticks(began, seconds, bottom)), began.astimezone().strftime("%Z")
    return Timeline(tuple(lanes), ticks, zone, bottom + 18.0)


def num_at_once(records: Iterable[Record]) -> int:
    runs = [run for record in records if (run := own_run(record)) and run.started]
    spans = [span(run.started, run.total_seconds) for run in runs]
    ends = sorted([(began, 1) for began, _ in spans] + [(ended, -1) for _, ended in spans])
    now = most = 0
    for _, change in ends:
        now += change
        most = max(most, now)
    return most


def _ticks(began: datetime, seconds: float, height: float) -> Iterable[Text]:
    for index in range(_NUM_TICKS + 1):
        moment = began + timedelta(seconds=seconds * index / _NUM_TICKS)
        yield Text(LEFT + (WIDTH - LEFT) * index / _NUM_TICKS, height + 14.0, moment.astimezone().strftime("%H:%M"))
