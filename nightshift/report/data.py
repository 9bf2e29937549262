"""What page and exports show of one campaign, from the ledger and the files of its runs. Not measured is None.

The files of a run may end at any byte, and agents can write to their folder. The readers of files.py follow no link
and have a limit; what they cannot read is absent.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from itertools import chain
from typing import Any

from nightshift.agents.history import load_configs
from nightshift.agents.presets import PRESETS, SEARCHES
from nightshift.campaign.campaign import Campaign, uncommitted
from nightshift.campaign.git import CAMPAIGN_PREFIX, Repo
from nightshift.campaign.ledger import Ledger, campaign_cost
from nightshift.campaign.metrics import Step
from nightshift.campaign.records import (
    JOB_NAME,
    NIGHT_NAME,
    Z95,
    Action,
    Change,
    Comparison,
    Cost,
    Decision,
    Effect,
    Job,
    Record,
    Rollout,
    Standing,
)
from nightshift.campaign.results import UNDECIDED, Counts, Row, verdict_of
from nightshift.campaign.waits import NightStatus
from nightshift.config import train_toml
from nightshift.config.rules import Rules
from nightshift.config.train_toml import Config, changes_of
from nightshift.errors import UsageError
from nightshift.files import read_json
from nightshift.text import clean, counted

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
_MAX_POINTS = 48
Configs = tuple[Config, Config]  # of baseline and incumbent
_MAX_DETAILS, _NUM_LAST = 150, 20  # experiments with details; among them the last ones


@dataclass(frozen=True, slots=True)
class Experiment:
    """One row of the page. `standing`: the estimates after this experiment, None if it was not measured."""

    record: Record
    row: Row
    changes: tuple[train_toml.Change, ...]
    standing: Standing | None

    @property
    def number(self) -> int:
        return self.record.number

    @property
    def verdict(self) -> str:
        return self.row.verdict or UNDECIDED

    @property
    def has_score(self) -> bool:
        return self.verdict in MEASURED and self.record.score is not None

    @property
    def spread(self) -> float | None:
        """Half-width of the score's 95 % interval, over seeds and examples."""
        return Z95 * self.standing.run_sd if self.standing and self.record.evaluation else None

    @property
    def kind(self) -> str:
        """Return how the experiment is drawn: `keep` if the incumbent has its change, `left` if the incumbent once had
        it, else the verdict."""
        return "keep" if self.row.is_kept else "left" if self.row.now else self.verdict


@dataclass(frozen=True, slots=True)
class Kept:
    """A change of the incumbent. `effect`: the current estimate. `support`: whether the change is confirmed, who kept
    it and what it takes back. `takes_back`: the experiment whose whole change it undoes. `commit`: 7 characters of the
    commit that kept it. `experiment`: the first that proposed it; None for a change of the user's own."""

    change: Change
    effect: Effect
    support: str
    takes_back: str
    commit: str
    experiment: Experiment | None

    @property
    def changes(self) -> tuple[train_toml.Change, ...]:
        return self.experiment.changes if self.experiment else ()


