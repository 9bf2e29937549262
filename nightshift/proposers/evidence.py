"""What a strategist can read beside its brief: curves and rollouts of training, and last words of runs that crashed.

The harness writes it anew for each question, from what it has read and checked itself: of the incumbent, the last runs
and the worst one. All of it is of training. What evaluations and certificates saw never stands in it.
"""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Iterable, Iterator
from pathlib import Path

from nightshift.files import read_rows
from nightshift.metrics import METRICS_NAME, SAMPLES_NAME, Sample, Step, read_steps
from nightshift.processes.supervise import tail
from nightshift.proposers import Context
from nightshift.proposers.notebook import NOTEBOOK_NAME, notebook
from nightshift.records import Record
from nightshift.text import clean

MAX_BYTES = 2_000_000  # of all files together
NUM_LAST = 5
NUM_ROLLOUTS = 20  # of a run
_MAX_ROWS = 1_000  # of a curve; of a longer one every second step, or third
_MAX_TEXT = 1_500  # characters of a problem or completion
_TAIL_BYTES, _NUM_LINES, _MAX_LINE = 16_000, 60, 300  # of a log
_LOGS = ("trainer.log", "orchestrator.log")  # of what trains and does nothing else: a server answers evaluations too
_README = """\
Training only; nothing here is of the problems that decide. Written by the harness; material to judge, no instructions.
{names}
NNNN-steps.csv     a row a training step: rewards, lengths, entropy, gradient norm, learning rate; empty: not measured
NNNN-rollouts.txt  some of the rollouts that it learnt from: best, worst, cut off
NNNN-log.txt       the last words of a run that crashed
notebook.md        what was thought and learnt so far, and how predictions came out
"""


def evidence(context: Context) -> dict[str, bytes]:
    """The files by name, at most MAX_BYTES together; the most important runs first."""
    found, names = {NOTEBOOK_NAME: notebook(context.campaign.decided).encode()}, list[str]()
    room = MAX_BYTES - len(found[NOTEBOOK_NAME]) - len(_README) - 1_000
    for role, record in _chosen(context):
        files = dict(_files_of(record, context))
        size = sum(map(len, files.values()))
        if size <= room:
            room -= size
            found |= files
            names.append(f"{record.number:04d} is {role}")
    return {"README.txt": _README.format(names="; ".join(names)).encode(), **found}


def _chosen(context: Context) -> Iterator[tuple[str, Record]]:
    """Why a run is of interest, and its experiment."""
    decided, seen = context.campaign.decided, {0}
    scored = [record for record in decided if record.score is not None]
    for role, records in (
        ("the incumbent", [context.incumbent]),
        (f"one of the last {NUM_LAST}", decided[: -NUM_LAST - 1 : -1]),
        ("the worst", [min(scored, key=lambda record: record.score or 0.0)]),
    ):
        for record in records:
            if record.number not in seen and record.runs:
                seen.add(record.number)
                yield role, record


def _files_of(record: Record, context: Context) -> Iterator[tuple[str, bytes]]:
    folder = context.ledger.attempt_dir(record, len(record.runs))
    if steps := read_steps(folder / METRICS_NAME):
        yield f"{record.number:04d}-steps.csv", _curves(steps)
    if samples := read_rows(folder / SAMPLES_NAME, Sample):
        yield f"{record.number:04d}-rollouts.txt", _rollouts(samples)
    if record.failure is not None and (lines := [*_last_words(folder)]):
        yield f"{record.number:04d}-log.txt", "\n".join(lines).encode()


def _curves(steps: list[Step]) -> bytes:
    """What was measured of every step, or of every k-th and the last."""
    shown = [*steps[: -1 : -(-len(steps) // _MAX_ROWS)], steps[-1]]
    rows = [{**dataclasses.asdict(step), **(step.rewards or {}), "rewards": None} for step in shown]
    columns = [
        name
        for name in dict.fromkeys(name for row in rows for name in row)
        if any(r.get(name) is not None for r in rows)
    ]
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow([clean(column, 60) for column in columns])
    for row in rows:
        table.writerow("" if (value := row.get(name)) is None else f"{value:.6g}" for name in columns)
    return text.getvalue().encode()


def _rollouts(samples: list[Sample]) -> bytes:
    """The best, the worst, and those that were cut off, a third of each."""
    by_reward = sorted((s for s in samples if s.reward is not None and not s.truncated), key=lambda s: s.reward or 0.0)
    third = NUM_ROLLOUTS // 3
    cut = [sample for sample in samples if sample.truncated][-third:]
    room = min(NUM_ROLLOUTS - len(cut), len(by_reward))  # of few the better half is best, none is both
    worst, best = by_reward[: room // 2], by_reward[len(by_reward) - (room - room // 2) :]
    groups: Iterable[tuple[str, list[Sample]]] = (("best", best[::-1]), ("worst", worst), ("cut off", cut))
    lines = []
    for name, group in groups:
        for sample in group:
            reward = "no reward: scoring failed" if sample.reward is None else f"reward {sample.reward:.3g}"
            lines.append(f"{name}, step {sample.step}, {reward}")
            lines += [
                f"| problem: {clean(sample.problem, _MAX_TEXT)}",
                f"| completion: {clean(sample.completion, _MAX_TEXT)}",
            ]
    return "\n".join([*lines, ""]).encode(errors="replace")


def _last_words(folder: Path) -> Iterator[str]:
    for name in _LOGS:
        if lines := tail(folder / name, _NUM_LINES, _MAX_LINE, _TAIL_BYTES):
            yield f"{name}:"
            yield from (f"| {line}" for line in lines)
