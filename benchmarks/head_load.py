"""What the controller of a night costs, and how many slots it keeps busy: simulated workers, real controller.

\b
    uv run --group dev benchmarks/head_load.py          1, 4, 16 and 64 slots, some minutes of one core

Ledger, journal, git, rule, proposals, page and all are the night's own; only the executor is a stand-in, whose runs end
by chance as soon as the controller waits. So all the time that passes is the controller's.
"""

import resource
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest
from machine import RESULTS, machine, table, write_result

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from nightshift.experiment.setup import Setup
from nightshift.night.loop import Night
from nightshift.night.state import NightRequest, NightState
from tests.checkouts import CAMPAIGN, small_checkout
from tests.stand_in_setup import make_poor
from tests.unit.test_parallel import RULES, AnyOrder, Rates

RUN_SECONDS = 600.0 + 120.0  # a budget on GPUs, with start-up and evaluation
SLOTS = (1, 4, 16, 64)


def play(setup: Setup, num_slots: int, num_experiments: int) -> dict[str, Any]:
    """CPU seconds of the controller for each of its experiments, of the first and the last quarter."""
    executor, proposer, seconds = AnyOrder(num_slots, seed=0), Rates(0), list[float]()

    def tell(text: str) -> None:
        decided = sum(record.decided is not None for record in setup.ledger.records())
        seconds.extend([time.process_time()] * (decided - len(seconds)))

    request = NightRequest("rates", experiments=num_experiments)
    state = NightState(request, CAMPAIGN, setup.rules_hash, setup.now().isoformat(), 1)
    began = time.process_time(), time.monotonic()
    stop = Night(state, replace(setup, executor=executor), proposer, tell, pauses=(0.0, 0.0, 0.0)).run()
    assert stop.cause == f"{num_experiments} experiments are done", stop
    cpu, wall = time.process_time() - began[0], time.monotonic() - began[1]
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    quarter = max(len(seconds) // 4, 1)
    return {
        "slots": num_slots,
        "experiments": num_experiments,
        "cpu_seconds_each": round(cpu / num_experiments, 3),
        "wall_seconds_each": round(wall / num_experiments, 3),
        "last_quarter": round((seconds[-1] - seconds[-quarter]) / max(quarter - 1, 1), 3),
        "children_seconds": round(children.ru_utime + children.ru_stime, 1),
        "peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "keeps_up_to": int(RUN_SECONDS / (wall / num_experiments)),
    }


@click.command(help=__doc__)
@click.option("--slots", type=int, multiple=True, default=SLOTS, show_default=True)
@click.option("--each", default=4, show_default=True, help="Experiments a slot; at least 40 in all.")
@click.option("--output", type=click.Path(path_type=Path), default=RESULTS / "head.json")
def main(slots: tuple[int, ...], each: int, output: Path) -> None:
    """Play, print, write."""
    kind, rows = machine(), list[dict[str, Any]]()
    for num_slots in slots:
        with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
            setup = make_poor(small_checkout(Path(folder)), RULES, patch)
            rows.append(play(setup, num_slots, max(each * num_slots, 40)))
            click.echo(rows[-1], err=True)
    command = "uv run --group dev benchmarks/head_load.py"
    write_result(output, command, {"run_seconds": RUN_SECONDS, "rows": rows}, kind)
    columns = {"slots": ">6", "experiments": ">12", "cpu_seconds_each": ">18.2f", "wall_seconds_each": ">19.2f"}
    click.echo(table(rows, columns | {"last_quarter": ">14.2f", "peak_mb": ">9", "keeps_up_to": ">13"}))


if __name__ == "__main__":
    main()