@dataclass(frozen=True, slots=True)
class Morning:
    """What the page shows. `obsolete`: why the certificate is not one of this incumbent; None if it is."""

    story: Story
    standing: Standing | None  # the current estimates; None before the baseline
    experiments: tuple[Experiment, ...]
    kept: tuple[Kept, ...]  # the incumbent's changes, the most certain first
    certificate: Comparison | None
    obsolete: str | None
    cost: Cost
    elsewhere: tuple[Comparison, ...]  # of this branch, on validation splits
    night: tuple[str, ...] = ()  # of the branch's last night: waits, proposers, directions
    direction: str = ""  # of the last night
    agent: str = "NAME"  # for --agent: the proposer of the last night

    @property
    def configs(self) -> Configs | None:
        """None if the baseline's train.toml cannot be read."""
        return self.story.campaign.configs

    @property
    def is_certified(self) -> bool:
        """True if the incumbent has a certificate."""
        return self.certificate is not None and self.obsolete is None

    @property
    def left(self) -> tuple[Experiment, ...]:
        """The experiments whose change was kept and is not in the incumbent any more."""
        return tuple(e for e in self.experiments if e.kind == "left")

    @property
    def counts(self) -> Counts:
        return Counts.of([e.row for e in self.experiments])

    @property
    def user_decisions(self) -> list[str]:
        decisions = [*(e.record.user_decisions for e in self.experiments), self.story.campaign.user_decisions]
        return decided_by_user(chain(*decisions))

    @property
    def uncommitted(self) -> str | None:
        """The last decisions that git has no commit of, in one line; None if nothing is missing."""
        return uncommitted(self.story.records, self.story.branch)


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
    def of(cls, ledger: Ledger, branch: str | None) -> Story:
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
        last = next((r for r in reversed(ours) if verdict_of(r) in MEASURED), ours[-1] if ours else None)
        rules_hash = last.rules_hash if last else ""
        shown = [r for r in ours if r.rules_hash == rules_hash]
        if others := len(ours) - len(shown):
            notes.append(f"Not shown: {counted(others)} of this branch, measured under other rules.")
        campaign = Campaign.read(ledger, records, branch, rules_hash)
        notes += [f"{campaign.unread[:1].upper()}{campaign.unread[1:]}"] if campaign.unread else []
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
    """Return what the page shows of a branch; damaged records become notes. UsageError as in `Story.of`."""
    story = Story.of(ledger, branch)
    campaign = story.campaign
    standings = {record.number: record.judgement.standing for record in campaign.decided if record.judgement}
    experiments = tuple(
        Experiment(record, row, changes_of(record.diff), standings.get(record.number))
        for record, row in zip(story.records, story.rows, strict=True)
    )
    comparisons, damage = list[Comparison](), None
    try:
        comparisons = ledger.comparisons()
    except UsageError as error:
        damage = f"A certificate cannot be read: {error}"
    on_test = [(c, obsolete(c, campaign)) for c in reversed(comparisons) if c.plan.split == "test"]
    certificate, reason = next((pair for pair in on_test if pair[1] is None), (*on_test, (None, damage))[0])
    # Of a program of your own, a record has only the file name, and night.json has the command.
    proposers = (record.proposal.proposer.partition(" (")[0] for record in reversed(story.records))
    agent, night = next((name for name in proposers if name in (*PRESETS, *SEARCHES)), "NAME"), None
    with suppress(UsageError):  # `status` reports the damaged file
        night = read_json(ledger.runs_dir / NIGHT_NAME, NightStatus, "")
        if night := night if night and night.branch == story.branch else None:
            request = (read_json(ledger.runs_dir / NIGHT_NAME, dict[str, Any], "") or {}).get("request", {})
            named = str(request.get("agent", agent))
            is_known = all(name in (*PRESETS, *SEARCHES) for name in named.removeprefix("team:").split(","))
            agent = named if is_known else "NAME"  # a command of the user's own may contain a key
    return Morning(
        story,
        campaign.standing,
        experiments,
        tuple(kept_changes(campaign, experiments)),
        certificate,
        reason,
        campaign_cost(ledger.runs_dir, story.records),
        tuple(c for c in comparisons if c.plan.split == "validation" and c.plan.branch == story.branch),
        night.morning(story.records, datetime.now(UTC)) if night else (),
        clean(night.direction) if night else "",
        agent,
    )


def kept_changes(campaign: Campaign, experiments: Iterable[Experiment]) -> list[Kept]:
    """Return the incumbent's changes, the largest P(it helps) first."""
    by_number = {e.number: e for e in experiments}
    decisions = [d for e in by_number.values() for d in e.record.user_decisions]
    by_user = {d.change.identity: d for d in (*decisions, *campaign.user_decisions)}
    kept = list[Kept]()
    for change in campaign.kept:
        assert campaign.posterior is not None
        effect, decision = campaign.posterior.effect(change), by_user.get(change.identity)
        experiment = by_number.get(change.experiment)
        is_whole, undone = _taken_back(experiment, by_number.values()) if experiment else (False, "")
        support = "confirmed" if campaign.is_confirmed(change) else "unconfirmed"
        commit = experiment.row.commit if experiment else change.commit
        if decision and decision.action is Action.KEEP and decision.commit:
            commit = decision.commit
            support += f", kept by you in commit {commit[:7]}"
        elif experiment and experiment.row.now == "kept later":
            support += ", kept later"
        if undone:
            support += f", takes back {'' if is_whole else 'part of '}{undone}"
        kept.append(Kept(change, effect, support, undone if is_whole else "", (commit or "")[:7], experiment))
    return sorted(kept, key=lambda kept_change: -kept_change.effect.p_helps)


