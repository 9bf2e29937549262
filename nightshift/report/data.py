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

from nightshift.campaign.ledger import Ledger
from nightshift.campaign.lineage import taken_back
from nightshift.campaign.posterior import Standing, follow
from nightshift.campaign.results import score_of
from nightshift.certify import certificate as certificates
from nightshift.certify.certificate import CERTIFICATE_NAME, Certificate
from nightshift.errors import NightshiftError, UsageError
from nightshift.records import Record, Side, Verdict
from nightshift.rules import ALL_RULES, Rules
from nightshift.train_toml.diff import Change, changes_of

Z95 = 1.959964  # half-width of a 95 % interval in standard deviations
MEASURED = (Verdict.KEEP, Verdict.DISCARD)


@dataclass(frozen=True, slots=True)
class Experiment:
    """One row of the page. Scores are fractions; `spread` is the half-width of the score's 95 % interval.

    `spread` covers seeds and examples where the campaign's run-to-run spread is known (`is_full_spread`), else
    examples only. `standing` is the belief after this experiment.
    """

    record: Record
    score: float | None
    spread: float | None
    is_full_spread: bool
    standing: Standing | None
    changes: tuple[Change, ...]
    is_taken_back: bool = False

    @property
    def number(self) -> int:
        """The experiment's number in the ledger."""
        return self.record.number

    @property
    def is_baseline(self) -> bool:
        """True for the first measured experiment, which is compared with nothing."""
        return self.record.status == Verdict.KEEP and self.record.parent is None

    @property
    def is_kept(self) -> bool:
        """True for a change that was kept, taken back later or not."""
        return self.record.status == Verdict.KEEP and self.record.parent is not None

    @property
    def is_standing(self) -> bool:
        """True for a kept change that the incumbent stands on."""
        return self.is_kept and not self.is_taken_back

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
class Certified:
    """A certificate; `obsolete` says why it does not speak of the page's incumbent, None if it does."""

    certificate: Certificate
    obsolete: str | None


@dataclass(frozen=True, slots=True)
class Morning:
    """All that the page says. `notes` name what could not be read or is not shown."""

    branch: str
    rules: Rules | None
    experiments: tuple[Experiment, ...]
    certified: Certified | None
    notes: tuple[str, ...]

    @property
    def standing(self) -> Standing | None:
        """The belief after the last measured experiment."""
        return next((e.standing for e in reversed(self.experiments) if e.standing is not None), None)

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
        """Baseline and the kept changes that the incumbent stands on, in order."""
        return tuple(e for e in self.experiments if e.is_baseline or e.is_standing)

    def count(self, status: str) -> int:
        """Experiments of one status."""
        return sum(e.record.status == status for e in self.experiments)

    @property
    def crash_causes(self) -> Counter[str]:
        """How many crashes each kind of failure caused."""
        crashed = (e.record for e in self.experiments if e.record.status == Verdict.CRASH)
        return Counter(str(record.failure or "cause not recorded") for record in crashed)


def gather(ledger: Ledger, branch: str | None, head_branch: str) -> Morning:
    """Read the ledger for one branch: the one named, else the one checked out, else that of the last experiment.

    Raises UsageError for a named branch without experiments. Damaged records become notes.
    """
    records, notes = _read(ledger)
    branches = list(dict.fromkeys(r.branch for r in records))
    if branch is not None and branch not in branches:
        known = ", ".join(name or "a detached HEAD" for name in branches) or "no experiment at all"
        raise UsageError(f"no experiment ran on branch {branch}", f"The ledger has: {known}.")
    if branch is None:
        branch = head_branch if head_branch in branches or not records else records[-1].branch
    ours = [r for r in records if r.branch == branch]
    rules_hash = next(
        (r.rules_hash for r in reversed(ours) if r.status in MEASURED), ours[-1].rules_hash if ours else ""
    )
    shown = [r for r in ours if r.rules_hash == rules_hash]
    if len(shown) < len(ours):
        notes.append(
            f"{_of(len(ours) - len(shown))} of this branch ran under other rules and do not compare: not shown."
        )
    if len(ours) < len(records):
        notes.append(f"{_of(len(records) - len(ours))} of other branches: not shown.")
    rules = next((r for r in ALL_RULES if shown and r.name == shown[-1].rules_name), None)
    standings = follow(shown, rules.decision if rules else None)
    if any(s.difference_sd is None for s in standings.values()):
        notes.append(
            "The recorded beliefs cannot be recomputed with this version's decision rule: "
            "the band and the interval of the difference are not shown."
        )
    gone = {record.number for record in taken_back(shown)}
    experiments = tuple(_experiment(r, standings, r.number in gone) for r in shown)
    certified, problem = _certified(ledger.runs_dir, branch, rules_hash, experiments)
    return Morning(branch, rules, experiments, certified, (*notes, *problem))


