"""The numbers of the morning page: every one from the ledger, None where the ledger has none.

A campaign here is what one branch ran under one rules hash: results compare only within it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from nightshift.campaign.index import fold_sound
from nightshift.campaign.ledger import Ledger
from nightshift.campaign.standing import Z95, Standing
from nightshift.certify import certificate
from nightshift.certify.certificate import CERTIFICATE_NAME, Certificate
from nightshift.certify.transfer import Transfer, made
from nightshift.errors import UsageError
from nightshift.records import Record, Verdict
from nightshift.train_toml.config import Change, changes_of

MEASURED = (Verdict.KEEP, Verdict.DISCARD)


@dataclass(frozen=True, slots=True)
class Experiment:
    """One row of the page. Scores are fractions.

    `standing` is what is believed after this experiment, None where it was not measured or decided nothing;
    `is_standing`: the incumbent of now stands on it: it is it, the baseline, or an experiment whose idea is part of it.
    `since`: what became of a keep, "" of any other. `beside`: how what its idea was tried on differed from the
    incumbent of then, "" where it did not.
    """

    record: Record
    changes: tuple[Change, ...]
    standing: Standing | None
    is_standing: bool
    since: str = ""
    beside: str = ""

    @property
    def number(self) -> int:
        """The experiment's number in the ledger."""
        return self.record.number

    @property
    def is_crash(self) -> bool:
        """True if it came to nothing."""
        return self.record.status == Verdict.CRASH

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
    def score(self) -> float | None:
        """Mean score of its runs."""
        return self.record.score

    @property
    def strict(self) -> float | None:
        """Mean strict score of its runs."""
        return self.record.strict_score

    @property
    def spread(self) -> float | None:
        """Half-width of the score's 95 % interval, over seeds and examples."""
        num_runs = len(self.record.evaluations)
        return Z95 * self.standing.run_sd / math.sqrt(num_runs) if self.standing and num_runs else None

    @property
    def kind(self) -> str:
        """How it is drawn: baseline, back for a keep that was taken back, else its status."""
        return "baseline" if self.is_baseline else "back" if self.is_taken_back else str(self.record.status)

    @property
    def delta(self) -> float | None:
        """Posterior mean of candidate minus incumbent."""
        return self.record.judgement.delta if self.record.judgement else None

    @property
    def delta_spread(self) -> float | None:
        """Half-width of delta's 95 % interval."""
        stderr = self.record.judgement.delta_stderr if self.record.judgement else None
        return None if stderr is None else Z95 * stderr


@dataclass(frozen=True, slots=True)
class Morning:
    """All that the page says. `notes` name what could not be read or is not shown.

    `obsolete` says why the certificate does not speak of the page's incumbent, None if it does.
    """

    branch: str
    environments: tuple[str, ...]  # names
    standing: Standing | None  # what is believed now; None before the baseline
    experiments: tuple[Experiment, ...]
    certificate: Certificate | None
    obsolete: str | None
    transfers: tuple[Transfer, ...]  # of this branch
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

    def count(self, status: str) -> int:
        """Experiments of one status."""
        return sum(e.record.status == status for e in self.experiments)

    @property
    def crash_causes(self) -> Counter[str]:
        """How many crashes each kind of failure caused."""
        return Counter(str(e.record.failure or "cause not recorded") for e in self.experiments if e.is_crash)


def gather(ledger: Ledger, branch: str | None, head_branch: str) -> Morning:
    """Read the ledger for one branch: the one named, else the one checked out, else that of the last experiment.

    Raises UsageError for a named branch without experiments. Damaged records become notes.
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
    shown = [r for r in shown if r.number not in unfit]
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
        )
        for r in shown
    )
    certified, unread = _certificate(ledger.runs_dir)
    obsolete = _obsolete(certified, branch, rules_hash, experiments) if certified else None
    return Morning(
        branch,
        last.environments if last else (),
        campaign.standing,
        experiments,
        certified,
        obsolete,
        tuple(answer for answer in made(ledger) if answer.branch == branch),
        (*notes, *unread),
    )


def counted(count: int, noun: str = "experiment") -> str:
    """1 experiment, 2 experiments."""
    return f"{count:,} {noun}{'s' if count != 1 else ''}"


def _certificate(runs_dir: Path) -> tuple[Certificate | None, list[str]]:
    try:
        found = certificate.read(runs_dir)
        is_sound = found is None or bool(_time(found.created) and found.num_seeds.keys() >= {"baseline", "incumbent"})
    except UsageError:
        is_sound = False
    return (found, []) if is_sound else (None, [f"{CERTIFICATE_NAME} is damaged: not shown."])


def _obsolete(found: Certificate, branch: str, rules_hash: str, experiments: Sequence[Experiment]) -> str | None:
    if found.branch != branch:
        return f"it is of branch {found.branch}"
    if found.rules_hash != rules_hash:
        return f"it was made under other rules ({found.rules_hash})"
    created = _time(found.created)
    for e in experiments:
        span, judgement = span_of(e.record), e.record.judgement
        if span and created and span[0] > created:
            if e.is_kept:
                return f"experiment {e.number:04d} was kept after it"
            if judgement and judgement.taken_back_to is not None:
                return f"experiment {e.number:04d} took a keep back after it"
    return None


def span_of(record: Record) -> tuple[datetime, datetime] | None:
    """When an experiment began and ended, an interrupted one at once; None where the record has no aware time."""
    began, ended = _time(record.started), _time(record.started, record.total_seconds or 0.0)
    return (began, ended) if began and ended else None


def _time(text: str, seconds_later: float = 0.0) -> datetime | None:
    try:
        time = datetime.fromisoformat(text) + timedelta(seconds=seconds_later)
    except (ValueError, OverflowError):
        return None
    return time if time.tzinfo is not None else None
