"""How much code one experiment runs through: the files of nightshift/ and environments/ that enter a function body.

\b
    uv run benchmarks/path_of_an_experiment.py                     this checkout, a minute
    uv run benchmarks/path_of_an_experiment.py --checkout DIR      another commit, measured by the same command

A copy of the checkout with an environment of its own runs two real experiments of the trl engine on a campaign branch:
a baseline with a poor learning rate, and a better one, which is kept. Every Python process of the second is
watched by sys.setprofile from its start, by a .pth file in that environment; a file counts when a named function or a
lambda of it is entered, and not when it is only imported. What is entered is written down at once, so that
processes that are killed tell it too. A file's lines are all of its lines.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
from machine import table

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests import checkouts  # noqa: E402

BRANCH = "autoresearch/path"
POOR, BETTER = "3e-7", "3e-6"
CONFIG = "[orchestrator]\nbatch_size = 256\ngroup_size = 4\n[trainer.optim]\nlr = {}\n"
FOLDERS = ("nightshift", "environments")
Row = dict[str, Any]
# Written to the site-packages of the copy; @PLACES@ are the watched folders, @OUTPUT@ is where a process tells.
WATCH = """
import os, sys, threading
_PLACES, _OUTPUT = @PLACES@, @OUTPUT@
_done = set()

def _tell(line):
    with open(os.path.join(_OUTPUT, str(os.getpid())), "a") as file:
        file.write(line + "\\n")

def _entered(frame, event, argument):
    code = frame.f_code
    name = code.co_filename
    if event != "call" or name in _done:
        return
    if not name.startswith(_PLACES):
        _done.add(name)
    # Bodies of modules and classes are not optimized; comprehensions belong to what they stand in.
    elif code.co_flags & 1 and (code.co_name == "<lambda>" or code.co_name[0] != "<"):
        _done.add(name)
        _tell(name)

_tell("# " + " ".join(sys.orig_argv))
threading.setprofile(_entered)
sys.setprofile(_entered)
"""


def make_checkout(source: Path, root: Path, output: Path) -> None:
    """A copy of `source` on a campaign branch, whose Python processes are watched."""
    checkouts.make_checkout(root, BRANCH, CONFIG.format(POOR), source=source)
    places = tuple(f"{root / folder}/" for folder in FOLDERS)
    code = WATCH.replace("@PLACES@", repr(places)).replace("@OUTPUT@", repr(str(output)))
    packages = checkouts.site_packages(root)
    (packages / "path_watch.py").write_text(code)
    (packages / "path_watch.pth").write_text("import path_watch\n")


def experiment(root: Path, budget_seconds: float) -> str:
    """Run one; the summary that it prints."""
    command = [checkouts.python(root), "run.py", "--engine", "trl", "--budget-seconds", str(budget_seconds)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"run.py ended with {done.returncode}: {done.stderr.strip()[-2000:]}")
    return done.stdout


def entered(root: Path, output: Path) -> list[Row]:
    """The files that were entered, longest first: their lines, and the programs that entered them."""
    found: dict[Path, set[str]] = {}
    for path in output.iterdir():
        program = ""
        for line in path.read_text().splitlines():
            if line.startswith("# "):  # a process starts, or becomes another one by exec
                named = re.search(r"-m (\S+)|(\S+\.py)\b", line)
                program = Path(named[1] or named[2]).name if named else line
            else:
                found.setdefault(Path(line), set()).add(program)
    rows = [
        {"file": str(path.relative_to(root)), "lines": len(path.read_text().splitlines()), "by": ", ".join(sorted(by))}
        for path, by in found.items()
    ]
    return sorted(rows, key=lambda row: (-row["lines"], row["file"]))


@click.command(help=__doc__)
@click.option("--checkout", type=click.Path(exists=True, file_okay=False, path_type=Path), default=ROOT)
@click.option("--budget-seconds", default=10.0, show_default=True, type=click.FloatRange(1))
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="The files and their lines as JSON.")
def main(checkout: Path, budget_seconds: float, output: Path | None) -> None:
    """Run both experiments, print what the second entered."""
    with tempfile.TemporaryDirectory(prefix="path-") as name:
        folder = Path(name).resolve()
        root, told = folder / "checkout", folder / "told"
        told.mkdir()
        make_checkout(checkout.resolve(), root, told)
        experiment(root, budget_seconds)
        for path in told.iterdir():
            path.unlink()
        (root / "train.toml").write_text(CONFIG.format(BETTER))
        summary = experiment(root, budget_seconds)
        if "\ndecision:         keep\n" not in summary:
            sys.exit(f"the better learning rate was not kept; try a longer --budget-seconds:\n{summary}")
        rows = entered(root, told)
    print(table(rows, {"lines": "<8", "file": "<60", "by": ""}))
    for folder in (*FOLDERS, ""):
        chosen = [row["lines"] for row in rows if row["file"].startswith(folder)]
        print(f"{sum(chosen):<8}lines of {len(chosen)} files: {folder or 'all'}")
    if output is not None:
        output.write_text(json.dumps({"lines": sum(row["lines"] for row in rows), "files": rows}, indent=1))


if __name__ == "__main__":
    main()
