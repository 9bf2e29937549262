"""What one experiment came to, by the names of results.tsv and of the summary; and its row there."""

from collections.abc import Iterable, Sequence
from typing import Any

from nightshift.campaign.records import Record
from nightshift.text import clean, escape_formula

# The first five are those that readers of the format know; then ours.
COLUMNS = (
    *("commit", "eval_score", "memory_gb", "status", "description"),
    *("run", "parent", "eval_stderr", "effect_at_decision", "p_helps", "rider", "num_steps", "reward_mean"),
    *("training_seconds", "total_seconds", "engine", "rules", "started"),
)

_TAKEN = ("eval", "strict", "incumbent")


def column_of(environment: str) -> str:
    """Of one environment of several: no column that there is already, whatever the environment is called."""
    return f"environment_{environment}_score" if environment in _TAKEN else f"{environment}_score"


def figures(record: Record) -> dict[str, Any]:
    """What one experiment came to, by the names of results.tsv and of the summary; None is "not measured"."""
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
    values, cells = figures(record), []
    for value in map(values.get, columns):
        text = "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
        cells.append(escape_formula(clean(text)) if isinstance(value, str) else text)
    return "\t".join(cells)


def columns(records: Iterable[Record]) -> tuple[str, ...]:
    """Those of results.tsv; last the environments that were averaged over, where any were."""
    names = dict.fromkeys(name for record in records for name in record.environment_scores)
    return (*COLUMNS, *map(column_of, names))
