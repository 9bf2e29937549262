"""train.toml compared key by key: experiments, commits, baseline, incumbent and the working file.

What counts is what trains: order, spelling and comments are no changes of a key. Texts of records and files are
lines as they stand there: who prints them makes them printable.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from nightshift.campaign.git import CONFIG_NAME, Repo
from nightshift.campaign.ledger import Ledger
from nightshift.config.toml_text import read_source
from nightshift.config.train_toml import Config, diff, parse
from nightshift.config.values import quoted, shorten
from nightshift.errors import UsageError
from nightshift.report.data import Experiment, gather
from nightshift.report.text import expected, score

WORKING, BASELINE, INCUMBENT = "working", "baseline", "incumbent"

Version = tuple[str, Config]  # one train.toml with the words for it


def kept_chain(ledger: Ledger, branch: str) -> Sequence[Experiment]:
    """The baseline and the keeps that the incumbent of a branch stands on. UsageError where nothing was measured."""
    chain = gather(ledger, branch, branch).chain
    if not chain:
        raise UsageError(f"branch {branch} has no baseline yet", "Run the first experiment: uv run run.py.")
    return chain


def find(name: str, root: Path, ledger: Ledger, repo: Repo) -> Version:
    """The train.toml that `name` means: 42, a commit, baseline, incumbent or working.

    Raises UsageError for another name, ConfigError where it names no valid train.toml.
    """
    number = int(name) if re.fullmatch(r"[0-9]{1,9}", name) else 0
    if name == WORKING:
        label, source = "working file", read_source(root / CONFIG_NAME)
    elif name in (BASELINE, INCUMBENT):
        number = kept_chain(ledger, repo.head().branch)[0 if name == BASELINE else -1].number
        label, source = f"{name} (experiment {number:04d})", ledger.source(number)
    elif ledger.run_dir(number).is_dir():
        label, source = f"experiment {number:04d}", ledger.source(number)
    elif name.isprintable() and not name.startswith("-") and (committed := repo.config_at(name)) is not None:
        label, source = f"commit {name}", committed
    else:
        raise UsageError(
            f"{quoted(shorten(name, 60))} is no experiment and no commit that holds a {CONFIG_NAME}",
            f"Give an experiment (42), a commit, {BASELINE}, {INCUMBENT} or {WORKING}.",
        )
    return label, parse(source, label)


def comparison(old: Version, new: Version) -> list[str]:
    """A title, then a line for each key that trains otherwise."""
    (old_label, old_config), (new_label, new_config) = old, new
    same = "the same bytes" if old_config.source == new_config.source else "no key differs: both train the same"
    lines = [change.line for change in diff(old_config, new_config)] or [same]
    return [f"{old_label} -> {new_label}", *(f"  {line}" for line in lines)]


def story(chain: Sequence[Experiment]) -> list[str]:
    """The kept experiments of a campaign, each with what is expected of it now and what it changed."""
    lines = []
    for e in chain:
        told = f"baseline {score(e.record.score)}" if e.is_baseline else expected(e.expected)
        lines += [f"{e.number:04d}  {told}  {e.record.proposal.description}", *(f"      {c.line}" for c in e.changes)]
    return lines
