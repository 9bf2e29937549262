"""One-time set-up: what a set of rules needs before its first experiment, and how to get it.

Used by prepare.py and by the first run.py; every step is skipped when it was done.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nightshift.errors import EngineError
from nightshift.ledger import Ledger
from nightshift.rules import Rules

Note = Callable[[str], None]


def prepare_missing(root: Path, rules: Rules, note: Note, gsm8k: Path | None = None) -> None:
    """Prepare base model, data and results.tsv as far as they are missing. EngineError names what cannot be had."""
    _base_model(root, rules, note)
    for environment in rules.environments:
        data: Any = importlib.import_module(f"{environment.package}.data")
        if hasattr(data, "prepare"):  # generated data needs none
            try:
                data.prepare(source=gsm8k, progress=note)
            except ValueError as error:  # the environments' own error, one line with its fix
                raise EngineError(str(error)) from None
    if Ledger(root).sync_tsv():
        note("results.tsv: written")


def _base_model(root: Path, rules: Rules, note: Note) -> None:
    if rules.model_revision is None:
        if not (root / rules.model / "model.safetensors").is_file():
            raise EngineError(f"{rules.model} is missing", "Restore it: git checkout models, or --rebuild-base.")
        return
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        snapshot_download(rules.model, revision=rules.model_revision, local_files_only=True)
    except (LocalEntryNotFoundError, OSError):
        note(f"downloading {rules.model} (about 1 GB, once)")
        try:
            snapshot_download(rules.model, revision=rules.model_revision)
        except (HfHubHTTPError, OSError) as error:
            reason = " ".join(str(error).split())[:200]
            raise EngineError(f"cannot download {rules.model}: {reason}", "Check the network, then repeat.") from None


def rebuild_base(root: Path, rules: Rules, note: Note) -> None:
    """Remake the shipped base model from its recipe: a fixed number of supervised steps (a few minutes)."""
    from nightshift.engines import trl_base

    note(f"rebuilding {rules.model}: a few minutes; its bytes belong to the rules, so a new campaign starts")

    def progress(step: int, num_steps: int) -> None:
        if step % 50 == 0 or step == num_steps:
            note(f"supervised step {step} / {num_steps}")

    trl_base.rebuild(root / rules.model, trl_base.NUM_STEPS, seed=0, progress=progress)
