"""What `nightshift diff`, `certify` and `transfer` say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Literal

from nightshift.campaign.ledger import Ledger
from nightshift.certify.certificate import Certificate, Comparison, Difference, verdict
from nightshift.certify.reproduce import Answer, Reproduction
from nightshift.certify.transfer import Transfer
from nightshift.report.data import shown_campaign
from nightshift.report.diff import Version, kept_chain
from nightshift.train_toml.config import Change, diff
from nightshift.views import Part, View
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


class Compared(Part, kw_only=True):
    """Incumbent minus baseline by fresh runs of both: fractions 0..1, `interval` of 95 %. `num_seeds`: runs that were
    evaluated, by side; `strict_scores`: of baseline and incumbent; `environments`: of each, where there are several."""

    created: str
    branch: str
    rules: str
    verdict: str
    baseline_score: float
    incumbent_score: float
    difference: float
    stderr: float | None
    df: float | None
    interval: tuple[float, float]
    num_seeds: dict[str, int]
    num_examples: int
    estimator: str
    strict_scores: tuple[float, float] | None
    environments: tuple[Difference, ...]
    notes: tuple[str, ...]


class Certified(View, kw_only=True, tag="certify"):
    """`sealed_looks` counts all looks at the sealed set up to this one; `chain`: its head when the runs were made."""

    comparison: Compared
    sealed_looks: int
    chain: str


class Elsewhere(Part, kw_only=True):
    """One question of `transfer`. `here`: what the campaign believes of the same two; `unused_keys` of the incumbent's
    change nothing there."""

    comparison: Compared
    to: str
    budget_seconds: float
    model: str
    model_here: str
    incumbent: int
    here: float
    here_interval: tuple[float, float]
    unused_keys: tuple[str, ...]


class Transferred(View, kw_only=True, tag="transfer"):
    """The verdicts are Holm's among the questions of one command: transfers, does not, not told apart."""

    answers: tuple[Elsewhere, ...]


class Reproduced(View, kw_only=True, tag="reproduce"):
    """`claimed` and its interval are the bundle's, by its certificate or a belief (`source`). `is_inside`: the gain
    that was measured here lies in it. `answer`: `holds` where the two gains differ by no more than both intervals allow
    together and the interval measured here lies above 0, `open` where that has 0 in it, else `does not hold`."""

    comparison: Compared
    bundle_sha256: str
    incumbent: int
    source: Literal["certified", "believed"]
    claimed: float
    claimed_interval: tuple[float, float]
    is_inside: bool
    answer: Answer


class Planned(View, kw_only=True, tag="plan"):
    """What certify, transfer or reproduce would do with --dry-run: lines for people, `name: value`."""

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


def comparison(found: Comparison, verdict: str) -> Compared:
    """Of fresh runs."""
    same = {field.name: getattr(found, field.name) for field in fields(Comparison) if field.name != "rules_hash"}
    return Compared(**same, rules=found.rules_hash, verdict=verdict)


def certified(found: Certificate) -> Certified:
    """Of a certificate."""
    return Certified(comparison=comparison(found, verdict(found)), sealed_looks=found.sealed_looks, chain=found.chain)


def transferred(answers: Sequence[Transfer]) -> Transferred:
    """Of the answers to the questions of one command."""
    found = (Elsewhere(comparison=comparison(each, each.verdict), **_own(each, "verdict")) for each in answers)
    return Transferred(answers=tuple(found))


def reproduced(found: Reproduction) -> Reproduced:
    """Of a reproduction."""
    return Reproduced(comparison=comparison(found, verdict(found)), **_own(found))


def _own(found: Comparison, *without: str) -> dict[str, Any]:
    """What it says beside the comparison that it is."""
    shared = {field.name for field in fields(Comparison)}
    return {f.name: getattr(found, f.name) for f in fields(found) if f.name not in (*shared, *without)}
