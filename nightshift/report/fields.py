"""What is known of one experiment as named texts, for the summary, `nightshift show` and the page."""

import math
from collections.abc import Callable, Iterator

from nightshift.campaign.records import NOT_ISOLATED, Outcome, Record
from nightshift.campaign.results import UNDECIDED, Row, decisions_text

_NO_GRADIENT = f"{Outcome.NO_GRADIENT}: training ended early, because no gradient was left; its weights were scored"
_PROPOSED = ("hypothesis", "proposer", "predicted", "mechanism", "falsifier", "reported", "notes", "lesson")
PROPOSAL = (*_PROPOSED, "now", "on top of")
_FORMATS = {
    "reward_mean": "{:.6f}",
    "training_seconds": "{:.1f}",
    "total_seconds": "{:.1f}",
    "peak_memory_gb": "{:.2f}",
}
# Only in the summary of a run: what you may need for the next run.
OF_RUN = ("scaled", "unused_keys")


def fields(record: Record, row: Row, score: Callable[[float], str] = "{:.6f}".format) -> Iterator[tuple[str, str]]:
    """Yield names and texts of what was proposed, measured and decided, without what is not known. `score` formats a
    fraction of 1."""
    proposal, training, effect = record.proposal, record.result and record.result.training, row.effect_at_decision
    games, unused = record.evaluation.figures if record.evaluation else {}, ", ".join(record.unused_keys)
    values: list[tuple[str, str | float | None]] = [
        ("hypothesis", proposal.description),
        ("proposer", row.proposer or "you"),
        ("predicted", proposal.prediction),
        ("mechanism", proposal.mechanism),
        ("falsifier", proposal.falsifier),
        ("reported", proposal.reported_outcome),
        ("notes", "; ".join(proposal.notes)),
        ("lesson", proposal.lesson),
        ("now", row.now),
        ("on top of", ", ".join(row.kept)),
        ("eval_score", row.eval_score),
        ("eval_stderr", row.eval_stderr),
        *row.environment_scores.items(),  # of several environments
        ("strict_score", row.strict_score),
        *((f"{name}_{what}", f"{value:.4g}") for name, game in games.items() for what, value in game.items()),
        ("incumbent_score", None if record.is_keep and record.parent is None else row.incumbent_score),
        ("effect_at_decision", None if effect is None else ("-" if effect < 0 else "+") + score(abs(effect))),
        ("p_helps", None if row.p_helps is None else f"{math.floor(1e4 * row.p_helps) / 1e4:.4f}"),
        ("verdict", row.verdict or UNDECIDED),
        ("outcome", _NO_GRADIENT if training and training.outcome is Outcome.NO_GRADIENT else None),
        ("why", row.why),
        ("reward_mean", row.reward_mean),
        ("num_steps", row.num_steps),
        ("training_seconds", row.training_seconds),
        ("total_seconds", row.total_seconds),
        ("peak_memory_gb", row.memory_gb),
        ("run", f"{row.number:04d}"),
        ("starts", record.starts),
        ("changes", ", ".join(row.changes)),
        ("rider", row.rider),
        *(("scaled", line) for line in record.scaled),
        ("unused_keys", f"the engine {record.engine} does not use {unused}" if unused else None),
        ("git", record.git_action),
        ("agent", None if proposal.is_isolated else NOT_ISOLATED),
        *(("health", finding) for finding in (record.health or "").splitlines()),
        ("train.toml", decisions_text(d for d in record.moved if f"{d.action} {d.change.name}" in record.commits)),
    ]
    for name, value in values:
        if isinstance(value, float):
            yield name, _FORMATS[name].format(value) if name in _FORMATS else score(value)
        elif value not in (None, ""):
            yield name, str(value)
