"""`nightshift export`: a campaign, or its model, for other programs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nightshift.campaign.ledger import Ledger
from nightshift.cli import run
from nightshift.cli.output import print_error, print_text
from nightshift.cli.progress import reporting
from nightshift.cli.shell import Command
from nightshift.errors import UsageError
from nightshift.files import remove_tree, write_atomically

if TYPE_CHECKING:
    from nightshift.report.data import Story

_ENDINGS = {"csv": ".csv", "wandb": "-wandb", "model": "-model", "rl.toml": "-rl.toml"}
_TEXTS = ("csv", "rl.toml")  # that go to stdout
_OF_ONE = {"model": "a model and its card", "rl.toml": "a config of prime-rl"}


@click.command("export", cls=Command)
@click.option("--to", "form", type=click.Choice([*_ENDINGS]), required=True, help="What opens it.")
@click.option("--output", help="File, or new folder; - writes csv or rl.toml to stdout. Default: in runs/export.")
@click.option("--branch", help="The campaign. Default: the branch checked out, else that of the last one.")
@click.option(
    "--experiment", type=click.IntRange(min=1), help="model, rl.toml: of another experiment than the incumbent."
)
@reporting("reading the records")
def export_command(form: str, output: str | None, branch: str | None, experiment: int | None) -> None:
    """Write a campaign as a table or as offline W&B runs; or its model or config.

    csv has a column for every key, and the texts of proposals and verdicts. wandb has keys, scores and steps, but no
    free text and no path. model is the incumbent's weights with a card that says how they were made and what is
    certified of them. rl.toml is the config that the incumbent trained with on prime-rl, which prime-rl accepts.
    """
    from nightshift.report.data import Story

    root = run.process_root()
    story = Story.of(Ledger(root), branch)
    if not story.records:
        raise UsageError("no experiment was run here yet", "Start one: uv run run.py.")
    if experiment is not None and form not in _OF_ONE:
        raise UsageError(f"--experiment {experiment} is for --to {' and '.join(_OF_ONE)}", "Leave it out.")
    if output == "-":
        if form not in _TEXTS:
            raise UsageError(f"--output -: {form} is no text", f"Name a place for it; {' and '.join(_TEXTS)} go there.")
        print_text(_text(form, story, root, experiment).decode().removesuffix("\n"))
    else:
        path = Path(output or root / "runs" / "export" / f"{story.tag}{_ENDINGS[form]}")
        if output is None:
            remove_tree(path)  # an earlier export
        path = _write(form, story, root, path, experiment)
        print_text(f"{path}: {_OF_ONE.get(form, f'{len(story.rows)} experiments')} of {story.branch}")
    for note in story.notes:
        print_error(note)


def _write(form: str, story: Story, root: Path, path: Path, experiment: int | None) -> Path:
    from nightshift.report.export.model import copy_model
    from nightshift.report.export.wandb_runs import write_runs

    if form == "wandb":
        return write_runs(story, path)
    if form == "model":
        return copy_model(story, experiment, path)
    target = path.resolve()
    if target.exists() and not target.is_file():
        raise UsageError(f"{target} is no regular file", "Name another place: --output PATH, or - for stdout.")
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(target, _text(form, story, root, experiment))
    return path


def _text(form: str, story: Story, root: Path, experiment: int | None) -> bytes:
    from nightshift.report.export.rl_toml import as_rl_toml
    from nightshift.report.export.table import as_csv

    return as_rl_toml(story, experiment, root, os.environ) if form == "rl.toml" else as_csv(story)
