"""What every engine needs of the world and fetches once: the base model, and the data of the environments."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from nightshift import environments
from nightshift.engines import Note
from nightshift.engines.own_model import FILES, folder_problem
from nightshift.errors import EngineError
from nightshift.rules import Rules
from nightshift.rules_toml import environments_named, is_own_model


def prepare_model(root: Path, rules: Rules, note: Note) -> Path:
    """The folder of the rules' model, downloaded if it is missing. EngineError when it cannot be had or trained."""
    folder = _model(root, rules, note)
    if problem := folder_problem(rules, folder):
        raise EngineError(problem)
    return folder


def _model(root: Path, rules: Rules, note: Note) -> Path:
    if rules.model_revision is None:
        if not (is_own_model(rules) or (root / rules.model / "model.safetensors").is_file()):
            raise EngineError(f"{rules.model} is missing", "Restore it: git checkout models, or --rebuild-base.")
        return root / rules.model
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    with suppress(LocalEntryNotFoundError, OSError):  # not in the cache
        snapshot = Path(snapshot_download(rules.model, revision=rules.model_revision, local_files_only=True))
        if is_whole_model(snapshot):
            return snapshot
    note(f"downloading {rules.model} (once; Qwen2.5-0.5B has about 1 GB)")
    try:
        return Path(snapshot_download(rules.model, revision=rules.model_revision, allow_patterns=FILES))
    except (HfHubHTTPError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise EngineError(f"cannot download {rules.model}: {reason}", "Check the network, then repeat.") from None


def is_whole_model(snapshot: Path) -> bool:
    """True if a model's folder has what vLLM and the trainer read; an interrupted download lacks some of it."""
    names = ("config.json", "tokenizer.json", "tokenizer_config.json")
    return all((snapshot / name).is_file() for name in names) and any(
        path.is_file() for path in snapshot.glob("*.safetensors")
    )


def prepare_data(root: Path, rules: Rules, sources: Mapping[str, Path], note: Note) -> None:
    """Fetch the data of the rules' environments, and of those that `sources` has a folder for, from there.

    EngineError if it is not to be had. Generated data needs none of this.
    """
    others = [name for name in sources if name not in rules.environment_names]
    named = environments_named(root, others) if others else ()
    for environment in environments.load(root, [*rules.environments, *named]):
        environment.prepare(sources.get(environment.name), note)


def data_problem(root: Path, rules: Rules) -> EngineError | None:
    """The data of an environment is missing, or is not the official one. Reads only."""
    try:
        for environment in environments.load(root, rules.environments):
            environment.examples("selection")
    except EngineError as error:
        return error
    return None
