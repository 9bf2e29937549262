"""What every engine needs of the world and fetches once: the base model, and the data of the environments."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from nightshift.config.rules import Rules
from nightshift.config.rules_toml import environments_named, is_own_model
from nightshift.engines.base import Note
from nightshift.errors import EngineError
from nightshift.evaluation.environment import load as load_environments
from nightshift.files import parse_json, read_file
from nightshift.waiting import mark, waiting

# Of a model on the hub nothing else is downloaded: no code, and no pickle, which is code.
FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
STATIC_ROPE = ("default", "linear", "yarn", "llama3")  # the same for every length of a batch


def model_folder(rules: Rules, root: Path) -> Path:
    """Return the folder of the rules' model, which may not exist: in the checkout, or in Hugging Face's cache."""
    if rules.model_revision is None:
        return root / rules.model
    from huggingface_hub.constants import HF_HUB_CACHE

    folder = Path(HF_HUB_CACHE).absolute() / f"models--{rules.model.replace('/', '--')}"
    return folder / "snapshots" / rules.model_revision


def model_problem(rules: Rules, root: Path) -> EngineError | None:
    """Return why the rules' model cannot be trained; None if it can."""
    folder, is_local = model_folder(rules, root), rules.model_revision is None
    if not is_whole_model(folder) and not (is_local and is_own_model(rules)):
        fix = "Restore it: git checkout models" if is_local else f"Run: uv run prepare.py --engine {rules.engine}."
        return EngineError(f"{rules.model} is missing, or not complete, in {folder}", fix)
    return folder_problem(rules, folder) if is_own_model(rules) else None


def folder_problem(rules: Rules, folder: Path) -> EngineError | None:
    """Return why a model of the user's own cannot be trained by these rules; None if it can."""
    try:
        config, tokenizer = (_json(folder / name) for name in ("config.json", "tokenizer_config.json"))
    except (OSError, ValueError) as error:
        needs = "Name one with config.json, tokenizer_config.json and weights"
        return EngineError(f"{folder} is no model's folder: {error}", needs)
    if "auto_map" in config or "auto_map" in tokenizer:
        cause = f"{folder} brings code of its own (auto_map), which is not run"
        return EngineError(cause, "Name a model that transformers has")
    if not any(folder.glob("*.safetensors")):
        others = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth"))
        weights = f"{others[0]}, a pickle" if others else "no weights"
        return EngineError(f"{folder} holds {weights}, and only safetensors are read", "Save it with save_pretrained")
    if not (folder / "tokenizer.json").is_file():
        fix = "Save its tokenizer there: AutoTokenizer ... save_pretrained"
        return EngineError(f"{folder} has no tokenizer.json", fix)
    if not tokenizer.get("chat_template") and not (folder / "chat_template.jinja").is_file():
        return EngineError(f"{folder} has no chat template", "Put one beside it: chat_template.jinja")
    if rules.engine == "trl" and (other := _other_forward_pass(config)):
        cause = f"{folder} has {other}, which the embedded engine's sampler does not compute"
        return EngineError(cause, "Use --engine prime-rl")
    return None


def _other_forward_pass(config: dict[str, Any]) -> str:
    """Return what makes the forward pass of a model another than that of trl/sampler.py; "" for nothing.

    The sampler reads every position alike. It asks the model once for rotary embeddings, which must not change with the
    length.
    """
    if (kind := config.get("model_type")) != "qwen2":
        return f"model_type = {kind!r}"
    if config.get("use_sliding_window") or "sliding_attention" in str(config.get("layer_types")):
        return "use_sliding_window = true"
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else "default"
    if rope_type not in STATIC_ROPE:
        return f"rope_type = {rope_type!r}"
    others = {"hidden_act": "silu", "attention_dropout": 0}
    return ", ".join(f"{name} = {config[name]!r}" for name, value in others.items() if config.get(name, value) != value)


def _json(path: Path) -> dict[str, Any]:
    return parse_json(read_file(path), dict[str, Any])


def prepare_model(root: Path, rules: Rules, note: Note) -> None:
    """Download the rules' model if it is missing. EngineError if the model is of no use."""
    mark("model and data")
    if rules.model_revision is not None and not is_whole_model(model_folder(rules, root)):
        _download(rules, note)
    if problem := model_problem(rules, root):
        raise problem


def _download(rules: Rules, note: Note) -> None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    note(f"downloading {rules.model}, once")
    try:  # with the hub client's own progress bars
        snapshot_download(rules.model, revision=rules.model_revision, allow_patterns=FILES)
    except (HfHubHTTPError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise EngineError(f"cannot download {rules.model}: {reason}", "Check the network, then repeat.") from None


def is_whole_model(snapshot: Path) -> bool:
    """True if a model's folder has what vLLM and the trainer read; an interrupted download lacks some of it."""
    names = {"config.json", "tokenizer.json", "tokenizer_config.json"}
    with suppress(OSError, ValueError):  # of a model in several files
        names |= {*_json(snapshot / "model.safetensors.index.json")["weight_map"].values()}
    has_weights = any(path.is_file() for path in snapshot.glob("*.safetensors"))
    return has_weights and all((snapshot / name).is_file() for name in names)


def prepare_data(root: Path, rules: Rules, sources: Mapping[str, Path], note: Note) -> None:
    """Fetch the data of the rules' environments, and of those that `sources` has a folder for, from there.

    EngineError if it is not to be had. Generated data needs none of this.
    """
    others = [name for name in sources if name not in [environment.name for environment in rules.scored]]
    named = environments_named(root, others) if others else ()
    for environment in load_environments(root, [*rules.scored, *named]):
        with waiting(f"fetching the data of {environment.name}, if it is not there"):
            environment.prepare(sources.get(environment.name), note)
    mark("model and data", f"{rules.model}, {', '.join(environment.name for environment in rules.scored)}")


def data_problem(root: Path, rules: Rules) -> EngineError | None:
    """Return the problem of an environment whose data is missing or not the official one. Reads only."""
    for environment in load_environments(root, rules.scored):
        try:
            environment.examples("validation")
        except EngineError as error:
            if environment.name != "gsm8k":
                return error
            cause, _, fix = str(error).partition(" Run: ")
            return EngineError(cause, f"Run: uv run prepare.py --engine {rules.engine} (downloads 5 MB), or: {fix}")
    return None
