"""train.toml compared key by key: experiments, commits, baseline, incumbent and the working file.

What counts is what trains: order, spelling and comments are no changes of a key. Texts of records and files are
lines as they stand there: who prints them makes them printable.
"""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from nightshift.campaign.commits import incumbent_config
from nightshift.campaign.git import CONFIG_NAME, Repo
from nightshift.campaign.ledger import Ledger
from nightshift.campaign.records import Effect
from nightshift.config.toml_text import read_source
from nightshift.config.train_toml import Change, Config, diff, parse
from nightshift.config.values import quoted, shorten
from nightshift.errors import UsageError
from nightshift.files import Document
from nightshift.report.data import Experiment, Kept, Morning, counted, gather
from nightshift.report.text import score, share

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
    """One kept change. `name`: of its first experiment, or of the user's commit; `effect`: as it is believed now."""

    name: str
    description: str
    support: str
    effect: Effect
    p_helps: float
    changes: tuple[Change, ...]

    @classmethod
    def of(cls, kept: Kept) -> Link:
        """The link of a kept change."""
        return cls(
            name=kept.change.name,
            description=kept.experiment.record.proposal.description if kept.experiment else "",
            support=kept.support,
            effect=kept.effect,
            p_helps=kept.effect.p_helps,
            changes=kept.changes,
        )

    def __str__(self) -> str:
        """A title, then a line for each key."""
        lines = "; ".join(change.line for change in self.changes)
        said = "" if self.description.endswith(lines) else self.description  # no more than the keys, or a search's name
        title = f"{self.name}  {self.effect}, P(it helps) {share(self.p_helps)}, {self.support}  {said}"
        return "\n".join([title.rstrip(), *(f"      {change.line}" for change in self.changes)])


class Chain(Document, frozen=True, kw_only=True, tag="chain"):
    """`nightshift diff --chain`: the baseline's experiment and its score, and the kept changes, the most certain first;
    with `--at-least` those with at least so high a P(it helps). `num_left_out`: the others."""

    branch: str
    baseline: int
    score: float | None
    changes: tuple[Link, ...]
    num_left_out: int = 0

    @classmethod
    def of(cls, ledger: Ledger, branch: str, at_least: float = 0.0) -> Chain:
        """The kept changes of a branch. UsageError where nothing was measured."""
        morning, baseline = measured(ledger, branch)
        links = tuple(Link.of(kept) for kept in morning.kept if kept.effect.p_helps >= at_least)
        return cls(
            branch=branch,
            baseline=baseline.number,
            score=baseline.record.score,
            changes=links,
            num_left_out=len(morning.kept) - len(links),
        )

    def __str__(self) -> str:
        """Each change with its effect as believed now, P(it helps) and its keys."""
        lines = [f"{self.baseline:04d}  baseline {score(self.score)}", *map(str, self.changes)]
        left_out = f"{counted(self.num_left_out, 'kept change')} with a lower P(it helps) left out"
        return "\n".join([*lines, *([left_out] if self.num_left_out else [])])


def measured(ledger: Ledger, branch: str) -> tuple[Morning, Experiment]:
    """What the page says of a branch, and its baseline. UsageError where nothing was measured."""
    morning = gather(ledger, branch, branch)
    if morning.baseline is None:
        raise UsageError(f"branch {branch} has no baseline yet", "Run the first experiment: uv run run.py.")
    return morning, morning.baseline


def find(name: str, root: Path, ledger: Ledger, repo: Repo) -> Version:
    """The train.toml that `name` means: 42, a commit, baseline, incumbent or working.

    Raises UsageError for another name, ConfigError where it names no valid train.toml.
    """
    number = int(name) if re.fullmatch(r"[0-9]{1,9}", name) else 0
    if name == WORKING:
        label, source = "working file", read_source(root / CONFIG_NAME)
    elif name in (BASELINE, INCUMBENT):
        morning, first = measured(ledger, repo.head().branch)
        label, source = f"baseline (experiment {first.number:04d})", ledger.source(first.number)
        if name == INCUMBENT:
            label = f"incumbent ({first.number:04d} with {counted(len(morning.kept), 'kept change')})"
            source = incumbent_config(parse(source, label), morning.campaign.kept).source
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
