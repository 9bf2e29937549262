"""The sealed set, and the count of looks at it: who reads it is counted first.

`open_sealed` is the only code that loads the sealed examples (tests/unit/test_looks.py walks the sources
for others), and it appends a line to `runs/sealed-looks.jsonl` before it does. A look is one certificate:
its configs and seeds are fixed when it is counted, so going on after an interruption is the same look.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from nightshift.errors import EngineError, UsageError
from nightshift.evaluation import Posed, examples_of
from nightshift.rules import Rules

LOOKS_NAME = "sealed-looks.jsonl"


@dataclass(frozen=True, slots=True)
class Look:
    """One certificate's claim on the sealed set. `baseline` and `incumbent` are numbers of experiments."""

    number: int
    time: str  # ISO 8601, UTC
    branch: str
    rules_hash: str
    baseline: int
    incumbent: int
    num_seeds: int

    def is_same(self, other: Look) -> bool:
        """True if the two compare the same configs under the same rules with as many seeds."""
        names = ("branch", "rules_hash", "baseline", "incumbent", "num_seeds")
        return all(getattr(self, name) == getattr(other, name) for name in names)


def counted_looks(runs_dir: Path) -> list[Look]:
    """All looks so far, in order. UsageError when the file is damaged: a look must not get lost in silence."""
    path = runs_dir / LOOKS_NAME
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        return [Look(**json.loads(line)) for line in lines if line.strip()]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(
            f"{path} is damaged: {error}", "Repair the line: every look at the sealed set counts."
        ) from None


def folder(runs_dir: Path, look: Look) -> Path:
    """Where the runs of a look are kept."""
    return runs_dir / "certify" / f"{look.number:04d}"


def open_sealed(rules: Rules, root: Path, runs_dir: Path, look: Look) -> list[Posed]:
    """Count the look and make its folder, unless it is the last one counted; then read the sealed examples.

    Raises EngineError when the look cannot be written (nothing is read then), or when data is missing.
    """
    counted = counted_looks(runs_dir)
    if not counted or counted[-1] != look:
        if look.number != len(counted) + 1:
            raise ValueError(f"look {look.number} after {len(counted)} looks")
        _append(runs_dir / LOOKS_NAME, json.dumps(asdict(look)), folder(runs_dir, look))
    return examples_of(rules, root, "sealed")


def _append(path: Path, line: str, folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(line.encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise EngineError(f"cannot write {path}: {error.strerror or error}", "Free disk space, then repeat.") from None


def num_examples(rules: Rules) -> int:
    """Size of the sealed set that the rules use: as many as decide."""
    return sum(environment.num_selection for environment in rules.environments)


def describe(counted: Sequence[Look]) -> list[str]:
    """One line a look, for people."""
    return [
        f"look {look.number}: {look.time[:10]} {look.branch}, experiment {look.baseline:04d} against "
        f"{look.incumbent:04d}, {look.num_seeds} seed{'s' if look.num_seeds != 1 else ''} each"
        for look in counted
    ]
