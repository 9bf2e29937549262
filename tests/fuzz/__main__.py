"""A thousand mutated train.toml through the front door: each is valid, or a line a problem and exit code 2.

\b
    uv run --group dev python -m tests.fuzz                 1,000 in this process and 30 as whole processes
    uv run --group dev python -m tests.fuzz --seed 7        another thousand

The mutants come from hypothesis, by class (mutants.py). In this process they go through what run.py calls, up to
the moment before an experiment would start (--dry-run); the 30 go through run.py with a stand-in for the
process that trains (tests/stand_in_run.py), and those that are accepted train and are recorded.

Wrong is: an exception; another exit code than 0 or 2; a refusal without a printable line for each problem; a word on
stdout at a refusal; a file that was changed, made or touched; and an accepted file that is not valid. Valid is
judged here anew (oracle.py): every key open, of its type, in its bounds; no locked name; the rules between batch,
group, lengths and steps; the same config after a rewrite; settings that both engines take as JSON.
"""

import contextlib
import io
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import click
import hypothesis
from hypothesis import HealthCheck, Phase, configuration

from benchmarks.machine import RESULTS, machine, table, write_result
from nightshift.campaign.records import Request
from nightshift.cli import run
from nightshift.cli.shell import in_one_line
from tests.checkouts import ROOT, git
from tests.fuzz.mutants import CLASSES
from tests.fuzz.oracle import doubts

MAX_LINE = 600
MAX_FAILURES = 20
_LINKS = ("nightshift", "environments", "models", "run.py")
COLUMNS = {"class": "<22", "cases": ">7", "accepted": ">10", "refused": ">9", "wrong": ">7",
           "slowest_milliseconds": ">22.0f"}  # fmt: skip
Row = dict[str, Any]
Answer = tuple[int, str, str]  # exit code, stdout, stderr


@dataclass
class Tally:
    """What came of one class."""

    name: str
    accepted: list[bytes] = field(default_factory=list)
    refused: list[bytes] = field(default_factory=list)
    wrong: list[tuple[str, bytes]] = field(default_factory=list)
    slowest_seconds: float = 0.0

    def row(self) -> Row:
        """For the table and the result file."""
        return {
            "class": self.name,
            "cases": len(self.accepted) + len(self.refused),
            "accepted": len(self.accepted),
            "refused": len(self.refused),
            "wrong": len(self.wrong),
            "slowest_milliseconds": round(1000 * self.slowest_seconds, 1),
        }


def make_checkout(root: Path) -> None:
    """A checkout that is no campaign: what is refused there is the config's own doing."""
    root.mkdir()
    for name in _LINKS:
        (root / name).symlink_to(ROOT / name)
    shutil.copy(ROOT / "rules.toml", root)  # no link: those are refused
    git(root, "init", "--quiet", "--initial-branch", "main")


def files(root: Path) -> dict[str, tuple[int, int, int]]:
    """Size, time of writing and inode number of every file but train.toml, and .git, whose time its locks move."""
    found = {}
    for path in root.rglob("*"):
        status = path.lstat()
        found[str(path.relative_to(root))] = (status.st_size, status.st_mtime_ns, status.st_ino)
    return {name: state for name, state in found.items() if name not in ("train.toml", ".git")}


