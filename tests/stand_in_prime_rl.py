"""Stand-ins for prime-rl's programs: they train nothing, but speak its files, ports and endpoints.

`install(folder)` makes a bin/ of small scripts named inference, env-server, orchestrator, torchrun and
python, each of which runs this file with its own name. `misbehave(folder, fault, step)` tells them what to
do wrong. File names, row shapes and the order of things are those of tests/fixtures/prime_rl, which a real
prime-rl wrote; what is in the rows is made up, and no test takes it for a result.
"""

from __future__ import annotations  # the programs import none of what is annotated

import json
import os
import shlex
import shutil
import signal
import socket
import struct
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
if __name__ != "__main__":  # the programs themselves import nothing of Nightshift
    from nightshift.engines.prime_rl.install import Installation, Pins

PROGRAMS = ("inference", "env-server", "orchestrator", "torchrun", "python")
STEP_SECONDS = 0.1
GROUPS = 4  # a step's rollouts are GROUPS groups of 2


def install(folder: Path) -> Path:
    """A bin/ folder with the stand-ins, as a prime-rl installation would have, and `reader.py`; returns it."""
    bin_dir = folder / "bin"
    bin_dir.mkdir(parents=True, exist_ok=True)
    words = [sys.executable, str(HERE / "stand_in_prime_rl.py"), str(folder), "reader"]
    (bin_dir / "reader.py").write_text(f"import os, sys\nos.execv({words[0]!r}, [*{words!r}, *sys.argv[1:]])\n")
    for name in PROGRAMS:
        script = bin_dir / name
        words = map(shlex.quote, (sys.executable, str(HERE / "stand_in_prime_rl.py"), str(folder), name))
        script.write_text(f'#!/bin/sh\nexec {" ".join(words)} "$@"\n')
        script.chmod(0o755)
    misbehave(folder, None)
    return bin_dir


def installation(folder: Path) -> Installation:
    """An installation of stand-ins."""
    pins = Pins.read(HERE.parent / "pyproject.toml")
    made = Installation(folder / "prime-rl", pins)
    install(made.bin_dir.parent)
    return made


def misbehave(folder: Path, fault: str | None, step: int = 2) -> None:
    """What the stand-ins of this installation do wrong from now on, and at which step."""
    (folder / "fault.json").write_text(json.dumps({"fault": fault, "step": step}))


def config_of(arguments: list[str]) -> dict[str, Any]:
    """The JSON file after `@`."""
    return json.loads(Path(arguments[arguments.index("@") + 1]).read_text())  # type: ignore[no-any-return]


