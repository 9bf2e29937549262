"""Everything that the ledger knows of one experiment, as plain text: `nightshift show 42`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from nightshift.records import Record

_LONG = ("effective", "scores", "curve")  # they fill screens: see record.json


def experiment_lines(record: Record, run_dir: Path) -> Iterator[str]:
    """`name: value` by the names of record.json, what is inside another value indented. Scores are fractions 0..1."""
    fields = msgspec.to_builtins(record, builtin_types=(msgspec.Raw,))
    runs = {f"run {index}": run for index, run in enumerate(fields.pop("runs"), 1)}
    return _lines({**fields, **runs, "files": os.fspath(run_dir)}, "")


def _lines(fields: Mapping[str, Any], indent: str) -> Iterator[str]:
    for name, value in fields.items():
        head = f"{indent}{name}:".ljust(23) + " "
        match value:
            case _ if name in _LONG:
                continue
            case None:
                yield f"{head}none"
            case float():
                yield f"{head}{value:.6g}"
            case dict():
                yield head
                yield from _lines(value, indent + "  ")
            case list() | tuple():
                yield from (f"{head}{each}" for each in value or ["none"])
            case _:
                yield from (f"{head}{line}" for line in str(value).splitlines() or [""])
