"""A campaign: the experiments of one branch under one set of rules, and the posterior of their changes. A fold of the
records repeats the decisions that they contain, so a refused decision stays refused.

Also the end of an experiment: record, commits, model, row of results.tsv. `resume` does what a kill left undone."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from operator import attrgetter, itemgetter
from statistics import NormalDist, fmean
from typing import Any

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from nightshift.campaign.commits import UNREAD, Validate, commit, decisions_since, incumbent_config, plan
from nightshift.campaign.git import CONFIG_NAME, EXPERIMENT_TRAILER, Head, Repo
from nightshift.campaign.ledger import STARTED, Ledger
from nightshift.campaign.posterior import Posterior
from nightshift.campaign.records import (
    MODEL_NAME,
    MODELS_GB,
    NOT_ISOLATED,
    WEIGHTS_NAME,
    Action,
    Change,
    Decision,
    Effect,
    Judgement,
    Part,
    Record,
    Run,
    Settings,
    Stage,
    Standing,
    Verdict,
    percent,
    settings_of,
)
from nightshift.campaign.results import Row, fates_of, measured_text, row
from nightshift.config.train_toml import Config
from nightshift.errors import EngineError, Failure, UsageError
from nightshift.files import disk_error, remove_tree, write_atomically
from nightshift.text import clean

_GUARD_LEVEL = 0.9  # at this P(a change lowers a guard by more than its limit) the change is not kept
Array = NDArray[np.float64]
Event = tuple[bool, Record]  # True and the record of a start, or False and the record of a decision


class Campaign:
    """The state of a campaign, which `step` updates by one event."""

    def __init__(self, branch: str = "", rules_hash: str = "") -> None:
        self.branch, self.rules_hash = branch, rules_hash
        self.records = list[Record]()  # all of the checkout
        self.decided = list[Record]()  # in the order of their decisions
        # By number: the score of each run after the baseline, minus the prediction for its config without its new
        # change.
        self.differences = dict[int, Effect]()
        # By environment: of the scores of guards, which never train. "": of eval_score. Empty before the baseline.
        self._posteriors = dict[str, Posterior]()
        self.user_decisions: tuple[Decision, ...] = ()  # by commits that are in no record yet
        self.config: Config | None = None  # the baseline's train.toml
        self.unread: str | None = None  # why the user's own commits could not be read

    @classmethod
    def of(cls, records: Iterable[Record], branch: str, rules_hash: str) -> Campaign:
        """Return the campaign of these records."""
        campaign = cls(branch, rules_hash)
        campaign.records = list(records)
        for event in events_of(campaign.records, branch, rules_hash):
            campaign.step(*event)
        return campaign

    def copy(self) -> Campaign:
        """Return a copy. A change of one of the two does not change the other."""
        other = copy.copy(self)
        other.decided, other.differences = [*self.decided], dict(self.differences)
        other._posteriors = copy.deepcopy(self._posteriors)
        return other

    @classmethod
    def read(cls, ledger: Ledger, records: Sequence[Record], branch: str, rules_hash: str) -> Campaign:
        """Return a campaign for a read-only command, with the user's commits, or with `unread` if that fails."""
        campaign = cls.of(records, branch, rules_hash)
        try:
            campaign.with_user_commits(ledger, Repo(ledger.root))
        except (UsageError, EngineError) as error:
            campaign.unread = f"{UNREAD}: {error}"
        return campaign

    def with_user_commits(self, ledger: Ledger, repo: Repo) -> Campaign:
        """Add the `config` and the decisions of the user's commits. UsageError if the stored train.toml of the baseline
        was changed. Also raises the errors of `decisions_since`."""
        if self.baseline is not None and self.posterior is not None:
            self.config = ledger.stored_config(self.baseline)
            for decision in decisions_since(repo, self.records, self.branch, self.config, self.kept):
                self.user_decisions += (replace(decision, change=self.posterior.known(decision.change)),)
                self._decide_for_user(self.user_decisions[-1:])
        return self

    def _decide_for_user(self, decisions: Iterable[Decision]) -> None:
        for decision in decisions:
            for posterior in self._posteriors.values():
                posterior.decide_for_user(decision.change, decision.action is Action.KEEP)

    @property
    def posterior(self) -> Posterior | None:
        """The posterior of eval_score; None before the baseline."""
        return self._posteriors.get("")

    def step(self, is_start: bool, record: Record) -> None:
        """Fold the start or the decision of one experiment."""
        judged = record.judgement
        if self.posterior is None:
            if not is_start and record.is_keep:
                self._posteriors = _first_posteriors(record)
        elif is_start:
            self._decide_for_user(record.user_decisions)
            for posterior in self._posteriors.values():
                posterior.stage = record.run.stage
        elif judged is not None and record.score is not None and record.status != Verdict.CRASH:
            expected, sd = self.posterior.predict(replace(record.run, new=None).changes, self.hours(record))
            sd = math.sqrt(sd**2 + self.posterior.noise_variance)
            self.differences[record.number] = Effect(record.score - expected, sd)
            # The decisions are recorded, but a refused decision also discards the final check runs of an earlier night,
            # and guards judge the changes that the rule kept.
            self._observe(record, decides=bool(judged.refused or self._posteriors.keys() - {""}))
            for posterior in self._posteriors.values():
                if posterior.kept != judged.kept:
                    posterior.set_kept(judged.kept)
        if not is_start:
            self.decided.append(record)

    def _observe(self, record: Record, *, decides: bool = True) -> tuple[tuple[Decision, ...], dict[Settings, str]]:
        """Update the posteriors. Return the rule's decisions, and by change the reason why a guard forbids it."""
        assert self.posterior is not None
        assert record.score is not None
        hours, before, falls = self.hours(record), self.posterior.kept, dict[Settings, str]()
        decisions = self.posterior.observe(record.run, record.score, hours, decides=decides)
        for guard in record.evaluation.guards if record.evaluation else ():
            posterior = self._posteriors[guard.environment]
            posterior.observe(record.run, guard.score, hours, decides=False)
            # The last final check runs measure an incumbent that does not change any more.
            for change in self.posterior.kept if posterior.stage is not Stage.LAST_INCUMBENTS else ():
                effect = posterior.effect(change, [other for other in self.posterior.kept if other != change])
                p_falls = NormalDist(effect.mean, effect.sd).cdf(-guard.limit)
                if p_falls >= _GUARD_LEVEL and not self.posterior.is_fixed(change):
                    limit = f"by more than {100 * guard.limit:g} pp"
                    why = f"guard {guard.environment} falls: {effect}, P({limit}) {percent(p_falls)}"
                    falls[change.identity] = why
        for change in self.posterior.kept:
            if change.identity in falls and change not in before:
                self.posterior.decide_for_user(change, False)  # no later run keeps the change or tests it again
        return decisions, falls

    def judge(self, record: Record, baseline: Config | None, validate: Validate = lambda config: None) -> Record:
        """Return a measured experiment with its verdict and planned commits. `baseline`: config of the campaign's
        first experiment; None if `record` is the first."""
        if self.posterior is None or baseline is None:
            standing = self._standing(_first_posteriors(record)[""], record)
            reason = "the first experiment of the campaign: later ones are compared with it"
            judgement = Judgement(why=reason, standing=standing)
            return replace(record, status=Verdict.KEEP, judgement=judgement)
        after = self.copy()
        posterior = after._posteriors[""]
        expected_score, _ = posterior.predict(record.run.kept, self.hours(record))
        before, (decisions, falls) = posterior.kept, after._observe(record)
        forbidden = [decision for decision in decisions if decision.change.identity in falls]
        allowed = [decision for decision in decisions if decision not in forbidden]
        allowed += [Decision(change=change, action=Action.REVERT) for change in before if change.identity in falls]
        steps, planned, kept, refused = plan(baseline, before, allowed, partial(self._reason, record), validate)
        posterior.set_kept(kept)  # in the order of the commits, without refused decisions
        stopped = tuple(decision for decision, _ in refused)
        new = [decision for decision in (*stopped, *forbidden) if decision.action is Action.KEEP]
        discards = [decision for decision in allowed if decision.action is Action.DISCARD]
        discards += [replace(decision, action=Action.DISCARD) for decision in new]
        judgement = Judgement(
            why="",
            decisions=(*planned, *discards),
            kept=posterior.kept,
            expected_score=expected_score,
            standing=self._standing(posterior, record),
            steps=tuple(steps),
            refused=stopped,
        )
        record = replace(record, judgement=judgement)
        status = Verdict.MEASURED  # also if another experiment kept the change during the run
        if record.decision is not None:
            status = Verdict.KEEP if record.decision.action is Action.KEEP else Verdict.DISCARD
        why = [measured_text(record)]
        why += [f"{d.change.name} {d.action.past} (effect {d.estimate.with_p})" for d in record.moved if d.estimate]
        why += [f"{d.change.name} cannot be {d.action.past}: {cause}" for d, cause in refused]
        why += [
            f"{d.change.name} {'not ' if d in forbidden else ''}{d.action.past}: {falls[d.change.identity]}"
            for d in (*forbidden, *planned)
            if d.change.identity in falls
        ]
        effect = record.decision and record.decision.estimate
        is_late = status is Verdict.DISCARD and posterior.stage is not Stage.SEARCH
        if is_late and effect and effect.p_helps >= posterior.rules.keep_at:
            why.append("no change is kept during the final check runs")
        return replace(record, status=status, judgement=replace(judgement, why="; ".join(why)))

    def _reason(self, record: Record, decision: Decision) -> str:
        """Return the message of a decision's commit, below its subject: evidence, hypothesis, trailers."""
        change, is_new = decision.change, decision.change == record.run.new
        runs = [*self.measured, record]
        first = record if is_new else next((run for run in runs if run.number == change.experiment), None)
        names = [f"{run.number:04d}" for run in runs if any(change.keys == other.keys for other in run.run.changes)]
        evidence = [f"effect {decision.estimate.with_p}"] if decision.estimate else []
        evidence += [f"measured by {', '.join(names)}{record.run.with_rider if is_new else ''}"] if names else []
        paragraphs = [f"Evidence: {', '.join(evidence)}"] if evidence else []
        # The label, and the paragraph of trailers below, keep git from reading a hypothesis as a trailer.
        paragraphs += [f"Hypothesis: {first.proposal.description}"] if first and first.proposal.description else []
        trailers = f"{EXPERIMENT_TRAILER}: {record.number:04d}\nNightshift-Campaign: {clean(record.branch)}\n"
        trailers += "" if record.proposal.is_isolated else f"Nightshift-Agent: {NOT_ISOLATED}\n"
        return "\n\n".join([*paragraphs, trailers])

    @property
    def baseline(self) -> Record | None:
        """The first kept experiment."""
        return next((record for record in self.decided if record.is_keep), None)

    @property
    def measured(self) -> list[Record]:
        """The decided experiments with a score."""
        return [record for record in self.decided if record.status != Verdict.CRASH]

    @property
    def rests_on_one_baseline(self) -> bool:
        """True if the gain is uncertain because the baseline has only one measured run."""
        return bool(self.kept) and sum(record.run.is_baseline for record in self.measured) == 1

    @property
    def kept(self) -> tuple[Change, ...]:
        return self.posterior.kept if self.posterior else ()

    @property
    def effects(self) -> list[tuple[Change, Effect]]:
        """The kept changes with their effects now, the most certain first."""
        effects = [(change, self.posterior.effect(change)) for change in self.kept if self.posterior]
        return sorted(effects, key=lambda item: -item[1].p_helps)

    @property
    def configs(self) -> tuple[Config, Config] | None:
        """The configs of baseline and incumbent; None if the baseline's was not read."""
        return None if self.config is None else (self.config, incumbent_config(self.config, self.kept))

    def compose(self, changes: Iterable[Change]) -> Config:
        """Return the baseline's train.toml with these changes. UsageError without a baseline, or if it is invalid."""
        if self.config is None:
            raise UsageError("there is no baseline to run again", "Run the first one: uv run run.py")
        return incumbent_config(self.config, changes)

    @property
    def standing(self) -> Standing | None:
        """The posterior of incumbent and baseline now; None before the baseline."""
        return self._standing(self.posterior, self.decided[-1]) if self.posterior else None

    @property
    def parent(self) -> Record | None:
        """The last experiment whose own change was kept and is still kept; else the baseline."""
        kept = [change.keys for change in self.kept]
        keeps = (r for r in reversed(self.decided) if r.is_keep and r.run.new and r.run.new.keys in kept)
        return next(keeps, self.baseline)

    @property
    def incumbent_run(self) -> Record | None:
        """The last experiment that ran the incumbent's config; None if there is no such experiment."""
        settings = settings_of(self.kept)
        return next((r for r in reversed(self.measured) if settings_of(r.run.changes) == settings), None)

    def rows(self, records: Iterable[Record]) -> list[Row]:
        """Return the rows of experiments of this campaign."""
        fates = fates_of(self.decided, self.kept)
        return [row(record, fates) for record in records]

    def is_confirmed(self, change: Change) -> bool:
        """Return True if P(it helps) is above `rules.confirmed_above`, which is rare in one night."""
        assert self.posterior is not None
        return self.posterior.effect(change).p_helps > self.posterior.rules.confirmed_above

    def known(self, keys: dict[str, str | None]) -> Change:
        """Return the change that sets these keys: as it was first proposed, or a new one."""
        change = Change(keys=keys)
        return self.posterior.known(change) if self.posterior else change

    def hours(self, record: Record) -> float:
        """Return the hours from the start of the first baseline run to the start of this run."""
        assert self.baseline is not None
        return max((_began(record) - _began(self.baseline)).total_seconds() / 3600, 0.0)

    def last_baseline(self) -> datetime | None:
        """Return the start of the last baseline run; None before the first one."""
        return next((_began(record) for record in reversed(self.measured) if record.run.is_baseline), None)

    def _standing(self, posterior: Posterior, record: Record) -> Standing:
        """Return the posterior of incumbent and baseline. Their difference is the reported gain."""
        # With several slots the intervals are wider (rules.widen).
        num_slots = 2 if any(other.result and other.result.slot for other in (*self.decided, record)) else 1
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


