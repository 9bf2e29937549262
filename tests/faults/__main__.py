"""Faults: after each one, is anything left behind, lost, doubled or half done, and does the next run work?

    uv run --group dev python -m tests.faults FOLDER 300
    uv run --group dev python -m tests.faults FOLDER 20 "trainer killed" "trainer exits"

Draws so many faults from a matrix (matrix.py), or from the families that are named: which process or file x which
moment x which failure. Each strikes a real run.py in a fresh checkout in mid-campaign, then a person sets right what
was broken from outside (removes the lock, switches back), and the next experiment runs. Checked after each: the exit
code, no traceback, no process, no lock, every record closed, results.tsv as the records say, the branch as the verdicts
say, a journal that can be read, nothing left over, and that the next experiment is measured. FOLDER is empty or new.

Only what trains is a stand-in. Prints a line for each fault; the exit code is 1 if a fault left a problem.
"""

import os
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.checkouts import leftovers
from tests.faults.matrix import draw
from tests.faults.play import make_templates, play


def main(folder: Path, num: int, *families: str) -> int:
    moments = make_templates(folder / "templates")
    faults = [draw(number, 0, moments, families[number % len(families)] if families else None) for number in range(num)]

    def play_one(number: int) -> tuple[bool, bool]:
        """An exception, of the tests or of the check, is a problem too."""
        fault, slot = faults[number], folder / f"fault-{number}"
        try:
            is_struck, problems = play(fault, slot, folder / "templates")
        except Exception:
            is_struck, problems = True, [f"play: {traceback.format_exc()}"]
            for process in leftovers(slot):
                process.kill()
        outcome = "; ".join(problems) or ("ok" if is_struck else "the moment did not come")
        words = (fault.family, fault.scenario, fault.victim, fault.moment, fault.failure)
        print(f"{number}, {', '.join(words)}: {outcome}", flush=True)
        return is_struck, bool(problems)

    with ThreadPoolExecutor(os.cpu_count()) as slots:
        rows = list(slots.map(play_one, range(num)))
    num_struck, num_bad = map(sum, zip(*rows, strict=True))
    print(f"{num} played, {num_struck} struck, {num_bad} with problems")
    return 1 if num_bad else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve(), int(sys.argv[2]), *sys.argv[3:]))
