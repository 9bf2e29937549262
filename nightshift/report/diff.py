"""Compare two train.toml key by key. Order, spelling and comments are no changes."""

from __future__ import annotations

from nightshift.campaign.commits import incumbent_config
from nightshift.campaign.git import CONFIG_NAME, Repo
from nightshift.campaign.ledger import Ledger
from nightshift.config.allowlist import quoted, shorten
from nightshift.config.train_toml import Change, Config, diff, parse, read_source
from nightshift.errors import UsageError
from nightshift.files import Document
from nightshift.report.data import Story
from nightshift.text import counted

Version = tuple[str, Config]  # a train.toml with its name


class Diff(Document, frozen=True, kw_only=True, tag="diff"):
    """The keys that train differently in two train.toml."""

    old: str
    new: str
    changes: tuple[Change, ...]

    @classmethod
    def of(cls, old: Version, new: Version) -> Diff:
        return cls(old=old[0], new=new[0], changes=diff(old[1], new[1]))

    def __str__(self) -> str:
        lines = [change.line for change in self.changes] or ["no key differs: both train the same"]
        return "\n".join([f"{self.old} -> {self.new}", *(f"  {line}" for line in lines)])


def find(name: str, ledger: Ledger) -> Version:
    """Return the train.toml of `name`: an experiment's number, a commit, baseline, incumbent or working. UsageError for
    another name, ConfigError if the file is not valid."""
    repo, number = Repo(ledger.root), int(name) if name.isdecimal() else 0
    if name == "working":
        label, source = "working file", read_source(ledger.root / CONFIG_NAME)
    elif name in ("baseline", "incumbent"):
        branch = repo.head().branch or None  # None, for a detached HEAD: the branch of the last experiment
        campaign = Story.of(ledger, branch).campaign
        if (first := campaign.baseline) is None:
            raise UsageError("the campaign has no baseline yet", "Run the first experiment: uv run run.py.")
        label, source = f"baseline (experiment {first.number:04d})", ledger.source(first.number)
        if name == "incumbent":
            unread = f"; {campaign.unread}" if campaign.unread else ""
            label = f"incumbent ({first.number:04d} with {counted(len(campaign.kept), 'kept change')}{unread})"
            source = incumbent_config(parse(source, label), campaign.kept).source
    elif ledger.run_dir(number).is_dir():
        label, source = f"experiment {number:04d}", ledger.source(number)
    elif name.isprintable() and not name.startswith("-") and (committed := repo.config_at(name)) is not None:
        label, source = f"commit {name}", committed
    else:
        raise UsageError(
            f"{quoted(shorten(name, 60))} is neither an experiment nor a commit with a {CONFIG_NAME}",
            "Name an experiment (42), a commit, baseline, incumbent or working.",
        )
    return label, parse(source, label)
