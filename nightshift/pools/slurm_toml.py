"""slurm.toml: what a person says of a SLURM cluster, in a file of their own that no agent sees."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from nightshift.errors import UsageError
from nightshift.files import read_file

Positive = Annotated[int, Meta(ge=1, le=100_000)]


class SlurmConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The keys of slurm.toml. `pairs`: how many runs at once; `gpus`: of each; `gres`: where another name than
    `gpu:N` is needed; `setup`: shell lines before the worker starts; `queue_minutes`: how long a job may wait."""

    pairs: Positive
    gpus: Annotated[int, Meta(ge=0, le=16)]
    cpus_per_run: Positive
    mem_gb: Positive
    time_minutes: Positive
    partition: str = ""
    account: str = ""
    constraint: str = ""
    gres: str = ""
    setup: tuple[str, ...] = ()
    queue_minutes: Positive = 600

    @property
    def layout(self) -> str:
        """What the hardware of a run is followed by: what it was given of its node, and whatever `setup` changes."""
        digest = hashlib.sha256("\n".join(self.setup).encode()).hexdigest()[:8]
        return f", job of {self.cpus_per_run} CPUs, {self.mem_gb} GB" + (f", setup {digest}" if self.setup else "")

    @property
    def options(self) -> list[str]:
        """For sbatch. Memory and cores are always said: a job without --mem may take a whole node."""
        asked = {
            "--partition": self.partition,
            "--account": self.account,
            "--constraint": self.constraint,
            "--gres": self.gres or (f"gpu:{self.gpus}" if self.gpus else ""),
        }
        fixed = (f"--cpus-per-task={self.cpus_per_run}", f"--mem={self.mem_gb}G", f"--time={self.time_minutes}")
        return ["--nodes=1", "--ntasks=1", *fixed, *(f"{name}={value}" for name, value in asked.items() if value)]


def read(path: Path) -> SlurmConfig:
    """The file. UsageError, one line with its fix, where it says something else."""
    try:
        return msgspec.toml.decode(read_file(path), type=SlurmConfig)
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist", "docs/cluster.md explains one.") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: {error}", f"Its keys: {', '.join(SlurmConfig.__struct_fields__)}.") from None
