"""What `nightshift diff` and `certify` say."""

from __future__ import annotations

from nightshift.campaign.ledger import Ledger
from nightshift.certify.certify import Comparison
from nightshift.report.data import shown_campaign
from nightshift.report.diff import Version, kept_chain
from nightshift.train_toml.config import Change, diff
from nightshift.views import View
from nightshift.views.experiment import Experiment, told


class Diff(View, kw_only=True, tag="diff"):
    """What trains otherwise in two train.toml, by key; `is_same_file`: byte for byte."""

    old: str
    new: str
    is_same_file: bool
    changes: tuple[Change, ...]


class Chain(View, kw_only=True, tag="chain"):
    """`nightshift diff --chain`: the baseline and the experiments that the incumbent stands on."""

    branch: str
    experiments: tuple[Experiment, ...]


class Certified(View, kw_only=True, tag="certify"):
    """`nightshift certify`: one comparison, or one for each environment that was asked for."""

    comparisons: tuple[Comparison, ...]


class Planned(View, kw_only=True, tag="plan"):
    """What certify would do with --dry-run: lines for people, `name: value`."""

    command: str
    lines: tuple[str, ...]


def compared(old: Version, new: Version) -> Diff:
    """Of two versions of train.toml."""
    (old_label, old_config), (new_label, new_config) = old, new
    is_same = old_config.source == new_config.source
    return Diff(old=old_label, new=new_label, is_same_file=is_same, changes=diff(old_config, new_config))


def chain(ledger: Ledger, branch: str) -> Chain:
    """UsageError where nothing was measured on the branch."""
    standing = {each.number for each in kept_chain(ledger, branch)}
    found = shown_campaign(ledger, branch, branch)
    records = [record for record in found.records if record.number in standing]
    return Chain(branch=branch, experiments=told(records, found.campaign))
