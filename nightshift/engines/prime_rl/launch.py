"""How one prime-rl run is started: its files, command lines, environment variables, ports and GPUs.

Command lines and variables are those of prime-rl's own launcher (src/prime_rl/entrypoints/rl.py at the
pinned commit, P/), which is not used: it waits half a minute before it stops anything, and always stops
the server first. Nothing is started here.
"""

from __future__ import annotations

import copy
import json
import shlex
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nightshift.engines.prime_rl.effective import HOST
from nightshift.engines.prime_rl.ports import Ports
from nightshift.files import write_json
from nightshift.processes.gpus import GpuIds
from nightshift.rules import NO_CARD

VALIDATOR = Path(__file__).with_name("validator.py")
# In the run's folder: prime-rl's own, the configs of its programs, the whole of them, the validator's answer.
PRIME_DIR, CONFIGS_DIR, TREE_NAME, VERDICT_NAME = "prime-rl", "configs", "rl.json", "validator.json"

# P/utils/process.py:17
_COMMON = {
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    "PYTHONUNBUFFERED": "1",
    "OMP_NUM_THREADS": "1",
    "GIT_LFS_SKIP_SMUDGE": "1",
}
_INFERENCE = {
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False",
    "VLLM_ENGINE_READY_TIMEOUT_S": "4200",
    "UCX_TLS": "all",
    # vLLM would compile FlashInfer's sampler when it starts, and end where there is no nvcc (vllm issue 49497). It
    # serves top-k and top-p, which are off here in training and in evaluation.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    # Read on WSL2 only, where a start ends with "UVA is not available" without it (vllm issue 47387).
    "VLLM_WSL2_ENABLE_PIN_MEMORY": "1",
}
_TRAINER = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
# Nothing is asked of a hub and nothing is reported to anybody. vLLM would ask the network for its own address.
_QUIET = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "WANDB_MODE": "disabled",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": HOST,
}


@dataclass(frozen=True, slots=True)
class Command:
    """One process: `env` is what is added to the harness's own environment; its log is NAME.log in the run's folder."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Launch:
    """Everything that one run needs before its first process starts.

    `commands`: inference, validator, an env-server for each environment, orchestrator, trainer. `inference` reads
    `inference_json` and may start at once; the validator writes the configs of the others, and its verdict to
    `verdict`. `served_model` is the policy's name in requests: with LoRA that of the adapter, else the model's.
    `memory`: the preset that the settings were made with; `score_last`: the rules'.
    """

    tree: Mapping[str, Any]
    inference_json: Mapping[str, Any]
    commands: tuple[Command, ...]
    ports: Ports
    gpu_ids: GpuIds
    run_dir: Path
    served_model: str
    is_adapter: bool
    memory: str = NO_CARD
    score_last: int = 0

    @property
    def is_shared(self) -> bool:
        """Server and trainer are on one GPU."""
        return len(self.gpu_ids) > len({*self.gpu_ids})

    @property
    def is_game(self) -> bool:
        """One of its environments has a seat for an opponent."""
        return any("opponent" in source["env"] for source in self.tree["orchestrator"]["train"]["source"])

    @property
    def env_servers(self) -> list[str]:
        """Names of their processes: one an environment."""
        return _env_servers([source["name"] for source in self.tree["orchestrator"]["train"]["source"]])

    @property
    def prime_dir(self) -> Path:
        """prime-rl's run folder."""
        return self.run_dir / PRIME_DIR

    @property
    def broadcasts_dir(self) -> Path:
        return self.prime_dir / "broadcasts"

    @property
    def rollouts_dir(self) -> Path:
        return self.prime_dir / "rollouts"

    @property
    def tree_path(self) -> Path:
        return self.run_dir / TREE_NAME

    @property
    def verdict(self) -> Path:
        """The validator's JSON: {"ok": true, ...} or {"ok": false, "errors": [...]}."""
        return self.run_dir / VERDICT_NAME

    def write(self) -> None:
        """Create the folders and the two files that the first processes read."""
        configs_dir = self.run_dir / CONFIGS_DIR
        configs_dir.mkdir(exist_ok=True)
        self.prime_dir.mkdir(exist_ok=True)
        write_json(self.tree_path, self.tree)
        write_json(configs_dir / "inference.json", self.inference_json)


