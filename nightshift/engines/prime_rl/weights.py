"""The weights that prime-rl's trainer publishes: find the last step, check the files, build a model folder.

After every step, the trainer writes `broadcasts/step_N/`, creates `STABLE` in it, and deletes step N-2
(prime_rl/transports/weights/filesystem.py, prime_rl/trainer/utils.py). A folder contains weights only: one
`model.safetensors`, or shards with an index, or an adapter with its config.
"""

import hashlib
import re
import shutil
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from safetensors import SafetensorError, safe_open

from nightshift.errors import EngineError
from nightshift.evaluation.environment import CURVE_STEPS
from nightshift.files import apply_umask, disk_error, parse_json, read_file

_INDEX = "model.safetensors.index.json"
_ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
_CONFIG = ("config.json", "generation_config.json")
Content = TypeVar("Content")


class _Index(msgspec.Struct):
    weight_map: dict[str, str]  # tensor -> file


def latest_stable(broadcasts: Path) -> int | None:
    """Return the highest step with the file STABLE, 0 for the base model; None if there is no such step.

    The last two steps are complete even if the trainer was killed.
    """
    steps = (re.fullmatch(r"step_(\d+)", marker.parent.name) for marker in broadcasts.glob("step_*/STABLE"))
    return max((int(step[1]) for step in steps if step), default=None)


def link_weights(source: Path, target: Path) -> None:
    """Create the folder `target` with hard links to a set of weights, or copies if links are not possible. OSError."""
    target.mkdir(parents=True)
    for path in source.iterdir():
        if path.suffix == ".safetensors" or path.name in (_INDEX, _ADAPTER[0]):
            try:
                (target / path.name).hardlink_to(path)
            except OSError:  # another filesystem, or one without hard links
                shutil.copyfile(path, target / path.name)


class EarlierWeights:
    """The weights after a few earlier steps of a self-play run, which its Elo curve is measured with.

    prime-rl's trainer deletes all but its last two steps. Hard links keep the newest step at the beginning of each
    fifth of the training but the first.
    """

    def __init__(self, broadcasts: Path, folder: Path) -> None:
        self._broadcasts, self._folder = broadcasts, folder
        self._fifth = 0
        self.folders: dict[int, Path] = {}  # by step, in order

    def look(self, share: float) -> None:
        """Keep the newest published step if another fifth of the training has begun. `share`: the part that is over."""
        fifth = int((CURVE_STEPS + 1) * share)
        if not self._fifth < fifth <= CURVE_STEPS:
            return
        step = latest_stable(self._broadcasts) or 0
        if step <= max(self.folders, default=0):  # step 0 is the base model
            return
        target = self._folder / f"step_{step}"
        try:
            link_weights(self._broadcasts / f"step_{step}", target)
            whole_files(target)
            self._fifth, self.folders[step] = fifth, target
        except (OSError, ValueError):  # the trainer was deleting this step
            shutil.rmtree(target, ignore_errors=True)


def check_weights(folder: Path) -> str:
    """Return the sha256 of a complete set of weights: the output of `LC_ALL=C; sha256sum FILES | sha256sum`.

    EngineError if a file is missing, incomplete or unexpected.
    """
    manifest = hashlib.sha256()
    try:
        for name in whole_files(folder):
            with (folder / name).open("rb") as file:
                manifest.update(f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {name}\n".encode())
    except (OSError, ValueError) as error:
        raise EngineError(f"the weights are incomplete: {error}") from None
    return manifest.hexdigest()


def build_model_folder(source: Path, base: Path, target: Path) -> str:
    """Create `target`, a Hugging Face folder with the weights of `source` and the other files of the snapshot `base`.

    The folder of an adapter needs no config: adapter_config.json names its base model. `target` appears when it is
    complete. Returns the sha256 as `check_weights`; EngineError if that fails.
    """
    partial = target.with_name(f".{target.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)  # of a killed process
        link_weights(source, partial)
        sha256 = check_weights(partial)
        excluded = (_INDEX, *_CONFIG) if (partial / _ADAPTER[0]).exists() else (_INDEX,)
        for path in base.iterdir():
            is_copied = path.suffix in (".json", ".jinja", ".model", ".txt") or path.name == "LICENSE"
            if is_copied and path.name not in excluded:
                shutil.copyfile(path, partial / path.name)
        apply_umask(partial)
        partial.rename(target)
    except FileNotFoundError as error:
        raise EngineError(f"{error.filename} is gone", "Run it again.") from None
    except OSError as error:
        raise disk_error(error, target) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return sha256


def whole_files(folder: Path) -> list[str]:
    """Return the sorted file names of a set of weights. ValueError if a file is missing, incomplete or unexpected."""
    names = sorted(path.name for path in folder.iterdir())
    weights = [name for name in names if name.endswith(".safetensors")]
    expected, others = ["model.safetensors"], list[str]()
    if any(name in names for name in _ADAPTER):
        _json(folder / _ADAPTER[0], dict[str, Any])
        expected, others = [_ADAPTER[1]], [_ADAPTER[0]]
    elif _INDEX in names:
        expected, others = sorted({*_json(folder / _INDEX, _Index).weight_map.values()}), [_INDEX]
    if weights != expected or not weights:
        raise ValueError(f"expected {', '.join(expected)}, the folder has {', '.join(names) or 'no files'}")
    for name in weights:
        try:  # safe_open compares the header with the size of the file
            with safe_open(folder / name, framework="numpy"):
                pass
        except SafetensorError as error:
            raise ValueError(f"{name}: {error}") from None
    return sorted([*weights, *others])


def _json(path: Path, kind: type[Content]) -> Content:
    try:
        return parse_json(read_file(path), kind)
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from None
