"""The weights that prime-rl's trainer publishes: find the last step, check the files, build a model folder.

After every step, the trainer writes `broadcasts/step_N/`, creates `STABLE` in it, and deletes step N-2
(prime_rl/transports/weights/filesystem.py, prime_rl/trainer/utils.py). A folder contains weights only: one
`model.safetensors`, or shards with an index, or an adapter with its config.
"""

import hashlib
import re
import shutil
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from nightshift.errors import EngineError
from nightshift.files import apply_umask, parse_json, read_file, whole_folder

_INDEX = "model.safetensors.index.json"
_ADAPTER = ("adapter_config.json", "adapter_model.safetensors")


def latest_stable(broadcasts: Path) -> int | None:
    """Return the highest step with the file STABLE, 0 for the base model; None if there is no such step.

    The last two steps are complete even if the trainer was killed.
    """
    steps = (re.fullmatch(r"step_(\d+)", marker.parent.name) for marker in broadcasts.glob("step_*/STABLE"))
    return max((int(step[1]) for step in steps if step), default=None)


def check_weights(folder: Path) -> str:
    """Return the sha256 of a complete set of weights: the output of `LC_ALL=C; sha256sum FILES | sha256sum`.

    EngineError if a file is missing, incomplete or unexpected.
    """
    manifest = hashlib.sha256()
    for name in whole_files(folder):
        with (folder / name).open("rb") as file:
            manifest.update(f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {name}\n".encode())
    return manifest.hexdigest()


def build_model_folder(source: Path, base: Path, target: Path) -> str:
    """Create `target`, a Hugging Face folder with the weights of `source` and the other files of the snapshot `base`.

    The folder of an adapter needs no config: adapter_config.json names its base model. `target` appears when it is
    complete. Returns the sha256 as `check_weights`; EngineError if that fails.
    """
    with whole_folder(target) as folder:
        for name in whole_files(source):
            try:
                (folder / name).hardlink_to(source / name)
            except OSError:  # another filesystem, or one without hard links
                shutil.copyfile(source / name, folder / name)
        sha256 = check_weights(folder)
        excluded = ("config.json", "generation_config.json") if (folder / _ADAPTER[0]).exists() else ()
        for path in base.iterdir():
            is_copied = path.suffix in (".json", ".jinja", ".model", ".txt") or path.name == "LICENSE"
            if is_copied and path.name not in (_INDEX, *excluded):
                shutil.copyfile(path, folder / path.name)
        apply_umask(folder)
    return sha256


def whole_files(folder: Path) -> list[str]:
    """Return the sorted file names of a set of weights. EngineError if a file is missing, incomplete or unexpected."""
    try:
        names = {path.name for path in folder.iterdir()}
        weights = {name for name in names if name.endswith(".safetensors")}
        expected = {"model.safetensors"}
        if names & {*_ADAPTER}:
            expected = {*_ADAPTER}
        elif _INDEX in names:
            expected = {
                _INDEX,
                *parse_json(read_file(folder / _INDEX), dict[str, dict[str, Any]])["weight_map"].values(),
            }
        if not weights or weights != expected - {_INDEX, _ADAPTER[0]} or not expected <= names:
            raise ValueError(f"expected {sorted(expected)}, the folder has {sorted(names)}")
        for name in weights:
            with safe_open(folder / name, framework="numpy"):  # compares the header with the size of the file
                pass
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise EngineError(f"the weights in {folder} are incomplete: {error}") from None
    return sorted(expected)
