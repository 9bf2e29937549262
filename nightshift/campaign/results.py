"""The results of experiments: the row that all views and exports show, results.tsv, counts, and sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, Literal

import msgspec
from msgspec.structs import asdict

from nightshift.campaign.records import (
    Change,
    Decision,
    Effect,
    Guard,
    Part,
    Record,
    Settings,
    Stage,
    Standing,
    settings_of,
)
from nightshift.errors import Failure
from nightshift.text import clean, counted, escape_formula

# The columns of results.tsv. The first five are autoresearch's columns. `status` is `Row.verdict`, not `Row.status`.
# Add new columns at the end.
COLUMNS = (
    *("commit", "eval_score", "memory_gb", "status", "description"),
    *("run", "parent", "eval_stderr", "effect_at_decision", "p_helps", "rider", "num_steps", "reward_mean"),
    *("training_seconds", "total_seconds", "engine", "rules", "started", "now", "proposer"),
)
UNDECIDED = "undecided"  # shown instead of a verdict: the run is in flight, or interrupted and not closed yet

VerdictName = Literal["baseline", "keep", "discard", "re-run", "crash", "interrupted"]
# The present status of a change; "" if it was never kept. "kept later": its own experiment discarded it, a later
# experiment kept it. "replaced": later kept changes set all of its keys.
Now = Literal["kept", "kept later", "replaced", "reverted", ""]
Fate = tuple[Now, str | None]  # the present status of a change, and the last commit that kept it


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One experiment as all views and exports show it. None: no value yet, not measured or not applicable."""

    number: int
    verdict: VerdictName | None
    now: Now  # the present status of the new change
    failure: Failure | None
    commit: str | None  # the commit that kept the new change
    description: str
    change: str | None  # the name of the new change: the number of the experiment that proposed it first
    changes: tuple[str, ...]  # the new change, one line per key
    parent: int | None
    kept: tuple[str, ...]  # the names of the kept changes in the run's config
    rider: str | None  # the name of the discarded change that the run re-tests
    eval_score: float | None
    eval_stderr: float | None
    strict_score: float | None
    environment_scores: dict[str, float]  # by column name; empty for one environment without a guard
    incumbent_score: float | None  # the incumbent's estimated score after the decision
    effect_at_decision: float | None  # of the new change
    effect_at_decision_stderr: float | None
    p_helps: float | None  # P(effect_at_decision > 0)
    why: str  # the reason for the verdict
    num_steps: int | None
    reward_mean: float | None
    training_seconds: float | None
    total_seconds: float | None
    memory_gb: float | None
    branch: str
    rules: str
    engine: str
    proposer: str | None
    started: str

    @property
    def effect(self) -> Effect | None:
        """The effect of the new change, as estimated at the decision."""
        mean, sd = self.effect_at_decision, self.effect_at_decision_stderr
        return None if mean is None or sd is None else Effect(mean, sd)

    @property
    def is_kept(self) -> bool:
        """True if the incumbent contains the new change."""
        return self.now in ("kept", "kept later")

    @property
    def status(self) -> str:
        """The verdict, with the present status if it differs: `keep`, `keep, now replaced`, `discard, kept later`."""
        now = {"kept": "", "kept later": "kept later", "": ""}.get(self.now, f"now {self.now}")
        return ", ".join(filter(None, (self.verdict or UNDECIDED, now)))

    @property
    def cells(self) -> dict[str, Any]:
        """The values by column name: a tuple becomes a string, and each environment has a column."""
        fields = {name: ", ".join(v) if isinstance(v, tuple) else v for name, v in asdict(self).items()}
        del fields["environment_scores"]
        return fields | self.environment_scores


def verdict_of(record: Record) -> VerdictName | None:
    """Return the verdict in the words of the views; None if there is no verdict yet."""
    if record.failure is Failure.INTERRUPTED:
        return "interrupted"
    keep: VerdictName = "baseline" if record.parent is None else "keep"
    words: dict[str, VerdictName] = {"keep": keep, "discard": "discard", "measured": "re-run", "crash": "crash"}
    return words.get(record.status)


