"""A campaign: the experiments of one branch under one set of rules, and the posterior of their changes. It is folded
from the records at every start, with their decisions, so that a decision whose commit was not possible stays undone."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial

from msgspec.structs import replace

from nightshift.campaign.commits import UNREAD, decisions_since, incumbent_config, plan
from nightshift.campaign.git import EXPERIMENT_TRAILER, Repo
from nightshift.campaign.ledger import Ledger
from nightshift.campaign.posterior import Posterior
from nightshift.campaign.records import (
    NOT_ISOLATED,
    Action,
    Change,
    Decision,
    Effect,
    Judgement,
    Record,
    Run,
    Settings,
    Standing,
    Verdict,
)
from nightshift.campaign.results import Row, fates_of, measured_text, row
from nightshift.campaign.scores import compare, remarks, run_scores, without
from nightshift.config.train_toml import Config
from nightshift.errors import EngineError, UsageError
from nightshift.text import clean

Event = tuple[bool, Record]  # True and the record of a start, or False and the record of a decision


class Campaign:
    """The fold."""

    def __init__(self, branch: str = "", rules_hash: str = "") -> None:
        self.branch, self.rules_hash = branch, rules_hash
        self.records = list[Record]()  # all of the checkout
        self.decided = list[Record]()  # in the order of their decisions
        # By number: the score of each later run minus the score that was expected, just before the run was observed, of
        # its config without its new change.
        self.differences = dict[int, Effect]()
        self.posterior: Posterior | None = None  # None before the baseline
        self.user_decisions: tuple[Decision, ...] = ()  # of commits that no record has yet
        self.config: Config | None = None  # the baseline's train.toml
        self.unread: str | None = None  # why the user's own commits could not be read
        self._folded = list[tuple[bool, int]]()  # the events, by their experiments' numbers

    @classmethod
    def of(cls, records: Iterable[Record], branch: str, rules_hash: str, before: Campaign | None = None) -> Campaign:
        """Return a campaign; of `before`, folded earlier, only later events. UsageError for unlike scores."""
        campaign, records = cls(branch, rules_hash), list(records)
        events = events_of(records, branch, rules_hash)
        names = [(is_start, record.number) for is_start, record in events]
        if before is not None and before._folded and before._folded == names[: len(before._folded)]:
            campaign = before._copy()
            campaign.decided, campaign.differences = [*before.decided], {**before.differences}
        for event in events[len(campaign._folded) :]:
            campaign.step(*event)
        campaign.decided = [record for is_start, record in events if not is_start]  # also with commits made since
        campaign.records, campaign._folded = records, names
        return campaign

    @classmethod
    def read(cls, ledger: Ledger, records: Sequence[Record], branch: str, rules_hash: str) -> Campaign:
        """Return a campaign for a command that only looks, with your own commits, or with the reason in `unread`."""
        campaign = cls.of(records, branch, rules_hash)
        try:
            return campaign.with_user_commits(ledger, Repo(ledger.root))
        except (UsageError, EngineError) as error:
            campaign.unread = f"{UNREAD}: {error}"
            return campaign

    def with_user_commits(self, ledger: Ledger, repo: Repo) -> Campaign:
        """Return the campaign with its `config` and with the decisions of `decisions_since`. Raises as that does."""
        self.read_config(ledger)
        if (campaign := self._copy()).posterior is None or self.baseline is None or self.config is None:
            return self
        for decision in decisions_since(ledger, repo, self.records, self.baseline.branch, self.config, self.kept):
            change = campaign.posterior.known(decision.change)
            campaign.user_decisions += (replace(decision, change=change),)
            campaign.posterior.decide_for_user(change, decision.action is Action.KEEP)
        return campaign

    def read_config(self, ledger: Ledger) -> None:
        """Read the baseline's train.toml into `config`, once. UsageError if it was changed."""
        if self.config is None and self.baseline is not None:
            self.config = ledger.stored_config(self.baseline)

    def _copy(self) -> Campaign:
        campaign = copy.copy(self)
        campaign.posterior = self.posterior and self.posterior.copy()
        return campaign

    def step(self, is_start: bool, record: Record) -> None:
        """Fold the start or the decision of one experiment. UsageError first for scores unlike the baseline's."""
        if self.posterior is None:
            if not is_start and record.is_keep:
                self.posterior = _first_posterior(record)
        elif is_start:
            for decision in record.user_decisions:
                self.posterior.decide_for_user(decision.change, decision.action is Action.KEEP)
            self.posterior.stage = record.run.stage
        elif record.judgement is not None and record.status != Verdict.CRASH:
            expected, sd = self.posterior.predict(replace(record.run, new=None).changes, self.hours(record))
            sd = math.sqrt(sd**2 + self.posterior.noise_variance)
            self._observe(self.posterior, record)
            assert record.score is not None
            self.differences[record.number] = Effect(record.score - expected, sd)
            if self.posterior.kept != record.judgement.kept:
                self.posterior.set_kept(record.judgement.kept)
        if not is_start:
            self.decided.append(record)

    def _observe(self, posterior: Posterior, record: Record) -> tuple[Decision, ...]:
        scores, num = run_scores(record), len(run_scores(self.baseline or record))
        if len(scores) != num:
            cause = f"experiment {record.number:04d} has {len(scores)} scores, the baseline {num}"
            raise UsageError(cause, without(record))
        return posterior.observe(record.run, float(scores.mean()), self.hours(record))

    def judge(
        self, record: Record, baseline: Config | None = None, validate: Callable[[Config], object] = lambda config: None
    ) -> Record:
        """Return a measured experiment with its verdict and planned commits. `baseline`: None for `config`."""
        if self.posterior is None:
            standing = _standing(_first_posterior(record), self._num_slots(record))
            return replace(record, status=Verdict.KEEP, judgement=Judgement(why="baseline", standing=standing))
        baseline = baseline or self.config
        assert baseline is not None
        posterior = self.posterior.copy()
        expected_score, _ = posterior.predict(record.run.kept, self.hours(record))
        before, decisions = posterior.kept, self._observe(posterior, record)
        steps, made, kept, refused = plan(baseline, before, decisions, partial(self._reason, record), validate)
        posterior.set_kept(kept)  # in the order of the commits, without what is refused
        made += [decision for decision in decisions if decision.action is Action.DISCARD]
        made += [replace(decision, action=Action.DISCARD) for decision, _ in refused if decision.action is Action.KEEP]
        judgement = Judgement(
            why="",
            decisions=tuple(made),
            kept=posterior.kept,
            expected_score=expected_score,
            standing=_standing(posterior, self._num_slots(record)),
            steps=tuple(steps),
            refused=tuple(decision for decision, _ in refused),
        )
        record = replace(record, judgement=judgement)
        status = Verdict.MEASURED  # also if its change was kept while it ran
        if record.decision is not None:
            status = Verdict.KEEP if record.decision.action is Action.KEEP else Verdict.DISCARD
        why = [measured_text(record, float(run_scores(record).mean()))]
        why += [f"{d.change.name} {d.action.past} (effect {d.estimate.with_p})" for d in record.moved if d.estimate]
        why += [f"{d.change.name} cannot be {d.action.past}: {cause}" for d, cause in refused]
        if (form := compare(record, self._parent_of(record))) and form.conclusion:
            why.append(form.conclusion)
        return replace(record, status=status, judgement=replace(judgement, why="; ".join(why)))

    def _reason(self, record: Record, decision: Decision) -> str:
        """Return the message of a decision's commit, below its subject: evidence, hypothesis, trailers."""
        change, is_new = decision.change, decision.change == record.run.new
        runs = [run for run in (*self.decided, record) if run.status != Verdict.CRASH]
        texts = [record.proposal.description] if is_new else []
        texts += [run.proposal.description for run in runs if run.judgement and run.number == change.experiment]
        names = [f"{run.number:04d}" for run in runs if any(change.keys == held.keys for held in run.run.changes)]
        evidence = [f"effect {decision.estimate.with_p}"] if decision.estimate else []
        evidence += [f"measured by {', '.join(names)}{record.run.with_rider if is_new else ''}"] if names else []
        paragraphs = [f"Evidence: {', '.join(evidence)}"] if evidence else []
        # After a label and before the last paragraph, so that no hypothesis is read as a trailer.
        paragraphs += [f"Hypothesis: {text}" for text in texts[:1] if text]
        trailers = f"{EXPERIMENT_TRAILER}: {record.number:04d}\nNightshift-Campaign: {clean(record.branch)}\n"
        trailers += "" if record.proposal.is_isolated else f"Nightshift-Agent: {NOT_ISOLATED}\n"
        return "\n\n".join([*paragraphs, trailers])

    @property
    def baseline(self) -> Record | None:
        """The first kept experiment."""
        return next((record for record in self.decided if record.is_keep), None)

    @property
    def kept(self) -> tuple[Change, ...]:
        return self.posterior.kept if self.posterior else ()

    @property
    def configs(self) -> tuple[Config, Config] | None:
        """The train.toml of baseline and incumbent; None if the baseline's cannot be read."""
        with suppress(UsageError):
            return None if self.config is None else (self.config, incumbent_config(self.config, self.kept))
        return None

    def compose(self, changes: Iterable[Change]) -> Config:
        """Return the baseline's train.toml with these changes. UsageError without a baseline, or if they do not fit."""
        if self.config is None:
            raise UsageError("there is no baseline to run once more", "Run the first one: uv run run.py")
        return incumbent_config(self.config, changes)

    @property
    def standing(self) -> Standing | None:
        """The posterior of incumbent and baseline now; None before the baseline."""
        return _standing(self.posterior, self._num_slots(self.decided[-1])) if self.posterior else None

    @property
    def parent(self) -> Record | None:
        """The last experiment whose change was kept then and is kept now; else the baseline."""
        keeps = (record for record in reversed(self.decided) if record.is_keep and self.is_kept(record.run.new))
        return next(keeps, self.baseline)

    @property
    def incumbent_run(self) -> Record | None:
        """The last experiment that ran the incumbent's config; None if none did."""
        settings, runs = _settings(self.kept), (r for r in reversed(self.decided) if r.status != Verdict.CRASH)
        return next((record for record in runs if _settings(record.run.changes) == settings), None)

    def rows(self, records: Iterable[Record]) -> list[Row]:
        """Return the rows of experiments of this campaign, as every view and export prints them."""
        fates = fates_of(self.decided, self.kept)
        return [row(record, fates) for record in records]

    def is_kept(self, change: Change | None) -> bool:
        return change is not None and any(change.keys == kept.keys for kept in self.kept)

    def is_confirmed(self, change: Change) -> bool:
        """Return True for P(it helps) above rules.confirmed_above: rare in one night."""
        assert self.posterior is not None
        return self.posterior.effect(change).p_helps > self.posterior.rules.confirmed_above

    def effect_now(self, record: Record) -> Effect | None:
        """Return what an experiment's change adds to the config that it was tried on, as all runs so far have it."""
        if record.decision is None or record.run.new is None or self.posterior is None:
            return None
        return self.posterior.effect(record.run.new, record.run.kept)

    def known(self, keys: dict[str, str | None]) -> Change:
        """Return the change that sets these keys, as it was first proposed."""
        change = Change(keys=keys)
        return self.posterior.known(change) if self.posterior else change

    def hours(self, record: Record) -> float:
        """Return when a run began: hours since the first baseline."""
        assert self.baseline is not None
        return max((_began(record) - _began(self.baseline)).total_seconds() / 3600, 0.0)

    def last_baseline(self) -> datetime | None:
        """Return when the last run of the baseline began; None before the first one."""
        runs = [r for r in self.decided if r.evaluation and r.run.is_baseline and r.status != Verdict.CRASH]
        return _began(runs[-1]) if runs else None

    def remarks(self, record: Record) -> list[str]:
        """Return what the verdict on a measured experiment does not say, a line each."""
        return remarks(record, self._parent_of(record))

    def _parent_of(self, record: Record) -> Record | None:
        parents = (other for other in self.decided if other.number == record.parent)
        return None if record.parent is None else next(parents, self.baseline)

    def _num_slots(self, record: Record) -> int:
        """Return 1 if the campaign's runs follow each other, else 2: then its intervals are wider (rules.widen)."""
        return 2 if any(other.result and other.result.slot for other in (*self.decided, record)) else 1