def already_tried(
    decided: Sequence[Record], run: Run, config_hash: str, effective: Mapping[str, Any] | None = None
) -> Record | None:
    """Return the last experiment with this config, or with the same effective settings or changes (not the rider)."""

    def contents(run: Run) -> set[Settings]:
        return {change.identity for change in replace(run, rider=None).changes}

    for record in reversed(decided):
        is_same = record.config_hash == config_hash or (effective and record.effective == effective)
        if is_same or contents(record.run) == contents(run):
            return record
    return None


def events_of(records: Iterable[Record], branch: str, rules_hash: str) -> list[Event]:
    """Return the starts and decisions of a campaign's experiments in the order in which they happened."""
    ours = [record for record in records if record.campaign == (branch, rules_hash)]
    starts = [((record.decided_before, True, record.number), record) for record in ours]
    decisions = [((record.decided, False, 0), record) for record in ours if record.decided is not None]
    events = sorted(starts + decisions, key=itemgetter(0))
    return [(is_start, record) for (_, is_start, _), record in events]


def _first_posteriors(baseline: Record) -> dict[str, Posterior]:
    evaluation = baseline.evaluation
    assert evaluation is not None
    scores = {"": (evaluation.eval_score, evaluation.eval_stderr)}
    scores |= {guard.environment: (guard.score, guard.stderr) for guard in evaluation.guards}
    return {name: Posterior(*score, baseline.decision_rules) for name, score in scores.items()}


