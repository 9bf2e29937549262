"""The numbers of the morning page: every one from the ledger, None where the ledger has none.

A campaign here is what one branch ran under one rules hash: results compare only within it.
"""

from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import takewhile
from typing import NamedTuple

from nightshift.campaign.campaign import Campaign
from nightshift.campaign.commits import incumbent_config
from nightshift.campaign.cost import campaign_cost
from nightshift.campaign.finish import uncommitted
from nightshift.campaign.ledger import Ledger
from nightshift.campaign.next_run import settings_of
from nightshift.campaign.records import (
    NIGHT_NAME,
    NOT_ISOLATED,
    Z95,
    Action,
    Change,
    Cost,
    Effect,
    Failure,
    NightStatus,
    Record,
    Stage,
    Standing,
    Verdict,
)
from nightshift.campaign.results import Counts, last_scores
from nightshift.config import train_toml
from nightshift.config.train_toml import Config, changes_of, diff
from nightshift.errors import UsageError
from nightshift.experiment.certify import Comparison, read_comparisons
from nightshift.files import read_json
from nightshift.text import clean

MEASURED = (Verdict.KEEP, Verdict.DISCARD, Verdict.MEASURED)
Span = tuple[datetime, datetime]


@dataclass(frozen=True, slots=True)
class Experiment:
    """One row of the page. Scores are fractions.

    `standing` is what was believed after this experiment, None where it was not measured or decided nothing. `effect`
    is what its change adds to the incumbent as it is believed now, None where it has no change or none was measured.
    `since`: what became of its change, see Campaign.since.
    """

    record: Record
    changes: tuple[train_toml.Change, ...]
    standing: Standing | None
    effect: Effect | None = None
    since: str = ""

    @property
    def number(self) -> int:
        return self.record.number

    @property
    def is_crash(self) -> bool:
        """True if it came to nothing, and nobody had asked it to stop."""
        return self.group == Verdict.CRASH

    @property
    def has_score(self) -> bool:
        return self.record.status in MEASURED and self.record.score is not None

    @property
    def is_baseline(self) -> bool:
        """True for the first measured experiment, which is compared with nothing."""
        return self.record.status == Verdict.KEEP and self.record.parent is None

    @property
    def is_kept(self) -> bool:
        return self.since.endswith("confirmed")

    @property
    def has_left(self) -> bool:
        """True if its change was kept, and was reverted or replaced."""
        return self.since in ("reverted", "replaced")

    @property
    def spread(self) -> float | None:
        """Half-width of the score's 95 % interval, over seeds and examples."""
        return Z95 * self.standing.run_sd if self.standing and self.record.evaluation else None

    @property
    def group(self) -> str:
        """What it is counted as: baseline, started, keep, also if it left, discard, measured, crash or interrupted."""
        is_interrupted = self.record.status == Verdict.CRASH and self.record.failure is Failure.INTERRUPTED
        return "baseline" if self.is_baseline else "interrupted" if is_interrupted else str(self.record.status)

    @property
    def kind(self) -> str:
        """How it is drawn: as a keep if the incumbent holds its change, as left if it did, else as its group."""
        return "keep" if self.is_kept else "left" if self.has_left else self.group

    @property
    def effect_at_decision(self) -> Effect | None:
        return self.record.decision.estimate if self.record.decision else None


@dataclass(frozen=True, slots=True)
class Kept:
    """A change that the incumbent holds. `changes`: the keys by which the incumbent differs from the incumbent without
    it. `effect`: as it is believed now. `experiment` first proposed it; None for a change of the user's own.
    `user_commit`: the user's commit that keeps it."""

    change: Change
    changes: tuple[train_toml.Change, ...]
    effect: Effect
    is_confirmed: bool
    experiment: Experiment | None = None
    user_commit: str | None = None

    @property
    def support(self) -> str:
        """In words, how sure it is that it helps, and whether the user decided that it stays."""
        support = "confirmed" if self.is_confirmed else "unconfirmed"
        return f"{support}, kept by you in commit {self.user_commit[:7]}" if self.user_commit else support


