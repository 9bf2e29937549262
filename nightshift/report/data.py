"""The numbers of the morning page: every one from the ledger, None where the ledger has none.

A campaign here is what one branch ran under one rules hash: results compare only within it.
"""

from collections import Counter
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import NamedTuple

from nightshift.campaign.campaign import Campaign, expected
from nightshift.campaign.cost import campaign_cost
from nightshift.campaign.finish import uncommitted
from nightshift.campaign.index import fold_sound
from nightshift.campaign.ledger import Ledger
from nightshift.campaign.records import NOT_ISOLATED, Cost, Failure, Record, Verdict
from nightshift.campaign.standing import Z95, Counts, Expected, Standing, effect_at_decision
from nightshift.config.train_toml import Change, changes_of
from nightshift.errors import UsageError
from nightshift.experiment.certify import Comparison, read_comparisons

MEASURED = (Verdict.KEEP, Verdict.DISCARD)
Span = tuple[datetime, datetime]


@dataclass(frozen=True, slots=True)
class Experiment:
    """One row of the page. Scores are fractions.

    `standing` is what is believed after this experiment, None where it was not measured or decided nothing;
    `is_standing`: the incumbent of now stands on it: it is it, the baseline, or an experiment whose idea is part of it.
    `since`: what became of a keep, "" of any other. `beside`: how what its idea was tried on differed from the
    incumbent of then, "" where it did not. `expected`: what is believed now of it less its parent; see standing.py.
    """

    record: Record
    changes: tuple[Change, ...]
    standing: Standing | None
    is_standing: bool
    since: str = ""
    beside: str = ""
    expected: Expected | None = None

    @property
    def number(self) -> int:
        """The experiment's number in the ledger."""
        return self.record.number

    @property
    def is_crash(self) -> bool:
        """True if it came to nothing, and nobody had asked it to stop."""
        return self.group == Verdict.CRASH

    @property
    def has_score(self) -> bool:
        """True if a run of it was evaluated."""
        return self.record.status in MEASURED and self.record.score is not None

    @property
    def is_baseline(self) -> bool:
        """True for the first measured experiment, which is compared with nothing."""
        return self.record.status == Verdict.KEEP and self.record.parent is None

    @property
    def is_kept(self) -> bool:
        """True for a change that was kept, taken back later or not."""
        return self.record.status == Verdict.KEEP and self.record.parent is not None

    @property
    def is_taken_back(self) -> bool:
        """True for a change that was kept, and that the incumbent does not stand on (any more)."""
        return self.is_kept and self.standing is not None and not self.is_standing

    @property
    def spread(self) -> float | None:
        """Half-width of the score's 95 % interval, over seeds and examples."""
        return Z95 * self.standing.run_sd if self.standing and self.record.evaluation else None

    @property
    def group(self) -> str:
        """What it is counted as: baseline, started, keep, also when it is taken back, discard, crash or interrupted."""
        is_interrupted = self.record.status == Verdict.CRASH and self.record.failure is Failure.INTERRUPTED
        return "baseline" if self.is_baseline else "interrupted" if is_interrupted else str(self.record.status)

    @property
    def idea(self) -> str:
        """What its author said of it; empty where that only lists the change, as searches do."""
        said = self.record.proposal.description
        return "" if self.changes and said.partition(": ")[2].startswith(self.changes[0].line) else said

    @property
    def kind(self) -> str:
        """How it is drawn: as its group, and back for a keep that was taken back."""
        return "back" if self.is_taken_back else self.group

    @property
    def effect_at_decision(self) -> Expected | None:
        """The same as its verdict had it."""
        return effect_at_decision(self.record)


