"""A thousand faults: after each one, is anything left behind, lost, doubled or half done, and does the next run work?

\b
    uv run --group dev python -m tests.faults --folder FOLDER               1,000 faults, up to an hour on 2 cores
    uv run --group dev python -m tests.faults --folder FOLDER --num 20 --only "trainer killed"

Draws faults by seed from a matrix (matrix.py): which process or file x which moment x which failure.
Each strikes a real run.py in a fresh checkout in mid-campaign, then a person sets right what was broken from
outside (makes room, removes the lock, switches back), and the next experiment runs. Checked after each: the exit
code, no traceback, no process, no lock, every record closed, results.tsv as the records say, the branch as the
verdicts say, nothing left over, and that the next experiment is measured.

Nineteen of twenty strike the stand-in engine (stand_in_trainer.py trains nothing, the validation split has 100
examples; for prime-rl the stand-in programs of the tests), one of twenty the real trl engine in whole processes.
Resumable: FOLDER/faults-SEED.jsonl holds what is finished. A full disk and read-only folders need root and Linux:
elsewhere those rows are counted as skipped.
"""

import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click

from benchmarks.machine import RESULTS, machine, table, write_result
from tests.checkouts import leftovers
from tests.faults import scenario
from tests.faults.matrix import FAMILIES, REAL, Fault, Moments, draw
from tests.faults.play import Row, play

ENDS = {0: "measured", 1: "crash", 2: "refused", 130: "stopped"}  # of the run.py that was struck, by its exit code


def play_all(faults: Sequence[Fault], slot: Path, templates: Path, output: Path) -> None:
    """Play faults one after the other; a row each is appended to `output`."""
    slot.mkdir(parents=True, exist_ok=True)
    for index, fault in enumerate(faults, start=1):
        try:
            played = play(fault, slot, templates)
        except Exception:  # of these tests, or of the check itself: a finding too
            played = asdict(fault) | {"struck": True, "problems": [f"play: {traceback.format_exc()}"]}
            for process in leftovers(slot):
                process.kill()
        with output.open("a") as file:
            file.write(json.dumps(played) + "\n")
        told = "; ".join(played.get("problems", [])) or "ok"
        print(f"{slot.name} {index}/{len(faults)} {fault.number}: {fault.family}, {fault.scenario}: {fault.victim}, "
              f"{fault.moment}, {fault.failure}: {told}", file=sys.stderr, flush=True)  # fmt: skip
    subprocess.run(["umount", "-l", str(slot / "disk")], capture_output=True, check=False)


def summarize(name: str, rows: Sequence[Row]) -> Row:
    """One line of the table."""
    played = [r for r in rows if "skipped" not in r]
    codes = [code for r in played for code in r.get("exit_codes", ())[:1] if code is not None]
    ends = Counter("killed" if code < 0 else ENDS.get(code, "else") for code in codes)
    gone = [r["gone_seconds"] for r in played if r.get("gone_seconds") is not None]
    seconds = [r["seconds"] for r in played if "seconds" in r]
    return {
        "family": name,
        "faults": len(rows),
        "skipped": len(rows) - len(played),
        "struck": sum(bool(r.get("struck")) for r in played),
        **{end: ends[end] for end in (*ENDS.values(), "killed")},
        "told_a_fix": sum(bool(r.get("told")) for r in played),
        "with_problems": sum(bool(r["problems"]) for r in played),
        "gone_seconds_max": round(max(gone), 1) if gone else None,
        "seconds_median": round(statistics.median(seconds), 2) if seconds else None,
    }


@click.command(help=__doc__)
@click.option("--num", default=1000, show_default=True, type=click.IntRange(1), help="Faults.")
@click.option("--seed", default=0, show_default=True)
@click.option("--only", type=click.Choice(list(FAMILIES)), multiple=True, help="Draw from these families alone.")
@click.option("--folder", type=click.Path(path_type=Path), required=True, help="Scratch; holds what is finished.")
@click.option("--slots", default=os.cpu_count() or 1, show_default=True, help="Checkouts side by side.")
@click.option("--real/--no-real", default=True, help="Whether to play those with the real engine, too.")
@click.option("--output", type=click.Path(path_type=Path), default=RESULTS / "faults.json", help="The result as JSON.")
def main(num: int, seed: int, only: tuple[str, ...], folder: Path, slots: int, real: bool, output: Path) -> None:
    """Draw, play what is not finished, print the table, write the result; exit code 1 if a fault left a problem."""
    kind, folder = machine(), folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    finished, templates = folder / f"faults-{seed}.jsonl", folder / "templates"
    moments = _moments(folder)
    faults = [draw(n, seed, moments, only[n % len(only)] if only else None) for n in range(num)]
    done = {(r["number"], r["family"]) for r in _rows(finished)}
    todo = [f for f in faults if (f.number, f.family) not in done]
    stand_in, trl = [f for f in todo if f.family != REAL], [f for f in todo if f.family == REAL and real]
    context = multiprocessing.get_context("fork")
    shares = [(stand_in[i::slots], folder / f"slot-{i}", templates, finished) for i in range(slots)]
    players = [context.Process(target=play_all, args=share) for share in shares]
    for player in players:
        player.start()
    for player in players:
        player.join()
    if trl:
        scenario.make_real_template(templates)
    play_all(trl, folder / "real", templates, finished)
    wanted = {(f.number, f.family) for f in faults}
    rows = [r for r in _rows(finished) if (r["number"], r["family"]) in wanted]
    by_family = {family: [r for r in rows if r["family"] == family] for family in FAMILIES}
    summary = [summarize(family, ours) for family, ours in by_family.items() if ours]
    findings = [r for r in rows if r.get("problems")]
    command = f"uv run --group dev python -m tests.faults --num {num} --seed {seed}"
    command += "".join(f' --only "{name}"' for name in only)
    figures = {"seed": seed, "num": len(rows), "families": summary, "findings": findings}
    write_result(output, command, figures, kind)
    columns = {name: "<30" if name == "family" else f">{len(name) + 2}" for name in summary[0]}
    print("\n".join([table([*summary, summarize("all", rows)], columns), *map(json.dumps, findings)]))
    sys.exit(1 if findings else 0)


def _moments(folder: Path) -> Moments:
    """Recorded once for a folder, so that a resumed run draws the same faults."""
    path = folder / "moments-of-scenarios.json"
    if not path.exists():
        made = scenario.make_templates(folder / "templates")
        path.write_text(json.dumps(made))
    moments: Moments = json.loads(path.read_text())
    return moments


def _rows(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


if __name__ == "__main__":
    main()
