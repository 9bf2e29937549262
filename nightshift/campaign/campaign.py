"""A campaign: the experiments of one branch under one set of rules, and what is believed of their changes.

Nothing of it is stored: it is folded from the records at every start. The records' decisions are what happened; the
fold takes them over, so that a decision whose commit was not possible stays undone.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from msgspec.structs import replace

from nightshift.campaign.commits import plan
from nightshift.campaign.next_run import Settings, settings_of
from nightshift.campaign.posterior import Posterior
from nightshift.campaign.records import Action, Change, Decision, Effect, Judgement, Record, Run, Standing, Verdict
from nightshift.campaign.results import is_replaced
from nightshift.campaign.scores import BUSY, Form, compare, remark, remarks, run_scores, taken, without
from nightshift.config.train_toml import Config
from nightshift.errors import UsageError

if TYPE_CHECKING:
    from nightshift.campaign.ledger import Ledger


class Campaign:
    """The fold. `decided`: the decided experiments, in the order of their decisions. `posterior` and `baseline`, the
    first kept experiment, are None before that."""

    def __init__(self) -> None:
        self.decided: list[Record] = []
        self.baseline: Record | None = None
        self.posterior: Posterior | None = None
        self.first_proposals: dict[int, Record] = {}  # by number: experiments that first proposed their change
        self._events: list[tuple[bool, Record]] = []  # is_start, record: in the order in which they happened

    @classmethod
    def of(cls, records: Sequence[Record], branch: str, rules_hash: str) -> Campaign:
        """The campaign of one branch and rules hash, as its records tell it. UsageError for scores that fit nothing."""
        campaign = cls()
        campaign.update(events_of(records, branch, rules_hash))
        return campaign

    def copy(self) -> Campaign:
        """The campaign as it is now, which later updates do not change."""
        made = copy.copy(self)
        made.posterior = self.posterior and self.posterior.copy()
        made.decided, made.first_proposals = [*self.decided], {**self.first_proposals}
        return made

    def update(self, events: Sequence[tuple[bool, Record]]) -> None:
        """Fold what came since; all of it, if what was folded before is not the beginning of `events`."""
        known = self._events
        if len(known) > len(events) or any(_differ(a, b) for a, b in zip(known, events, strict=False)):
            self.__init__()  # type: ignore[misc]
        num_known = len(self._events)
        # The same experiments as they are written now: with a lesson, with the commits.
        self._events = list(events[:num_known])
        self.decided = [record for is_start, record in self._events if not is_start]
        newest = {record.number: record for record in self.decided}
        self.first_proposals = {number: newest[number] for number in self.first_proposals}
        self.baseline = newest[self.baseline.number] if self.baseline else None
        for is_start, record in events[num_known:]:
            self.step(is_start, record)

    def step(self, is_start: bool, record: Record) -> None:
        """Fold the start or the decision of one experiment. UsageError for scores that fit nothing; then nothing of it
        is folded."""
        if self.posterior is None:
            if not is_start and record.is_keep:
                self.posterior = _first_posterior(record)
                self.baseline = record
        elif is_start:
            for decision in record.user_decisions:
                self.posterior.decide_for_user(decision.change, decision.action is Action.KEEP)
            self.posterior.stage = record.run.stage
        elif record.judgement is not None and record.status != Verdict.CRASH:
            self._observe(self.posterior, record)
            if self.posterior.kept != record.judgement.kept:
                self.posterior.set_kept(record.judgement.kept)
            if record.run.new is not None and record.run.new.experiment == record.number:
                self.first_proposals[record.number] = record
        self._events.append((is_start, record))
        if not is_start:
            self.decided.append(record)

    def _observe(self, posterior: Posterior, record: Record) -> tuple[Decision, ...]:
        assert self.baseline is not None
        scores, before = run_scores(record), run_scores(self.baseline)
        _require_as_many(record, len(scores), len(before))
        return posterior.observe(record.run, float(scores.mean()), self.hours(record), _noise_factor(record))

    def judge(
        self, record: Record, baseline: Config, validate: Callable[[Config], object] = lambda config: None
    ) -> Record:
        """A measured experiment with its verdict and judgement. `baseline`: the config of the campaign's first one;
        `validate`: UsageError for an incumbent that the engine would not run."""
        scores = run_scores(record)
        if self.posterior is None:
            posterior = _first_posterior(record)
            judgement = Judgement(why="baseline", standing=_standing(posterior, self._num_slots(record)))
            return replace(record, status=Verdict.KEEP, judgement=judgement)
        posterior = self.posterior.copy()
        expected_score, _ = posterior.predict(record.run.kept, self.hours(record))
        kept = posterior.kept
        decisions = self._observe(posterior, record)
        steps, refused = plan(baseline, kept, decisions, validate)
        posterior.set_kept(steps[-1].kept if steps else kept)  # in the order of the commits, without what is refused
        made = [step.decision for step in steps]
        made += [d for d in decisions if d.action is Action.DISCARD]
        made += [replace(decision, action=Action.DISCARD) for decision, _ in refused if decision.action is Action.KEEP]
        judgement = Judgement(
            why="",
            decisions=tuple(made),
            kept=posterior.kept,
            expected_score=expected_score,
            standing=_standing(posterior, self._num_slots(record)),
            refused=tuple(decision for decision, _ in refused),
        )
        record = replace(record, judgement=judgement)
        verdict = Verdict.MEASURED  # also if its change was kept while it ran
        if (own := record.decision) is not None:
            verdict = Verdict.KEEP if own.action is Action.KEEP else Verdict.DISCARD
        record = replace(record, status=verdict)
        why = [told(record, float(scores.mean()))]
        why += [f"{d.change.name} {d.action.past} (effect {d.estimate.with_p})" for d in record.moved if d.estimate]
        why += [f"{d.change.name} cannot be {d.action.past}: {cause}" for d, cause in refused]
        learnt = self.form(record)
        why += [learnt.conclusion] if learnt and learnt.conclusion else []
        return replace(record, judgement=replace(judgement, why="; ".join(why)))

    @property
    def kept(self) -> tuple[Change, ...]:
        return self.posterior.kept if self.posterior else ()

    @property
    def standing(self) -> Standing | None:
        """What is believed now; None before the baseline."""
        if self.posterior is None:
            return None
        return _standing(self.posterior, self._num_slots(self.decided[-1]))

    @property
    def parent(self) -> Record | None:
        """The last experiment whose change came in when it was new, and is kept; else the baseline. Its answers are
        compared with those of the next one."""
        for record in reversed(self.decided):
            if record.is_keep and self.is_kept(record.run.new):
                return record
        return self.baseline

    @property
    def incumbent_run(self) -> Record | None:
        """The last experiment that ran the incumbent's config as it is now; None if none did."""
        settings = _settings(self.kept)
        for record in reversed(self.decided):
            if record.status != Verdict.CRASH and _settings(record.run.changes) == settings:
                return record
        return None

    def effect(self, record: Record) -> Effect | None:
        """What the change of an experiment adds to the incumbent, as it is believed now; None if it has no change, or
        came to no verdict, or crashed: another experiment may have measured the same change."""
        change, is_measured = record.run.new, record.status in (Verdict.KEEP, Verdict.DISCARD)
        if change is None or not is_measured or self.posterior is None or self.posterior.known(change) is None:
            return None
        return self.posterior.effect(change)

    def is_kept(self, change: Change | None) -> bool:
        return change is not None and any(change.keys == kept.keys for kept in self.kept)

    def is_confirmed(self, change: Change) -> bool:
        """True for P(it helps) above rules.confirmed_above: rare in one night."""
        assert self.posterior is not None
        return self.posterior.effect(change).p_helps > self.posterior.rules.confirmed_above

    def since(self, record: Record) -> str:
        """What became of the experiment's change by now: confirmed or unconfirmed if it is kept; `adopted, ...` if it
        was discarded at first; reverted, or replaced by changes of all its keys, if it was kept. Else empty."""
        change = record.run.new
        if change is None or record.status not in (Verdict.KEEP, Verdict.DISCARD):
            return ""
        if not self.is_kept(change):
            left = "replaced" if is_replaced(change, self.kept) else "reverted"
            return left if record.is_keep else ""
        support = "confirmed" if self.is_confirmed(change) else "unconfirmed"
        return support if record.is_keep else f"adopted, {support}"

    def known(self, keys: dict[str, str | None]) -> Change:
        """The change that sets these keys, as it was first proposed."""
        change = Change(keys=keys)
        return (self.posterior and self.posterior.known(change)) or change

    def measured_by(self, change: Change) -> tuple[int, ...]:
        """The experiments whose runs held a change, so that they measured it against the runs that did not."""
        return tuple(
            record.number
            for record in self.decided
            if record.status != Verdict.CRASH and any(change.keys == held.keys for held in record.run.changes)
        )

    def hours(self, record: Record) -> float:
        """When a run began: hours since the first baseline."""
        assert self.baseline is not None
        return max((_began(record) - _began(self.baseline)).total_seconds() / 3600, 0.0)

    def last_baseline(self) -> datetime | None:
        """When the last run of the baseline began; None before the first one."""
        runs = [r for r in self.decided if r.evaluation and r.run.is_baseline and r.status != Verdict.CRASH]
        return _began(runs[-1]) if runs else None

    def _num_slots(self, record: Record) -> int:
        """1 if the campaign's runs follow each other, else 2: then its intervals are wider (rules.widen)."""
        return 2 if any(each.result and each.result.slot for each in (*self.decided, record)) else 1

    def form(self, record: Record) -> Form | None:
        """What a measured experiment learnt of the form beside its parent, see `scores.Form`."""
        parent = self._parent_of(record)
        return compare(record, parent) if parent else None

    def remarks(self, record: Record) -> list[str]:
        """What the verdict on a measured experiment does not say: load, gains in form, environments that fall."""
        form, busy = self.form(record), remark(record)
        lines = [busy] if busy else []
        lines += [form.line] if form and form.conclusion else []
        return lines + remarks(record, self._parent_of(record))

    def _parent_of(self, record: Record) -> Record | None:
        """What its answers are compared with; None for the first one."""
        if record.parent is None:
            return None
        return next((each for each in self.decided if each.number == record.parent), self.baseline)

    def seeds(self) -> set[int]:
        """Those of all runs so far that were scored: each experiment has one of its own."""
        return {record.result.seed for record in self.decided if record.result and record.result.evaluation}

    def tried(self, run: Run, config_hash: str) -> Record | None:
        """The last experiment that decided this config, or the same changes, whatever rider it had."""
        wanted = _contents(run)
        for record in reversed(self.decided):
            if record.config_hash == config_hash or _contents(record.run) == wanted:
                return record
        return None


