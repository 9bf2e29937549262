"""How one prime-rl run is started: its files, command lines, environment variables, ports and GPUs.

Command lines and variables are those of prime-rl's own launcher (src/prime_rl/entrypoints/rl.py at the
pinned commit, P/), which is not used: it waits half a minute before it stops anything, and always stops
the server first. Nothing is started here.
"""

import random
import socket
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from nightshift.engines.prime_rl.config import HOST, with_seed
from nightshift.engines.prime_rl.remains import PRIME_DIR
from nightshift.errors import EngineError
from nightshift.executors.gpus import GpuIds
from nightshift.files import write_json

# The first of a run's. Below the ephemeral ports of Linux (32768-60999): no outgoing connection can take one.
_PORT_RANGE = range(20_000, 32_000)
_PORT_TRIES = 200


def free_ports(num_environments: int = 1) -> int:
    """Return the first of a run's loopback ports that nobody uses now: five in a row, and one for every environment
    after the first.

    A race is left: between this call and the moment, up to half a minute later, at which a process binds its port,
    another program could bind the same one out of 12,000; that process then ends with "address already in use", an
    infrastructure failure.
    """
    for _ in range(_PORT_TRIES):
        first = random.SystemRandom().choice(_PORT_RANGE)
        try:
            for port in range(first, first + 4 + num_environments):
                with socket.socket() as opened:
                    # All addresses: torchrun's store listens on every one. No SO_REUSEADDR: it would let two share.
                    opened.bind(("", port))
        except OSError:
            continue
        return first
    raise EngineError(f"no free port among {_PORT_RANGE.start}-{_PORT_RANGE.stop}", "See what listens: ss -ltn")