@dataclass(frozen=True, slots=True)
class Morning:
    """All that the page says. `notes` name what could not be read or is not shown.

    `obsolete` says why the certificate does not speak of the page's incumbent, None if it does.
    """

    branch: str
    environments: tuple[str, ...]  # names
    standing: Standing | None  # what is believed now; None before the baseline
    experiments: tuple[Experiment, ...]
    kept: tuple[Kept, ...]  # the incumbent's changes, the most certain first
    certificate: Comparison | None
    obsolete: str | None
    campaign: Campaign  # what is believed of it
    cost: Cost
    elsewhere: tuple[Comparison, ...]  # of this branch, on validation splits
    notes: tuple[str, ...]
    night: tuple[str, ...] = ()  # the direction of its last night, and why the agent cannot be asked now

    @property
    def baseline(self) -> Experiment | None:
        return next((e for e in self.experiments if e.is_baseline), None)

    @property
    def left(self) -> tuple[Experiment, ...]:
        """The experiments whose change was kept, and is not any more."""
        return tuple(e for e in self.experiments if e.has_left)

    @property
    def counts(self) -> Counts:
        return Counts.of((e.record for e in self.experiments), self.campaign.kept)

    @property
    def user_decisions(self) -> list[str]:
        """What the user's own commits decided, a line each, in their order."""
        return [line for e in self.experiments for line in decided_by_user(e.record)]

    @property
    def last_runs(self) -> str:
        """`the last runs: incumbent 51.2, 50.4 %; baseline 47.1, 47.9 %`; empty where the last runs measured other
        things."""
        records = (e.record for e in reversed(self.experiments))
        scores = last_scores([*takewhile(lambda record: record.run.stage is not Stage.SEARCH, records)][::-1])
        return f"the last runs: {scores}" if scores else ""

    @property
    def isolation(self) -> str | None:
        """Which experiments come from an agent without a sandbox, in one line; None if none does."""
        number = sum(not e.record.proposal.is_isolated for e in self.experiments)
        return f"agent: {NOT_ISOLATED} in {counted(number)} (--sandbox none)" if number else None

    @property
    def uncommitted(self) -> str | None:
        """What git did not take of the last verdicts, in one line; None if nothing is missing."""
        return uncommitted([e.record for e in self.experiments], self.branch)

    @property
    def crash_causes(self) -> Counter[str]:
        return Counter(str(e.record.failure or "cause not recorded") for e in self.experiments if e.is_crash)


class Shown(NamedTuple):
    """One campaign: what a branch ran under the rules of its last measured experiment. `notes` name what could not be
    read, fits nothing, or is of another one."""

    branch: str
    rules_hash: str
    records: tuple[Record, ...]
    campaign: Campaign
    notes: tuple[str, ...]


def shown_campaign(ledger: Ledger, branch: str | None, head_branch: str) -> Shown:
    """Of one branch: the one named, else the one checked out, else that of the last experiment.

    Raises UsageError for a named branch without experiments.
    """
    records, damaged = ledger.readable()
    notes = [f"Not counted: {cause}." for cause in damaged]
    branches = list(dict.fromkeys(r.branch for r in records))
    if branch is not None and branch not in branches:
        known = ", ".join(branches) or "no experiment at all"
        raise UsageError(f"no experiment ran on {branch}", f"The ledger has: {known}.")
    if branch is None:
        branch = head_branch if head_branch in branches or not records else records[-1].branch
    ours = [r for r in records if r.branch == branch]
    last = next((r for r in reversed(ours) if r.status in MEASURED), ours[-1] if ours else None)
    rules_hash = last.rules_hash if last else ""
    shown = [r for r in ours if r.rules_hash == rules_hash]
    if others := len(ours) - len(shown):
        notes.append(f"{counted(others)} of this branch ran under other rules and do not compare: not shown.")
    return Shown(branch, rules_hash, tuple(shown), Campaign.of(shown, branch, rules_hash), tuple(notes))


def gather(ledger: Ledger, branch: str | None, head_branch: str) -> Morning:
    """What the page says of one branch. Damaged records become notes. UsageError as `shown_campaign`."""
    branch, rules_hash, shown, campaign, notes = shown_campaign(ledger, branch, head_branch)
    decided = {record.number for record in campaign.decided if record.status in MEASURED}
    experiments = tuple(
        Experiment(
            record=r,
            changes=changes_of(r.diff),
            standing=r.judgement.standing if r.judgement and r.number in decided else None,
            effect=campaign.effect(r),
            since=campaign.since(r) if r.number in decided else "",
        )
        for r in shown
    )
    comparisons, damage = list[Comparison](), None
    try:
        comparisons = read_comparisons(ledger)
    except UsageError as error:
        damage = f"A certificate cannot be read: {error}"
    configs = baseline_and_incumbent(ledger, campaign)
    on_test = [(c, _obsolete(c, branch, rules_hash, configs)) for c in reversed(comparisons) if c.plan.split == "test"]
    certified, obsolete = next((each for each in on_test if each[1] is None), (*on_test, (None, damage))[0])
    return Morning(
        branch,
        shown[-1].environments if shown else (),
        campaign.standing,
        experiments,
        tuple(kept_changes(campaign, experiments, configs)),
        certified,
        obsolete,
        campaign,
        campaign_cost(ledger.runs_dir, shown),
        tuple(c for c in comparisons if c.plan.split == "validation" and c.plan.branch == branch),
        notes,
        _night_lines(ledger, branch),
    )