@dataclass(frozen=True, slots=True)
class Morning:
    """All that the page says. `notes` name what could not be read or is not shown.

    `obsolete` says why the certificate does not speak of the page's incumbent, None if it does.
    """

    branch: str
    environments: tuple[str, ...]  # names
    standing: Standing | None  # what is believed now; None before the baseline
    experiments: tuple[Experiment, ...]
    certificate: Comparison | None
    obsolete: str | None
    campaign: Campaign  # what is believed of it
    cost: Cost
    elsewhere: tuple[Comparison, ...]  # of this branch, on validation splits
    notes: tuple[str, ...]

    @property
    def kept(self) -> tuple[Experiment, ...]:
        """The changes that were kept, without the baseline; also those that were taken back."""
        return tuple(e for e in self.experiments if e.is_kept)

    @property
    def taken_back(self) -> tuple[Experiment, ...]:
        """The kept changes that the incumbent does not stand on (any more)."""
        return tuple(e for e in self.experiments if e.is_taken_back)

    @property
    def chain(self) -> tuple[Experiment, ...]:
        """Baseline and the changes that the incumbent stands on, in order; one may have been discarded at first."""
        return tuple(e for e in self.experiments if e.is_standing)

    @property
    def counts(self) -> Counts:
        """How many came to what, as everywhere."""
        return Counts.of((e.record for e in self.experiments), (e.record for e in self.taken_back))

    @property
    def isolation(self) -> str | None:
        """Which experiments come from an agent without a sandbox, in one line; None if none does."""
        number = sum(not e.record.proposal.is_isolated for e in self.experiments)
        return f"agent: {NOT_ISOLATED} in {counted(number)} (--sandbox none)" if number else None

    @property
    def uncommitted(self) -> str | None:
        """What git did not take of the last verdicts, in one line; None if nothing is missing."""
        return uncommitted(self.campaign)

    @property
    def crash_causes(self) -> Counter[str]:
        """How many crashes each kind of failure caused."""
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
        known = ", ".join(name or "a detached HEAD" for name in branches) or "no experiment at all"
        raise UsageError(f"no experiment ran on {branch or 'a detached HEAD'}", f"The ledger has: {known}.")
    if branch is None:
        branch = head_branch if head_branch in branches or not records else records[-1].branch
    ours = [r for r in records if r.branch == branch]
    last = next((r for r in reversed(ours) if r.status in MEASURED), ours[-1] if ours else None)
    rules_hash = last.rules_hash if last else ""
    shown = [r for r in ours if r.rules_hash == rules_hash]
    if others := len(ours) - len(shown):
        notes.append(f"{counted(others)} of this branch ran under other rules and do not compare: not shown.")
    if others := len(records) - len(ours):
        notes.append(f"{counted(others)} of other branches: not shown.")
    campaign, unfit = fold_sound(ledger, shown, branch, rules_hash)
    notes += [f"Not counted: {cause}." for cause in unfit.values()]
    return Shown(branch, rules_hash, tuple(r for r in shown if r.number not in unfit), campaign, tuple(notes))


def gather(ledger: Ledger, branch: str | None, head_branch: str) -> Morning:
    """What the page says of one branch. Damaged records become notes. UsageError as `shown_campaign`."""
    branch, rules_hash, shown, campaign, notes = shown_campaign(ledger, branch, head_branch)
    decided = zip(campaign.decided, campaign.standings, strict=True)
    standings = {record.number: standing for record, standing in decided if record.status in MEASURED}
    stands, since = campaign.parts | {r.number for r in campaign.kept[:1]}, campaign.since
    experiments = tuple(
        Experiment(
            record=r,
            changes=changes_of(r.diff),
            standing=standings.get(r.number),
            is_standing=r.number in stands,
            since=since.get(r.number, ""),
            beside=campaign.beside(r),
            expected=expected(campaign, r),
        )
        for r in shown
    )
    comparisons, unread = read_comparisons(ledger)
    on_test = [(c, _obsolete(c, branch, rules_hash, campaign)) for c in reversed(comparisons) if c.plan.split == "test"]
    certified, obsolete = next((each for each in on_test if each[1] is None), (*on_test, (None, None))[0])
    return Morning(
        branch,
        shown[-1].environments if shown else (),
        campaign.standing,
        experiments,
        certified,
        obsolete,
        campaign,
        campaign_cost(ledger.runs_dir, shown),
        tuple(c for c in comparisons if c.plan.split == "validation" and c.plan.branch == branch),
        (*notes, *unread),
    )


def counted(count: int, noun: str = "experiment") -> str:
    """1 experiment, 2 experiments."""
    return f"{count:,} {noun}{'s' if count != 1 else ''}"


def _obsolete(certified: Comparison, branch: str, rules_hash: str, campaign: Campaign) -> str | None:
    plan = certified.plan
    if plan.branch != branch:
        return f"it is of branch {plan.branch}"
    if plan.rules_hash != rules_hash:
        return f"it was made under other rules ({plan.rules_hash})"
    wanted = [record.config_hash for record in (*campaign.kept[:1], campaign.incumbent) if record is not None]
    if wanted != [plan.configs[side] for side in ("baseline", "incumbent")]:
        return f"it compares {plan.names['incumbent']} with {plan.names['baseline']}"
    return None


def span(began: str, seconds: float | None = None) -> Span | None:
    """When it began and ended, an interrupted one at once; None where that is no time in a time zone."""
    try:
        start = datetime.fromisoformat(began)
        return (start, start + timedelta(seconds=seconds or 0.0)) if start.tzinfo else None
    except (ValueError, OverflowError):
        return None