def row(record: Record, fates: Mapping[Settings, Fate]) -> Row:
    """Return the row of one experiment. `fates`: the result of `fates_of` for the experiment's campaign."""
    run, verdict, evaluation = record.run, verdict_of(record), record.evaluation
    effect = record.decision and record.decision.estimate
    training = record.result and record.result.training
    standing = record.judgement and record.judgement.standing
    fate = fates.get(run.new.identity) if run.new and verdict in ("keep", "discard") else None
    now, commit = fate or ("", None)
    environments: list[Part | Guard] = [*evaluation.parts, *evaluation.guards] if evaluation else []
    fields: dict[str, Any] = {}
    for source, names in (
        (record, ("number", "failure", "parent", "why", "total_seconds", "branch", "engine", "started")),
        (evaluation, ("eval_score", "eval_stderr", "strict_score")),
        (training, ("num_steps", "reward_mean", "training_seconds")),
    ):
        fields |= {name: getattr(source, name, None) for name in names}
    return Row(
        **fields,
        verdict=verdict,
        now="kept later" if now == "kept" and verdict == "discard" else now,
        commit=(record.kept_commit or commit or "")[:7] or None,
        description=record.proposal.description,
        change=run.new.name if run.new else None,
        changes=record.diff,
        kept=tuple(change.name for change in run.kept),
        rider=run.rider.name if run.rider else None,
        environment_scores={f"{each.environment}_score": each.score for each in environments},
        incumbent_score=standing.incumbent if standing else None,
        effect_at_decision=effect.mean if effect else None,
        effect_at_decision_stderr=effect.sd if effect else None,
        p_helps=effect.p_helps if effect else None,
        memory_gb=training.peak_memory_gb if training else None,
        rules=record.rules_hash,
        proposer=record.proposal.proposer or None,
    )


def fates_of(records: Sequence[Record], kept: Sequence[Change] | None = None) -> dict[Settings, Fate]:
    """Return the fate of each change that was ever kept. `kept`: the incumbent's changes, by default those after the
    last decision."""
    records = sorted(records, key=attrgetter("place"))
    incumbents = [record.judgement.kept for record in records if record.judgement and record.judgement.standing]
    kept = kept if kept is not None else incumbents[-1] if incumbents else ()
    commit_items = [item for record in records for item in record.commits.items()]  # ("keep 0012", commit id)
    commits = {words.partition(" ")[2]: commit for words, commit in commit_items if not words.startswith("revert")}
    kept_keys, kept_settings = settings_of(kept).keys(), {change.identity for change in kept}
    fates = dict[Settings, Fate]()
    for change in chain(*incumbents, kept):
        now: Now = "replaced" if change.keys.keys() <= kept_keys else "reverted"
        settings = change.identity
        fates[settings] = "kept" if settings in kept_settings else now, commits.get(change.name)
    return fates


def results_tsv(records: Sequence[Record]) -> str:
    """Return the text of results.tsv, with one line per experiment that has a verdict, from all campaigns."""
    campaigns = {record.campaign for record in records}
    fates = {name: fates_of([record for record in records if record.campaign == name]) for name in campaigns}
    table = [row(record, fates[record.campaign]) for record in records if verdict_of(record)]
    lines = [(*COLUMNS, *dict.fromkeys(name for line in table for name in line.environment_scores))]
    for line in table:
        parent = "" if line.parent is None else f"{line.parent:04d}"
        cells = line.cells | {"status": line.verdict, "run": f"{line.number:04d}", "parent": parent}
        lines.append(tuple(_cell(cells.get(name)) for name in lines[0]))
    return "".join("\t".join(line) + "\n" for line in lines)


def _cell(value: str | float | None) -> str:
    if isinstance(value, str):
        return escape_formula(clean(value))
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


class Counts(msgspec.Struct, frozen=True):
    """The number of experiments by verdict, and of changes by present status. Counts of zero are left out."""

    verdict: dict[str, int]
    now: dict[str, int]

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Counts:
        by_change = {row.change: row.now for row in rows if row.now}
        return cls(Counter(row.verdict or UNDECIDED for row in rows), Counter(by_change.values()))

    def __str__(self) -> str:
        """Both counts: `30 experiments: 1 baseline, 5 keep, 24 discard; their changes now: 4 kept, 1 reverted`."""
        parts = (", ".join(f"{n} {word}" for word, n in part.items()) for part in (self.verdict, self.now))
        num = counted(sum(self.verdict.values()))
        return f"{num}: {'; their changes now: '.join(filter(None, parts)) or 'none'}"