def _began(record: Record) -> datetime:
    return datetime.fromisoformat((record.result and record.result.started) or record.started)


def weighted(scores: Sequence[float], parts: Sequence[Part]) -> Array:
    """Return n values whose mean is the weighted mean of the environments e, and whose spread over examples gives the
    standard error of this mean: each score minus the mean of e, times (w_e / sum of w) (n / n_e), plus the mean."""
    if not parts:
        return np.array(scores, dtype=np.float64)
    groups = split(scores, parts)
    means = np.array([fmean(group) for group in groups])
    shares = np.array([part.weight for part in parts]) / sum(part.weight for part in parts)
    return np.concatenate(
        [
            (np.array(group) - mean) * (share * len(scores) / len(group)) + shares @ means
            for group, mean, share in zip(groups, means, shares, strict=True)
        ]
    )


def split(scores: Sequence[float], parts: Sequence[Part]) -> list[Sequence[float]]:
    """Return the scores of each environment."""
    ends = np.cumsum([part.num_examples for part in parts])
    return [scores[end - part.num_examples : end] for part, end in zip(parts, ends, strict=True)]


def crash(record: Record, failure: Failure, cause: str) -> Record:
    """Return the record as a crash with its cause."""
    return replace(record, status=Verdict.CRASH, failure=failure, judgement=Judgement(why=clean(cause)))


