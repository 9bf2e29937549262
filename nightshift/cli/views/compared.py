"""What `nightshift diff` and `certify` say."""

from __future__ import annotations

from collections.abc import Sequence

from nightshift.campaign.ledger import Ledger
from nightshift.campaign.verify import Findings
from nightshift.config.rules import Rules
from nightshift.config.train_toml import Change, diff
from nightshift.engines.base import Check
from nightshift.engines.doctor import is_ready
from nightshift.experiment.certify import Comparison
from nightshift.report.data import shown_campaign
from nightshift.report.diff import Version, kept_chain
from nightshift.report.experiment_view import Experiment, told
from nightshift.report.views import Part, View


class Verified(View, kw_only=True, tag="verify"):
    """What differs from the chain: `problems` are none of the harness's doing, `notes` may be. `chain`: its head."""

    chain: str
    num_lines: int
    problems: tuple[str, ...]
    notes: tuple[str, ...]


class Checked(Part, kw_only=True):
    """One thing that was looked at, for the readiness of an `engine` or of `all`: what is there, or the problem with
    its fix."""

    engine: str
    name: str
    detail: str | None
    problem: str | None


class Doctor(View, kw_only=True, tag="doctor"):
    """Whether an experiment could start here, on the engine that was asked for or that this machine would use."""

    engine: str
    rules_name: str
    is_ready: bool
    checks: tuple[Checked, ...]


def verified(found: Findings) -> Verified:
    """Of a comparison with the chain."""
    return Verified(
        chain=found.head, num_lines=found.num_lines, problems=tuple(found.problems), notes=tuple(found.notes)
    )


def examined(found: Sequence[Check], rules: Rules) -> Doctor:
    """Of what doctor looked at."""
    return Doctor(
        engine=rules.engine,
        rules_name=rules.name,
        is_ready=is_ready(found, rules.engine),
        checks=tuple(
            Checked(
                engine=each.engine,
                name=each.name,
                detail=each.detail or None,
                problem=None if each.ok else str(each.problem),
            )
            for each in found
        ),
    )


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