def told(record: Record, score: float) -> str:
    """A measured experiment in one line: what was measured, what was expected, and what follows for its change."""
    judged, run, decision = record.judgement, record.run, record.decision
    assert judged is not None
    text = f"measured {100 * score:.1f} %{run.with_rider}"
    if judged.expected_score is not None:
        of = "incumbent" if run.new or run.kept else "baseline"
        text += f", expected of the {of} {100 * judged.expected_score:.1f} %"
    if decision is not None and decision.estimate is not None:
        text += f"; effect {decision.estimate.with_p}: {decision.action}"
    return text


def events_of(records: Sequence[Record], branch: str, rules_hash: str) -> list[tuple[bool, Record]]:
    """The starts (True) and decisions (False) of a campaign's experiments, in the order in which they happened."""
    ours = [record for record in records if (record.branch, record.rules_hash) == (branch, rules_hash)]
    starts = [((record.decided_before, 1, record.number), True, record) for record in ours]
    decisions = [((record.decided, 0, 0), False, record) for record in ours if record.decided is not None]
    return [(is_start, record) for _, is_start, record in sorted([*starts, *decisions], key=lambda event: event[0])]


def fold(ledger: Ledger, records: Sequence[Record], branch: str, rules_hash: str) -> Campaign:
    """As `Campaign.of`, from where this process has folded to. The next call changes the same campaign."""
    campaign: Campaign = ledger.folded.pop((branch, rules_hash), None) or Campaign()
    campaign.update(events_of(records, branch, rules_hash))
    ledger.folded[branch, rules_hash] = campaign
    return campaign


