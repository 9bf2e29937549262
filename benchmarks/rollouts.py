"""Rewards per second: our in-process environment against one process a rollout.

\b
    uv run benchmarks/rollouts.py                          both paths, a few minutes
    uv run benchmarks/rollouts.py --process-rollouts 0     without the path that needs a package index

Both paths are verifiers' own, and the same but for the harness: its env server (one worker, as in a pool of prime-rl's)
in a process of its own, runtime `subprocess`, its EnvClient with the tasks loaded on the client's side.

\b
in-process   the ChatHarness of our environments: one HTTP request from inside the worker
process      verifiers' stock `null` harness: `sh -c`, then a Python program, for every rollout

What the stock harness needs first it installs itself, once a worker, from a package index; that goes into a
throw-away HOME, and its time is reported apart, as the first rollout. The model is a stand-in (stand_in_model.py): a
fixed reply without delay. So the figures are the price of the environment alone, without tokenization, which
both paths pay alike. The paths take turns, and the median of all repetitions counts.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import click
from arithmetic import data
from env_server import MAX_IN_FLIGHT, TASKSET, WARM_UP_ROLLOUTS, Route, start_model, start_server
from machine import RESULTS, machine, table, write_result

from nightshift.errors import NightshiftError
from nightshift.processes.supervise import ProcessGroup, interruptible

COLUMNS = {"name": "<12", "harness": "<24", "num_rollouts": ">13", "max_in_flight": ">14",
           "rewards_per_second": ">19.1f", "first_rollout_seconds": ">22.1f"}  # fmt: skip
Row = dict[str, Any]


async def measure(
    routes: Sequence[Route], repetitions: int, group: ProcessGroup, folder: Path, say: Callable[[str], None]
) -> list[Row]:
    """One row a route. The routes take turns, so that a slow minute of the machine hits all of them."""
    reply = f"So it is.\n#### {data.load('train', 1)[0].answer}"
    base_url = start_model(group, folder, reply)
    async with AsyncExitStack() as stack:
        servers, first_seconds = [], []
        for route in routes:
            say(f"{route.name}: starting the env server, and what its harness prepares first")
            server = await start_server(route, group, folder, base_url)
            stack.push_async_callback(server.client.close)
            began = time.perf_counter()
            await server.rewards(1)
            first_seconds.append(time.perf_counter() - began)
            await server.rewards(WARM_UP_ROLLOUTS)
            servers.append(server)
        runs: list[list[float]] = [[] for _ in routes]
        for number in range(1, repetitions + 1):
            for server, seconds in zip(servers, runs, strict=True):
                seconds.append(await server.seconds(reply))
                route = server.route
                say(f"{route.name}: {number} of {repetitions}: {route.num_rollouts} rollouts in {seconds[-1]:.1f} s")
    return [
        {
            "name": route.name,
            "harness": route.harness,
            "num_rollouts": route.num_rollouts,
            "max_in_flight": MAX_IN_FLIGHT,
            "rewards_per_second": route.num_rollouts / statistics.median(seconds),
            "first_rollout_seconds": first,
            "repetitions": [{"wall_seconds": each} for each in seconds],
        }
        for route, first, seconds in zip(routes, first_seconds, runs, strict=True)
    ]


@click.command(help=__doc__)
@click.option("--rollouts", default=256, show_default=True, type=click.IntRange(1), help="In-process, a repetition.")
@click.option("--process-rollouts", default=64, show_default=True, type=click.IntRange(0), help="0: leave it out.")
@click.option("--repetitions", default=3, show_default=True, type=click.IntRange(1))
@click.option(
    "--output", type=click.Path(path_type=Path), default=RESULTS / "rollouts.json", help="The result as JSON."
)
def main(rollouts: int, process_rollouts: int, repetitions: int, output: Path) -> None:
    """Measure, print the table, write the result."""
    kind = machine()
    fix = "Run: uv run --group dev pytest tests/integration/test_tasksets.py"
    routes = [Route("in-process", TASKSET, rollouts, fix)]
    if process_rollouts:
        fix = "Make a package index reachable, or leave this path out: --process-rollouts 0"
        routes.append(Route("process", "null", process_rollouts, fix))
    model = "stand-in: one fixed reply, no model, no delay"
    result: Row = {"verifiers": importlib.metadata.version("verifiers"), "model": model}
    with tempfile.TemporaryDirectory(prefix="rollouts-") as name:
        folder = Path(name)
        group = ProcessGroup(marker=folder.name, grace_seconds=10)
        try:
            with interruptible():
                result["rollouts"] = asyncio.run(
                    measure(routes, repetitions, group, folder, lambda line: print(line, file=sys.stderr, flush=True))
                )
        except NightshiftError as error:
            print(f"rollouts.py: {error}", file=sys.stderr)
            sys.exit(error.exit_code)
        finally:
            group.stop()
    flags = f"--rollouts {rollouts} --process-rollouts {process_rollouts} --repetitions {repetitions}"
    write_result(output, f"uv run benchmarks/rollouts.py {flags}", result, kind)
    print(table(result["rollouts"], COLUMNS))


if __name__ == "__main__":
    main()
