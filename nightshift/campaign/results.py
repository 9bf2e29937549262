"""What experiments came to: the row of one in results.tsv, the counts of many, and the lines that say it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from nightshift.campaign.records import Change, Decision, Failure, Record, Stage, Standing, Verdict
from nightshift.text import clean, escape_formula

# The first five are those of autoresearch's results.tsv. Each is a key of `figures`; a new one goes last.
COLUMNS = (
    *("commit", "eval_score", "memory_gb", "status", "description"),
    *("run", "parent", "eval_stderr", "effect_at_decision", "p_helps", "rider", "num_steps", "reward_mean"),
    *("training_seconds", "total_seconds", "engine", "rules", "started"),
)


def column_of(environment: str) -> str:
    """Return the column of one environment's score, which differs from `eval_score`, `strict_score` and so on."""
    prefix = "environment_" if environment in ("eval", "strict", "incumbent") else ""
    return f"{prefix}{environment}_score"


def columns(records: Iterable[Record]) -> tuple[str, ...]:
    """Return the columns of results.tsv: COLUMNS, then one for each environment if the score is a mean over several."""
    names = dict.fromkeys(name for record in records for name in record.environment_scores)
    return (*COLUMNS, *map(column_of, names))


def figures(record: Record) -> dict[str, Any]:
    """Return what one experiment came to, by the names of results.tsv and of the summary; None is "not measured"."""
    judgement, decision, evaluation = record.judgement, record.decision, record.evaluation
    training = record.result and record.result.training
    return {
        "commit": record.kept_commit and record.kept_commit[:7],
        "eval_score": record.score,
        "memory_gb": training and training.peak_memory_gb,
        "status": record.status,
        "description": record.proposal.description,
        "run": f"{record.number:04d}",
        "parent": f"{record.parent:04d}" if record.parent is not None else None,
        "eval_stderr": evaluation and evaluation.eval_stderr,
        "strict_score": record.strict_score,
        "incumbent_score": judgement and judgement.standing and judgement.standing.incumbent,
        "effect_at_decision": decision and decision.effect,
        "p_helps": decision and decision.p_helps,
        "rider": record.run.rider and record.run.rider.name,
        "why": judgement and judgement.why,
        "num_steps": training and training.num_steps,
        "reward_mean": training and training.reward_mean,
        "training_seconds": training and training.training_seconds,
        "total_seconds": record.total_seconds,
        "engine": record.engine,
        "rules": record.rules_hash,
        "started": record.started,
        **{column_of(name): score for name, score in record.environment_scores.items()},
    }


def row(record: Record, columns: Sequence[str] = COLUMNS) -> str:
    """Return the experiment's line of results.tsv. An empty cell is "not measured"."""
    values, cells = figures(record), []
    for value in map(values.get, columns):
        text = "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
        cells.append(escape_formula(clean(text)) if isinstance(value, str) else text)
    return "\t".join(cells)


@dataclass(frozen=True, slots=True)
class Counts:
    """Numbers of experiments. The baseline is not one of the `kept`. Kept changes may be `reverted` later, or
    `replaced` by changes of the same keys; discarded ones may be `adopted`. `interrupted` ones were cut off by a
    person, a kill or a reboot, and are not `crashed`."""

    num_experiments: int = 0
    baseline: int = 0
    kept: int = 0
    reverted: int = 0
    replaced: int = 0
    discarded: int = 0
    adopted: int = 0
    measured: int = 0  # without a new change
    crashed: int = 0
    by_machinery: int = 0  # of the crashed: not the config's fault
    interrupted: int = 0
    undecided: int = 0  # in flight, or cut off and not closed yet

    @classmethod
    def of(cls, records: Iterable[Record], kept: Iterable[Change] = ()) -> Counts:
        """Count experiments. `kept`: the incumbent's changes."""
        records, kept = list(records), tuple(kept)
        numbers = {change.experiment for change in kept}
        keeps = [record.run.new for record in records if record.is_keep and record.run.new]
        left = {change.experiment: change for change in keeps if change.experiment not in numbers}
        num_replaced = sum(is_replaced(change, kept) for change in left.values())
        discards = [r.run.new.experiment for r in records if r.status == Verdict.DISCARD and r.run.new]
        crashes = [r.failure for r in records if r.status == Verdict.CRASH]
        baseline = sum(r.is_keep for r in records) - len(keeps)
        measured = sum(r.status == Verdict.MEASURED for r in records)
        return cls(
            num_experiments=len(records),
            baseline=baseline,
            kept=len(keeps),
            reverted=len(left) - num_replaced,
            replaced=num_replaced,
            discarded=len(discards),
            adopted=len({*discards} & numbers - {change.experiment for change in keeps}),
            measured=measured,
            crashed=len(crashes) - crashes.count(Failure.INTERRUPTED),
            by_machinery=crashes.count(Failure.MACHINERY),
            interrupted=crashes.count(Failure.INTERRUPTED),
            undecided=len(records) - baseline - len(keeps) - len(crashes) - len(discards) - measured,
        )

    def __str__(self) -> str:
        """One line: `30 experiments: the baseline, 5 kept (1 reverted), 20 discarded, 4 measured again, 0 crashed`."""
        left = [f"{self.reverted} reverted"] * (self.reverted > 0) + [f"{self.replaced} replaced"] * (self.replaced > 0)
        parts = [
            "the baseline" if self.baseline else "",
            f"{self.kept} kept" + (f" ({', '.join(left)})" if left else ""),
            f"{self.discarded} discarded" + (f" ({self.adopted} adopted later)" if self.adopted else ""),
            f"{self.measured} measured again" if self.measured else "",
            f"{self.crashed} crashed" + (f" ({self.by_machinery} by machinery)" if self.by_machinery else ""),
            f"{self.interrupted} interrupted" if self.interrupted else "",
            f"{self.undecided} without a verdict" if self.undecided else "",
        ]
        whole = f"{self.num_experiments:,} experiment{'' if self.num_experiments == 1 else 's'}"
        return f"{whole}: {', '.join(filter(None, parts))}"