def contradictions(records: Sequence[Record], stored: Callable[[Record], Config]) -> list[str]:
    """Where a campaign's decisions are not those that the rule makes of its scores, a line for each experiment.

    `stored`: reads the config that an experiment ran; UsageError where it cannot be read.
    """
    found = []
    for branch, rules_hash in dict.fromkeys((record.branch, record.rules_hash) for record in records):
        campaign = Campaign()
        try:
            for is_start, record in events_of(records, branch, rules_hash):
                judged = record.judgement
                if not is_start and judged and record.status != Verdict.CRASH and campaign.baseline:
                    again = campaign.judge(record, stored(campaign.baseline)).judgement
                    # What the engine refused cannot be repeated without the engine.
                    if _decided(again) != _decided(judged) and not judged.refused:
                        found.append(f"experiment {record.number:04d}: its scores do not lead to its decisions")
                campaign.step(is_start, record)
        except UsageError:  # told by those that read this record and its train.toml
            continue
    return found


def _decided(judgement: Judgement | None) -> list[tuple[str, Action, float]]:
    decisions = judgement.decisions if judgement else ()
    return [(d.change.name, d.action, round(d.effect or 0.0, 9)) for d in decisions]


def _standing(posterior: Posterior, num_slots: int) -> Standing:
    """What is believed now. Incumbent less baseline is the gain as it is reported."""
    baseline, _ = posterior.predict(())
    _, incumbent_sd = posterior.predict(posterior.kept)
    gain, halfwidth = posterior.gain(num_slots)
    return Standing(
        incumbent=baseline + gain,
        incumbent_sd=incumbent_sd,
        baseline=baseline,
        gain=gain,
        gain_halfwidth=halfwidth,
        run_sd=math.sqrt(posterior.noise_variance),
    )


