"""What every engine needs of the world and fetches once: the base model, and the data of the environments."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from nightshift import environments
from nightshift.engines import Message, Note
from nightshift.errors import EngineError
from nightshift.rules import Rules


def prepare_model(root: Path, rules: Rules, note: Note) -> Path:
    """The folder of the rules' model, downloaded if it is missing. EngineError when it cannot be had."""
    if rules.model_revision is None:
        if not (root / rules.model / "model.safetensors").is_file():
            raise EngineError(f"{rules.model} is missing", "Restore it: git checkout models, or --rebuild-base.")
        return root / rules.model
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    with suppress(LocalEntryNotFoundError, OSError):  # not in the cache
        snapshot = Path(snapshot_download(rules.model, revision=rules.model_revision, local_files_only=True))
        if is_whole_model(snapshot):
            return snapshot
    note(f"downloading {rules.model} (about 1 GB, once)")
    try:
        return Path(snapshot_download(rules.model, revision=rules.model_revision))
    except (HfHubHTTPError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise EngineError(f"cannot download {rules.model}: {reason}", "Check the network, then repeat.") from None


def is_whole_model(snapshot: Path) -> bool:
    """True if a model's folder has what vLLM and the trainer read; an interrupted download lacks some of it."""
    names = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
    return all((snapshot / name).is_file() for name in names) and any(
        path.is_file() for path in snapshot.glob("*.safetensors")
    )


def prepare_data(root: Path, rules: Rules, source: Path | None, note: Note) -> None:
    """Fetch the data of the rules' environments, from the folder `source` if given. EngineError if it is not to be had.

    Generated data needs none of this.
    """
    for environment in environments.load(root, rules.environments):
        environment.prepare(source, note)


def data_problem(root: Path, rules: Rules) -> EngineError | None:
    """The official data is missing or is not the official one."""
    problems = map(environments.data_problem, environments.load(root, rules.environments))
    return next((problem for problem in problems if problem is not None), None)


def prompts(root: Path, rules: Rules, num: int) -> list[Sequence[Message]]:
    """The first prompts of the selection set, for a rehearsal."""
    (environment,) = environments.load(root, rules.environments)
    episodes = (environment.episode(example) for example in environment.examples("selection")[:num])
    return [episode.ask() or () for episode in episodes]
