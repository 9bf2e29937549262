"""Attempts of an adversarial agent to get a better number without a better policy.

\b
    uv run --group dev python -m tests.cheats                     all of them, a few minutes
    uv run --group dev python -m tests.cheats --only forged       those whose name holds the word

Each attempt is made in a throw-away checkout (checkout.py) with the real run.py, the real `nightshift night`,
real processes and real git; only the process that trains is a stand-in, so that equal settings score equally and
a moved number shows. What is measured is compared with what is expected: refused (exit 2, nothing recorded),
harmless (score and verdict of the honest run), named (the record or the night's end says what was done), or not
defended: those tricks are known to succeed, and SECURITY.md says so.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks.machine import RESULTS, machine, table, write_result
from tests.cheats import by_agent, by_config, by_files, by_ledger, by_python
from tests.cheats.attempt import Attempt
from tests.cheats.checkout import Checkout

ATTEMPTS = [a for module in (by_config, by_files, by_python, by_ledger, by_agent) for a in module.attempt.attempts]
ATTEMPTS += by_agent.walled.attempts
Row = dict[str, Any]


def attempt_all(attempts: Sequence[Attempt], folder: Path) -> list[Row]:
    """Make each attempt in a fresh copy of one checkout below `folder`."""
    checkout = Checkout(folder)
    checkout.build()
    rows: list[Row] = []
    for attempt in attempts:
        checkout.restore()
        began = time.perf_counter()
        finding = attempt.make(checkout)
        rows.append({
            "name": attempt.name,
            "setting": attempt.setting,
            "action": attempt.action,
            "expected": attempt.expected,
            "check": attempt.check,
            "measured": "not defended" if finding.outcome == "succeeded" else finding.outcome,
            "holds": attempt.holds(finding),
            "evidence": checkout.free_of_places(" ".join(finding.evidence.split())[:400]),
            "seconds": round(time.perf_counter() - began, 2),
        })  # fmt: skip
        last = rows[-1]
        said = last["measured"] if last["holds"] else f"{last['measured']}, NOT {last['expected']}: {last['evidence']}"
        print(f"{len(rows)} of {len(attempts)}: {last['setting']}, {last['name']}: {said}", file=sys.stderr, flush=True)
    checkout.restore()
    return rows


def told(rows: Sequence[Row]) -> str:
    """All rows, then the counts."""
    columns = {"setting": "<11", "name": "<42", "expected": "<14", "measured": "<14"}
    counts = Counter((row["setting"], row["measured"]) for row in rows)
    totals = [f"{setting:<11}{outcome:<14}{number}" for (setting, outcome), number in sorted(counts.items())]
    unexpected = [f"not as expected: {row['name']}: {row['evidence']}" for row in rows if not row["holds"]]
    last = f"{len(rows)} attempts, {len(unexpected)} not as expected"
    return "\n".join([table(rows, columns), "", *totals, *unexpected, last])


@click.command(help=__doc__)
@click.option("--only", help="Only attempts whose name holds this word.")
@click.option("--output", type=click.Path(path_type=Path), default=RESULTS / "cheats.json", help="The result as JSON.")
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
        "num_spellings_of_locked_keys": by_config.NUM_SPELLINGS,
        "attempts": rows,
    }
    command = "uv run --group dev python -m tests.cheats" + (f" --only {only}" if only else "")
    write_result(output, command, figures, kind)
    print(told(rows))
    sys.exit(0 if figures["num_as_expected"] == len(rows) else 1)


if __name__ == "__main__":
    main()
