"""The weights that prime-rl's trainer publishes: which are the last, are they whole, and a model folder of them.

The trainer writes `broadcasts/step_N/` after every step, touches `STABLE` in it last, and then deletes step N-2
(prime_rl/transports/weights/filesystem.py, prime_rl/trainer/utils.py). A folder holds weights only: one
`model.safetensors`, or numbered shards with an index; or, of a LoRA run, an adapter with its config.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from safetensors import SafetensorError, safe_open

from nightshift.errors import EngineError

_INDEX = "model.safetensors.index.json"
_ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
# What a Hugging Face folder holds beside weights, as far as the base model has it.
_CONFIG = ("config.json", "generation_config.json")
_TOKENIZER = (
    "LICENSE",
    "added_tokens.json",
    "chat_template.jinja",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)
_HEAVY = ("broadcasts", "rollouts")
Content = TypeVar("Content")


class _Index(msgspec.Struct):
    weight_map: dict[str, str]  # tensor -> file


@dataclass(frozen=True, slots=True)
class Broadcast:
    """A policy version that the trainer has published: `step` 0 is the base model."""

    step: int
    folder: Path


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The files of one set of weights, opened and found whole.

    `sha256` is over names and bytes: that of the lines `<sha256 of the file>  <name>`, by name, so it can be
    checked with `LC_ALL=C; sha256sum FILES | sha256sum`.
    """

    names: tuple[str, ...]
    sha256: str
    is_adapter: bool


def latest_stable(broadcasts: Path) -> Broadcast | None:
    """The highest step that has its STABLE now; None without one.

    The trainer may publish and delete meanwhile: what vanishes is passed over, and if that leaves nothing and
    the folder has changed, it is looked at again.
    """
    steps = _steps(broadcasts)
    while True:
        published = [step for step in steps if (steps[step] / "STABLE").exists()]
        seen, steps = steps, _steps(broadcasts)
        if published:
            return Broadcast(max(published), seen[max(published)])
        if steps == seen:
            return None


def still_there(chosen: Broadcast) -> Broadcast:
    """`chosen`, or the next one that is left where the trainer went on for two steps, and so deleted it.

    Ask when the trainer is dead. A kill leaves steps N-1 and N whole, and of N-2 any part or nothing.
    """
    last = latest_stable(chosen.folder.parent)
    if last is None or last.step < chosen.step + 2:
        return chosen
    return Broadcast(last.step - 1, chosen.folder.with_name(f"step_{last.step - 1}"))


def check_weights(folder: Path, source: Path | None = None) -> WeightFiles:
    """Open every safetensors file (its header must account for every byte), compare with the index, and hash.

    Raises EngineError that names the file, what is wrong with it, and `source`, where the files are from.
    """
    try:
        return _check(folder)
    except (OSError, ValueError) as error:
        raise EngineError(f"the weights in {source or folder} are not whole: {error}") from None


def build_model_folder(source: Path, base: Path, target: Path) -> WeightFiles:
    """Make `target` a complete Hugging Face folder: the weights of `source`, config and tokenizer of `base`.

    `base` is the base model's snapshot. An adapter names its base model in adapter_config.json and needs no
    config. Weights are hard links where the filesystem allows it. `target` appears when it is complete, and
    checked, or not at all. Raises EngineError.
    """
    partial = target.with_name(f".{target.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)  # left by a kill
        partial.mkdir(parents=True)
        for path in source.iterdir():
            if path.suffix == ".safetensors" or path.name in (_INDEX, _ADAPTER[0]):
                _link(path, partial / path.name)
        files = check_weights(partial, source)  # the bytes that are kept
        for name in _TOKENIZER if files.is_adapter else (*_CONFIG, *_TOKENIZER):
            if (base / name).is_file():
                shutil.copyfile(base / name, partial / name)
        for name in ("tokenizer_config.json",) if files.is_adapter else ("config.json", "tokenizer_config.json"):
            if not (partial / name).is_file():
                raise EngineError(f"{base} has no {name}", "Run: uv run prepare.py")
        partial.rename(target)
    except FileNotFoundError as error:
        raise EngineError(f"{error.filename} is gone", "Run it again.") from None
    except OSError as error:
        raise EngineError(
            f"cannot write {target}: {error.strerror or error}", "Free disk space or fix its permissions."
        ) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return files


def remove_heavy(run_dir: Path) -> None:
    """Delete what prime-rl wrote by the gigabyte: published weights and rollouts. What cannot be deleted stays."""
    for name in _HEAVY:
        shutil.rmtree(run_dir / name, ignore_errors=True)


def _steps(broadcasts: Path) -> dict[int, Path]:
    try:
        names = [(re.fullmatch(r"step_(\d+)", folder.name), folder) for folder in broadcasts.iterdir()]
    except FileNotFoundError:
        return {}
    return {int(name[1]): folder for name, folder in names if name}


def _check(folder: Path) -> WeightFiles:
    names = sorted(entry.name for entry in os.scandir(folder))
    weights = {name: _tensor_names(folder / name) for name in names if name.endswith(".safetensors")}
    is_adapter = any(name in names for name in _ADAPTER)
    if is_adapter:
        if list(weights) != [_ADAPTER[1]]:
            raise ValueError(f"an adapter is one {_ADAPTER[1]}, here is {', '.join(weights) or 'none'}")
        _json(folder / _ADAPTER[0], dict[str, Any])
        used = sorted(_ADAPTER)
    elif _INDEX in names:
        _compare_with_index(_json(folder / _INDEX, _Index).weight_map, weights)
        used = sorted([*weights, _INDEX])
    elif list(weights) == ["model.safetensors"]:
        used = list(weights)
    else:
        raise ValueError(f"model.safetensors or {_INDEX} is missing, here is {', '.join(names) or 'nothing'}")
    manifest = "".join(f"{_sha256(folder / name)}  {name}\n" for name in used)
    return WeightFiles(tuple(used), hashlib.sha256(manifest.encode()).hexdigest(), is_adapter)


def _tensor_names(path: Path) -> set[str]:
    """Names in a file's header. The library refuses a header that does not account for every byte of the file."""
    try:
        with safe_open(path, framework="numpy") as file:
            names = set(file.keys())
    except SafetensorError as error:
        raise ValueError(f"{path.name}: {error}") from None
    if not names:
        raise ValueError(f"{path.name} holds no tensors")
    return names


def _compare_with_index(listed: dict[str, str], weights: dict[str, set[str]]) -> None:
    actual = {tensor: name for name, tensors in weights.items() for tensor in tensors}
    if listed != actual or sum(map(len, weights.values())) != len(actual):
        differing = sorted({f"{t} in {n}" for t, n in listed.items() ^ actual.items()})
        raise ValueError(f"{_INDEX} and the files differ, first at {differing[0] if differing else 'a double tensor'}")


def _json(path: Path, kind: type[Content]) -> Content:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"{path.name}: {error}") from None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _link(source: Path, target: Path) -> None:
    try:
        target.hardlink_to(source)
    except OSError:  # another filesystem, or one without hard links
        shutil.copyfile(source, target)
