"""`nightshift import`: begin with a config of prime-rl, of autoresearch-rl, or of prime's hosted training."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import click

from nightshift.campaign.git import CONFIG_NAME, Repo
from nightshift.campaign.ledger import Ledger
from nightshift.cli import run
from nightshift.cli.output import print_text
from nightshift.cli.shell import Command
from nightshift.config.allowlist import CARRIED, RATIO, value_text
from nightshift.config.import_config import (
    IMPORTED_NAME,
    Import,
    environment_name,
    environments,
    import_config,
    model_name,
)
from nightshift.config.rules import RULES_NAME
from nightshift.config.rules_toml import NAME, REVISIONS, chosen_in, rules_of
from nightshift.config.train_toml import read_source
from nightshift.errors import UsageError
from nightshift.executors.gpus import num_gpus
from nightshift.files import read_file, write_atomically
from nightshift.text import clean


@click.command("import", cls=Command)
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
def import_command(file: Path) -> None:
    """Write train.toml from the config FILE, and the lines of rules.toml that carry over; commit what changed.

    FILE is a config of prime-rl with today's names or older ones, autoresearch-rl's train.toml, or a config of prime's
    hosted training. Every key that train.toml cannot hold is listed with its owner. FILE is kept as imported.toml.
    """
    root = run.process_root()
    source = file.read_bytes()
    imported = import_config(source, file.name)
    repo = Repo(root)
    ledger = Ledger(root)
    with ledger.lock():
        head = repo.head()
        if any(record.branch == head.branch for record in ledger.records()):
            raise UsageError(f"{head.branch} is a campaign", "Import on your own branch: git switch BRANCH.")
        blobs = repo.files_at(head.commit) if head.commit else {}
        for name in (CONFIG_NAME, RULES_NAME, IMPORTED_NAME):
            if repo.differs(name, blobs[name]) if name in blobs else os.path.lexists(root / name):
                raise UsageError(f"{name} has changes that are not committed", "Commit them, or move the file away.")
        rules, notes = carried_rules(imported, root, num_gpus(os.environ))
        files = {CONFIG_NAME: imported.train_toml(file.name), IMPORTED_NAME: source, RULES_NAME: rules}
        files = {name: data for name, data in files.items() if name not in blobs or read_file(root / name) != data}
        for name, data in files.items():
            write_atomically(root / name, data)
        outcome = f"wrote {', '.join(files)}; "
        if not files:
            outcome = "nothing changed: this config was imported before"
        elif head.branch and head.commit:
            committed = repo.commit_files(head, files, f"Import {clean(file.name, 80)}")
            outcome += f"committed as {(committed.commit or '')[:7]} on {head.branch}"
        else:
            outcome += "not committed: no branch is checked out"
    print_text(*imported.report(), *notes, outcome, "next: uv run run.py --dry-run")


def carried_rules(imported: Import, root: Path, gpu_count: int) -> tuple[bytes, list[str]]:
    """Return rules.toml with the environments and the model of an imported config, and notes for the user.

    The file stays as it is if this checkout does not have them. Then their ratios are removed from `imported`.
    """
    import tomlkit

    before = read_source(root / RULES_NAME)
    settings, notes = dict[str, Any](), list[str]()
    names = [*dict.fromkeys(filter(None, (environment_name(entry) for _, entry in environments(imported.tree))))]
    model = model_name(imported.tree)
    for name in names:
        if not (NAME.fullmatch(name) and (root / "environments" / name / "pyproject.toml").is_file()):
            notes.append(
                f"environment {clean(name, 80)} is not in environments/; docs/environments.md says how to add it"
            )
    if names and not notes:
        settings["environments"] = tomlkit.item(names)
        settings["environments"].comment("of this checkout: prompts and rewards may differ from theirs")
    revision = REVISIONS.get(model)
    if revision or (model and (root / model).is_dir()):
        settings |= {"model": model, "revision": revision or ""}
    elif model:
        notes.append(f"model = {value_text(model)} needs its commit on the hub: write both into {RULES_NAME}")
    data = before
    try:
        chosen_in(root, before)
        document = tomlkit.parse(before.decode())
        document.update(settings)
        data = tomlkit.dumps(document).encode() if settings else before
        rules_of(root, chosen_in(root, data), None, gpu_count)
    except UsageError as error:
        settings, data = {}, before
        notes.append(f"{RULES_NAME} stays as it is: {error}")
    if "environments" not in settings and any(path.startswith(f"{RATIO}.") for path in imported.values):
        imported.leave_out(RATIO, f"{RATIO} is not copied: {RULES_NAME} does not have these environments")
    if "model" in settings:
        imported.left_out = [p for p in imported.left_out if ".".join(p.path) not in CARRIED["model"]]
    return data, [*(f"{RULES_NAME}: {name} = {json.dumps(value)}" for name, value in settings.items()), *notes]
