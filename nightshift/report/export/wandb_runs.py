"""Offline runs of Weights & Biases, one an experiment: `wandb sync` sends them, when and where the person says."""

from pathlib import Path
from typing import Any

from nightshift.campaign.records import Record
from nightshift.config.train_toml import spelled
from nightshift.errors import EngineError
from nightshift.files import remove_tree, whole_folder
from nightshift.report.export.story import Row, Story, measured, scores
from nightshift.text import clean

FIX = "Install the extra: uv run --extra wandb nightshift export --to wandb."


def write_runs(story: Story, folder: Path) -> Path:
    """Write a new folder; returns `folder`/wandb. EngineError where the package is not installed, or fails.

    These fields of an experiment are written, and no others: number, outcome, parent, hash of the rules, the changed
    keys as notes, the config as the allow-list reads it, scores and figures, and the steps of its run. None of them
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
            for record, each in story.rows():
                _write_run(wandb, settings, story, record, each, partial)
        except wandb.Error as error:
            raise EngineError(f"wandb cannot write its runs: {error}", "Try again; csv needs no package.") from None
        finally:
            wandb.teardown()
        for path in (partial / "wandb").iterdir():
            for left in (path,) if path.is_symlink() else (path / "logs", path / "tmp"):
                remove_tree(left)
    return folder / "wandb"


def _write_run(wandb: Any, settings: Any, story: Story, record: Record, each: Row, folder: Path) -> None:
    with wandb.init(
        project=f"nightshift-{story.tag}",
        id=f"{story.tag}-{each['number']:04d}",
        name=f"{each['number']:04d} {each['outcome']}",
        group=story.tag,
        tags=[each["outcome"]],
        notes=clean(each["changes"]),
        dir=folder,
        config=_config(story, each),
        settings=settings,
    ) as run:
        run.define_metric("training_step")
        run.define_metric("*", step_metric="training_step")
        for step in story.steps(record):
            run.log(measured(step) | {"training_step": step.step})
        run.summary.update({"outcome": each["outcome"], "experiment": each["number"], **scores(record, each)})


def _config(story: Story, each: Row) -> dict[str, Any]:
    config = story.configs.get(each["number"])
    values = config.resolved if config else {}
    plain = {path: value if isinstance(value, bool | int | float) else spelled(value) for path, value in values.items()}
    return plain | {"rules": clean(each["rules"]), "parent": each["parent"]}