def _read(ledger: Ledger) -> tuple[list[Record], list[str]]:
    records, notes = [], []
    for number in ledger.numbers():
        try:
            record = ledger.read(number)
        except (NightshiftError, OSError) as error:
            notes.append(f"Not counted: {error.cause if isinstance(error, NightshiftError) else error}.")
            continue
        if record is None:
            continue
        if _has_sound_values(record):
            records.append(record)
        else:
            notes.append(f"Not counted: {ledger.run_dir(number) / 'record.json'} holds values of a wrong kind.")
    return records, notes


def _has_sound_values(record: Record) -> bool:
    """Whether texts are texts and numbers are finite numbers: the ledger checks names only."""
    texts: list[object] = [record.description, record.started, record.branch, record.status, record.rules_hash]
    texts += [record.rules_name, record.engine, record.hardware, *record.diff, *record.unused_keys]
    texts += [text for text in (record.prediction, record.lesson, record.health, record.settled) if text is not None]
    needed: list[object] = [record.number]
    measured: list[object] = [record.total_seconds, record.parent]
    if (j := record.judgement) is not None:
        texts.append(j.why)
        measured += [j.delta, j.delta_stderr, j.p_better, j.incumbent_score, j.taken_back_to, j.taken_back_score]
    for run in record.runs:
        needed += [run.index, run.seed, run.total_seconds, run.training.num_steps]
        measured += [run.startup_seconds, run.training.training_seconds]
        if (e := run.evaluation) is not None:
            needed += [e.eval_score, e.eval_stderr, e.truncated_share, e.completion_tokens_mean, e.seconds]
    return (
        isinstance(record.versions, dict)
        and all(isinstance(text, str) for text in texts)
        and all(map(_is_number, needed))
        and all(value is None or _is_number(value) for value in measured)
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _of(count: int) -> str:
    return f"{count:,} experiment{'s' if count != 1 else ''}"


def _experiment(record: Record, standings: dict[int, Standing], is_taken_back: bool) -> Experiment:
    runs = [run for run in record.runs if run.side is Side.CANDIDATE and run.evaluation is not None]
    score, stderr = score_of(runs)
    standing = standings.get(record.number)
    run_sd = standing.run_sd if standing else None
    if run_sd is not None and runs:
        spread: float | None = Z95 * run_sd / math.sqrt(len(runs))
    else:
        spread = None if stderr is None else Z95 * stderr
    return Experiment(record, score, spread, run_sd is not None, standing, changes_of(record.diff), is_taken_back)


def _certified(
    runs_dir: Path, branch: str, rules_hash: str, experiments: Sequence[Experiment]
) -> tuple[Certified | None, list[str]]:
    try:
        found = certificates.read(runs_dir)
    except (UsageError, OSError):
        found, is_damaged = None, True
    else:
        is_damaged = found is not None and not _is_sound(found)
    if is_damaged:
        return None, [f"{CERTIFICATE_NAME} is damaged: not shown."]
    if found is None:
        return None, []
    return Certified(found, _obsolete(found, branch, rules_hash, experiments)), []


def _is_sound(certificate: Certificate) -> bool:
    """Whether every number of a certificate that was read from a file is one."""
    if not isinstance(certificate.num_seeds, dict):
        return False
    numbers: tuple[object, ...] = (
        *(certificate.baseline_score, certificate.incumbent_score, certificate.difference, *certificate.interval),
        *(certificate.num_examples, certificate.sealed_looks),
        *(certificate.num_seeds.get(side) for side in ("baseline", "incumbent")),
    )
    return all(map(_is_number, numbers)) and _time(certificate.created) is not None


def _obsolete(found: Certificate, branch: str, rules_hash: str, experiments: Sequence[Experiment]) -> str | None:
    if found.branch != branch:
        return f"it is of branch {found.branch}"
    if found.rules_hash != rules_hash:
        return f"it was made under other rules ({found.rules_hash})"
    created = _time(found.created)
    for experiment in experiments:
        began = began_at(experiment.record)
        if began is None or created is None or began <= created:
            continue
        if experiment.is_kept:
            return f"experiment {experiment.number:04d} was kept after it"
        judgement = experiment.record.judgement
        if judgement is not None and judgement.taken_back_to is not None:
            return f"experiment {experiment.number:04d} took a keep back after it"
    return None


def began_at(record: Record) -> datetime | None:
    """When an experiment started; None where the record does not say it as an aware time."""
    return _time(record.started)


def ended_at(record: Record) -> datetime | None:
    """When it ended, as far as its record says: an interrupted one may have no duration."""
    began = began_at(record)
    return None if began is None else began + timedelta(seconds=record.total_seconds or 0.0)


def _time(text: str) -> datetime | None:
    try:
        time = datetime.fromisoformat(text)
    except (ValueError, TypeError):
        return None
    return time if time.tzinfo is not None else None
