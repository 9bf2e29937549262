"""What page and exports show of one campaign, from the ledger and the files of its runs. Not measured is None."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from nightshift.agents.history import load_configs
from nightshift.campaign.campaign import Campaign
from nightshift.campaign.git import CAMPAIGN_PREFIX, Repo
from nightshift.campaign.ledger import Ledger
from nightshift.campaign.metrics import Step
from nightshift.campaign.records import (
    JOB_NAME,
    NIGHT_NAME,
    Comparison,
    Job,
    Plan,
    Record,
    Settings,
    Standing,
)
from nightshift.campaign.results import UNDECIDED, Counts, Row, verdict_of
from nightshift.campaign.waits import NightStatus
from nightshift.config.rules import Rules
from nightshift.config.train_toml import Config
from nightshift.errors import UsageError
from nightshift.files import read_json
from nightshift.text import counted

MEASURED = ("baseline", "keep", "discard", "re-run")  # verdicts
# The curves of a run: names in metrics.jsonl, and titles.
CURVES = {
    "reward_mean": "reward",
    "entropy": "entropy",
    "completion_tokens_mean": "length, tokens",
    "grad_norm": "gradient norm",
    "kl": "KL",
    "truncated_share": "truncated share",
}
BY_USER = "reverted by you"  # a fate
_MAX_POINTS = 48
_MAX_DETAILS = 75
# The times of a step in metrics.jsonl, by use. The trainer is idle while it waits for rollouts from the other GPU.
_USES = {
    "generation": "generate_seconds",
    "training": "train_seconds",
    "weight transfer": "broadcast_seconds",
    "trainer idle": "wait_for_rollouts_seconds",
}


@dataclass(frozen=True)
class Experiment:
    """One row of the page. `fate`: why the incumbent does not contain its kept change any more, else ""."""

    record: Record
    row: Row
    fate: str

    @property
    def number(self) -> int:
        return self.record.number

    @property
    def verdict(self) -> str:
        return self.row.verdict or UNDECIDED

    @property
    def standing(self) -> Standing | None:
        """The estimates after this experiment; None if it was not measured."""
        return self.record.judgement.standing if self.record.judgement else None

    @property
    def kind(self) -> str:
        """Return how the experiment is drawn: `keep` if the incumbent has its change, `left` if the incumbent once had
        it, else the verdict."""
        return "keep" if self.row.is_kept else "left" if self.row.now else self.verdict


@dataclass(frozen=True)
class Morning:
    """What the page shows. `certificate`: of this incumbent. `obsolete`: the last one, if of another incumbent."""

    story: Story
    standing: Standing | None  # the current estimates; None before the baseline
    experiments: tuple[Experiment, ...]
    certificate: Comparison | None
    obsolete: Comparison | None
    night: NightStatus | None = None  # the last night of the branch

    @property
    def counts(self) -> Counts:
        return Counts.of([e.row for e in self.experiments])


@dataclass(frozen=True)
class Story:
    """One campaign: what a branch ran under the rules of its last measured experiment, since results compare only under
    the same rules. `rows`: of `records`. `notes`: what could not be read or is not shown."""

    ledger: Ledger
    branch: str
    rules_hash: str
    records: tuple[Record, ...]
    campaign: Campaign
    rows: tuple[Row, ...]
    notes: tuple[str, ...]

    @classmethod
    def of(cls, ledger: Ledger, branch: str | None, rules_hash: str | None = None) -> Story:
        """Return the campaign of `branch`; None: of the branch checked out, else of the last experiment's branch.
        UsageError if `branch` has no experiments."""
        records, damaged = ledger.readable()
        notes = [f"Not counted: {cause}." for cause in damaged]
        branches = list(dict.fromkeys(r.branch for r in records))
        if branch is not None and branch not in branches:
            known = f"Branches with experiments: {', '.join(branches) or 'none'}."
            raise UsageError(f"no experiment ran on {branch}", known)
        if branch is None:
            branch = Repo(ledger.root).head().branch
            branch = branch if branch in branches or not records else records[-1].branch
        ours = [r for r in records if r.branch == branch]
        if rules_hash is None:
            last = [r.rules_hash for r in ours if verdict_of(r) in MEASURED] or [r.rules_hash for r in ours]
            rules_hash = last[-1] if last else ""
        shown = [r for r in ours if r.rules_hash == rules_hash]
        if others := len(ours) - len(shown):
            notes.append(f"Not shown: {counted(others)} of this branch, measured under other rules.")
        campaign = Campaign.read(ledger, records, branch, rules_hash)
        notes += [campaign.unread] if campaign.unread else []
        return cls(ledger, branch, rules_hash, tuple(shown), campaign, tuple(campaign.rows(shown)), tuple(notes))

    @cached_property
    def configs(self) -> Mapping[int, Config]:
        """The submitted configs by experiment number, without those that are gone."""
        return load_configs(self.ledger, self.records)

    @property
    def tag(self) -> str:
        """The branch's name as a name of files and of W&B groups."""
        name = self.branch.removeprefix(CAMPAIGN_PREFIX)
        return re.sub(r"[^A-Za-z0-9._-]+", "-", name)[:80].strip(".-") or "campaign"

    def rules(self, record: Record) -> Rules | None:
        """Return the rules of an experiment; None if its job.json is gone, or has other rules."""
        with suppress(UsageError):
            job = read_json(self.ledger.run_dir(record.number) / JOB_NAME, Job, "")
            return job.rules if job and job.rules_hash == record.rules_hash else None
        return None


