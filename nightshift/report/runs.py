"""What the files of a run show on the page: thinned curves, and answers, three of them with their problems.

The files are written by processes that may have been killed at any byte, and their texts by a policy:
whatever cannot be read is absent.
"""

import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from nightshift.campaign.metrics import Step
from nightshift.campaign.records import ANSWERS_NAME
from nightshift.files import read_rows

# What the page draws of every run: the name in metrics.jsonl, and its words.
CURVES = {
    "reward_mean": "reward",
    "entropy": "entropy",
    "completion_tokens_mean": "length, tokens",
    "grad_norm": "gradient norm",
    "kl": "KL",
    "truncated_share": "truncated share",
}
_MAX_POINTS = 48


@dataclass(frozen=True, slots=True)
class Curves:
    """What was measured in one run, at most _MAX_POINTS of each quantity: means of neighbours, 4 significant digits.
    `values`: by the names of CURVES, beside each of `steps`; None where it was not measured."""

    steps: tuple[float, ...]
    values: Mapping[str, tuple[float | None, ...]]


@dataclass(frozen=True, slots=True)
class Rollout:
    """One answer of the final policy to one problem of the validation split: a line of evaluation.jsonl.

    `problem` is its text, None without its data.
    """

    environment: str
    key: str
    score: float
    answer: str
    completion: str
    num_tokens: int | None = None
    truncated: bool = False
    problem: str | None = None
    games: tuple[dict[str, str], ...] = ()

    @property
    def kind(self) -> str:
        return "truncated" if self.truncated else "right" if self.score > 0.5 else "wrong"


def curves(steps: Sequence[Step]) -> Curves:
    """The curves of one run; those of which no step tells anything are absent."""
    size = -(-len(steps) // _MAX_POINTS) or 1
    buckets = [steps[start : start + size] for start in range(0, len(steps), size)]
    found = {name: tuple(_mean([getattr(step, name) for step in bucket]) for bucket in buckets) for name in CURVES}
    measured = {name: values for name, values in found.items() if any(value is not None for value in values)}
    return Curves(tuple(_mean([step.step for step in bucket]) or 0.0 for bucket in buckets), measured)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(f"{sum(known) / len(known):.4g}") if known else None


def read_rollouts(run_dir: Path) -> list[Rollout]:
    """All answers of one run that can be read, in the order of its file."""
    return read_rows(run_dir / ANSWERS_NAME, Rollout)


def sampled(rows: Sequence[Rollout], seed: int, problems: Mapping[tuple[str, str], str]) -> list[Rollout]:
    """The first right, wrong and truncated answer from a place in the file that `seed` alone decides: not chosen."""
    start = zlib.crc32(str(seed).encode()) % max(len(rows), 1)
    first = {row.kind: row for row in (*rows[start:], *rows[:start])[::-1]}
    found = (first[kind] for kind in ("right", "wrong", "truncated") if kind in first)
    return [replace(row, problem=problems.get((row.environment, row.key))) for row in found]


def lost_game(rows: Sequence[Rollout]) -> Mapping[str, str]:
    """Of the games of a run the first that was lost to the opponent who won most; empty where there was none."""
    lost = [game for row in rows for game in row.games if game.get("ended") in ("lost", "forfeit")]
    (worst, _), *_ = Counter(game.get("opponent") for game in lost).most_common(1) or [(None, 0)]
    return next((game for game in lost if game.get("opponent") == worst), {})
