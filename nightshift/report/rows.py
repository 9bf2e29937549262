"""The experiments as the page shows them: each with what its files tell, or without where there are too many."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from nightshift.campaign.ledger import Ledger
from nightshift.campaign.metrics import METRICS_NAME, read_steps
from nightshift.campaign.records import Record, Verdict
from nightshift.report.data import Experiment
from nightshift.report.runs import Curves, Rollout, curves, lost_game, read_rollouts, sampled
from nightshift.report.slices import SelectionSet, Slice
from nightshift.report.timing import Seconds, split_experiment

# Of more experiments the details are those of keeps, of the last ones and of the largest differences: see page.py.
_MAX_DETAILS = 150
_NUM_LAST = 20


@dataclass(frozen=True, slots=True)
class Row:
    """One experiment. Without details curves, times and answers are left out, texts are cut earlier, and `rollouts` is
    None. `answers`: to the examples that `rows` was asked for, by (package, key)."""

    experiment: Experiment
    uses: Seconds
    curves: Curves | None = None  # of its run
    rollouts: tuple[Rollout, ...] | None = None
    lost_game: Mapping[str, str] = field(default_factory=dict)
    slices: tuple[Slice, ...] = ()  # of a measured change, against the last keep before it
    answers: Mapping[tuple[str, str], Rollout] = field(default_factory=dict)


def detailed(experiments: Sequence[Experiment]) -> list[Experiment]:
    """Those that are shown with details, in order: keeps, the last and the most telling ones."""
    keeps = [e for e in experiments if e.record.status == Verdict.KEEP][-_MAX_DETAILS // 2 :]
    telling = sorted(experiments, key=lambda e: -abs(e.effect.mean) if e.effect else 0.0)
    chosen = dict.fromkeys(e.number for e in (*keeps, *experiments[-_NUM_LAST:], *telling))
    numbers = set(list(chosen)[:_MAX_DETAILS])
    return [e for e in experiments if e.number in numbers]


def rows(
    experiments: Sequence[Experiment],
    shown: Sequence[Experiment],
    ledger: Ledger,
    examples: SelectionSet,
    wanted: frozenset[tuple[str, str]],
) -> list[Row]:
    """A row each, with details those that are `shown`, and of these the answers to the `wanted` examples."""
    measured = {e.number: e.record for e in experiments if e.standing}
    with_details = {e.number for e in shown}
    return [
        _row(e, ledger, measured, examples, wanted)
        if e.number in with_details
        else Row(e, split_experiment(e.record, []))
        for e in experiments
    ]


def _row(
    e: Experiment,
    ledger: Ledger,
    measured: Mapping[int, Record],
    examples: SelectionSet,
    wanted: frozenset[tuple[str, str]],
) -> Row:
    record, folder = e.record, ledger.run_dir(e.record.number)
    steps = read_steps(folder / METRICS_NAME) if record.result else []
    parent = measured.get(record.parent or 0) if record.number in measured else None
    answers = read_rollouts(folder) if record.evaluation else []
    return Row(
        experiment=e,
        uses=split_experiment(record, steps),
        curves=curves(steps) if record.result else None,
        rollouts=tuple(sampled(answers, record.number, examples.texts)),
        lost_game=lost_game(answers) if record.evaluation and record.evaluation.figures else {},
        slices=examples.flips(record, parent) if parent else (),
        answers={place: one for one in answers if (place := (one.environment, one.key)) in wanted},
    )
