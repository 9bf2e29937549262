"""machine.toml, the settings of one machine. The file is not in git and not in the rules hash; each run records it.

share_network = true              # prime-rl: runs use the network of the machine, not a namespace
[environment]                     # variables of the engine's processes
CC = "/usr/bin/gcc-12"
NCCL_P2P_DISABLE = "1"

[limits]
startup_seconds = 600             # a start may take longer than the rules allow
no_step_seconds = 600             # prime-rl: a run without a step and a rollout for this long hangs

[wandb]
project = "nightshift"            # run.py and night log each experiment to this project while it runs
"""

import re
from pathlib import Path
from typing import Annotated

import msgspec

from nightshift.errors import UsageError, listed
from nightshift.files import parse_toml, read_file

MACHINE_NAME = "machine.toml"
# Variables of compilers, GPUs and their libraries, but none that injects code, logs prompts or chooses the GPUs.
_NAMES = re.compile(
    r"CC|CXX|LD_LIBRARY_PATH|OMP_NUM_THREADS|TMPDIR|(?:NCCL|GLOO|UCX|TRITON|TORCH|TORCHINDUCTOR|PYTORCH)_\w+"
    r"|CUDA_(?!VISIBLE_DEVICES$|DEVICE_ORDER$)\w+"
    r"|VLLM_(?:ATTENTION_BACKEND|FLASH_ATTN_VERSION|(?:USE|ENABLE|DISABLE|WSL2)_\w+)"
)
Seconds = Annotated[float, msgspec.Meta(ge=1, le=86_400)]


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Seconds; None is the default limit."""

    startup_seconds: Seconds | None = None
    no_step_seconds: Seconds | None = None


class Wandb(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The project of Weights & Biases for experiments while they run; None: no logging."""

    project: str | None = None


class Machine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The contents of machine.toml."""

    share_network: bool = False
    environment: dict[str, str] = {}
    limits: Limits = Limits()
    wandb: Wandb = Wandb()

    @property
    def text(self) -> str:
        """The settings that affect runs, in one line for records and doctor; "" without a file."""
        network = {"share_network": "true"} if self.share_network else {}
        return ", ".join(
            f"{name} = {value}"
            for name, value in {**network, **self.environment, **msgspec.to_builtins(self.limits)}.items()
        )


def read_machine(root: Path) -> Machine:
    """Read machine.toml of the checkout at `root`, if it exists. UsageError for an invalid file."""
    path = root / MACHINE_NAME
    try:
        machine = msgspec.convert(parse_toml(read_file(path)), Machine)
    except FileNotFoundError:
        return Machine()
    except (OSError, ValueError) as error:
        fix = "Its keys: share_network, [environment], [limits] startup_seconds and no_step_seconds, [wandb] project."
        raise UsageError(f"{MACHINE_NAME}: {error}", fix) from None
    if others := [name for name in machine.environment if not _NAMES.fullmatch(name)]:
        fix = "Delete it. docs/gpus.md lists the variables of compilers, cards and their libraries that may be set."
        raise UsageError(f"{MACHINE_NAME}: [environment] may not set {listed(others)}", fix)
    return machine
