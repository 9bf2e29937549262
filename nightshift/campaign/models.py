"""The trained weights in runs/: one model folder of every kept experiment, and of any other none."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from nightshift.campaign.campaign import Campaign
from nightshift.campaign.ledger import Ledger
from nightshift.files import disk_error
from nightshift.records import Record

WEIGHTS_NAME, MODEL_NAME = "weights", "model"  # of a run, as its engine left them; of a kept experiment
MODELS_GB = 20.0  # in 1e9 bytes: about twenty models of 0.5B parameters


def keep_model(ledger: Ledger, record: Record, max_gb: float = MODELS_GB) -> None:
    """Leave of a kept experiment one model folder, `runs/NNNN/model`, and of any other no weights at all.

    A model is a gigabyte on a GPU. Beyond `max_gb` (1e9 bytes) of models in runs/, the oldest are deleted,
    but never the baseline's, the incumbent's, or this one. Raises EngineError when the disk refuses.

    Comes before `Ledger.close`: what a kill leaves undone is done again only for a record that is not closed.
    """
    try:
        _keep_weights(ledger, record)
        _delete_oldest(ledger, record, max_gb)
    except OSError as error:
        raise disk_error(error, ledger.run_dir(record.number)) from None


def _keep_weights(ledger: Ledger, record: Record) -> None:
    folder = ledger.run_dir(record.number)
    first = next((i for i, run in enumerate(record.runs, 1) if run.evaluation is not None), None)
    if record.is_keep and first is not None:
        weights = ledger.attempt_dir(record.number, first, record.runs[first - 1]) / WEIGHTS_NAME
        with contextlib.suppress(FileNotFoundError):  # moved already: this is the second try after a power cut
            weights.rename(folder / MODEL_NAME)
    for name in (WEIGHTS_NAME, f"{WEIGHTS_NAME}.partial", f".{WEIGHTS_NAME}.partial"):  # a kill leaves partial ones
        for path in (*folder.glob(f"run-*/{name}"), *folder.glob(f"run-*/attempt-*/{name}")):
            _remove(path)


def _delete_oldest(ledger: Ledger, record: Record, max_gb: float) -> None:
    models = sorted(path for path in ledger.runs_dir.glob(f"*/{MODEL_NAME}") if path.is_dir())
    sizes = {model: sum(file.stat().st_size for file in model.iterdir()) for model in models}
    if sum(sizes.values()) <= max_gb * 1e9:
        return
    others = [r for r in ledger.records() if r.number != record.number]
    incumbent = Campaign.of([*others, record], record.branch, record.rules_hash).incumbent or record
    for model in models[1:-1]:
        if sum(sizes.values()) <= max_gb * 1e9:
            break
        if model.parent != ledger.run_dir(incumbent.number):
            shutil.rmtree(model, ignore_errors=True)
            del sizes[model]


def _remove(path: Path) -> None:
    """A folder, or whatever lies in its place: rmtree refuses links."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)
