"""Everything that the ledger knows of one experiment, as plain text: `nightshift show 42`, what matters first."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

import msgspec

from nightshift.campaign.expected import Expected, expected, expected_then
from nightshift.campaign.index import fold_sound
from nightshift.campaign.ledger import Ledger
from nightshift.campaign.standing import Z95
from nightshift.records import Record

_LONG = ("effective", "scores", "curve")  # they fill screens: see record.json
_FIRST = ("description", "prediction", "mechanism", "refuted_by", "proposer", "told_outcome", "lesson", "diff", "base")
_HASHES = ("config_hash", "effective_hash", "rules_hash", "harness_tree", "commit", "kept_commit")
_LAST = ("unused_keys", *_HASHES, "decision", "versions", "version")  # what programs compare and people hardly read


def experiment_lines(ledger: Ledger, record: Record) -> Iterator[str]:
    """`name: value` by the names of record.json, what is inside another value indented. Scores are fractions 0..1.

    First the verdict with its numbers, then the hypothesis; last hashes, versions and keys that nothing used.
    """
    campaign, _ = fold_sound(ledger, ledger.readable()[0], record.branch, record.rules_hash)
    fields = msgspec.to_builtins(record, builtin_types=(msgspec.Raw,))
    runs = {f"run {index}": run for index, run in enumerate(fields.pop("runs"), 1)}
    judged = fields.pop("judgement")
    for name in ("delta", "delta_stderr") if judged else ():  # as record.json calls expected_then, which stands below
        judged.pop(name)
    verdict = {"number": record.number, "status": record.status, "judgement": judged}
    told = {"expected_then": _interval(expected_then(record)), "expected": _interval(expected(campaign, record))}
    first, last = ({name: fields.pop(name) for name in names if name in fields} for names in (_FIRST, _LAST))
    fields["started"] = f"{datetime.fromisoformat(record.started).astimezone():%Y-%m-%d %H:%M:%S %Z}"
    folder = os.fspath(ledger.run_dir(record.number))
    return _lines({**verdict, **told, "score": record.score, **first, **fields, **runs, "files": folder, **last}, "")


def _interval(found: Expected | None) -> str | None:
    """A difference with half its 95 % interval."""
    return None if found is None else f"{found.mean:+.4f} \N{PLUS-MINUS SIGN} {Z95 * found.stderr:.4f}"


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
