"""What every engine needs of the world and fetches once: the base model, and the data of the environments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from nightshift import environments
from nightshift.engines import Note
from nightshift.engines.own_model import FILES, folder_problem
from nightshift.errors import EngineError
from nightshift.rules import Rules
from nightshift.rules_toml import environments_named, is_own_model
from nightshift.waiting import waiting


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
    wanted: Any = partial(snapshot_download, rules.model, revision=rules.model_revision, allow_patterns=FILES)
    silent, counted = _progress()
    try:
        with waiting(f"asking the hub for {rules.model}"):
            missing = [file for file in wanted(dry_run=True, tqdm_class=silent) if file.will_download]
        total = sum(file.file_size for file in missing)
        note(f"downloading {rules.model}, once: {len(missing)} files, {total / 1e6:,.0f} MB")
        counted.clear()
        with waiting(lambda: f"downloading {rules.model}: {_megabytes(counted):,.0f} of {total / 1e6:,.0f} MB"):
            return Path(wanted(tqdm_class=silent))
    except (HfHubHTTPError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise EngineError(f"cannot download {rules.model}: {reason}", "Check the network, then repeat.") from None


def _progress() -> tuple[type, list[Any]]:
    """For the hub's client a class of progress bars that nobody sees, and a list of those that count bytes."""
    from huggingface_hub.utils.tqdm import tqdm

    counted: list[Any] = []

    class Silent(tqdm):
        def __init__(self, *words: Any, **flags: Any) -> None:
            super().__init__(*words, **{**flags, "disable": True})  # type: ignore[no-untyped-call]
            if flags.get("unit") == "B":
                counted.append(self)

        def update(self, n: float | None = 1) -> None:
            self.n += n or 0  # one that is disabled does not count

    return Silent, counted


def _megabytes(counted: Sequence[Any]) -> float:
    """What has come so far: of two bars, for what came and what was written, the one that is further."""
    return max((bar.n for bar in counted), default=0) / 1e6


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
        with waiting(f"fetching the data of {environment.name}, if it is not there"):
            environment.prepare(sources.get(environment.name), note)


def data_problem(root: Path, rules: Rules) -> EngineError | None:
    """The data of an environment is missing, or is not the official one. Reads only."""
    try:
        for environment in environments.load(root, rules.environments):
            environment.examples("selection")
    except EngineError as error:
        return error
    return None