def close(record: Record, ledger: Ledger, repo: Repo) -> Record:
    """Write a record with its verdict, commit owed decisions and its own, keep or delete the model, add the row."""
    ledger.write(record)
    for earlier in _owed(ledger.records(), record.branch):
        if earlier.place < record.place:
            ledger.write(_settle(earlier, ledger, repo))
    record = _settle(record, ledger, repo)
    keep_model(ledger, record)
    ledger.close(record)
    return record


def _settle(record: Record, ledger: Ledger, repo: Repo) -> Record:
    """Make a record's planned commits, and write train.toml. Return the record with what git did, or the error."""
    if record.failure in (Failure.INFRASTRUCTURE, Failure.INTERRUPTED):
        return replace(record, git_action="train.toml left as it is: nothing was decided")
    if record.parent is None or (record.is_keep and record.decision is None):  # the first baseline's record may be gone
        return replace(record, git_action="nothing to commit: train.toml is the baseline")
    assert record.judgement is not None
    steps, head, path = record.judgement.steps, Head(record.branch, record.commit), repo.root / CONFIG_NAME
    try:
        others = {id for r in ledger.records() if r.number != record.number for id in r.commits.values()}
        ids = commit(repo, head, steps, others)
        commits = {step.name: id for step, id in zip(steps, ids, strict=True) if id is not None}
        actions = [f"committed {id[:7]} ({name})" for name, id in commits.items()]
        earlier = {ledger.stored_config(record).source, *(entry.before for entry in repo.config_history(head))}
        source, here = repo.config_at("HEAD"), path.read_bytes() if path.is_file() and not path.is_symlink() else None
        if here == source:
            actions.append("train.toml contains the incumbent")
        elif here in earlier and source is not None:
            write_atomically(path, source)
            actions.append("wrote the incumbent to train.toml")
        else:
            actions.append("left train.toml as it is: it is neither the config that ran nor the incumbent")
        return replace(record, commits=commits, git_action="; ".join(actions), git_error=None)
    except (EngineError, UsageError, OSError, ValueError) as error:
        return replace(record, git_action=f"not committed yet: {error}", git_error=str(error))


