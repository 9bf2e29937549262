"""Faults: after each one, is anything left behind, lost, doubled or half done, and does the next run work?

\b
    uv run --group dev python -m tests.faults --folder FOLDER               300 faults
    uv run --group dev python -m tests.faults --folder FOLDER --num 20 --only "trainer killed"

Draws faults by seed from a matrix (matrix.py): which process or file x which moment x which failure.
Each strikes a real run.py in a fresh checkout in mid-campaign, then a person sets right what was broken from
outside (removes the lock, switches back), and the next experiment runs. Checked after each: the exit
code, no traceback, no process, no lock, every record closed, results.tsv as the records say, the branch as the
verdicts say, a journal that can be read, nothing left over, and that the next experiment is measured.

Only what trains is a stand-in.
"""

import multiprocessing
import os
import sys
import traceback
from collections import Counter
from dataclasses import asdict
from functools import partial
from pathlib import Path

import click

from tests.checkouts import leftovers
from tests.faults import scenario
from tests.faults.matrix import FAMILIES, Fault, draw
from tests.faults.play import Row, play


def play_one(fault: Fault, folder: Path) -> Row:
    """Play a fault in the folder of this process. An exception, of the tests or of the check, is a problem too."""
    slot = folder / f"slot-{os.getpid()}"
    slot.mkdir(exist_ok=True)
    try:
        return play(fault, slot, folder / "templates")
    except Exception:
        for process in leftovers(slot):
            process.kill()
        return asdict(fault) | {"struck": True, "problems": [f"play: {traceback.format_exc()}"]}


@click.command(help=__doc__)
@click.option("--num", default=300, show_default=True, type=click.IntRange(1), help="Faults.")
@click.option("--seed", default=0, show_default=True)
@click.option("--only", type=click.Choice(list(FAMILIES)), multiple=True, help="Draw from these families alone.")
@click.option("--folder", type=click.Path(path_type=Path), required=True, help="An empty folder for the checkouts.")
@click.option("--slots", default=os.cpu_count() or 1, show_default=True, help="Checkouts side by side.")
def main(num: int, seed: int, only: tuple[str, ...], folder: Path, slots: int) -> None:
    """Draw and play, a line each on stdout; exit code 1 if a fault left a problem."""
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    moments = scenario.make_templates(folder / "templates")
    faults = [draw(number, seed, moments, only[number % len(only)] if only else None) for number in range(num)]
    counts: Counter[str] = Counter()
    with multiprocessing.get_context("fork").Pool(slots) as pool:
        for row in pool.imap_unordered(partial(play_one, folder=folder), faults):
            problems = row.get("problems", [])
            counts.update(played=True, struck=bool(row.get("struck")), problems=bool(problems))
            outcome = "; ".join(problems) or ("ok" if row["struck"] else "the moment did not come")
            words = (row[name] for name in ("number", "family", "scenario", "victim", "moment", "failure"))
            print(", ".join(map(str, words)), outcome, sep=": ", flush=True)
    print(f"{counts['played']} played, {counts['struck']} struck, {counts['problems']} with problems")
    sys.exit(1 if counts["problems"] else 0)


if __name__ == "__main__":
    main()
