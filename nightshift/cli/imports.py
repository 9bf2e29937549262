"""`nightshift import`: begin with a config of prime-rl, of autoresearch-rl, or of prime's hosted training."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import click

from nightshift.campaign.git import CONFIG_NAME, Repo
from nightshift.campaign.ledger import Ledger
from nightshift.cli import run
from nightshift.cli.output import print_lines
from nightshift.cli.shell import Command
from nightshift.config.allowlist import CARRIED, RATIO
from nightshift.config.import_config import (
    IMPORTED_NAME,
    Import,
    at,
    environment_name,
    environments,
    import_config,
    model_name,
)
from nightshift.config.rules import RULES_NAME
from nightshift.config.rules_toml import REVISIONS, chosen_in, rules_of
from nightshift.config.values import value_text
from nightshift.errors import UsageError
from nightshift.executors.gpus import num_gpus
from nightshift.files import disk_error, read_file, write_atomically
from nightshift.text import clean


@click.command("import", cls=Command)
@click.argument("file", type=click.Path(path_type=Path))
def import_command(file: Path) -> None:
    """Write train.toml from the config FILE, and the lines of rules.toml that carry over; then commit both.

    FILE is a config of prime-rl with today's names or older ones, autoresearch-rl's train.toml, or a config of prime's
    hosted training. Every key that train.toml cannot hold is listed with its owner. FILE is kept as imported.toml, for
    nightshift export --to rl.toml.
    """
    root = run.process_root()
    try:
        source = read_file(os.path.realpath(file))
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror or error}", "Name a config file.") from None
    imported = import_config(source, file.name)
    repo = Repo(root)
    with Ledger(root).controller():
        head = repo.head()
        if head.is_campaign:
            raise UsageError(f"{head.branch} is a campaign", "Import on your own branch: git switch main.")
        blobs = repo.files_at(head.commit) if head.commit else {}
        for name in (CONFIG_NAME, RULES_NAME):
            if name in blobs and repo.differs(name, blobs[name]):
                raise UsageError(f"{name} has changes that are not committed", f"Commit them, or: git checkout {name}.")
        rules, notes = carried_rules(imported, root, num_gpus(os.environ))
        files = {CONFIG_NAME: imported.train_toml(file.name), IMPORTED_NAME: source}
        if rules != read_file(root / RULES_NAME):
            files[RULES_NAME] = rules
        for name, data in files.items():
            try:
                write_atomically(root / name, data)
            except OSError as error:
                raise disk_error(error, root / name) from None
        where = "not committed: no branch is checked out"
        if head.branch and head.commit:
            committed = repo.commit_files(head, files, f"Import {clean(file.name, 80)}")
            where = f"committed as {(committed.commit or '')[:7]} on {head.branch}"
    print_lines([*imported.report(), *notes, f"wrote {', '.join(files)}; {where}", "next: uv run run.py --dry-run"])


def carried_rules(imported: Import, root: Path, gpu_count: int) -> tuple[bytes, list[str]]:
    """Return rules.toml with the environments and the model of an imported config, and notes for the user.

    The file stays as it is if this checkout does not have them. Then their ratios are removed from `imported`.
    """
    before = read_file(root / RULES_NAME)
    settings, notes = dict[str, str](), list[str]()
    names = list(dict.fromkeys(filter(None, (environment_name(entry) for _, entry in environments(imported.tree)))))
    model = model_name(imported.tree)
    for name in names:
        if not (root / "environments" / name / "pyproject.toml").is_file():
            notes.append(f"environment {name} is not in environments/; docs/environments.md says how to add it")
    if names and not notes:
        comment = "of this checkout: prompts and rewards may differ from theirs"
        settings["environments"] = f"{json.dumps(names)}  # {comment}"
    revision = REVISIONS.get(model)
    if revision or (model and (root / model).is_dir()):
        settings |= {"model": json.dumps(model), "revision": json.dumps(revision or "")}
    elif model:
        notes.append(f"model = {json.dumps(model)} needs its commit on the hub: write both into {RULES_NAME}")
    gpus = [f"{path} = {value_text(at(imported.tree, path))}" for path in CARRIED["gpus"] if at(imported.tree, path)]
    if gpus:
        notes.append(f"{', '.join(gpus)}: uv run run.py --gpus names the GPUs of an experiment")
    after = before.decode(errors="replace")
    for name, value in settings.items():
        after = _with_setting(after, name, value)
    try:
        rules_of(root, chosen_in(root, after.encode()), None, gpu_count)
    except UsageError as error:
        settings = {}
        notes.append(f"{RULES_NAME} stays as it is: {error}")
    if "environments" not in settings and any(path.startswith(f"{RATIO}.") for path in imported.values):
        imported.leave_out(RATIO, f"{RATIO} is not copied: {RULES_NAME} does not have these environments")
    data = after.encode() if settings else before
    return data, [*(f"{RULES_NAME}: {name} = {value}" for name, value in settings.items()), *notes]


def _with_setting(text: str, name: str, value: str) -> str:
    """Return the text of rules.toml with one top-level setting on a line of its own."""
    line = f"{name} = {value}"
    setting = re.compile(rf"(?m)^{name} *=.*$")
    if setting.search(text):
        return setting.sub(lambda match: line, text, count=1)
    model = re.search(r"(?m)^model *=.*\n", text)
    place = model.end() if model else 0
    return f"{text[:place]}{line}\n{text[place:]}"
