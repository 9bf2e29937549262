"""What page and exports show: every number from the ledger and the files of runs, None where these have none.

A campaign here is what one branch ran under one rules hash: results compare only within it. The files of a run are
written by processes that may have been killed at any byte, and lie where agents write: they are read by files.py's
readers, which follow no link and have a bound. What cannot be read is absent.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from itertools import takewhile
from typing import Any

from nightshift.agents.history import load_configs
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
    Stage,
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

# What the page draws of every run: the name in metrics.jsonl, and its words.
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
# Of more experiments the details are those of keeps, of the last ones and of the largest differences: see page.py.
_MAX_DETAILS = 150
_NUM_LAST = 20


@dataclass(frozen=True, slots=True)
class Experiment:
    """One row of the page. Scores are fractions.

    `standing`: the estimates after this experiment, None if it was not measured or decided nothing.
    """

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
    def is_crash(self) -> bool:
        """True if it came to nothing, and nobody had asked it to stop."""
        return self.verdict == "crash"

    @property
    def has_score(self) -> bool:
        return self.verdict in MEASURED and self.record.score is not None

    @property
    def spread(self) -> float | None:
        """Half-width of the score's 95 % interval, over seeds and examples."""
        return Z95 * self.standing.run_sd if self.standing and self.record.evaluation else None

    @property
    def kind(self) -> str:
        """How it is drawn: as a keep if the incumbent has its change, as left if it had, else as its verdict."""
        return "keep" if self.row.is_kept else "left" if self.row.now else self.verdict


@dataclass(frozen=True, slots=True)
class Kept:
    """A change of the incumbent. `effect`: the current estimate. `support`: in words, how sure it is that it helps, and
    who kept it. `commit` kept it: 7 characters. `experiment` first proposed it; None for a change of the user's own."""

    change: Change
    effect: Effect
    support: str
    commit: str
    experiment: Experiment | None

    @property
    def changes(self) -> tuple[train_toml.Change, ...]:
        """As the experiment has them in every table; none of a change of the user's own."""
        return self.experiment.changes if self.experiment else ()


@dataclass(frozen=True, slots=True)
class Morning:
    """All that the page says. `obsolete`: why the certificate is not of the page's incumbent; None if it is."""

    story: Story
    standing: Standing | None  # the current estimates; None before the baseline
    experiments: tuple[Experiment, ...]
    kept: tuple[Kept, ...]  # the incumbent's changes, the most certain first
    certificate: Comparison | None
    obsolete: str | None
    cost: Cost
    elsewhere: tuple[Comparison, ...]  # of this branch, on validation splits
    configs: Configs | None = None  # None if the baseline's train.toml cannot be read
    night: tuple[str, ...] = ()  # of the branch's last night: waits, proposers, directions
    direction: str = ""  # of the last night

    @property
    def baseline(self) -> Experiment | None:
        return next((e for e in self.experiments if e.verdict == "baseline"), None)

    @property
    def left(self) -> tuple[Experiment, ...]:
        """The experiments whose change was kept, and is not any more."""
        return tuple(e for e in self.experiments if e.kind == "left")

    @property
    def counts(self) -> Counts:
        return Counts.of([e.row for e in self.experiments])

    @property
    def user_decisions(self) -> list[str]:
        """What the user's own commits decided, a line each, in their order."""
        decisions = [e.record.user_decisions for e in self.experiments] + [self.story.campaign.user_decisions]
        return [line for each in decisions for line in decided_by_user(each)]

    @property
    def final_runs(self) -> list[Record]:
        """The records of the final check runs that end the campaign; none if other experiments followed."""
        records = (e.record for e in reversed(self.experiments))
        return [*takewhile(lambda record: record.run.stage is not Stage.SEARCH, records)][::-1]

    @property
    def uncommitted(self) -> str | None:
        """What git did not take of the last verdicts, in one line; None if nothing is missing."""
        return uncommitted(self.story.records, self.story.branch)


@dataclass(frozen=True)
class Story:
    """One campaign: what a branch ran under the rules of its last measured experiment. `rows`: of `records`. `notes`
    name what could not be read, fits nothing, or is of another one."""

    ledger: Ledger
    branch: str
    rules_hash: str
    records: tuple[Record, ...]
    campaign: Campaign
    rows: tuple[Row, ...]
    notes: tuple[str, ...]

    @classmethod
    def of(cls, ledger: Ledger, branch: str | None) -> Story:
        """Of the branch named, else the one checked out, else that of the last experiment. UsageError for a named one
        without experiments."""
        records, damaged = ledger.readable()
        notes = [f"Not counted: {cause}." for cause in damaged]
        branches = list(dict.fromkeys(r.branch for r in records))
        if branch is not None and branch not in branches:
            known = ", ".join(branches) or "no experiment at all"
            raise UsageError(f"no experiment ran on {branch}", f"The ledger has: {known}.")
        if branch is None:
            branch = Repo(ledger.root).head().branch
            branch = branch if branch in branches or not records else records[-1].branch
        ours = [r for r in records if r.branch == branch]
        last = next((r for r in reversed(ours) if verdict_of(r) in MEASURED), ours[-1] if ours else None)
        rules_hash = last.rules_hash if last else ""
        shown = [r for r in ours if r.rules_hash == rules_hash]
        if others := len(ours) - len(shown):
            notes.append(f"{counted(others)} of this branch ran under other rules and do not compare: not shown.")
        campaign = Campaign.read(ledger, records, branch, rules_hash)
        notes += [f"{campaign.unread[:1].upper()}{campaign.unread[1:]}"] if campaign.unread else []
        return cls(ledger, branch, rules_hash, tuple(shown), campaign, tuple(campaign.rows(shown)), tuple(notes))

    @cached_property
    def configs(self) -> Mapping[int, Config]:
        """The submitted configs by number, without those that are gone."""
        return load_configs(self.ledger, self.records)

    @property
    def tag(self) -> str:
        """A name for files and studies: the branch's, of plain letters."""
        name = self.branch.removeprefix(CAMPAIGN_PREFIX)
        return re.sub(r"[^A-Za-z0-9._-]+", "-", name)[:80].strip(".-") or "campaign"

    def rules(self, record: Record) -> Rules | None:
        """Return the rules of a record's job; None if job.json is gone, or has other rules."""
        with suppress(UsageError):
            job = read_json(self.ledger.run_dir(record.number) / JOB_NAME, Job, "")
            return job.rules if job and job.rules_hash == record.rules_hash else None
        return None


