"""What flags may say: times, numbers, heads of chains."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import Any

import click

FOLDER = click.Path(path_type=Path, exists=True, file_okay=False)


class Finite(click.FloatRange):
    """A range that refuses nan, which is on no side of any bound."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """As click's."""
        number = super().convert(value, param, ctx)
        return number if math.isfinite(number) else self.fail(f"{value!r} is not a number.", param, ctx)


def hexadecimal(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """The head of a chain, or the beginning of one."""
    if value is not None and not re.fullmatch("[0-9a-f]{8,64}", value):
        raise click.BadParameter(f"{value!r} is no head. Give 8 to 64 of its digits, 0-9 and a-f.")
    return value


def num_slots(ctx: click.Context, param: click.Parameter, value: str) -> int:
    """--pairs: a number, or 0: as many as there are GPUs for."""
    if value == "auto":
        return 0
    if not re.fullmatch("[1-9][0-9]{0,2}", value):
        raise click.BadParameter(f"{value!r} is no number of runs. Write 1 to 999, or auto.")
    return int(value)


def use_prime_rl(ctx: click.Context, param: click.Parameter, value: Path | None) -> Path | None:
    """--prime-rl: this process, and the workers that it starts, take prime-rl from there."""
    if value is not None:
        os.environ["NIGHTSHIFT_PRIME_RL"] = os.fspath(value.absolute())
    return value


AS_JSON = click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text (docs/schemas).")
GPUS = click.option("--gpus", help="prime-rl: GPU to serve, GPU to train: 2,3, or 0,0. trl: one.")
SLURM = click.option(
    "--slurm",
    type=click.Path(exists=True, dir_okay=False, resolve_path=True, path_type=Path),
    help="slurm.toml of the cluster whose jobs the runs are (docs/cluster.md).",
)