def plan(
    settings: Mapping[str, Any],
    *,
    seed: int,
    run_dir: Path,
    ports: Ports,
    gpu_ids: GpuIds,
    bin_dir: Path,
    environment: Mapping[str, str],
    memory: str = NO_CARD,
    score_last: int = 0,
) -> Launch:
    """How to run `settings` (from `effective`) once; starts and writes nothing.

    `run_dir` and `bin_dir` (of prime-rl's own environment) are absolute. `environment`: what makes a process
    use that installation: PATH, PYTHONPATH, caches (Installation.environment). `gpu_ids`: inference, trainer,
    perhaps the same; () hides every GPU from both.
    """
    if not run_dir.is_absolute() or not bin_dir.is_absolute():
        raise ValueError(f"relative path: {run_dir} or {bin_dir}")
    tree = _tree(settings, seed, run_dir, ports)
    lora = tree["orchestrator"]["model"].get("lora")
    return Launch(
        tree=tree,
        inference_json=_inference(tree),
        commands=_commands(tree, run_dir, ports, gpu_ids, bin_dir, environment),
        ports=ports,
        gpu_ids=gpu_ids,
        run_dir=run_dir,
        served_model=lora["name"] if lora else tree["model"]["name"],
        is_adapter=bool(lora),
        memory=memory,
        score_last=score_last,
    )


def describe(launch: Launch) -> list[str]:
    """The whole launch as text for --dry-run: GPUs, ports, processes with the variables set for them, config."""
    gpus = "inference {}, trainer {}".format(*launch.gpu_ids) if launch.gpu_ids else "none"
    gpus += " after it" if launch.is_shared else ""
    ports = launch.ports
    lines = [
        f"GPUs:     {gpus}",
        f"memory:   {launch.memory if launch.memory != NO_CARD else 'no GPU: as on 2 x 80 GB'}",
        f"ports:    inference {ports.inference}, rollouts {ports.rollouts} and {ports.rollouts + 1}, "
        f"{', '.join(f'{n} {ports.env_server + i}' for i, n in enumerate(launch.env_servers))}, "
        f"torchrun {ports.rendezvous}",
        f"model:    {launch.served_model}",
        *([f"scored:   the mean of the weights of the last {launch.score_last} steps"] if launch.score_last else []),
    ]
    shared = dict(set.intersection(*(set(command.env.items()) for command in launch.commands)))
    lines += [f"env:      all: {_assignments(shared)}"]
    for command in launch.commands:
        own = {name: value for name, value in command.env.items() if name not in shared}
        lines.append(f"{command.name + ':':<13} {shlex.join(command.argv)}")
        lines += [f"{'':<14}with {_assignments(own)}"] if own else []
        lines.append(f"{'':<14}log {command.name}.log")
    return lines + [f"config:   {path} = {json.dumps(value)}" for path, value in leaves(launch.tree)]