def gather(ledger: Ledger, branch: str | None) -> Morning:
    """What the page says of one branch. Damaged records become notes. UsageError as `Story.of`."""
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
    configs = campaign.configs
    on_test = [(c, _obsolete(c, story, configs)) for c in reversed(comparisons) if c.plan.split == "test"]
    certified, obsolete = next((each for each in on_test if each[1] is None), (*on_test, (None, damage))[0])
    night = None
    with suppress(UsageError):  # `status` reports the damaged file
        found = read_json(ledger.runs_dir / NIGHT_NAME, NightStatus, "")
        night = found if found and found.branch == story.branch else None
    return Morning(
        story,
        campaign.standing,
        experiments,
        tuple(kept_changes(campaign, experiments)),
        certified,
        obsolete,
        campaign_cost(ledger.runs_dir, story.records),
        tuple(c for c in comparisons if c.plan.split == "validation" and c.plan.branch == story.branch),
        configs,
        night.morning(story.records, datetime.now(UTC)) if night else (),
        clean(night.direction) if night else "",
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
        support = "confirmed" if campaign.is_confirmed(change) else "unconfirmed"
        commit = experiment.row.commit if experiment else change.commit
        if decision and decision.action is Action.KEEP and decision.commit:
            commit = decision.commit
            support += f", kept by you in commit {commit[:7]}"
        elif experiment and experiment.row.now == "kept later":
            support += ", kept later"
        kept.append(Kept(change, effect, support, (commit or "")[:7], experiment))
    return sorted(kept, key=lambda each: -each.effect.p_helps)


def decided_by_user(decisions: Iterable[Decision]) -> list[str]:
    """What the user's own commits decided: `0012 kept by you in commit abc1234`."""
    words = {Action.KEEP: "kept", Action.REVERT: "taken out"}
    return [
        f"{d.change.name if d.change.experiment else 'a change of your own'} {words.get(d.action, d.action)} by you"
        + (f" in commit {d.commit[:7]}" if d.commit else "")
        for d in decisions
    ]


def _obsolete(certified: Comparison, story: Story, configs: Configs | None) -> str | None:
    plan = certified.plan
    if plan.branch != story.branch:
        return f"it is of branch {plan.branch}"
    if plan.rules_hash != story.rules_hash:
        return f"it was made under other rules ({plan.rules_hash})"
    hashes = plan.configs["baseline"], plan.configs["incumbent"]
    if configs is None or hashes != (configs[0].hash, configs[1].hash):
        return f"it compares {plan.names['incumbent']} with {plan.names['baseline']}"
    return None


def detailed(experiments: Sequence[Experiment]) -> list[Experiment]:
    """Those that are shown with details, in order: keeps, the last and the most telling ones."""
    keeps = [e for e in experiments if e.verdict in ("baseline", "keep")][-_MAX_DETAILS // 2 :]
    telling = sorted(experiments, key=lambda e: -abs(e.row.effect_at_decision or 0.0))
    chosen = dict.fromkeys(e.number for e in (*keeps, *experiments[-_NUM_LAST:], *telling))
    numbers = set(list(chosen)[:_MAX_DETAILS])
    return [e for e in experiments if e.number in numbers]


def curves(steps: Sequence[Step]) -> dict[str, Any]:
    """Return what was measured in one run: `steps`, and `values` beside them by the names of CURVES, None where it was
    not measured. At most _MAX_POINTS of each: means of neighbours, 4 significant digits."""
    size = -(-len(steps) // _MAX_POINTS) or 1
    buckets = [steps[start : start + size] for start in range(0, len(steps), size)]
    values = {name: [_mean([getattr(step, name) for step in bucket]) for bucket in buckets] for name in CURVES}
    measured = {name: means for name, means in values.items() if any(mean is not None for mean in means)}
    return {"steps": [_mean([step.step for step in bucket]) for bucket in buckets], "values": measured}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(f"{sum(known) / len(known):.4g}") if known else None


def lost_game(rows: Sequence[Rollout]) -> Mapping[str, str]:
    """Of the games of a run the first that was lost to the opponent who won most; empty where there was none."""
    lost = [game for row in rows for game in row.games if game.get("ended") in ("lost", "forfeit")]
    (worst, _), *_ = Counter(game.get("opponent") for game in lost).most_common(1) or [(None, 0)]
    return next((game for game in lost if game.get("opponent") == worst), {})
