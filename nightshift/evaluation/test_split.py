"""The sealed set, and the count of looks at it: who reads it is counted first.

`sealed_set` is the only code that loads the sealed examples (tests/unit/test_sealed.py walks the sources for others).
It does so for a look that stands in `runs/sealed-looks.jsonl`, and for a worker that was given the key of that look's
head. A look is one certificate: its configs and seeds are fixed when it is counted, so going on after an interruption
is the same look, with a line of its own for the new head's key.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from dataclasses import dataclass, replace
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
    """One certificate's claim on the sealed set. `baseline` and `incumbent` are hashes of their configs;
    in lines of 0.2 numbers of experiments.

    `key_sha256` is of the key that the look's head gives to its workers; `count` fills it in.
    """

    number: Annotated[int, msgspec.Meta(ge=1, le=10**6)]
    time: str  # ISO 8601, UTC
    branch: str
    rules_hash: str
    baseline: str | int
    incumbent: str | int
    num_seeds: Annotated[int, msgspec.Meta(ge=1, le=100)]
    key_sha256: str = ""


def counted_looks(runs_dir: Path) -> list[Look]:
    """All looks so far, in order. UsageError when the file is damaged: a look must not get lost in silence."""
    path = runs_dir / LOOKS_NAME
    try:
        lines = [msgspec.json.decode(line, type=Look) for line in read_file(path).splitlines() if line.strip()]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        fix = "Repair the line: every look at the sealed set counts."
        raise UsageError(f"{path} is damaged: {reason}", fix) from None
    return list({look.number: look for look in lines}.values())


def count(runs_dir: Path, look: Look, key: bytes) -> Path:
    """Count the look, or that another head resumes the last one; the file that it is counted in.

    Raises EngineError when it cannot be written: then nothing sealed is read.
    """
    counted = counted_looks(runs_dir)
    if look.number != len(counted) + 1 and not (counted and counted[-1].number == look.number):
        raise ValueError(f"look {look.number} after {len(counted)} looks")
    look, path = replace(look, key_sha256=hashlib.sha256(key).hexdigest()), runs_dir / LOOKS_NAME
    try:
        with open_regular(path, "ab") as file:
            file.write(msgspec.json.encode(look) + b"\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise disk_error(error, path) from None
    return path


def sealed_set(rules: Rules, root: Path, number: int | None, key: bytes) -> list[tuple[Environment, Example]]:
    """The sealed examples, for a worker of the last look that was counted.

    Raises EngineError for another look, a key that is not its head's, or missing data.
    """
    counted = counted_looks(root / "runs")
    digest = hashlib.sha256(key).hexdigest()
    if not counted or counted[-1].number != number or not hmac.compare_digest(counted[-1].key_sha256, digest):
        raise EngineError(f"the sealed examples are for the head of a look in {LOOKS_NAME}, not for this worker")
    found = load(root, rules.environments)
    return [(environment, example) for environment in found for example in environment.examples("sealed")]
