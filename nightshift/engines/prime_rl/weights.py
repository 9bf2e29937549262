"""The weights that prime-rl's trainer publishes: which are the last, are they whole, and a model folder of them.

The trainer writes `broadcasts/step_N/` after every step, touches `STABLE` in it last, and then deletes step N-2
(prime_rl/transports/weights/filesystem.py, prime_rl/trainer/utils.py). A folder holds weights only: one
`model.safetensors`, or numbered shards with an index; or, of a LoRA run, an adapter with its config.
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
    """Return the highest step that has its STABLE now, 0 for the base model; None without one.

    A trainer that is killed leaves its last two steps whole, and of the one before any part or nothing.
    """
    steps = (re.fullmatch(r"step_(\d+)", marker.parent.name) for marker in broadcasts.glob("step_*/STABLE"))
    return max((int(step[1]) for step in steps if step), default=None)


def link_weights(source: Path, target: Path) -> None:
    """Hard links to a set of weights in the new folder `target`, copies where the filesystem has no links. OSError."""
    target.mkdir(parents=True)
    for path in source.iterdir():
        if path.suffix == ".safetensors" or path.name in (_INDEX, _ADAPTER[0]):
            try:
                (target / path.name).hardlink_to(path)
            except OSError:  # another filesystem, or one without hard links
                shutil.copyfile(path, target / path.name)


class EarlierWeights:
    """The weights after a few earlier steps of a self-play run, which its Elo curve is measured with.

    prime-rl's trainer deletes all but its last two steps, so the newest step is kept by hard links when each fifth of
    the training but the first begins. `folders`: by step, in order.
    """

    def __init__(self, broadcasts: Path, folder: Path) -> None:
        self._broadcasts, self._folder = broadcasts, folder
        self._fifth = 0
        self.folders: dict[int, Path] = {}

    def look(self, share: float) -> None:
        """Keep the newest published step if another fifth of the training has begun; `share` of it is over, 0 to 1."""
        fifth = int((CURVE_STEPS + 1) * share)
        if not self._fifth < fifth <= CURVE_STEPS:
            return
        step = latest_stable(self._broadcasts) or 0
        if step <= max(self.folders, default=0):  # step 0 is the base model, which no update made
            return
        target = self._folder / f"step_{step}"
        try:
            link_weights(self._broadcasts / f"step_{step}", target)
            whole_files(target)
            self._fifth, self.folders[step] = fifth, target
        except (OSError, ValueError):  # the trainer was deleting this step
            shutil.rmtree(target, ignore_errors=True)


def check_weights(folder: Path) -> str:
    """Return the sha256 of a whole set of weights: over the lines `<sha256 of the file>  <name>`, by name.

    Anyone can check it: `LC_ALL=C; sha256sum FILES | sha256sum`. EngineError names what is missing, torn or too many.
    """
    manifest = hashlib.sha256()
    try:
        for name in whole_files(folder):
            with (folder / name).open("rb") as file:
                manifest.update(f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {name}\n".encode())
    except (OSError, ValueError) as error:
        raise EngineError(f"the weights are not whole: {error}") from None
    return manifest.hexdigest()


def build_model_folder(source: Path, base: Path, target: Path) -> str:
    """Make `target` a complete Hugging Face folder: the weights of `source` and the other files of the snapshot `base`.

    An adapter names its base model in adapter_config.json and needs no config. Weights are hard links where the
    filesystem allows it. `target` appears when it is complete and checked. Returns the sha256 as `check_weights`,
    raises EngineError.
    """
    partial = target.with_name(f".{target.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)  # left by a kill
        link_weights(source, partial)
        sha256 = check_weights(partial)  # the bytes that are kept
        without = _CONFIG if (partial / _ADAPTER[0]).exists() else ()
        for path in base.iterdir():
            is_beside = path.suffix in (".json", ".jinja", ".model", ".txt") or path.name == "LICENSE"
            if is_beside and path.name not in (_INDEX, *without):
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
    """Return the names of the files of a set of weights, sorted. ValueError if one is missing, torn or too many."""
    names = sorted(path.name for path in folder.iterdir())
    weights = [name for name in names if name.endswith(".safetensors")]
    expected, beside = ["model.safetensors"], list[str]()
    if any(name in names for name in _ADAPTER):
        _json(folder / _ADAPTER[0], dict[str, Any])
        expected, beside = [_ADAPTER[1]], [_ADAPTER[0]]
    elif _INDEX in names:
        expected, beside = sorted({*_json(folder / _INDEX, _Index).weight_map.values()}), [_INDEX]
    if weights != expected or not weights:
        raise ValueError(f"{', '.join(expected)} should be there, here is {', '.join(names) or 'nothing'}")
    for name in weights:
        try:  # the library refuses a header that does not account for every byte of the file
            with safe_open(folder / name, framework="numpy"):
                pass
        except SafetensorError as error:
            raise ValueError(f"{name}: {error}") from None
    return sorted([*weights, *beside])


def _json(path: Path, kind: type[Content]) -> Content:
    try:
        return parse_json(read_file(path), kind)
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from None
