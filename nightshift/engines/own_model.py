"""A model that rules.toml names: what its folder must hold before anything loads it, and what it changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from nightshift.errors import EngineError
from nightshift.files import read_file
from nightshift.rules import Rules
from nightshift.rules_toml import is_own_model

# Of a model on the hub nothing else is downloaded: no code, and no pickle, which is code.
FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
_PRESET_GB = 0.99  # weights of Qwen2.5-0.5B in bfloat16, for which docs/gpus.md computes


def folder_problem(rules: Rules, folder: Path) -> str | None:
    """Why the folder cannot be trained by these rules, one line with its fix; None if it can, or comes with us."""
    if not is_own_model(rules):
        return None
    try:
        config, tokenizer = (_json(folder / name) for name in ("config.json", "tokenizer_config.json"))
    except (OSError, ValueError, RecursionError) as error:
        return f"{folder} is no model's folder: {error}. Name one with config.json, tokenizer_config.json and weights"
    if "auto_map" in config or "auto_map" in tokenizer:
        return f"{folder} brings code of its own (auto_map), which is not run. Name a model that transformers has"
    if not any(folder.glob("*.safetensors")):
        others = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth"))
        found = f"{others[0]}, a pickle" if others else "no weights"
        return f"{folder} holds {found}, and only safetensors are read. Save it with save_pretrained"
    if not (folder / "tokenizer.json").is_file():
        return f"{folder} has no tokenizer.json. Save its tokenizer there: AutoTokenizer ... save_pretrained"
    if not tokenizer.get("chat_template") and not (folder / "chat_template.jinja").is_file():
        return f"{folder} has no chat template. Put one beside it: chat_template.jinja"
    if rules.engine == "trl" and config.get("model_type") != "qwen2":
        kind = config.get("model_type")
        return f"{folder} is of type {kind!r}, and the embedded engine samples from qwen2 only. Use --engine prime-rl"
    if rules.engine == "trl" and (found := _unsampled(config)):
        return f"{folder} has {found}, which the embedded engine's sampler does not compute. Use --engine prime-rl"
    return None


def _unsampled(config: dict[str, Any]) -> str:
    """What transformers' Qwen2 would do and trl/sampler.py does not, which reads every position alike; "" for nothing.
    Rotary embeddings it takes from the model once: other kinds are right, but for those that change with the length."""
    if config.get("use_sliding_window") or "sliding_attention" in str(config.get("layer_types")):
        return "use_sliding_window = true"
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type")) if isinstance(rope, dict) else rope
    if kind in ("dynamic", "longrope"):
        return f"rope_type = {kind!r}"
    return "" if (act := config.get("hidden_act", "silu")) == "silu" else f"hidden_act = {act!r}"


def local_problem(rules: Rules, root: Path) -> EngineError | None:
    """The same of a model in a folder; None for one on the hub, which `prepare` looks at."""
    problem = None if rules.model_revision else folder_problem(rules, root / rules.model)
    return EngineError(problem) if problem else None


def changes(rules: Rules, folder: Path) -> list[str]:
    """What a dry run says of a model that rules.toml names."""
    if not is_own_model(rules):
        return []
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors")) / 1e9
    what = "its bytes are in the rules hash" if rules.model_revision is None else f"revision {rules.model_revision}"
    weights = f"{size:.3g} GB of weights" if size else "not downloaded yet"
    return [
        f"model:    {rules.model}: {what}; renderer: its chat template; learning rates x {rules.learning_rate_scale:g}",
        f"model:    {weights}; presets of memory are computed for {_PRESET_GB} GB (docs/gpus.md)",
    ]


def _json(path: Path) -> dict[str, Any]:
    return msgspec.json.decode(read_file(path), type=dict[str, Any])