def append(path: Path, row: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


TRACEBACK = 'Traceback (most recent call last):\n  File "stand_in"\n'
# As torch's torchrun ends (tests/fixtures/prime_rl/logs/kill9-trainer.txt), and vLLM's API server.
TORCHRUN = f"""E1120 18:01:14.545000 32683 torch/distributed/elastic/multiprocessing/api.py:986] failed (exitcode: 1)
{TRACEBACK}torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
======================================================
prime_rl.trainer.rl.train FAILED
Root Cause (first observed failure):
[0]:
  exitcode  : {{code}} (pid: 32703)
  error_file: <N/A>
  traceback : {{why}}
======================================================"""
CORE = "(EngineCore pid=30504) ERROR 11-20 17:43:38 [core.py:1313] "  # what stands before a line
API = "(APIServer pid=30442) ERROR 11-20 17:43:38 [serving.py:1267] "
ENGINE_DEAD = (
    f"{TRACEBACK}vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. "
    "See stack trace (above) for the root cause."
)
CORE_FAILED = (
    f"{TRACEBACK}RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {{}}"
)


def say(text: str, prefix: str = "") -> None:
    """Into the log, each line with what the real program puts before it."""
    print("".join(f"{prefix}{line}\n" for line in text.splitlines()), end="", file=sys.stderr, flush=True)


def fail_below_torchrun(message: str) -> None:
    """End as the worker of torchrun, which has the last words."""
    say(f"17:45:37   ERROR Fatal error in train\n{TRACEBACK}{message}", "[trainer0]:")
    say(TORCHRUN.format(code=1, why="To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html"))
    sys.exit(1)


def fail_in_rank_1(fault: str) -> None:
    """A second process of torchrun raises; with `rank_1_stays` it stays. Then the first process says what it saw."""
    say(f"17:45:37   ERROR Fatal error in train\n{TRACEBACK}ZeroDivisionError: in rank 1", "[trainer1]:")
    if fault == "rank_1_stays":
        time.sleep(600)
    say(f"17:45:38   ERROR Fatal error in train\n{TRACEBACK}RuntimeError: Connection closed by peer", "[trainer0]:")
    ended = "(exitcode: 1) local_rank: 1 (pid: 32703) of binary: /opt/bin/python"
    say(TORCHRUN.replace("(exitcode: 1)", ended).format(code=1, why="To enable traceback see: https://pytorch.org"))
    sys.exit(1)


def metrics_path(config: dict[str, Any]) -> Path:
    return Path(config["output_dir"]) / config["monitors"]["file"]["path"]


def broadcast(folder: Path, step: int) -> None:
    """As P/transports/weights/filesystem.py: temporary name, rename, then the empty markers.

    The safetensors file is written here, because numpy takes longer to import than all the rest.
    """
    target = folder / f"step_{step}"
    target.mkdir(parents=True)
    header = json.dumps({"step": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    data = struct.pack("<Q", len(header)) + header + struct.pack("<f", step)
    (target / "tmp.safetensors").write_bytes(data)
    (target / "tmp.safetensors").rename(target / "model.safetensors")
    (target / "NCCL_READY").touch()
    (target / "STABLE").touch()


def trainer(config: dict[str, Any], orders: dict[str, Any]) -> None:
    fault, at = orders["fault"], orders["step"]
    run_dir = Path(config["output_dir"])
    broadcasts = run_dir / "broadcasts"
    broadcast(broadcasts, 0)
    step, max_steps = 0, config["max_steps"]
    while max_steps is None or step < max_steps:
        step += 1
        batch = run_dir / "rollouts" / f"step_{step}" / "train" / "effective" / "traces.jsonl"
        while not batch.exists():  # the stand-in for the ZMQ queue
            time.sleep(0.02)
        time.sleep(STEP_SECONDS)
        if step == at and fault == "trainer_hang":
            time.sleep(600)
        if step == at and fault and fault.startswith("rank_1_"):
            fail_in_rank_1(fault)
        if step == at and fault == "trainer_out_of_memory":
            fail_below_torchrun("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
        row = {"step": step, "time": time.time()}
        losses = {} if step >= at and fault == "nan" else {"loss/mean": 0.01, "loss/std": 0.02}
        norms = {} if step >= at and fault == "nan" else {"optim/grad_norm": 0.5}
        for values in (
            {"perf/throughput": 1000.0, "perf/peak_memory": 2.0},
            {"optim/lr": 1e-6, **norms},
            {"entropy/all/mean": 0.5, "mismatch_kl/all/mean": 1e-4, **losses},
            {"time/step": STEP_SECONDS, "time/wait_for_batch": 0.02, "time/forward_backward": 0.05,
             "time/broadcast_weights": 0.01},
            {"system/ckpt_disk_free_gib": 100.0},
        ):  # fmt: skip
            append(metrics_path(config), row | values)
        broadcast(broadcasts, step)
        shutil.rmtree(broadcasts / f"step_{step - 2}", ignore_errors=True)
    if fault == "slow_exit":
        time.sleep(600)


def post(base: str, path: str, body: dict[str, Any]) -> None:
    data = json.dumps(body).encode()
    request = urllib.request.Request(base + path, data, {"Content-Type": "application/json"})
    urllib.request.urlopen(request).read()


def get(url: str) -> bool:
    try:
        return urllib.request.urlopen(url).status == 200  # type: ignore[no-any-return]
    except OSError:
        return False


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def trace(reward: float, number: int) -> dict[str, Any]:
    """The few fields of an episode that Nightshift reads."""
    message = {"role": "assistant", "content": f"2 + {number} = {2 + number}\n#### {2 + number}"}
    nodes = [
        {"parent": None, "message": {"role": "user", "content": f"2 + {number}?"}, "sampled": False},
        {"parent": 0, "message": message, "sampled": True},
    ]
    one = {"nodes": nodes, "rewards": {"correct": {"score": reward, "weight": 1.0}}, "stop_condition": None, "ok": True}
    return {"id": str(number), "ok": True, "traces": [one]}


def orchestrator(config: dict[str, Any], orders: dict[str, Any]) -> None:
    run_dir = Path(config["output_dir"])
    base = config["model"]["client"]["base_url"].removesuffix("/v1")
    unreached = "Inference server was not reached after 10 seconds (Error: All connection attempts failed)"
    say(f"17:57:55 WARNING {unreached} on {base}")
    sources = [source["name"] for source in config["train"]["source"]]
    while (
        not all(listens(config["env_server_base_port"] + index) for index in range(len(sources)))
        or not get(base + "/health")
        or not (run_dir / "broadcasts" / "step_0" / "STABLE").exists()
    ):
        time.sleep(0.05)
    print("\x1b[2m17:41:57\x1b[0m   INFO \x1b[22mStarting orchestrator loop (max_steps=infinite)\x1b[0m", flush=True)
    step, version = 0, 0
    while config["max_steps"] is None or step < config["max_steps"]:
        step += 1
        while version < step - 2:  # as TARGET_LAG: batch N waits for version N - 2
            if not (run_dir / "broadcasts" / f"step_{version + 1}" / "STABLE").exists():
                time.sleep(0.05)
                continue
            version += 1
            post(base, "/pause", {})
            post(base, "/update_weights", {"weight_dir": str(run_dir / "broadcasts" / f"step_{version}")})
            post(base, "/resume", {})
        if orders["fault"] == "no_rollout":
            time.sleep(600)
        rollouts = run_dir / "rollouts" / f"step_{step}" / "train"
        for number in range(2 * GROUPS):
            append(rollouts / "all" / "traces.jsonl", trace(float(number % 2), number))
        append(
            metrics_path(config),
            {
                "step": step,
                "time": time.time(),
                "train/agg/all/agent/reward/mean": 0.5,
                **{f"train/{name}/all/agent/reward/mean": i / len(sources) for i, name in enumerate(sources)},
                "train/agg/all/agent/reward/std": 0.5,
                "train/agg/effective/agent/reward/mean": 0.9,  # biased by the filter: must not be read
                "train/agg/all/agent/num_output_tokens/mean": 20.0,
                "train/agg/all/agent/is_truncated/mean": 0.0,
                "train/agg/all/solved_none": 0.25,
                "train/agg/all/solved_all": 0.25,
                "progress/tokens": 400,
                "progress/rollouts": 2 * GROUPS,
                "time/step": STEP_SECONDS,
                "time/pack": 0.01,
                "time/wait_for_policy": 0.0,
                "off_policy/mean": 1.0,
            },
        )
        append(rollouts / "effective" / "traces.jsonl", trace(1.0, 1))
    time.sleep(0.2)


NUM_WORKERS = 4


def env_server(config: dict[str, Any], orders: dict[str, Any]) -> None:
    """Hold the port on which the real one would answer, as a broker over workers that take their time to end."""
    host, port = config["serve"]["address"].removeprefix("tcp://").split(":")
    with socket.create_server((host, int(port))):
        workers = [worker(number) for number in range(NUM_WORKERS)]
        say(f"17:40:57    INFO EnvServerPool up: address=tcp://{host}:{port} workers=4/4 multiplex=128 elastic=False")
        signal.signal(signal.SIGTERM, lambda *_: [os.waitpid(pid, 0) for pid in workers] and sys.exit(0))
        time.sleep(600)


def worker(number: int) -> int:
    """A process that imports, says that it is up, and on SIGTERM ends its rollouts for as long as one lets it."""
    if pid := os.fork():
        return pid
    signal.signal(signal.SIGTERM, lambda *_: time.sleep(600))
    say(f"17:41:48    INFO EnvServer up: taskset=nightshift_arithmetic address=ipc:///tmp/vf-pool-x/{number}")
    time.sleep(600)
    os._exit(0)


def inference(config: dict[str, Any], orders: dict[str, Any]) -> None:
    """The stand-in server, whose every answer is the step of the weights that it has loaded."""
    fault = orders["fault"]
    if fault == "server_never_ready":
        time.sleep(600)
    if fault == "slow_start":
        time.sleep(1.0)
    sys.path.insert(0, str(HERE))
    from stand_in_server import StandInServer

    def answer(content: str) -> str:
        step = step_of(server.weight_dir or next(iter(server.adapters.values()), None))
        return f"weights of step {step}\n#### {step}"

    def served(model: str) -> int:
        folder = server.adapters.get(model) or server.weight_dir
        if fault == "swapped_after_scoring" and sum("prompt_logprobs" in body for _, body in server.requests) > 8:
            return step_of(folder) + 1  # the second question, after the scoring: somebody has loaded other weights
        return 0 if fault == "serves_the_start" else step_of(folder)

    server = StandInServer(
        config["vllm"]["model"], config["server"]["port"], fault, answer, max_model_len=8192, step=served
    )
    server.serve()


def step_of(folder: str | Path | None) -> int:
    """Of the weights in a folder; 0 without any, as the stand-in for a base model has none."""
    files = [] if folder is None else sorted(Path(folder).glob("*.safetensors"))
    return int(struct.unpack("<f", files[0].read_bytes()[-4:])[0]) if files else 0


def reader(base: str, folder: str, served: str, answer: str, fault: str | None) -> None:
    """The stand-in for transformers: what `logprob` makes of the steps of the two folders."""
    sys.path.insert(0, str(HERE))
    from stand_in_server import logprob

    if fault == "reader_hangs":
        time.sleep(600)
    if fault == "reader_fails":
        raise ValueError(f"{folder} lacks model.norm.weight")
    prompts = json.loads(Path(served).read_bytes())["tokens"]
    steps = {"start": step_of(base), "file": step_of(folder)}
    told = {name: [logprob(t, step) for tokens in prompts for t in tokens[1:]] for name, step in steps.items()}
    Path(answer).write_text(json.dumps(told))


def validator(arguments: list[str], orders: dict[str, Any]) -> None:
    """Write the configs without checking anything: the few keys of each that the other stand-ins read."""
    tree_path, configs_dir, verdict = map(Path, arguments[-3:])
    tree = json.loads(tree_path.read_text())
    if orders["fault"] == "config_refused":
        error = {"loc": ["trainer", "optim", "adamw", "lr"], "message": "Input should be less than 1", "input": 2}
        verdict.write_text(json.dumps({"errors": [error]}))
        sys.exit(1)
    run_dir = str(Path(tree["output_dir"]) / tree["run"]["name"])
    shared = {"output_dir": run_dir, "max_steps": tree.get("max_steps")}
    tree["orchestrator"]["model"] |= tree["model"]
    for name in ("trainer", "orchestrator"):
        (configs_dir / f"{name}.json").write_text(json.dumps(tree[name] | shared))
    tree["inference"]["vllm"] |= {"model": tree["model"]["name"]}
    (configs_dir / "inference.json").write_text(json.dumps(tree["inference"]))
    folder = configs_dir / "envs" / "train"
    folder.mkdir(parents=True)
    for index, source in enumerate(tree["orchestrator"]["train"]["source"]):
        address = f"tcp://127.0.0.1:{tree['orchestrator']['env_server_base_port'] + index}"
        text = json.dumps({"env": source["env"], "serve": {"address": address}})
        (folder / f"{source['name']}.json").write_text(text)
    verdict.write_text(json.dumps({"errors": []}))


def main() -> None:
    folder, name, arguments = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    orders = json.loads((folder / "fault.json").read_text())
    if name == "python":
        validator(arguments, orders)
    elif name == "reader":
        reader(*arguments, orders["fault"])
    else:
        programs = {"inference": inference, "env-server": env_server, "orchestrator": orchestrator, "torchrun": trainer}
        programs[name](config_of(arguments), orders)


if __name__ == "__main__":
    main()