def measured_text(record: Record) -> str:
    """Return a run's score, the prediction for it, and the decision about the new change, if there are any:
    `measured 51.2 %; predicted without the new change: 50.4 %; effect +0.9 ± 2.0 pp, ...: keep`."""
    run, decision = record.run, record.decision
    assert record.score is not None
    text = f"measured {percents(record.score)}{run.with_rider}"
    if record.judgement and record.judgement.expected_score is not None:
        name = "without the new change" if run.new else "for the incumbent" if run.kept else "for the baseline"
        text += f"; predicted {name}: {percents(record.judgement.expected_score)}"
    if decision and decision.estimate:
        text += f"; effect {decision.estimate.with_p}: {decision.action}"
    return text


def decisions_text(decisions: Iterable[Decision]) -> str:
    """Return each change with its decision: `0003 reverted, 0005 kept later`."""
    return ", ".join(f"{decision.change.name} {decision.action.past}" for decision in decisions)


def standing_text(standing: Standing, kept: Sequence[Change]) -> str:
    """Return the gain, the estimates and the changes: `gain +4.1 ± 2.4 pp over the baseline (...) by 0003, 0007`."""
    names = ", ".join(change.name for change in kept)
    text = f"nothing is kept; estimated score of the baseline {percents(standing.baseline)}"
    if kept:
        text = f"gain {gain_text(standing)} over the baseline ({estimates(standing)}) by {names}"
    return ". ".join(filter(None, (text, contradiction(standing))))


def estimates(standing: Standing) -> str:
    """Return the estimated scores of baseline and incumbent, and what ± means. Contradicted scores are left out."""
    text = "± is half of a 95 % interval"
    if standing.contradicted:  # the reported gain is not the difference of the estimates
        return text
    scores = f"{percents(standing.baseline)} \N{RIGHTWARDS ARROW} {incumbent_text(standing)}"
    return f"estimated scores {scores}, corrected for selection; {text}"


def incumbent_text(standing: Standing) -> str:
    """Return the incumbent's estimated score: rounded baseline plus rounded gain, so that the shown numbers add up."""
    return percents(round(standing.baseline, 3) + round(standing.gain, 3))


def percents(score: float) -> str:
    """Return `51.2 %`."""
    return f"{100 * score:.1f} %"


def contradiction(standing: Standing) -> str:
    """Return a sentence if the final check runs contradict the estimated gain; else an empty string."""
    if standing.contradicted is None:
        return ""
    gain, half = standing.contradicted
    estimate = f"{100 * gain:+.1f} ± {100 * half:.1f} pp"
    return f"The final check runs contradict the estimated gain ({estimate}): the gain shown is their plain difference"


def gain_text(standing: Standing) -> str:
    """Return the reported gain and half of its 95 % interval: `+4.1 ± 2.4 pp`."""
    return f"{100 * standing.gain:+.1f} ± {100 * standing.gain_halfwidth:.1f} pp"


def one_baseline(standing: Standing) -> tuple[str, str]:
    """Return why two more runs of the baseline are useful, and their command."""
    gain = f"The gain {gain_text(standing)} rests on one run of the baseline"
    return f"{gain}. Two more runs make it more certain. Run this twice:", "uv run run.py --baseline"


def last_scores(records: Sequence[Record]) -> str:
    """Return the scores of the final check runs: `incumbent 51.2, 50.4 %; baseline 47.1, 47.9 %`."""
    texts = []
    for name, stage in (("incumbent", Stage.LAST_INCUMBENTS), ("baseline", Stage.LAST_BASELINES)):
        scores = [f"{100 * r.score:.1f}" for r in records if r.run.stage is stage and r.score is not None]
        texts += [f"{name} {', '.join(scores)} %"] if scores else []
    return "; ".join(texts)


def last_campaign(records: Sequence[Record]) -> tuple[str, str]:
    """Return branch and rules hash of the last experiment with a verdict; two empty strings without a verdict."""
    return next((r.campaign for r in reversed(records) if r.judgement is not None), ("", ""))
