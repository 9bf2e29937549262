"""Nights with four runs in flight, whose processes are killed at random moments: what is left must be one campaign.

\b
    uv run --group dev python -m tests.faults.nights              300 faults, about an hour of two cores

Real heads, workers, watchdogs, git and files; only what trains is a stand-in. Goes on where it stopped.
"""

import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from subprocess import Popen
from typing import Any

import click
import psutil

from benchmarks.machine import RESULTS, machine, table, write_result
from tests.checkouts import small_checkout
from tests.night_checkout import finish, furnish, leftovers, problems, records, start
from tests.waiting import wait_for

NUM_SLOTS, NUM_EXPERIMENTS, NUM_FAULTS = 4, 12, 6  # of a night
VICTIMS = {
    "head, killed": signal.SIGKILL,
    "head, asked to stop": signal.SIGTERM,
    "worker, killed": signal.SIGKILL,
    "worker, asked to stop": signal.SIGTERM,
    "trainer, killed": signal.SIGKILL,
    "head's watchdog, killed": signal.SIGKILL,
    "worker's watchdog, killed": signal.SIGKILL,
    "head and worker, killed": signal.SIGKILL,
}
PATIENCE_SECONDS = 2.0  # until who is meant is there
WITHIN_SECONDS = 300.0  # a night takes half a minute; more is a hang


def play(root: Path, seed: int, num_faults: int = NUM_FAULTS) -> list[dict[str, Any]]:
    """One night to its end, with so many faults; a row each, the night's problems in the last."""
    rng, rows, ends_at = random.Random(seed), list[dict[str, Any]](), time.monotonic() + WITHIN_SECONDS
    asked = {
        "agent": "lr",
        "lengths": [rng.uniform(0.3, 1.5) for _ in range(40)],
        "proposal_seconds": 0.1,
        "slots": NUM_SLOTS,
        "seed": seed,
    }
    found, night = list[str](), start(root, **asked, experiments=NUM_EXPERIMENTS)
    while True:
        time.sleep(rng.uniform(0.1, 1.2))
        if night.poll() is not None:
            finish(night)
            num_left = NUM_EXPERIMENTS - len([r for r in records(root) if r.decided is not None])
            if num_left <= 0:
                break
            state = root / "runs" / "night.json"  # none where the head was killed before it wrote one
            over = state.exists() and json.loads(state.read_text())["cause"] is not None
            night = start(root, **asked, experiments=num_left if over else NUM_EXPERIMENTS)
        elif len(rows) < num_faults:
            victim, tries_until = rng.choice(list(VICTIMS)), time.monotonic() + PATIENCE_SECONDS
            while night.poll() is None and time.monotonic() < tries_until:  # who is meant may not be there now
                if strike(victim, night, root, rng):
                    rows.append({"night": seed, "victim": victim, "problems": []})
                    break
                time.sleep(0.02)
        if time.monotonic() > ends_at:
            found.append(f"no end after {WITHIN_SECONDS:g} s")
            night.kill()
            finish(night)
            break
    try:
        wait_for(lambda: not leftovers(root))
    except AssertionError:
        found.append(f"left running: {[process.cmdline()[-2:] for process in leftovers(root)]}")
    found += problems(root) + _wrong(root)
    rows = rows or [{"night": seed, "victim": "nobody", "problems": []}]
    rows[-1]["problems"] = found
    return rows


def strike(victim: str, night: Popen[str], root: Path, rng: random.Random) -> bool:
    """Do it; False where there is no such process now."""
    who, _, _ = victim.partition(", ")
    below = {process: _command(process) for process in leftovers(root)}
    workers = [process for process, command in below.items() if Path(command[-1]).parent.name == "runs"]
    trainers = [process for process, command in below.items() if any("stand_in_trainer" in word for word in command)]
    # In sessions of their own, and without a word of the checkout: known by whom they watch.
    commands = {process: _command(process) for process in psutil.process_iter()}
    dogs = {int(c[-1]): p for p, c in commands.items() if c[-2:-1] and Path(c[-2]).name == "watchdog.py"}
    head = psutil.Process(night.pid)
    of_workers = [dog for pid, dog in dogs.items() if pid in {worker.pid for worker in workers}]
    targets: dict[str, Sequence[psutil.Process]] = {
        "head": [head],
        "worker": workers,
        "trainer": trainers,
        "head's watchdog": [dogs[night.pid]] if night.pid in dogs else [],
        "worker's watchdog": of_workers,
        "head and worker": workers,
    }
    if not targets[who]:
        return False
    chosen = [rng.choice(targets[who]), *([head] if who == "head and worker" else [])]
    for process in chosen:
        try:
            process.send_signal(VICTIMS[victim])
        except psutil.NoSuchProcess:
            return False
    return True


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline() or [""]
    except psutil.NoSuchProcess:
        return [""]


def _wrong(root: Path) -> list[str]:
    """What no night may leave: an order with gaps, a seed that ran twice, a parent that was never kept."""
    ours, found = records(root), list[str]()
    counted = [r for r in ours if r.decided is not None]
    decided = sorted(r.decided or 0 for r in counted)
    if decided != [*range(1, len(decided) + 1)]:
        found.append(f"decided: {decided}")
    seeds = Counter(r.result.seed for r in counted if r.result and r.result.evaluation)
    found += [f"seed {seed} twice" for seed, count in seeds.items() if count > 1]
    kept = {r.number for r in ours if r.is_keep}
    found += [f"{r.number:04d} has a parent that was not kept" for r in ours if r.parent not in {None, *kept}]
    return found


@click.command(help=__doc__)
@click.option("--faults", default=300, show_default=True)
@click.option("--seed", default=1, show_default=True, help="Of the first night.")
@click.option("--output", type=click.Path(path_type=Path), default=RESULTS / "night_faults.json")
def main(faults: int, seed: int, output: Path) -> None:
    """Play what is missing, print, write; exit 1 where something was wrong."""
    old = json.loads(output.read_text()) if output.exists() else {}
    rows: list[dict[str, Any]] = old.get("faults", [])
    played = {row["night"] for row in rows}
    while len(rows) < faults:
        if seed not in played:
            with tempfile.TemporaryDirectory() as folder:
                made = play(furnish(small_checkout(Path(folder))), seed)
            rows += made
            wrong = made[-1]["problems"]
            click.echo(f"night {seed}: {len(made)} faults, {len(rows)} in all; {wrong or 'nothing wrong'}", err=True)
            write_result(output, "uv run --group dev python -m tests.faults.nights", {"faults": rows}, machine())
        seed += 1
    counts = Counter(row["victim"] for row in rows)
    click.echo(table([{"victim": v, "faults": n} for v, n in counts.items()], {"victim": "<28", "faults": ">7"}))
    wrong = [problem for row in rows for problem in row["problems"]]
    click.echo(f"{len(rows)} faults in {len({row['night'] for row in rows})} nights, {len(wrong)} problems")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
