"""The commands that carry a campaign away: export and model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nightshift import command, console
from nightshift.campaign.ledger import Ledger
from nightshift.errors import UsageError
from nightshift.files import disk_error, write_atomically
from nightshift.live import at_work
from nightshift.shell import Command

if TYPE_CHECKING:
    from nightshift.export.story import Story

_FORMS = {"csv": ".csv", "optuna": ".journal", "bundle": ".tar.gz", "wandb": "-wandb", "tensorboard": "-tensorboard"}
_TEXTS = ("csv", "optuna")  # that go to stdout
_BRANCH = click.option("--branch", help="The campaign. Default: the branch checked out, else that of the last one.")


@click.command("export", cls=Command)
@click.option("--to", "form", type=click.Choice([*_FORMS]), required=True, help="What opens it.")
@click.option("--output", help="File, or new folder; - writes csv or optuna to stdout. Default: in runs/export.")
@_BRANCH
@at_work("reading the records")
def export_command(form: str, output: str | None, branch: str | None) -> None:
    """Write a campaign as a table, an Optuna journal, offline W&B runs, TensorBoard events or a bundle to reproduce.

    csv has a column for every key; optuna a study that optuna-dashboard opens; bundle the records, configs, certificate
    and chain, and `nightshift reproduce` trains its winner again in another clone.
    """
    from nightshift.export.story import Story
    from nightshift.git.repo import Repo

    root = command.process_root()
    story = Story.of(Ledger(root), branch, Repo(root).head().branch)
    if output == "-":
        if form not in _TEXTS:
            raise UsageError(f"--output -: {form} is no text", f"Name a place for it; {' and '.join(_TEXTS)} go there.")
        console.print_json(_bytes(form, story, root, "").decode().removesuffix("\n"))
    else:
        path = _written(form, story, root, None if output is None else Path(output))
        console.print_lines(
            [f"{os.fspath(path)}: {len(story.experiments)} experiments of {story.shown.branch or 'no branch'}"]
        )
    for note in story.shown.notes:
        console.print_error(note)


def _written(form: str, story: Story, root: Path, named: Path | None) -> Path:
    """Where it was written. In runs/export, where agents write, no link is followed; where a person says, each is."""
    path = named or root / "runs" / "export" / f"{story.tag}{_FORMS[form]}"
    if named is None and path.parent.is_symlink():
        raise UsageError(f"{path.parent} is a link", "Name another place: --output PATH.")
    if form == "wandb":
        from nightshift.export.private import Private
        from nightshift.export.wandb_runs import write_runs

        return write_runs(story, path, Private(root, os.environ), is_mine=named is None)
    if form == "tensorboard":
        from nightshift.export.event_files import write_events

        return write_events(story, path, is_mine=named is None)
    _write(path if named is None else Path(os.path.realpath(path)), _bytes(form, story, root, path.name))
    return path


def _bytes(form: str, story: Story, root: Path, name: str) -> bytes:
    from nightshift.export import archive, optuna_journal, private, table

    if form == "csv":
        return table.as_csv(story)
    if form == "optuna":
        return optuna_journal.as_journal(story)
    return archive.as_archive(story, root, private.Private(root, os.environ), name)


def _write(path: Path, data: bytes) -> None:
    if path.is_dir():
        raise UsageError(f"{path} is a folder", "Name a file: --output PATH.")
    if path.exists() and not path.is_symlink() and not path.is_file():
        raise UsageError(f"{path} is no regular file", "Name another place: --output PATH, or - for stdout.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, data)
    except OSError as error:
        raise disk_error(error, path) from None


@click.command("model", cls=Command)
@click.option("--to", "target", type=click.Path(path_type=Path), required=True, help="A new folder.")
@click.option("--experiment", type=click.IntRange(min=1), help="Another one than the incumbent.")
@_BRANCH
@at_work("copying the model")
def model_command(target: Path, experiment: int | None, branch: str | None) -> None:
    """Copy the incumbent's weights, with a card that says how they were made and what is certified of them."""
    from nightshift.export.model import copy_model
    from nightshift.export.private import Private
    from nightshift.export.story import Story
    from nightshift.git.repo import Repo

    root = command.process_root()
    story = Story.of(Ledger(root), branch, Repo(root).head().branch)
    console.print_lines(copy_model(story, experiment, target, Private(root, os.environ)))