def measured_text(record: Record, score: float) -> str:
    """Return `measured 51.2 %, expected of the incumbent 50.4 %; effect +0.9 ± 2.0 pp, P(it helps) 81 %: keep`.
    `score`: of the run, as it decides."""
    judged, run, decision = record.judgement, record.run, record.decision
    assert judged is not None
    text = f"measured {100 * score:.1f} %{run.with_rider}"
    if judged.expected_score is not None:
        name = "incumbent" if run.new or run.kept else "baseline"
        text += f", expected of the {name} {100 * judged.expected_score:.1f} %"
    if decision is not None and decision.estimate is not None:
        text += f"; effect {decision.estimate.with_p}: {decision.action}"
    return text


def is_replaced(change: Change, kept: Iterable[Change]) -> bool:
    """Return True if kept changes set all keys of a change that left."""
    return change.keys.keys() <= {key for other in kept for key in other.keys}


def decisions_text(decisions: Iterable[Decision]) -> str:
    """Return the changes that came in or went out: `0003 reverted, 0005 adopted`."""
    return ", ".join(f"{decision.change.name} {decision.action.past}" for decision in decisions)


def num_since_keep(decided: Sequence[Record]) -> int:
    """Count the experiments since the last keep, without those that had no new change."""
    tried = [record for record in decided if record.status != Verdict.MEASURED]
    return next((index for index, record in enumerate(reversed(tried)) if record.is_keep), len(tried))


def standing_text(standing: Standing, kept: Sequence[Change]) -> str:
    """Return `expected score 0.5120, baseline 0.4710: +4.1 ± 2.4 pp by 0003, 0007`."""
    names = ", ".join(change.name for change in kept)
    gain = f"{gain_text(standing)} by {names}" if kept else "nothing is kept"
    return f"expected score {standing.incumbent:.4f}, baseline {standing.baseline:.4f}: {gain}"


def gain_text(standing: Standing) -> str:
    """Return the reported gain and half of its 95 % interval: `+4.1 ± 2.4 pp`."""
    return f"{100 * standing.gain:+.1f} ± {100 * standing.gain_halfwidth:.1f} pp"


def last_scores(records: Sequence[Record]) -> str:
    """Return the scores of a night's last runs: `incumbent 51.2, 50.4 %; baseline 47.1, 47.9 %`."""
    parts = []
    for name, stage in (("incumbent", Stage.LAST_INCUMBENTS), ("baseline", Stage.LAST_BASELINES)):
        scores = [r.score for r in records if r.run.stage is stage and r.score is not None]
        if scores:
            parts.append(f"{name} {', '.join(f'{100 * score:.1f}' for score in scores)} %")
    return "; ".join(parts)


def last_campaign(records: Sequence[Record]) -> tuple[str, str]:
    """Return branch and rules hash of the last experiment with a verdict; empty ones if there is none."""
    return next(((r.branch, r.rules_hash) for r in reversed(records) if r.judgement is not None), ("", ""))
