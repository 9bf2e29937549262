"""Offline runs of Weights & Biases, one an experiment: `wandb sync` sends them, when and where the person says."""

from pathlib import Path
from typing import Any

import msgspec

from nightshift.campaign.metrics import METRICS_NAME, read_steps
from nightshift.campaign.records import Record
from nightshift.campaign.results import UNDECIDED, Row
from nightshift.errors import EngineError
from nightshift.files import remove_tree, whole_folder
from nightshift.report.data import Story
from nightshift.report.export.table import values
from nightshift.text import clean

FIX = "Install the extra: uv run --extra wandb nightshift export --to wandb."


def write_runs(story: Story, folder: Path) -> Path:
    """Write a new folder; returns `folder`/wandb. EngineError if the package is not installed.

    These fields of an experiment are written, and no others: number, verdict, now, parent, hash of the rules, the
    changed keys as notes, the config as the allow-list reads it, its numbers, and the steps of its run. None of them
    can contain a path of this machine or an environment variable. Free text (description, why, health) and the
    package's own logs, which contain paths, are left out.
    """
    try:
        import wandb
    except ImportError:
        raise EngineError("the package wandb is not installed", FIX) from None
    settings = wandb.Settings(
        mode="offline", silent=True, console="off", disable_git=True, disable_code=True, disable_job_creation=True,
        save_code=False, x_disable_stats=True, x_disable_meta=True, x_disable_machine_info=True,
        x_save_requirements=False, host="nightshift", username="", email="", program="nightshift",
    )  # fmt: skip
    with whole_folder(folder) as partial:
        try:
            for record, row in zip(story.records, story.rows, strict=True):
                _write_run(wandb, settings, story, record, row, partial)
        except wandb.Error as error:
            raise EngineError(f"wandb wrote no runs: {error}") from None
        finally:
            wandb.teardown()
        for path in (partial / "wandb").iterdir():
            for left in (path,) if path.is_symlink() else (path / "logs", path / "tmp"):
                remove_tree(left)
    return folder / "wandb"


def _write_run(wandb: Any, settings: Any, story: Story, record: Record, row: Row, folder: Path) -> None:
    verdict = row.verdict or UNDECIDED
    numbers = {name: value for name, value in row.cells.items() if isinstance(value, int | float)}
    with wandb.init(
        project=f"nightshift-{story.tag}",
        id=f"{story.tag}-{row.number:04d}",
        name=f"{row.number:04d} {row.status}",
        group=story.tag,
        tags=[*filter(None, (verdict, row.now))],
        notes=clean(", ".join(row.changes)),
        dir=folder,
        config=values(story, row) | {"rules": row.rules, "parent": row.parent},
        settings=settings,
    ) as run:
        run.define_metric("training_step")
        run.define_metric("*", step_metric="training_step")
        for step in read_steps(story.ledger.run_dir(row.number) / METRICS_NAME) if record.result else []:
            fields = msgspec.to_builtins(step)
            rewards = {f"rewards/{name}": value for name, value in (fields.pop("rewards") or {}).items()}
            fields["training_step"] = fields.pop("step")
            run.log({name: value for name, value in (fields | rewards).items() if value is not None})
        run.summary.update({"verdict": verdict, "now": row.now, **numbers})
