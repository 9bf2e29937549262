"""Everything that the ledger knows of one experiment, as plain text: `nightshift show 42`."""

from __future__ import annotations

import os
from pathlib import Path

from nightshift.records import Judgement, Record, Result, Verdict

_NOT_MEASURED = "not measured"
_NO_JUDGEMENT = Judgement(Verdict.CRASH, _NOT_MEASURED)
Block = list[tuple[str, str | None]]  # names and values; None is not measured


def experiment_text(record: Record, run_dir: Path) -> str:
    """`name: value` lines in blocks: what was tried, what came of it, every run, where the files are."""
    judgement = record.judgement or _NO_JUDGEMENT
    tried: Block = [
        ("experiment", f"{record.number:04d}"),
        ("status", record.status + (f" ({record.failure})" if record.failure else "")),
        ("description", record.description),
        ("prediction", record.prediction),
        ("lesson", record.lesson),
        *(("besides", note) for note in record.notes),
        ("branch", record.branch or "a detached HEAD"),
        ("compared with", f"experiment {record.parent:04d}" if record.parent is not None else "nothing"),
        *(("change", line) for line in record.diff or ("none",)),
        *(("unused key", key) for key in record.unused_keys),
    ]
    found: Block = [
        ("why", judgement.why),
        ("delta", _pp(judgement.delta)),
        ("delta_stderr", _pp(judgement.delta_stderr)),
        *_numbers(judgement, "p_better", "incumbent_score"),
        *((name, f"{value:.6g}") for name, value in judgement.diagnostics.items()),
        ("settled", record.settled or "not settled"),
        ("kept commit", record.kept_commit or "none"),
    ]
    health: Block = [("health", line) for line in (record.health or _NOT_MEASURED).splitlines()]
    circumstances: Block = [
        ("started", record.started),
        *_numbers(record, "total_seconds"),
        ("engine", f"{record.engine}, rules {record.rules_name} {record.rules_hash}"),
        ("hardware", record.hardware),
        ("versions", ", ".join(f"{name} {version}" for name, version in record.versions.items())),
        ("commit", record.commit or "none"),
        ("config hash", record.config_hash[:12]),
        ("files", os.fspath(run_dir)),
    ]
    runs = (_run(index, run) for index, run in enumerate(record.runs, 1))
    blocks = (tried, found, *runs, health, circumstances)
    return "\n\n".join("\n".join(_line(name, value) for name, value in block) for block in blocks)


def _run(index: int, run: Result) -> Block:
    training, evaluation = run.training, run.evaluation
    block: Block = [
        ("run", f"{index}, seed {run.seed}"),
        ("outcome", training.outcome + (f": {training.cause}" if training.cause else "")),
        *_numbers(training, "num_steps", "reward_mean", "training_seconds"),
        *_numbers(run, "startup_seconds", "total_seconds"),
        *_numbers(training, "peak_memory_gb"),
        *(_numbers(run.load, "num_cores", "load_average", "step_seconds") if run.load else ()),
        ("versions", ", ".join(f"{name} {version}" for name, version in run.versions.items())),
    ]
    if evaluation is None:
        return [*block, ("eval_score", None)]
    return [
        *block,
        *_numbers(evaluation, "eval_score", "eval_stderr"),
        ("examples", str(len(evaluation.scores))),
        *_numbers(evaluation, "truncated_share", "completion_tokens_mean"),
        ("evaluation_seconds", f"{evaluation.seconds:.6g}"),
        ("weights", f"step {evaluation.weights.step}, sha256 {evaluation.weights.sha256}"),
    ]


def _line(name: str, value: str | None) -> str:
    text = _NOT_MEASURED if value is None else value
    return f"{name + ':':20}" + "".join(character if character.isprintable() else " " for character in text)


def _numbers(value: object, *names: str) -> Block:
    """Fields of a value, by their names."""
    numbers = ((name, getattr(value, name)) for name in names)
    return [(name, None if number is None else f"{number:.6g}") for name, number in numbers]


def _pp(value: float | None) -> str | None:
    return None if value is None else f"{100 * value:+.2f} pp"