def _night_lines(ledger: Ledger, branch: str) -> tuple[str, ...]:
    """The direction of the branch's last night; why its agent cannot be asked, while the night goes on."""
    try:
        night = read_json(ledger.runs_dir / NIGHT_NAME, NightStatus, "")
    except UsageError:  # `status` reports the damaged file
        return ()
    if night is None or night.branch != branch:
        return ()
    lines = [f"Direction: {clean(night.direction, 1_500)}"] if night.direction else []
    if night.unavailable is not None and night.cause is None:
        away = night.unavailable
        cause = f"{clean(away.meaning)}: {clean(away.text, 300)}"
        lines.append(f"Waiting for the agent: {cause}; asked again at {clean(away.asks_at)}")
    return tuple(lines)


def counted(count: int, noun: str = "experiment") -> str:
    """1 experiment, 2 experiments."""
    return f"{count:,} {noun}{'s' if count != 1 else ''}"


def kept_changes(
    campaign: Campaign, experiments: Iterable[Experiment], configs: tuple[Config, Config] | None
) -> list[Kept]:
    """Return the incumbent's changes, the largest P(it helps) first. `configs`: see `baseline_and_incumbent`."""
    by_number = {e.number: e for e in experiments}
    by_user = {settings_of(d.change): d for e in by_number.values() for d in e.record.user_decisions}
    found = list[Kept]()
    for change in campaign.kept:
        assert campaign.posterior is not None
        decision = by_user.get(settings_of(change))
        found.append(
            Kept(
                change=change,
                changes=_keys_of(change, campaign, configs),
                effect=campaign.posterior.effect(change),
                is_confirmed=campaign.is_confirmed(change),
                experiment=by_number.get(change.experiment),
                user_commit=decision.commit if decision and decision.action is Action.KEEP else None,
            )
        )
    return sorted(found, key=lambda kept: -kept.effect.p_helps)


def _keys_of(
    change: Change, campaign: Campaign, configs: tuple[Config, Config] | None
) -> tuple[train_toml.Change, ...]:
    """By which keys the incumbent differs from the incumbent without a change; the change's own keys where no valid
    train.toml is without it."""
    with suppress(UsageError):
        if configs is not None:
            without = incumbent_config(configs[0], [kept for kept in campaign.kept if kept != change])
            return diff(without, configs[1])
    return tuple(
        train_toml.Change(key, "removed", "", None) if value is None else train_toml.Change(key, "added", None, value)
        for key, value in change.keys.items()
    )


def decided_by_user(record: Record) -> list[str]:
    """What the user's own commits before an experiment decided: `0012 kept by you in commit abc1234`."""
    words = {Action.KEEP: "kept", Action.REVERT: "taken out"}
    return [
        f"{d.change.name if d.change.experiment else 'a change of your own'} {words.get(d.action, d.action)} by you"
        + (f" in commit {d.commit[:7]}" if d.commit else "")
        for d in record.user_decisions
    ]


def baseline_and_incumbent(ledger: Ledger, campaign: Campaign) -> tuple[Config, Config] | None:
    """The baseline's config, and the incumbent's, composed of it; None where the baseline's file is gone."""
    with suppress(UsageError):
        if campaign.baseline is not None:
            baseline = ledger.stored_config(campaign.baseline)
            return baseline, incumbent_config(baseline, campaign.kept)
    return None


def _obsolete(certified: Comparison, branch: str, rules_hash: str, configs: tuple[Config, Config] | None) -> str | None:
    plan = certified.plan
    if plan.branch != branch:
        return f"it is of branch {plan.branch}"
    if plan.rules_hash != rules_hash:
        return f"it was made under other rules ({plan.rules_hash})"
    hashes = plan.configs["baseline"], plan.configs["incumbent"]
    if configs is None or hashes != (configs[0].hash, configs[1].hash):
        return f"it compares {plan.names['incumbent']} with {plan.names['baseline']}"
    return None


def span(began: str, seconds: float | None = None) -> Span:
    """Return when a run began and ended; an interrupted one ended at once."""
    start = datetime.fromisoformat(began)
    return start, start + timedelta(seconds=seconds or 0.0)
