"""The sealed set, and the count of looks at it: who reads it is counted first.

`sealed_set` is the only code that loads the sealed examples (tests/unit/test_sealed.py walks the sources for others).
It does so for a job whose token stands in a line of the last look in `runs/sealed-looks.jsonl`. A look is one
certificate, whose configs and seeds are fixed; each of its jobs adds a line before its worker starts, so that resuming
after an interruption is the same look.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from nightshift.config.rules import Rules
from nightshift.errors import EngineError, UsageError
from nightshift.evaluation.environment import Environment, load
from nightshift.evaluation.episode import Example
from nightshift.files import disk_error, open_regular, read_file

LOOKS_NAME = "sealed-looks.jsonl"


@dataclass(frozen=True, slots=True)
class Look:
    """One job's access to the sealed set for a certificate. `baseline` and `incumbent` are hashes of their configs;
    in lines of 0.2 numbers of experiments. `token`: of the job.
    """

    number: Annotated[int, msgspec.Meta(ge=1, le=10**6)]
    time: str  # ISO 8601, UTC
    branch: str
    rules_hash: str
    baseline: str | int
    incumbent: str | int
    num_seeds: Annotated[int, msgspec.Meta(ge=1, le=100)]
    token: str = ""


def counted_looks(runs_dir: Path) -> list[Look]:
    """All looks so far, in order: the last line of each. UsageError as `_lines` says."""
    return list({look.number: look for look in _lines(runs_dir)}.values())


def _lines(runs_dir: Path) -> list[Look]:
    """All lines. UsageError when the file is damaged: a look must not get lost in silence."""
    path = runs_dir / LOOKS_NAME
    try:
        return [msgspec.json.decode(line, type=Look) for line in read_file(path).splitlines() if line.strip()]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        fix = "Repair the line: every look at the sealed set counts."
        raise UsageError(f"{path} is damaged: {reason}", fix) from None


def count(runs_dir: Path, look: Look) -> Path:
    """Count the look of a job, a new one or one more line of the last one; the file that it is counted in.

    Raises EngineError when it cannot be written: then nothing sealed is read.
    """
    counted = counted_looks(runs_dir)
    if look.number != len(counted) + 1 and not (counted and counted[-1].number == look.number):
        raise ValueError(f"look {look.number} after {len(counted)} looks")
    path = runs_dir / LOOKS_NAME
    try:
        with open_regular(path, "ab") as file:
            file.write(msgspec.json.encode(look) + b"\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise disk_error(error, path) from None
    return path


def sealed_set(rules: Rules, root: Path, number: int | None, token: str) -> list[tuple[Environment, Example]]:
    """The sealed examples, for a job of the last look that was counted.

    Raises EngineError for another look, a token that no line of the look holds, or missing data.
    """
    lines = _lines(root / "runs")
    tokens = {look.token for look in lines if look.number == number and number == lines[-1].number}
    if not token or token not in tokens:
        raise EngineError(f"the sealed examples are for the jobs of the last look in {LOOKS_NAME}, not for this one")
    found = load(root, rules.environments)
    return [(environment, example) for environment in found for example in environment.examples("sealed")]
