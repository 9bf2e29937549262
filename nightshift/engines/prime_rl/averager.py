"""The mean of the weights of several steps of one run: a program that entry.py begins.

    averager.py TARGET SOURCE...    TARGET is an empty folder; each SOURCE holds one step's safetensors, in order

Added up in float32, a tensor at a time, and written in the files and the dtype of the last SOURCE. The server computes
in that dtype, and so it would round a float32 file as it loads it: this way the file holds what is served.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any


def main(target: Path, sources: list[Path]) -> None:
    """Read, add, write."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    with ExitStack() as stack:
        steps = []  # of each the open file that holds a tensor, by its name
        for source in sources:
            files = [stack.enter_context(safe_open(path, "pt")) for path in source.glob("*.safetensors")]
            steps.append({name: file for file in files for name in file.keys()})  # noqa: SIM118
        if odd := set().union(*steps).difference(set(steps[0]).intersection(*steps)):
            raise ValueError(f"{min(odd)} is not in the weights of every step")
        for path in sources[-1].glob("*.safetensors"):
            with safe_open(path, "pt") as file:
                tensors = {name: _mean(step[name].get_tensor(name) for step in steps) for name in file.keys()}  # noqa: SIM118
                save_file(tensors, target / path.name, file.metadata())
    for path in sources[-1].glob("*.json"):  # the index of numbered files
        shutil.copyfile(path, target / path.name)


def _mean(tensors: Iterator[Any]) -> Any:
    """ValueError for other shapes, which torch would stretch, and for a mean that is not finite."""
    import torch

    total, count = torch.zeros(()), 0
    for count, tensor in enumerate(tensors, 1):
        if count > 1 and tensor.shape != total.shape:
            raise ValueError(f"a tensor is {[*tensor.shape]} at one step and {[*total.shape]} before")
        total = total + tensor.to(torch.float32)
    if not torch.isfinite(total).all():
        raise ValueError("the weights are not finite")
    return (total / count).to(tensor.dtype)


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]])