def leaves(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of a tree with its dotted path; `[0]` counts in lists of tables."""
    if isinstance(node, Mapping) and node:
        for name, value in node.items():
            yield from leaves(value, f"{path}.{name}" if path else name)
    elif isinstance(node, list) and node and isinstance(node[0], Mapping):
        for index, value in enumerate(node):
            yield from leaves(value, f"{path}[{index}]")
    else:
        yield path, node


def _assignments(variables: Mapping[str, str]) -> str:
    return " ".join(f"{name}={shlex.quote(value)}" for name, value in sorted(variables.items()))


def _env_servers(sources: Sequence[str]) -> list[str]:
    """What their servers are called here."""
    return ["env-server"] if len(sources) == 1 else [f"env-server-{source}" for source in sources]


def _tree(settings: Mapping[str, Any], seed: int, run_dir: Path, ports: Ports) -> dict[str, Any]:
    """`settings` with what belongs to this run: folder, ports, seeds."""
    tree: dict[str, Any] = copy.deepcopy(dict(settings))
    tree["output_dir"] = str(run_dir)
    tree["run"] = {"name": PRIME_DIR}
    tree["rollout_transport"]["port"] = ports.rollouts
    tree["inference"]["server"]["port"] = ports.inference
    tree["inference"]["vllm"]["seed"] = seed
    orchestrator = tree["orchestrator"]
    orchestrator["env_server_base_port"] = ports.env_server
    orchestrator.setdefault("model", {})["client"] = {"base_url": f"http://{HOST}:{ports.inference}/v1"}
    for source in orchestrator["train"]["source"]:
        source["env"]["taskset"]["seed"] = seed
        sampler = source.get("curriculum", {}).get("sampler", {})
        if sampler.get("type") == "difficulty_pool":
            sampler["seed"] = seed
    return tree


def _inference(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The server's own config, as RLConfig will resolve it: the validator compares the two."""
    inference: dict[str, Any] = copy.deepcopy(tree["inference"])
    inference["weight_broadcast"] = dict(tree["weight_broadcast"])
    inference["vllm"]["model"] = tree["model"]["name"]
    lora = tree["trainer"]["model"].get("lora")
    if lora is not None:
        inference["vllm"] |= {"enable_lora": True, "max_lora_rank": lora["rank"]}
    return inference


def _commands(
    tree: Mapping[str, Any], run_dir: Path, ports: Ports, gpu_ids: GpuIds, bin_dir: Path, environment: Mapping[str, str]
) -> tuple[Command, ...]:
    # The same id for the same folder: nothing here is random, so a dry run shows what a run would start.
    run_id = uuid.uuid5(uuid.NAMESPACE_URL, run_dir.as_uri()).hex
    common = {**environment, **_COMMON, **_QUIET, "PRL_RUN_ID": run_id, "PRL_RUN_NAME": PRIME_DIR}
    configs_dir = run_dir / CONFIGS_DIR
    names = [source["name"] for source in tree["orchestrator"]["train"]["source"]]

    def command(name: str, argv: Sequence[object], **variables: str) -> Command:
        program, *arguments = argv
        words = (str(bin_dir / str(program)), *map(str, arguments))
        return Command(name, words, {**common, **variables})

    trainer = [
        "torchrun",
        "--role=trainer",
        f"--rdzv-endpoint=localhost:{ports.rendezvous}",
        f"--rdzv-id={run_id}",
        f"--log-dir={run_dir / 'torchrun'}",
        "--local-ranks-filter=0",
        "--redirect=3",
        "--tee=3",
        "--nproc-per-node=1",
        "-m",
        "prime_rl.trainer.rl.train",
        "@",
        configs_dir / "trainer.json",
    ]
    inference_gpu, trainer_gpu = map(str, gpu_ids) if gpu_ids else ("", "")
    env_configs = [configs_dir / "envs" / "train" / f"{name}.json" for name in names]
    env_servers = zip(_env_servers(names), env_configs, strict=True)  # prime-rl counts their ports up from the base
    # -P: nothing from beside the validator is importable, which is Nightshift.
    validator = ["python", "-P", VALIDATOR, run_dir / TREE_NAME, configs_dir, run_dir / VERDICT_NAME]
    return (
        command(
            "inference",
            ["inference", "@", configs_dir / "inference.json"],
            **_INFERENCE,
            CUDA_VISIBLE_DEVICES=inference_gpu,
        ),
        command("validator", validator),
        *(command(name, ["env-server", "@", env_config]) for name, env_config in env_servers),
        command("orchestrator", ["orchestrator", "@", configs_dir / "orchestrator.json"]),
        command("trainer", trainer, **_TRAINER, CUDA_VISIBLE_DEVICES=trainer_gpu),
    )