def already_tried(decided: Sequence[Record], run: Run, config_hash: str) -> Record | None:
    """Return the last experiment with this config, or with the same changes besides its rider."""

    def contents(run: Run) -> set[Settings]:
        return {change.identity for change in replace(run, rider=None).changes}

    same = (r for r in reversed(decided) if r.config_hash == config_hash or contents(r.run) == contents(run))
    return next(same, None)


def events_of(records: Iterable[Record], branch: str, rules_hash: str) -> list[Event]:
    """Return the starts and decisions of a campaign's experiments in the order in which they happened."""
    ours = [record for record in records if (record.branch, record.rules_hash) == (branch, rules_hash)]
    starts = [(record.decided_before, True, record.number, record) for record in ours]
    decisions = [(record.decided, False, 0, record) for record in ours if record.decided is not None]
    return [(is_start, record) for _, is_start, _, record in sorted(starts + decisions, key=lambda event: event[:3])]


def _standing(posterior: Posterior, num_slots: int) -> Standing:
    """Return the posterior of incumbent and baseline. Their difference is the reported gain."""
    baseline, _ = posterior.predict(())
    (gain, halfwidth), estimate = posterior.gain(num_slots), posterior.estimated_gain(num_slots)
    return Standing(
        incumbent=baseline + gain,
        incumbent_sd=posterior.predict(posterior.kept)[1],
        baseline=baseline,
        gain=gain,
        gain_halfwidth=halfwidth,
        contradicted=None if (gain, halfwidth) == estimate else estimate,
        run_sd=math.sqrt(posterior.noise_variance),
    )


def _first_posterior(baseline: Record) -> Posterior:
    scores = run_scores(baseline)
    return Posterior(float(scores.mean()), float(scores.std()) / len(scores) ** 0.5, baseline.decision_rules)


def _began(record: Record) -> datetime:
    return datetime.fromisoformat((record.result and record.result.started) or record.started)


def _settings(changes: Iterable[Change]) -> dict[str, str | None]:
    return {key: value for change in changes for key, value in change.keys.items()}