def gather(ledger: Ledger, branch: str | None) -> Morning:
    """Return what the page shows of a branch; damaged records become notes. UsageError as in `Story.of`, and for a
    damaged certificate or night.json."""
    story = Story.of(ledger, branch)
    campaign = story.campaign
    pairs, reverts = zip(story.records, story.rows, strict=True), _reverts(campaign)
    experiments = tuple(Experiment(record, row, _fate(row, record, campaign, reverts)) for record, row in pairs)
    on_test = [c for c in reversed(ledger.comparisons()) if c.plan.split == "test"]
    certificate = next((c for c in on_test if not obsolete(c.plan, campaign)), None)
    last = on_test[0] if on_test and certificate is None else None
    night = read_json(ledger.runs_dir / NIGHT_NAME, NightStatus, "Move it away.")
    night = night if night and night.branch == story.branch else None
    return Morning(story, campaign.standing, experiments, certificate, last, night)


def _reverts(campaign: Campaign) -> dict[Settings, str]:
    """Return by change who reverted it: `reverted after 0021 (-0.4 ± 5.0 pp, P(it helps) 43 %)`."""
    by_user = [d for record in campaign.decided for d in record.user_decisions]
    reverts = {d.change.identity: BY_USER for d in (*by_user, *campaign.user_decisions)}
    for record in campaign.decided:
        for decision in record.moved:
            at = f" ({decision.estimate.with_p})" if decision.estimate else ""
            reverts[decision.change.identity] = f"{decision.action.past} after {record.number:04d}{at}"
    return reverts


def _fate(row: Row, record: Record, campaign: Campaign, reverts: Mapping[Settings, str]) -> str:
    change = record.run.new
    if change is None or row.now not in ("replaced", "reverted"):
        return ""
    others = ", ".join(other.name for other in campaign.kept if other.keys.keys() & change.keys.keys())
    return f"replaced by {others}" if row.now == "replaced" else reverts.get(change.identity, row.now)


def certificates(ledger: Ledger, campaign: Campaign) -> tuple[Comparison | None, int | None]:
    """Return the last certificate of the incumbent, and the number of its last unfinished comparison, which
    `certify --resume` can finish; None if there is none."""
    certificate = unfinished = None
    with suppress(UsageError):
        finished = {c.plan.number: c for c in ledger.comparisons() if c.plan.split == "test"}
        certificate = next((c for c in reversed(finished.values()) if not obsolete(c.plan, campaign)), None)
        plans = [plan for plan in ledger.plans() if plan.split == "test" and not obsolete(plan, campaign)]
        unfinished = next((plan.number for plan in reversed(plans) if plan.number not in finished), None)
    return certificate, unfinished


def obsolete(plan: Plan, campaign: Campaign) -> str:
    """Return why a comparison is not one of the campaign's incumbent; empty if it is."""
    configs = campaign.configs
    if (plan.branch, plan.rules_hash) != (campaign.branch, campaign.rules_hash):
        return f"it is of branch {plan.branch} and rules {plan.rules_hash}"
    hashes = plan.configs["baseline"], plan.configs["incumbent"]
    if configs is None or hashes != (configs[0].hash, configs[1].hash):
        return f"it compares {plan.names['incumbent']} with {plan.names['baseline']}"
    return ""


def detailed(experiments: Sequence[Experiment]) -> dict[int, Experiment]:
    """Return the experiments with details by number: the last ones, and the last keeps."""
    keeps = [e for e in experiments if e.verdict in ("baseline", "keep")][-_MAX_DETAILS:]
    return {e.number: e for e in (*keeps, *experiments[-_MAX_DETAILS:])}


def curves(steps: Sequence[Step]) -> dict[str, Any]:
    """Return the steps and the measured curves of one run: at most _MAX_POINTS values each, with 4 digits."""
    points = steps[:: -(-len(steps) // _MAX_POINTS) or 1]
    table = {name: [getattr(step, name) for step in points] for name in ("step", *CURVES)}
    return {
        name: [None if value is None else float(f"{value:.4g}") for value in values]
        for name, values in table.items()
        if set(values) != {None}
    }


def split_experiment(record: Record, steps: Sequence[Step]) -> dict[str, float]:
    """Return the seconds of an experiment by use. `steps` split the time of training, unless their sum is too long.
    Generation in parallel to training (prime-rl) counts only as the time that the trainer waits for rollouts."""
    run, total = record.result, record.total_seconds or 0.0
    if run is None:
        return {"other": total} if total else {}
    parts = {use: sum(getattr(step, name) or 0.0 for step in steps) for use, name in _USES.items()}
    window, scoring = run.training.training_seconds or 0.0, run.evaluation.seconds if run.evaluation else 0.0
    if not 0 < sum(parts.values()) <= window * 1.02:  # the parts were measured by several clocks
        parts = {"training, not split": window}
    seconds = {"start-up": run.startup_seconds or 0.0, **parts, "evaluation": scoring}
    seconds["other"] = max(run.total_seconds, total) - sum(seconds.values())  # stopping, writing, the rest of a crash
    return {use: value for use, value in seconds.items() if value > 0}
