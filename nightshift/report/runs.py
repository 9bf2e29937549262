"""What the files of a run show on the page: thinned curves, and three sampled rollouts with their problems.

The files are written by processes that may have been killed at any byte, and their texts by a policy:
whatever cannot be read is absent.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from nightshift.errors import NightshiftError
from nightshift.evaluation import examples_of
from nightshift.metrics import METRICS_NAME, Step, read_steps
from nightshift.records import Run, Side
from nightshift.rules import Rules

# What the page draws of every run: the name in metrics.jsonl, and its words.
CURVES = {
    "reward_mean": "reward",
    "completion_tokens_mean": "length, tokens",
    "truncated_share": "truncated share",
    "kl": "KL",
    "entropy": "entropy",
}
ROLLOUTS_NAME = "evaluation.jsonl"
_MAX_BYTES = 32 * 1024 * 1024  # of an evaluation.jsonl: 1,319 answers of 1,024 tokens take 6 MB


@dataclass(frozen=True, slots=True)
class Series:
    """One curve of one run: (step, value) points; a point of a thinned curve is the mean of its neighbours."""

    run_index: int
    side: Side
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Rollout:
    """One answer of the final policy to one problem of the selection set. `problem` is None without its data."""

    kind: str  # right | wrong | truncated
    key: str
    problem: str | None
    answer: str
    completion: str
    num_tokens: int | None


def steps_of(run_dir: Path) -> list[Step]:
    """The steps of one run; empty where there is no readable metrics.jsonl."""
    try:
        return read_steps(run_dir / METRICS_NAME)
    except (OSError, RecursionError):
        return []


def series_of(name: str, runs: Sequence[tuple[Run, Sequence[Step]]], max_points: int) -> list[Series]:
    """The curve `name` of every run that measured it."""
    found = []
    for run, steps in runs:
        points = [(float(step.step), value) for step in steps if (value := getattr(step, name)) is not None]
        if points:
            found.append(Series(run.index, run.side, tuple(_thinned(points, max_points))))
    return found


def _thinned(points: Sequence[tuple[float, float]], max_points: int) -> list[tuple[float, float]]:
    size = -(-len(points) // max_points)
    buckets = [points[start : start + size] for start in range(0, len(points), size)]
    return [(sum(x for x, _ in b) / len(b), sum(y for _, y in b) / len(b)) for b in buckets]


def problem_texts(rules: Rules | None, root: Path) -> dict[tuple[str, str], str]:
    """The last message of every problem of the selection set by (environment, key); empty without its data."""
    if rules is None:
        return {}
    try:
        return _texts(rules, root)
    except (NightshiftError, ImportError, OSError):
        return {}


@lru_cache(maxsize=1)  # for a night, which writes the page after every experiment
def _texts(rules: Rules, root: Path) -> dict[tuple[str, str], str]:
    return {
        (environment.package, example.key): chat[-1]["content"]
        for environment, example in examples_of(rules, root, "selection")
        if (chat := environment.episode(example).ask())
    }


def rollouts(run_dir: Path, seed: int, problems: Mapping[tuple[str, str], str]) -> list[Rollout]:
    """The first right, wrong and truncated answer from a place in the file that `seed` alone decides: not chosen."""
    try:
        with (run_dir / ROLLOUTS_NAME).open("rb") as file:
            lines = file.read(_MAX_BYTES).split(b"\n")
    except OSError:
        return []
    found: dict[str, Rollout] = {}
    start = zlib.crc32(str(seed).encode()) % len(lines)
    for line in (*lines[start:], *lines[:start]):
        rollout = _rollout(line, problems)
        if rollout is not None:
            found.setdefault(rollout.kind, rollout)
        if len(found) == 3:
            break
    return [found[kind] for kind in ("right", "wrong", "truncated") if kind in found]


def _rollout(line: bytes, problems: Mapping[tuple[str, str], str]) -> Rollout | None:
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict):
        return None
    texts = [row.get(name) for name in ("environment", "key", "answer", "completion")]
    score, truncated, num_tokens = row.get("score"), row.get("truncated"), row.get("num_tokens")
    if not all(isinstance(text, str) for text in texts) or not isinstance(score, int | float):
        return None
    environment, key, answer, completion = map(str, texts)
    kind = "truncated" if truncated is True else "right" if score > 0.5 else "wrong"
    tokens = num_tokens if isinstance(num_tokens, int) else None
    return Rollout(kind, key, problems.get((environment, key)), answer, completion, tokens)