def uncommitted(records: Sequence[Record], branch: str) -> str | None:
    """Return a line about the first decisions of a campaign that git did not commit; None if all are committed."""
    for record in records:
        if record.branch == branch and record.git_error and record.judgement and record.judgement.steps:
            names = ", ".join(step.name for step in record.judgement.steps)
            return (
                f"{names}: decided, but not committed: {record.git_error}. Each later experiment and start tries again."
            )
    return None


def _owed(records: Sequence[Record], branch: str) -> list[Record]:
    """Return the experiments whose commits are owed, in order; none from before the user's last decision."""
    ours = [record for record in records if record.branch == branch]
    by_user = max((record.decided_before for record in ours if record.user_decisions), default=0)
    owed = [r for r in ours if r.judgement and r.place > by_user and (r.git_action is None or r.git_error)]
    return sorted(owed, key=attrgetter("place"))


def resume(ledger: Ledger, repo: Repo, note: Callable[[str], None], in_flight: Collection[int] = ()) -> None:
    """Close the experiments that an earlier controller left open, except those `in_flight`. Needs the lock."""
    ledger.sweep()
    records = [record for record in ledger.records() if record.number not in in_flight]
    owed = _owed(records, repo.head().branch)
    due = [record for record in records if record.git_action is None or record in owed]
    for record in sorted(due, key=lambda record: (record.decided is None, record.place, record.number)):
        if record.status == STARTED:
            cause = "interrupted: the process ended before the verdict"
            close(crash(record, Failure.INTERRUPTED, cause), ledger, repo)
            note(f"experiment {record.number:04d} was interrupted")
        elif record.judgement and (git_action := close(record, ledger, repo).git_action) != record.git_action:
            note(f"experiment {record.number:04d} was decided before git was called; now: {git_action}")


def keep_model(ledger: Ledger, record: Record) -> None:
    """Keep the model of a kept experiment or of a run of the incumbent as `runs/NNNN/model`; delete other weights. If
    the models in runs/ use more than MODELS_GB, delete the oldest, except for those of the baseline, the parent, the
    last run of the incumbent and this experiment. Call before `Ledger.close`, because `resume` repeats both after a
    kill. EngineError if the disk refuses."""
    folder = ledger.run_dir(record.number)
    try:
        if record.evaluation and (record.is_keep or record.is_incumbent):
            with suppress(FileNotFoundError):  # moved before a kill
                (folder / WEIGHTS_NAME).rename(folder / MODEL_NAME)
        for path in folder.glob(f"*{WEIGHTS_NAME}*"):  # also partial ones, after a kill
            remove_tree(path)
        models = sorted(ledger.runs_dir.glob(f"[0-9]*/{MODEL_NAME}"))
        sizes = {model: sum(file.lstat().st_size for file in model.iterdir()) for model in models}
        if sum(sizes.values()) <= MODELS_GB * 1e9:
            return
        campaign = Campaign.of(ledger.records(), *record.campaign)
        needed = filter(None, (campaign.baseline, campaign.parent, campaign.incumbent_run, record))
        spared = {ledger.run_dir(other.number) for other in needed}
        for model in models:
            if sum(sizes.values()) > MODELS_GB * 1e9 and model.parent not in spared:
                remove_tree(model)
                del sizes[model]
    except OSError as error:
        raise disk_error(error, folder) from None
