"""verifiers' real rollout path, driven from outside: its env server in a process of its own, and its client.

As prime-rl does it: `serve_env` with one worker, EnvClient, and the tasks loaded on the client's side.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arithmetic import PYTHONPATH, score

from nightshift.errors import EngineError
from nightshift.processes.supervise import ProcessGroup

STAND_IN = Path(__file__).with_name("stand_in_model.py")
TASKSET = "nightshift-arithmetic"
MAX_IN_FLIGHT = 128  # at once: an env worker's
WARM_UP_ROLLOUTS = 4  # after the first one: byte code, file cache, connections
STARTUP_SECONDS = 120.0
# The call of prime-rl's entry point env-server, with one worker.
SERVE = """
import json, sys
from verifiers.v1.serve import serve_env
serve_env(config_data=json.loads(sys.argv[1]), address=sys.argv[2], max_workers=1, elastic=False)
"""

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Route:
    """One way to a reward: a harness, and how much of it is measured."""

    name: str
    harness: str
    num_rollouts: int
    fix: str  # what to do when a rollout fails


@dataclass(frozen=True, slots=True)
class Server:
    """A running env server, its client, and the tasks that the client sends to it."""

    route: Route
    client: Any  # verifiers' EnvClient; verifiers takes seconds to import, so only the measurement does
    tasks: Sequence[Any]
    context: Row

    async def rewards(self, num_rollouts: int) -> list[float]:
        """The rewards of that many rollouts. Raises EngineError if one fails."""
        gate = asyncio.Semaphore(MAX_IN_FLIGHT)

        async def rollout(task: Any) -> float:
            async with gate:
                episode = await self.client.run(**self.context, task_data=task.data.model_dump(mode="json"))
            if not episode.ok:
                errors = [error for part in (episode, *episode.traces) for error in part.errors]
                cause = errors[-1].message if errors else "no cause given"
                raise EngineError(f"{self.route.name}: a rollout failed: {cause}", self.route.fix)
            (trace,) = episode.traces
            return float(trace.reward)

        return await asyncio.gather(*map(rollout, self.tasks[:num_rollouts]))

    async def seconds(self, reply: str) -> float:
        """Run the route once and see that every reward is the right one: wall-clock seconds."""
        began = time.perf_counter()
        rewards = await self.rewards(self.route.num_rollouts)
        seconds = time.perf_counter() - began
        expected = [score(reply, task.data.answer) for task in self.tasks[: self.route.num_rollouts]]
        if rewards != expected:
            raise AssertionError(f"{self.route.name}: rewards {rewards} are not {expected}")
        return seconds


def start_model(group: ProcessGroup, folder: Path, reply: str) -> str:
    """Start the stand-in; its base URL."""
    child = group.start(
        "stand-in model",
        [sys.executable, STAND_IN, reply],
        log_path=folder / "model.log",
        env=os.environ,
        cwd=folder,
        stdout=subprocess.PIPE,
    )
    assert child.stdout is not None
    port = child.stdout.readline().decode().strip()
    if not port:
        raise EngineError(f"the stand-in model ended: {' | '.join(child.tail(3))}", "Mend stand_in_model.py.")
    return f"http://127.0.0.1:{port}/v1"


async def start_server(route: Route, group: ProcessGroup, folder: Path, base_url: str) -> Server:
    """The env server of a route, healthy, and its tasks."""
    import verifiers.v1 as vf
    from verifiers.v1.serve import EnvClient, env_config_data
    from verifiers.v1.utils.loaders import resolve_env_config

    agent = {"harness": {"id": route.harness}, "runtime": {"type": "subprocess"}}
    taskset = {"id": TASKSET, "split": "train", "size": max(route.num_rollouts, WARM_UP_ROLLOUTS)}
    config = resolve_env_config({"taskset": taskset, "agent": agent})
    address = f"ipc://{folder / route.harness}.sock"
    # Everything that verifiers, pip and uv keep goes into the throw-away folder.
    places = {"HOME": str(folder), "XDG_CACHE_HOME": str(folder / ".cache"), "UV_CACHE_DIR": str(folder / ".cache/uv")}
    child = group.start(
        f"env server {route.harness}",
        [sys.executable, "-c", SERVE, json.dumps(env_config_data(config)), address],
        log_path=folder / f"{route.harness}.log",
        env={**os.environ, **places, "PYTHONPATH": PYTHONPATH},
        cwd=folder,
    )
    client = EnvClient(address=address)
    deadline = time.monotonic() + STARTUP_SECONDS
    while not await client.health():
        if child.poll() is not None or time.monotonic() > deadline:
            cause = f"{child.name} is not ready: {child.exit_cause()}: {' | '.join(child.tail(3))}"
            raise EngineError(cause, "Run uv sync.")
    policy = vf.EvalClientConfig(base_url=base_url, api_key_var="UNSET")
    context = {"client": policy, "model": "stand-in", "sampling": vf.SamplingConfig(temperature=1.0)}
    return Server(route, client, list(vf.load_taskset(config.taskset)), context)
