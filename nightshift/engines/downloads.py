"""Check and download what every engine needs: the base model, and the data of the environments."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from nightshift.config.rules import Rules
from nightshift.config.rules_toml import environments_named, is_own_model
from nightshift.engines.base import Note
from nightshift.errors import EngineError, listed
from nightshift.evaluation.environment import load as load_environments
from nightshift.files import parse_json, read_file
from nightshift.waiting import mark, waiting

# The files of a model that are downloaded from the hub: no code, and no pickle, which can contain code.
FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]


def model_folder(rules: Rules, root: Path) -> Path:
    """Return the folder of the rules' model in the checkout or in Hugging Face's cache, which may not exist."""
    if rules.model_revision is None:
        return root / rules.model
    from huggingface_hub.constants import HF_HUB_CACHE

    folder = Path(HF_HUB_CACHE).absolute() / f"models--{rules.model.replace('/', '--')}"
    return folder / "snapshots" / rules.model_revision


def model_problem(rules: Rules, root: Path) -> EngineError | None:
    """Return why the rules' model cannot be trained; None if it can."""
    folder, is_local = model_folder(rules, root), rules.model_revision is None
    if not is_whole_model(folder) and not (is_local and is_own_model(rules)):
        fix = "Run: git checkout models" if is_local else f"Run: uv run prepare.py --engine {rules.engine}."
        return EngineError(f"{rules.model} is missing or incomplete in {folder}", fix)
    return folder_problem(rules, folder) if is_own_model(rules) else None


def folder_problem(rules: Rules, folder: Path) -> EngineError | None:
    """Return why these rules cannot train the user's own model in `folder`; None if they can."""
    try:
        config, tokenizer = (_json(folder / name) for name in ("config.json", "tokenizer_config.json"))
    except (OSError, ValueError) as error:
        needs = "Name a folder with config.json, tokenizer_config.json and weights"
        return EngineError(f"{folder} is not the folder of a model: {error}", needs)
    if "auto_map" in config | tokenizer:
        cause = f"{folder} needs its own code (auto_map), which Nightshift does not run"
        return EngineError(cause, "Name a model that transformers supports")
    has_template = bool(tokenizer.get("chat_template")) or (folder / "chat_template.jinja").is_file()
    parts = {
        "weights in safetensors": any(folder.glob("*.safetensors")),
        "tokenizer.json": (folder / "tokenizer.json").is_file(),
        "chat template (chat_template.jinja)": has_template,
    }
    if missing := [part for part, is_there in parts.items() if not is_there]:
        return EngineError(f"{folder} has no {listed(missing)}", "Save model and tokenizer with save_pretrained")
    if rules.engine == "trl" and (features := _unsupported_features(config)):
        cause = f"{folder} has {features}, which the sampler of --engine trl does not support"
        return EngineError(cause, "Use --engine prime-rl")
    return None


def _unsupported_features(config: dict[str, Any]) -> str:
    """Return the features of a model's forward pass that trl/sampler.py does not compute; "" if there are none.

    The sampler computes the rotary embeddings once, so they must not depend on the length.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    values = {"model_type": None, "rope_type": rope.get("type", "default"), **config, **rope}
    supported = {
        "model_type": ("qwen2",),
        "use_sliding_window": (False,),
        "rope_type": ("default", "linear", "yarn", "llama3"),
        "hidden_act": ("silu",),
        "attention_dropout": (0,),
    }
    names = [name for name, known in supported.items() if values.get(name, known[0]) not in known]
    return ", ".join(f"{name} = {values[name]!r}" for name in names)


def _json(path: Path) -> dict[str, Any]:
    return parse_json(read_file(path), dict[str, Any])


def prepare_model(root: Path, rules: Rules, note: Note) -> None:
    """Download the rules' model if it is missing. EngineError if the model cannot be trained."""
    mark("model and data")
    if rules.model_revision is not None and not is_whole_model(model_folder(rules, root)):
        from huggingface_hub import snapshot_download

        note(f"downloading {rules.model}, once")
        try:
            snapshot_download(rules.model, revision=rules.model_revision, allow_patterns=FILES)
        except OSError as error:  # also of the hub
            cause = f"cannot download {rules.model}: {' '.join(str(error).split())[:200]}"
            raise EngineError(cause, "Check the network, then run the command again.") from None
    if problem := model_problem(rules, root):
        raise problem


def is_whole_model(snapshot: Path) -> bool:
    """Return whether a folder has all files that vLLM and the trainer read, as after a complete download."""
    names = {"config.json", "tokenizer.json", "tokenizer_config.json"}
    with suppress(OSError, ValueError):  # only a model in several files has an index
        names |= {*_json(snapshot / "model.safetensors.index.json")["weight_map"].values()}
    has_weights = any(path.is_file() for path in snapshot.glob("*.safetensors"))
    return has_weights and all((snapshot / name).is_file() for name in names)


def prepare_data(root: Path, rules: Rules, sources: Mapping[str, Path], note: Note) -> None:
    """Fetch the missing data of the rules' environments and of those in `sources`, from its folder if there is one.

    EngineError if data cannot be fetched.
    """
    others = [name for name in sources if name not in [environment.name for environment in rules.scored]]
    for environment in load_environments(root, [*rules.scored, *environments_named(root, others)]):
        with waiting(f"preparing the data of {environment.name}"):
            environment.prepare(sources.get(environment.name), note)
    mark("model and data", f"{rules.model}, {', '.join(environment.name for environment in rules.scored)}")


def data_problem(root: Path, rules: Rules) -> EngineError | None:
    """Return the problem of the first environment whose data is missing or has a wrong hash."""
    for environment in load_environments(root, rules.scored):
        try:
            environment.examples("validation")
        except EngineError as error:
            # By default prepare.py prepares for the engine of this machine, which may be another one.
            return EngineError(str(error).replace("uv run prepare.py", f"uv run prepare.py --engine {rules.engine}", 1))
    return None
