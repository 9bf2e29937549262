"""train.toml compared key by key: experiments, commits, baseline, incumbent and the working file.

What counts is what trains: order, spelling and comments are no changes of a key. Texts of records and files are
lines as they stand there: who prints them makes them printable.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from nightshift.campaign.git import CONFIG_NAME, Repo
from nightshift.campaign.ledger import Ledger
from nightshift.campaign.standing import Expected
from nightshift.config.toml_text import read_source
from nightshift.config.train_toml import Change, Config, diff, parse
from nightshift.config.values import quoted, shorten
from nightshift.errors import UsageError
from nightshift.files import Document
from nightshift.report.data import Experiment, gather
from nightshift.report.text import expected, score

WORKING, BASELINE, INCUMBENT = "working", "baseline", "incumbent"

Version = tuple[str, Config]  # one train.toml with the words for it


class Diff(Document, frozen=True, kw_only=True, tag="diff"):
    """What trains otherwise in two train.toml, by key. `is_same_file`: byte for byte."""

    old: str
    new: str
    is_same_file: bool
    changes: tuple[Change, ...]

    @classmethod
    def of(cls, old: Version, new: Version) -> Diff:
        """Compare two versions."""
        (old_label, old_config), (new_label, new_config) = old, new
        is_same_file = old_config.source == new_config.source
        changes = diff(old_config, new_config)
        return cls(old=old_label, new=new_label, is_same_file=is_same_file, changes=changes)

    def __str__(self) -> str:
        """A title, then a line for each key that trains otherwise."""
        same = "the same bytes" if self.is_same_file else "no key differs: both train the same"
        lines = [change.line for change in self.changes] or [same]
        return "\n".join([f"{self.old} -> {self.new}", *(f"  {line}" for line in lines)])


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """One experiment of a chain. `effect` is that of its change as believed now, `score` that of the baseline."""

    number: int
    description: str
    score: float | None
    effect: Expected | None
    changes: tuple[Change, ...]


class Chain(Document, frozen=True, kw_only=True, tag="chain"):
    """`nightshift diff --chain`: the baseline and the kept experiments that the incumbent stands on."""

    branch: str
    experiments: tuple[Link, ...]

    @classmethod
    def of(cls, ledger: Ledger, branch: str) -> Chain:
        """The chain of a branch. UsageError where nothing was measured."""
        links = [
            Link(
                number=e.number,
                description=e.record.proposal.description,
                score=e.record.score if e.is_baseline else None,
                effect=e.expected,
                changes=e.changes,
            )
            for e in kept_chain(ledger, branch)
        ]
        return cls(branch=branch, experiments=tuple(links))

    def __str__(self) -> str:
        """Each experiment with what is expected of it now and what it changed."""
        lines = []
        for place, link in enumerate(self.experiments):
            told = f"baseline {score(link.score)}" if place == 0 else expected(link.effect)
            lines += [f"{link.number:04d}  {told}  {link.description}", *(f"      {c.line}" for c in link.changes)]
        return "\n".join(lines)


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
