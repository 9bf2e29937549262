"""Everything that the ledger knows of one experiment, as plain text: `nightshift show 42`."""

from __future__ import annotations

import os
from pathlib import Path

from nightshift.records import Record, Run

_NOT_MEASURED = "not measured"


def facts(record: Record, run_dir: Path) -> str:
    """`name: value` lines in blocks: what was tried, what came of it, every run, where the files are."""
    judgement = record.judgement
    lines = [
        _line("experiment", f"{record.number:04d}"),
        _line("status", record.status + (f" ({record.failure})" if record.failure else "")),
        _line("description", record.description),
        _line("prediction", record.prediction),
        _line("lesson", record.lesson),
        *(_line("besides", note) for note in record.notes),
        _line("branch", record.branch or "a detached HEAD"),
        _line("compared with", f"experiment {record.parent:04d}" if record.parent is not None else "nothing"),
        *(_line("change", line) for line in record.diff or ("none",)),
        *(_line("unused key", key) for key in record.unused_keys),
        "",
        _line("why", judgement.why if judgement else None),
        _line("delta", _pp(judgement.delta if judgement else None)),
        _line("delta_stderr", _pp(judgement.delta_stderr if judgement else None)),
        _line("p_better", _number(judgement.p_better if judgement else None, ".2f")),
        _line("incumbent_score", _number(judgement.incumbent_score if judgement else None, ".6f")),
        *(_line(name, f"{value:.6g}") for name, value in (judgement.diagnostics if judgement else {}).items()),
        _line("settled", record.settled or "not settled"),
        _line("kept commit", record.kept_commit or "none"),
    ]
    for run in record.runs:
        lines += ["", *_run_lines(run)]
    lines += [
        "",
        *(_line("health", line) for line in (record.health or _NOT_MEASURED).splitlines()),
        "",
        _line("started", record.started),
        _line("total_seconds", _number(record.total_seconds, ".1f")),
        _line("engine", f"{record.engine}, rules {record.rules_name} {record.rules_hash}"),
        _line("hardware", record.hardware),
        _line("versions", ", ".join(f"{name} {version}" for name, version in record.versions.items())),
        _line("commit", record.commit or "none"),
        _line("config hash", record.config_hash[:12]),
        _line("files", os.fspath(run_dir)),
    ]
    return "\n".join(lines)


def _run_lines(run: Run) -> list[str]:
    training, evaluation = run.training, run.evaluation
    lines = [
        _line("run", f"{run.index} of the {run.side}, seed {run.seed}"),
        _line("outcome", training.outcome + (f": {training.cause}" if training.cause else "")),
        _line("num_steps", str(training.num_steps)),
        _line("reward_mean", _number(training.reward_mean, ".6f")),
        _line("training_seconds", _number(training.training_seconds, ".1f")),
        _line("startup_seconds", _number(run.startup_seconds, ".1f")),
        _line("total_seconds", _number(run.total_seconds, ".1f")),
        _line("peak_memory_gb", _number(training.peak_memory_gb, ".2f")),
    ]
    if evaluation is None:
        return [*lines, _line("eval_score", None)]
    return [
        *lines,
        _line("eval_score", f"{evaluation.eval_score:.6f}"),
        _line("eval_stderr", f"{evaluation.eval_stderr:.6f} over {len(evaluation.scores)} examples"),
        _line("truncated_share", f"{evaluation.truncated_share:.4f}"),
        _line("completion_tokens", f"{evaluation.completion_tokens_mean:.1f} on average"),
        _line("evaluation_seconds", f"{evaluation.seconds:.1f}"),
        _line("weights", f"step {evaluation.weights.step}, sha256 {evaluation.weights.sha256}"),
    ]


def _line(name: str, value: str | None) -> str:
    text = _NOT_MEASURED if value is None else value
    return f"{name + ':':20}" + "".join(character if character.isprintable() else " " for character in text)


def _number(value: float | None, spec: str) -> str | None:
    return None if value is None else format(value, spec)


def _pp(value: float | None) -> str | None:
    return None if value is None else f"{100 * value:+.2f} pp"