def in_process(root: Path) -> Answer:
    """What run.py does with --dry-run, in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = in_one_line(partial(run.run, root, Request(engine="trl", dry_run=True)))()
        except Exception:
            return 1, "", traceback.format_exc()
    return int(code), out.getvalue(), err.getvalue()


def as_process(root: Path) -> Answer:
    """run.py with the stand-in, a whole experiment."""
    program = [sys.executable, str(ROOT / "tests" / "stand_in_run.py"), str(root)]
    flags = ["--engine=trl", "--budget-seconds=1"]
    done = subprocess.run([*program, *flags], cwd=root, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout, done.stderr


def complaint(answer: Answer) -> str | None:
    """What is wrong with an answer as such, if anything."""
    code, stdout, stderr = answer
    if "Traceback" in stderr:
        return f"traceback: {stderr.strip().splitlines()[-1]}"
    if code == 0:
        return None
    if code != 2:
        return f"exit code {code}"
    lines = stderr.removesuffix("\n").split("\n")
    is_readable = all(line.isprintable() and 20 <= len(line) <= MAX_LINE for line in lines)
    has_heading = len(lines) == 1 or lines[0].endswith(" problems:")
    if stdout or not is_readable or not has_heading:
        return f"not printable lines: {stdout + stderr!r}"
    return None


def try_one(root: Path, tally: Tally, ask: Callable[[Path], Answer], source: bytes) -> None:
    """Put one file through the door and note what came of it."""
    path = root / "train.toml"
    path.write_bytes(source)
    before = files(root)
    began = time.perf_counter()
    answer = ask(root)
    tally.slowest_seconds = max(tally.slowest_seconds, time.perf_counter() - began)
    is_accepted = answer[0] == 0
    wrong = complaint(answer)
    changed = {name for name, _ in before.items() ^ files(root).items()}
    if is_accepted and ask is as_process:
        changed = {name for name in changed if not name.startswith(("runs", "results.tsv"))}
    if changed or path.read_bytes() != source:
        wrong = wrong or f"changed {', '.join(sorted(changed)) or 'train.toml'}"
    if is_accepted:
        wrong = wrong or next(iter(doubts(source)), None)
    (tally.accepted if is_accepted else tally.refused).append(source)
    if wrong is not None:
        tally.wrong.append((wrong, source))


def _tried(root: Path, tally: Tally) -> Callable[[bytes], None]:
    def case(source: bytes) -> None:
        try_one(root, tally, in_process, source)

    return case


def fuzz(root: Path, num_cases: int, seed: int) -> list[Tally]:
    """`num_cases` in this process, shared among the classes; the same ones for the same seed."""
    tallies = []
    for index, (name, strategy) in enumerate(CLASSES.items()):
        tally = Tally(name)
        settings = hypothesis.settings(
            max_examples=num_cases // len(CLASSES) + (index < num_cases % len(CLASSES)), database=None, deadline=None,
            phases=[Phase.generate], suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        case = settings(hypothesis.given(source=strategy())(_tried(root, tally)))
        hypothesis.seed(seed)(case)()
        tallies.append(tally)
        print(f"{name}: {tally.row()['cases']} cases, {len(tally.wrong)} wrong", file=sys.stderr, flush=True)
    return tallies


def whole_processes(root: Path, tallies: Sequence[Tally], num_cases: int) -> Tally:
    """`num_cases` of the same files through run.py itself, in turn from each class, refused and accepted."""
    whole = Tally("whole processes")
    halves = [kind[len(kind) // 2 :] for tally in tallies for kind in (tally.refused, tally.accepted)]
    chosen = [source for turn in zip_longest(*halves) for source in turn if source is not None]
    for source in chosen[:num_cases]:
        try_one(root, whole, as_process, source)
    if len(whole.accepted) + len(whole.refused) < min(num_cases, 1):
        raise AssertionError("no file was left for the whole processes")
    return whole


@click.command(help=__doc__)
@click.option("--cases", default=1000, show_default=True, type=click.IntRange(1), help="In this process.")
@click.option("--processes", default=30, show_default=True, type=click.IntRange(0), help="As whole processes.")
@click.option("--seed", default=0, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), default=RESULTS / "fuzz_config.json", help="Result as JSON.")
def main(cases: int, processes: int, seed: int, output: Path) -> None:
    """Fuzz, print the table, write the result; exit code 1 when anything is wrong."""
    kind = machine()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        folder = Path(name).resolve()
        configuration.set_hypothesis_home_dir(folder / "hypothesis")
        root = folder / "checkout"
        make_checkout(root)
        tallies = fuzz(root, cases, seed)
        tallies.append(whole_processes(root, tallies, processes))
    wrong = [(tally.name, *entry) for tally in tallies for entry in tally.wrong]
    figures: Row = {
        "hypothesis": hypothesis.__version__,
        "seed": seed,
        "seconds": round(time.perf_counter() - began, 1),
        "classes": [tally.row() for tally in tallies],
        "num_wrong": len(wrong),
        "wrong": [
            {"class": c, "cause": cause, "file": repr(source[:2000])} for c, cause, source in wrong[:MAX_FAILURES]
        ],
    }
    flags = f"--cases {cases} --processes {processes} --seed {seed}"
    write_result(output, f"uv run --group dev python -m tests.fuzz {flags}", figures, kind)
    print(table(figures["classes"], COLUMNS))
    for found in figures["wrong"]:
        print(f"WRONG {found['class']}: {found['cause']}\n  {found['file'][:300]}", file=sys.stderr)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
