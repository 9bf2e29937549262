"""Attempts of an adversarial agent to get a better number without a better policy.

\b
    uv run --group dev python -m tests.cheats                     all of them, on two cores up to half an hour
    uv run --group dev python -m tests.cheats --only forged       those whose name holds the word
    uv run --group dev python -m tests.cheats --sandbox user      those of a night's agent in that sandbox (as root)

Each attempt is made in a throw-away checkout (checkout.py) with the real run.py, the real `nightshift night`,
real processes and real git; only the process that trains is a stand-in, so that equal settings score equally and
a moved number shows. What is measured is compared with what is expected: refused (exit 2, one line, nothing recorded),
harmless (score and verdict of the honest run), named (the record or the night's end says what was done), or not
defended: those tricks are known to succeed, and SECURITY.md says so. Of nights without a
sandbox two lists are printed.
"""

import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import click

from benchmarks.machine import RESULTS, machine, table, write_result
from tests.cheats import by_agent, by_config, by_files, by_ledger, by_python
from tests.cheats.attempt import Attempt
from tests.cheats.checkout import Checkout

ATTEMPTS = [a for module in (by_config, by_files, by_python, by_ledger) for a in module.attempt.attempts]
ATTEMPTS += [a for collection in by_agent.SANDBOXES.values() for a in collection.attempts]
OUTCOMES = {"refused": "refused", "named": "named", "harmless": "without effect", "not defended": "succeed"}
Row = dict[str, Any]


def attempt_all(only: str | None, sandboxes: Sequence[str], folder: Path, first: int = 0, step: int = 1) -> list[Row]:
    """Make every `step`-th of the chosen attempts from `first`, each in a fresh copy of one checkout below `folder`."""
    attempts = chosen(only, sandboxes)[first::step]
    folder.mkdir()
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
            "kind": attempt.kind,
            "action": attempt.action,
            "expected": attempt.expected,
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


def chosen(only: str | None, sandboxes: Sequence[str] = ()) -> list[Attempt]:
    """The attempts whose name holds that word, of all settings or in these sandboxes; `user` only as root."""
    settings = sandboxes or {attempt.setting for attempt in ATTEMPTS} - ({"user"} if os.getuid() else set())
    return [attempt for attempt in ATTEMPTS if (only or "") in attempt.name and attempt.setting in settings]


def totals(rows: Sequence[Row]) -> list[str]:
    """How many came to what, by setting and by what they go at: the table of docs/measured.md."""
    lines = ["| setting | what is tried | attempts | " + " | ".join(OUTCOMES.values()) + " |", "|---" * 7 + "|"]
    for kind in dict.fromkeys((row["setting"], row["kind"]) for row in rows):
        counts = Counter(row["measured"] for row in rows if (row["setting"], row["kind"]) == kind)
        numbers = (counts.total(), *(counts[word] for word in OUTCOMES))
        lines.append(f"| {' | '.join((*kind, *map(str, numbers)))} |")
    return lines


def told(rows: Sequence[Row]) -> str:
    """All rows, then the counts, and what did and did not have an effect without a sandbox."""
    columns = {"setting": "<11", "name": "<42", "expected": "<14", "measured": "<14"}
    unexpected = [f"not as expected: {row['name']}: {row['evidence']}" for row in rows if not row["holds"]]
    last = f"{len(rows)} attempts, {len(unexpected)} not as expected"
    counted = [row for row in rows if row["expected"] == "counted"]
    lists = {
        "stopped or without an effect": [row["name"] for row in counted if row["measured"] != "not defended"],
        "had an effect": [row["name"] for row in counted if row["measured"] == "not defended"],
    }
    lines = [f"--sandbox none, {what} ({len(names)}): {', '.join(names)}" for what, names in lists.items() if counted]
    return "\n".join([table(rows, columns), "", *totals(rows), *lines, *unexpected, last])


@click.command(help=__doc__)
@click.option("--only", help="Only attempts whose name holds this word.")
@click.option(
    "--sandbox", "sandboxes", multiple=True, type=click.Choice([*by_agent.SANDBOXES]), help="Only nights in it."
)
@click.option("--side-by-side", default=os.cpu_count(), show_default=True, type=click.IntRange(1), help="Processes.")
@click.option("--output", type=click.Path(path_type=Path), default=RESULTS / "cheats.json", help="The result as JSON.")
def main(only: str | None, sandboxes: tuple[str, ...], side_by_side: int, output: Path) -> None:
    """Attempt, print the table, write the result; exit code 1 when something is not as expected."""
    kind = machine()
    with (
        tempfile.TemporaryDirectory(prefix="cheats-", ignore_cleanup_errors=True) as name,
        ProcessPoolExecutor(side_by_side, multiprocessing.get_context("fork")) as executor,
    ):
        made = [
            executor.submit(attempt_all, only, sandboxes, Path(name, str(n)), n, side_by_side)
            for n in range(side_by_side)
        ]
        order = {(attempt.setting, attempt.name): place for place, attempt in enumerate(ATTEMPTS)}
        rows = sorted(
            (row for each in made for row in each.result()), key=lambda row: order[row["setting"], row["name"]]
        )
    figures: Row = {
        "engine": "trl, with a stand-in for the process that trains",
        "num_attempts": len(rows),
        "num_as_expected": sum(row["holds"] for row in rows),
        "num_spellings_of_locked_keys": by_config.NUM_SPELLINGS,
        "attempts": rows,
    }
    command = "uv run --group dev python -m tests.cheats" + (f" --only {only}" if only else "")
    command += "".join(f" --sandbox {sandbox}" for sandbox in sandboxes)
    write_result(output, command, figures, kind)
    print(told(rows))
    sys.exit(0 if figures["num_as_expected"] == len(rows) else 1)


if __name__ == "__main__":
    main()