def _require_as_many(record: Record, num_scores: int, num_of_baseline: int) -> None:
    if num_scores != num_of_baseline:
        cause = f"experiment {record.number:04d} has {num_scores} scores, the baseline {num_of_baseline}"
        raise UsageError(cause, without(record))


def _first_posterior(baseline: Record) -> Posterior:
    scores = run_scores(baseline)
    stderr = float(scores.std()) / len(scores) ** 0.5
    return Posterior(float(scores.mean()), stderr, baseline.decision_rules, _noise_factor(baseline))


def _noise_factor(record: Record) -> float:
    """Factor on the noise of a run: more if others took much of its CPUs or GPUs."""
    return record.decision_rules.contention_noise if taken(record) >= BUSY else 1.0


def _began(record: Record) -> datetime:
    return datetime.fromisoformat((record.result and record.result.started) or record.started)


def _settings(changes: Iterable[Change]) -> dict[str, str | None]:
    return {key: value for change in changes for key, value in change.keys.items()}


def _contents(run: Run) -> set[Settings]:
    """What a run holds besides its rider."""
    return {settings_of(change) for change in (*run.kept, *([run.new] if run.new else []))}


def _differ(one: tuple[bool, Record], other: tuple[bool, Record]) -> bool:
    """True if two events do not fold to the same."""
    (is_start, a), (is_start_too, b) = one, other
    if a is b and is_start == is_start_too:
        return False
    if (is_start, a.number, a.run, a.user_decisions) != (is_start_too, b.number, b.run, b.user_decisions):
        return True
    return not is_start and (a.status, a.decided, a.judgement, a.result) != (b.status, b.decided, b.judgement, b.result)
