"""Attempts of an adversarial agent to get a better number without a better policy.

\b
    uv run benchmarks/cheats.py                     all of them, a few minutes
    uv run benchmarks/cheats.py --only forged       those whose name holds the word

Each attempt is made in a throw-away checkout (cheat_checkout.py) with the real run.py, the real
`nightshift night`, real processes and real git; only the process that trains is a stand-in, so that equal
settings score equally and a moved number shows. What is measured is compared with what is expected:
refused (exit 2, nothing recorded), harmless (score and verdict of the honest run), named (the record or the
night's end says what was done), or not defended: those tricks are known to succeed, and SECURITY.md says so.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cheats_by_agent
import cheats_by_config
import cheats_by_files
import cheats_by_ledger
import cheats_by_python
import click
from cheat_attempt import Attempt
from cheat_checkout import Checkout, free_of_places
from machine import RESULTS, machine, write_result

_MODULES = (cheats_by_config, cheats_by_files, cheats_by_python, cheats_by_ledger, cheats_by_agent)
ATTEMPTS = [attempt for module in _MODULES for attempt in module.ATTEMPTS]
Row = dict[str, Any]


def attempt_all(attempts: Sequence[Attempt], folder: Path) -> list[Row]:
    """Make each attempt in a fresh copy of one checkout below `folder`."""
    checkout = Checkout(folder)
    checkout.build()
    rows = []
    for attempt in attempts:
        checkout.restore()
        began = time.perf_counter()
        finding = attempt.act(checkout)
        row = {
            "name": attempt.name,
            "setting": attempt.setting,
            "deed": attempt.deed,
            "expected": attempt.expected,
            "check": attempt.check,
            "measured": "not defended" if finding.outcome == "succeeded" else finding.outcome,
            "holds": attempt.holds(finding),
            "evidence": free_of_places(" ".join(finding.evidence.split())[:400], folder),
            "seconds": round(time.perf_counter() - began, 2),
        }
        rows.append(row)
        print(f"{len(rows)} of {len(attempts)}: {line(row)}", file=sys.stderr, flush=True)
    checkout.restore()
    return rows


def line(row: Row) -> str:
    """One row for people."""
    mark = "" if row["holds"] else "   <-- not as expected"
    return f"{row['setting']:<11}{row['name']:<42}{row['expected']:<14}{row['measured']:<14}{mark}"


def table(rows: Sequence[Row]) -> str:
    """All rows, then the counts."""
    counts = Counter((row["setting"], row["measured"]) for row in rows)
    totals = [f"{setting:<11}{outcome:<14}{number}" for (setting, outcome), number in sorted(counts.items())]
    head = f"{'setting':<11}{'attempt':<42}{'expected':<14}{'measured':<14}"
    unexpected = sum(not row["holds"] for row in rows)
    return "\n".join([head, *map(line, rows), "", *totals, f"{len(rows)} attempts, {unexpected} not as expected"])


@click.command(help=__doc__)
@click.option("--only", help="Only attempts whose name holds this word.")
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    default=RESULTS / "cheats.json",
    help="The result as JSON.  [default: benchmarks/results/cheats.json]",
)
def main(only: str | None, output: Path) -> None:
    """Attempt, print the table, write the result; exit code 1 when something is not as expected."""
    kind = machine()
    chosen = [attempt for attempt in ATTEMPTS if only is None or only in attempt.name]
    with tempfile.TemporaryDirectory(prefix="cheats-", ignore_cleanup_errors=True) as name:
        rows = attempt_all(chosen, Path(name))
    figures: Row = {
        "engine": "trl, with a stand-in for the process that trains",
        "num_attempts": len(rows),
        "num_as_expected": sum(row["holds"] for row in rows),
        "num_spellings_of_locked_keys": cheats_by_config.spellings(),
        "attempts": rows,
    }
    write_result(output, "uv run benchmarks/cheats.py" + (f" --only {only}" if only else ""), figures, kind)
    print(table(rows))
    sys.exit(0 if figures["num_as_expected"] == len(rows) else 1)


if __name__ == "__main__":
    main()