def _taken_back(experiment: Experiment, others: Iterable[Experiment]) -> tuple[bool, str]:
    """Return whether a change does nothing but undo the whole change of an earlier keep, and the number of this keep;
    "" if the change does not restore the values before a keep."""
    undone = {(change.key, change.new, change.old) for change in experiment.changes if change.old != change.new}
    for other in reversed([e for e in others if e.number < experiment.number and e.row.now]):
        made = {(change.key, change.old, change.new) for change in other.changes if change.old != change.new}
        if undone and undone <= made:
            return undone == made, f"{other.number:04d}"
    return False, ""


def decided_by_user(decisions: Iterable[Decision]) -> list[str]:
    """Return what the user's own commits decided: `0012 kept by you in commit abc1234`."""
    return [
        f"{d.change.name if d.change.experiment else 'a change of your own'} {d.action.past} by you"
        + (f" in commit {d.commit[:7]}" if d.commit else "")
        for d in decisions
    ]


def obsolete(certificate: Comparison, campaign: Campaign) -> str | None:
    """Return why a certificate is not one of the campaign's incumbent; None if it is."""
    plan, configs = certificate.plan, campaign.configs
    if plan.branch != campaign.branch:
        return f"it is of branch {plan.branch}"
    if plan.rules_hash != campaign.rules_hash:
        return f"it was made under other rules ({plan.rules_hash})"
    hashes = plan.configs["baseline"], plan.configs["incumbent"]
    if configs is None or hashes != (configs[0].hash, configs[1].hash):
        return f"it compares {plan.names['incumbent']} with {plan.names['baseline']}"
    return None


def detailed(experiments: Sequence[Experiment]) -> list[Experiment]:
    """Return the experiments that are shown with details: keeps, the last ones, and those with the largest effects."""
    keeps = [e for e in experiments if e.verdict in ("baseline", "keep")][-_MAX_DETAILS // 2 :]
    by_effect = sorted(experiments, key=lambda e: -abs(e.row.effect_at_decision or 0.0))
    chosen = dict.fromkeys(e.number for e in (*keeps, *experiments[-_NUM_LAST:], *by_effect))
    numbers = set(list(chosen)[:_MAX_DETAILS])
    return [e for e in experiments if e.number in numbers]


def curves(steps: Sequence[Step]) -> dict[str, Any]:
    """Return the curves of one run: `steps`, and `values` of the same length by the names of CURVES. At most
    _MAX_POINTS of each: means of neighbours, 4 significant digits, None if not measured."""
    size = -(-len(steps) // _MAX_POINTS) or 1
    buckets = [steps[start : start + size] for start in range(0, len(steps), size)]
    values = {name: [_mean([getattr(step, name) for step in bucket]) for bucket in buckets] for name in CURVES}
    measured = {name: means for name, means in values.items() if any(mean is not None for mean in means)}
    return {"steps": [_mean([step.step for step in bucket]) for bucket in buckets], "values": measured}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(f"{sum(known) / len(known):.4g}") if known else None


def lost_game(rows: Sequence[Rollout]) -> Mapping[str, str]:
    """Return the first game that was lost to the opponent who won most; empty if no game was lost."""
    lost = [game for row in rows for game in row.games if game.get("ended") in ("lost", "forfeit")]
    (worst, _), *_ = Counter(game.get("opponent") for game in lost).most_common(1) or [(None, 0)]
    return next((game for game in lost if game.get("opponent") == worst), {})
