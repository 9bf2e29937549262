"""Which weights stay on the disk: those of kept experiments and of incumbents, up to a size."""

from contextlib import suppress

from nightshift.campaign.campaign import Campaign
from nightshift.campaign.ledger import Ledger
from nightshift.campaign.records import Record
from nightshift.files import disk_error, remove_tree

WEIGHTS_NAME, MODEL_NAME = "weights", "model"  # of a run, as its engine left them; of a kept experiment
MODELS_GB = 20.0  # in 1e9 bytes: about twenty models of 0.5B parameters


def keep_model(ledger: Ledger, record: Record, max_gb: float = MODELS_GB) -> None:
    """Keep the model of a kept experiment, and of a run of the incumbent, as `runs/NNNN/model`; delete all weights of
    any other. Call before `Ledger.close`: a kill repeats both. EngineError if the disk refuses.

    Above `max_gb` (1e9 bytes) of models in runs/, the oldest are deleted, but never the baseline's, the last one of the
    incumbent, or this one.
    """
    folder = ledger.run_dir(record.number)
    try:
        is_model = record.is_keep or record.is_incumbent
        if is_model and record.evaluation:
            with suppress(FileNotFoundError):  # moved already: this is the second try after a kill
                (folder / WEIGHTS_NAME).rename(folder / MODEL_NAME)
        delete_weights(ledger, record.number)
        if not is_model:
            return
        models = sorted(path for path in ledger.runs_dir.glob(f"*/{MODEL_NAME}") if path.is_dir())
        sizes = {model: sum(file.lstat().st_size for file in model.iterdir()) for model in models}
        if sum(sizes.values()) <= max_gb * 1e9:
            return
        campaign = Campaign.of(ledger.records(), record.branch, record.rules_hash)
        spared = [each for each in (campaign.baseline, campaign.parent, campaign.incumbent_run, record) if each]
        folders = {ledger.run_dir(each.number) for each in spared}
        for model in models[1:-1]:
            if sum(sizes.values()) > max_gb * 1e9 and model.parent not in folders:
                remove_tree(model)
                del sizes[model]
    except OSError as error:
        raise disk_error(error, folder) from None


def delete_weights(ledger: Ledger, number: int) -> None:
    """Delete the weights that a run left."""
    for path in ledger.run_dir(number).glob(f"*{WEIGHTS_NAME}*"):  # a kill leaves partial ones
        remove_tree(path)
