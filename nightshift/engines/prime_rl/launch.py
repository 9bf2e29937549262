"""The processes of one prime-rl run: files, command lines, environment variables, ports and GPUs.

Command lines and variables are those of prime-rl's launcher (P/entrypoints/rl.py; P/ is src/prime_rl/ at the pinned
commit), which always stops the server first, and waits half a minute before it stops a process.
"""

import random
import socket
import uuid
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from nightshift.engines.base import Environ, Settings
from nightshift.engines.prime_rl.config import HOST, with_seed
from nightshift.engines.prime_rl.remains import PRIME_DIR
from nightshift.errors import EngineError
from nightshift.executors.gpus import GpuIds
from nightshift.files import write_json

# Below the ephemeral ports of Linux (32768-60999), which outgoing connections use.
_PORT_RANGE = range(20_000, 32_000)
VALIDATOR = Path(__file__).with_name("validate.py")


def free_ports(num_environments: int) -> int:
    """Return the first of 4 + `num_environments` consecutive ports that are free now."""
    for _ in range(200):
        first = random.SystemRandom().choice(_PORT_RANGE)
        try:
            for port in range(first, first + 4 + num_environments):
                with socket.socket() as opened:
                    opened.bind(("", port))  # torchrun's store listens on all addresses
        except OSError:
            continue
        return first
    raise EngineError(f"no free ports in {_PORT_RANGE.start}-{_PORT_RANGE.stop}", "List listening programs: ss -ltn")


_COMMON = {
    # P/utils/process.py:17
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    "PYTHONUNBUFFERED": "1",
    "OMP_NUM_THREADS": "1",
    "GIT_LFS_SKIP_SMUDGE": "1",
    # No requests to a hub and no telemetry.
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "WANDB_MODE": "disabled",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": HOST,  # otherwise vLLM opens a socket to the internet to find its address
}
_INFERENCE = {
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False",
    "VLLM_ENGINE_READY_TIMEOUT_S": "4200",
    "UCX_TLS": "all",
    # FlashInfer's sampler is for top-k and top-p, which are off. vLLM would compile it, and fail without nvcc (vllm
    # issue 49497).
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    # On WSL2, a start fails without this variable: "UVA is not available" (vllm issue 47387).
    "VLLM_WSL2_ENABLE_PIN_MEMORY": "1",
}
_TRAINER = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


class Command(NamedTuple):
    """One process. `env` extends the environment of the worker."""

    argv: tuple[str, ...]
    env: Environ


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Everything that one run needs before its first process starts."""

    settings: Settings  # of `effective`
    seed: int
    run_dir: Path  # absolute
    port: int  # of the inference server, the first of `free_ports`
    gpu_ids: GpuIds  # of inference, then of the trainer; () hides all GPUs
    bin_dir: Path  # absolute, of prime-rl's environment
    environment: Environ  # of the installation: PATH, PYTHONPATH, caches
    variables: Environ  # of machine.toml; they override prime-rl's
    seats: dict[str, str]  # by environment, the seat whose rollouts the curves show

    @cached_property
    def tree(self) -> dict[str, Any]:
        """The settings with the folder, ports and seeds of this run."""
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
    def served_model(self) -> str:
        """The name of the policy in requests."""
        adapter = self.tree["orchestrator"]["model"].get("lora")
        return str((adapter or self.tree["model"])["name"])

    @property
    def is_shared(self) -> bool:
        """Whether server and trainer share a GPU."""
        return len(self.gpu_ids) > len({*self.gpu_ids})

    @property
    def num_engines(self) -> int:
        """The number of data-parallel engines, each with a copy of the policy."""
        parallel: int = self.tree["inference"]["vllm"].get("tensor_parallel_size", 1)
        return int(self.tree["deployment"]["num_infer_gpus"]) // parallel

    @property
    def prime_dir(self) -> Path:
        """The folder of prime-rl's files."""
        return self.run_dir / PRIME_DIR

    @property
    def verdict(self) -> Path:
        return self.run_dir / "validator.json"

    def write(self) -> None:
        """Create the folders and the input of the validator."""
        (self.run_dir / "configs").mkdir(exist_ok=True)
        self.prime_dir.mkdir(exist_ok=True)
        write_json(self.run_dir / "rl.json", self.tree)

    @property
    def env_servers(self) -> dict[str, str]:
        """The environment of each env-server process, by the name of the process."""
        names = [source["name"] for source in self.tree["orchestrator"]["train"]["source"]]
        return {"env-server" if len(names) == 1 else f"env-server-{name}": name for name in names}

    @cached_property
    def commands(self) -> dict[str, Command]:
        """Validator, inference, an env-server for each environment, orchestrator, trainer. NAME.log is the log.

        The validator must end before the others start: it writes their configs.
        """
        run_id = uuid.uuid5(uuid.NAMESPACE_URL, self.run_dir.as_uri()).hex  # not random: a dry run shows the same
        common = {**self.environment, **_COMMON, "PRL_RUN_ID": run_id, "PRL_RUN_NAME": PRIME_DIR}
        configs, deployment = self.run_dir / "configs", self.tree["deployment"]

        def command(*argv: object, **variables: str) -> Command:
            program, *arguments = map(str, argv)
            return Command((str(self.bin_dir / program), *arguments), {**common, **variables, **self.variables})

        num_infer_gpus = deployment["num_infer_gpus"]
        sides = self.gpu_ids[:num_infer_gpus], self.gpu_ids[num_infer_gpus:]
        inference_gpus, trainer_gpus = ({"CUDA_VISIBLE_DEVICES": ",".join(map(str, ids))} for ids in sides)
        trainer = (
            "torchrun",
            "--role=trainer",
            f"--rdzv-endpoint=localhost:{self.port + 3 + len(self.env_servers)}",
            f"--rdzv-id={run_id}",
            f"--log-dir={self.run_dir / 'torchrun'}",
            "--redirect=3",
            "--tee=3",
            f"--nproc-per-node={deployment['num_train_gpus']}",
            "-m",
            "prime_rl.trainer.rl.train",
            "@",
            configs / "trainer.json",
        )
        # -P: without the validator's folder on the path, which is part of Nightshift.
        validator = ("python", "-P", VALIDATOR, self.run_dir / "rl.json", configs, self.verdict)
        return {
            "validator": command(*validator),
            "inference": command("inference", "@", configs / "inference.json", **_INFERENCE, **inference_gpus),
            **{
                name: command("env-server", "@", configs / "envs" / "train" / f"{environment}.json")
                for name, environment in self.env_servers.items()
            },
            "orchestrator": command("orchestrator", "@", configs / "orchestrator.json"),
            "trainer": command(*trainer, **_TRAINER, **trainer_gpus),
        }