VALIDATOR = Path(__file__).with_name("validate.py")

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


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Everything that one run of `settings` (from `effective`) needs before its first process starts.

    `run_dir` and `bin_dir` (of prime-rl's own environment) are absolute. `environment`: what makes a process use that
    installation: PATH, PYTHONPATH, caches (Installation.environment). `gpu_ids`: of inference, then of the trainer, or
    the same for both; () hides every GPU from both. `variables`: of machine.toml, in place of what prime-rl's launcher
    sets. `seats`: whose rollouts the curves show, by the name of the environment.
    """

    settings: Mapping[str, Any]
    seed: int
    run_dir: Path
    port: int  # the inference server's, the first of `free_ports`
    gpu_ids: GpuIds
    bin_dir: Path
    environment: Mapping[str, str]
    variables: Mapping[str, str] = field(default_factory=dict)
    seats: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def tree(self) -> dict[str, Any]:
        """The settings with what belongs to this run: folder, ports, seeds."""
        tree = with_seed(self.settings, self.seed)
        tree["output_dir"] = str(self.run_dir)
        tree["run"] = {"name": PRIME_DIR}
        tree["rollout_transport"]["port"] = self.port + 1  # and the next one: P/transports/rollouts/zmq.py:29
        tree["inference"]["server"]["port"] = self.port
        orchestrator = tree["orchestrator"]
        orchestrator["env_server_base_port"] = self.port + 3
        orchestrator.setdefault("model", {})["client"] = {"base_url": f"http://{HOST}:{self.port}/v1"}
        return tree

    @property
    def is_adapter(self) -> bool:
        """The policy is an adapter beside the model."""
        return bool(self.tree["orchestrator"]["model"].get("lora"))

    @property
    def served_model(self) -> str:
        """The policy's name in requests."""
        model = self.tree["orchestrator"]["model"]["lora"] if self.is_adapter else self.tree["model"]
        return str(model["name"])

    @property
    def is_shared(self) -> bool:
        """Server and trainer are on one GPU."""
        return len(self.gpu_ids) > len({*self.gpu_ids})

    @property
    def num_trainers(self) -> int:
        """How many processes train, each on a GPU."""
        return int(self.tree["deployment"]["num_train_gpus"])

    @property
    def num_engines(self) -> int:
        """The number of data-parallel engines: each has a copy of the policy."""
        parallel: int = self.tree["inference"]["vllm"].get("tensor_parallel_size", 1)
        return int(self.tree["deployment"]["num_infer_gpus"]) // parallel

    @property
    def is_game(self) -> bool:
        """One of its environments has a seat for an opponent."""
        return any("opponent" in source["env"] for source in self.tree["orchestrator"]["train"]["source"])

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
    def configs_dir(self) -> Path:
        """The configs of prime-rl's programs."""
        return self.run_dir / "configs"

    @property
    def verdict(self) -> Path:
        """The validator's JSON: {"ok": true, ...} or {"ok": false, "errors": [...]}."""
        return self.run_dir / "validator.json"

    def write(self) -> None:
        """Create the folders and the file that the validator reads."""
        self.configs_dir.mkdir(exist_ok=True)
        self.prime_dir.mkdir(exist_ok=True)
        write_json(self.run_dir / "rl.json", self.tree)

    @property
    def env_servers(self) -> list[str]:
        """Names of their processes: one an environment. prime-rl counts their ports up from the base."""
        return [command.name for command in self.commands if command.name.startswith("env-server")]

    @cached_property
    def commands(self) -> tuple[Command, ...]:
        """Validator, inference, an env-server for each environment, orchestrator, trainer.

        The validator ends before any other process starts: it writes `verdict`, and the config of each of them.
        """
        # The same id for the same folder: nothing here is random, so a dry run shows what a run would start.
        run_id = uuid.uuid5(uuid.NAMESPACE_URL, self.run_dir.as_uri()).hex
        common = {**self.environment, **_COMMON, **_QUIET, "PRL_RUN_ID": run_id, "PRL_RUN_NAME": PRIME_DIR}
        configs_dir = self.configs_dir
        names = [source["name"] for source in self.tree["orchestrator"]["train"]["source"]]

        def command(name: str, argv: Sequence[object], **variables: str) -> Command:
            program, *arguments = argv
            words = (str(self.bin_dir / str(program)), *map(str, arguments))
            return Command(name, words, {**common, **variables, **self.variables})

        trainer = [
            "torchrun",
            "--role=trainer",
            f"--rdzv-endpoint=localhost:{self.port + 3 + len(names)}",
            f"--rdzv-id={run_id}",
            f"--log-dir={self.run_dir / 'torchrun'}",
            "--local-ranks-filter=0",
            "--redirect=3",
            "--tee=3",
            f"--nproc-per-node={self.num_trainers}",
            "-m",
            "prime_rl.trainer.rl.train",
            "@",
            configs_dir / "trainer.json",
        ]
        num_infer_gpus = self.tree["deployment"]["num_infer_gpus"]
        sides = self.gpu_ids[:num_infer_gpus], self.gpu_ids[num_infer_gpus:]
        inference_gpus, trainer_gpus = (",".join(map(str, ids)) for ids in sides)
        inference, orchestrator = ([name, "@", configs_dir / f"{name}.json"] for name in ("inference", "orchestrator"))
        # -P: nothing from beside the validator is importable, which is Nightshift.
        validator = ["python", "-P", VALIDATOR, self.run_dir / "rl.json", configs_dir, self.verdict]
        env_servers = {
            "env-server" if len(names) == 1 else f"env-server-{name}": configs_dir / "envs" / "train" / f"{name}.json"
            for name in names
        }
        return (
            command("validator", validator),
            command("inference", inference, **_INFERENCE, CUDA_VISIBLE_DEVICES=inference_gpus),
            *(command(name, ["env-server", "@", config]) for name, config in env_servers.items()),
            command("orchestrator", orchestrator),
            command("trainer", trainer, **_TRAINER, CUDA_VISIBLE_DEVICES=trainer_gpus),
        )
