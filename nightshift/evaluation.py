"""Score a run's final policy on the selection set, and write one line an example.

The policy completes; the scores are computed here, in the harness's own process, with the scoring of
each environment. The bytes of this file are part of the rules hash.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nightshift.engines import ProgressCallback, Session
from nightshift.errors import EngineError
from nightshift.records import Completion, Evaluation
from nightshift.rules import EnvironmentRules, Rules

Monotonic = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Problem:
    """One example of an evaluation set: what the policy sees, and how its answer is scored (0..1)."""

    environment: str
    key: str
    messages: Sequence[dict[str, str]]
    answer: str
    score: Callable[[str, str], float]


def selection_set(rules: Rules) -> list[Problem]:
    """The examples that decide keep or discard, environment by environment, in a fixed order.

    Raises EngineError when the data is missing or is not what the environment expects.
    """
    return [problem for environment in rules.environments for problem in problems_of(environment, "selection")]


def problems_of(environment: EnvironmentRules, split: str) -> list[Problem]:
    """The examples of one set of one environment; the sealed set is read through looks.py only."""
    # The packages ship with this repository and are named by the rules, never by train.toml.
    data: Any = importlib.import_module(f"{environment.package}.data")
    scoring: Any = importlib.import_module(f"{environment.package}.scoring")
    try:
        examples = data.load(split, environment.num_selection)
    except ValueError as error:  # the environments' own error: data missing, or not the official bytes
        raise EngineError(str(error)) from None
    return [Problem(environment.package, e.key, data.messages(e), e.answer, scoring.score) for e in examples]


def evaluate(
    session: Session,
    problems: Sequence[Problem],
    rules: Rules,
    path: Path,
    progress: ProgressCallback,
    clock: Monotonic,
) -> Evaluation:
    """Load the final weights, complete every problem, score, and write `path` (JSON lines).

    `eval_score` is the mean over environments, which equals the mean over examples because all
    selection sets have one size. Raises EngineError when the policy cannot be loaded or answers
    another number of problems than it was asked.
    """
    began = clock()
    weights = session.load_final_weights()
    completions = session.complete([p.messages for p in problems], rules.decoding, progress)
    if len(completions) != len(problems):
        raise EngineError(f"the policy completed {len(completions)} of {len(problems)} examples")
    scores = tuple(p.score(c.text, p.answer) for p, c in zip(problems, completions, strict=True))
    _write(path, problems, completions, scores)
    n = len(scores)
    mean = sum(scores) / n
    return Evaluation(
        eval_score=mean,
        eval_stderr=math.sqrt(mean * (1 - mean) / n),
        scores=scores,
        examples_sha256=hashlib.sha256("\n".join(f"{p.environment}/{p.key}" for p in problems).encode()).hexdigest(),
        truncated_share=sum(c.truncated for c in completions) / n,
        completion_tokens_mean=sum(c.num_tokens for c in completions) / n,
        weights=weights,
        seconds=clock() - began,
    )


def _write(path: Path, problems: Sequence[Problem], completions: Sequence[Completion], scores: Sequence[float]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for problem, completion, score in zip(problems, completions, scores, strict=True):
            line = {
                "environment": problem.environment,
                "key": problem.key,
                "score": score,
                "answer": problem.answer,
                "completion": completion.text,
                "num_tokens": completion.num_tokens,
                "truncated": completion.truncated,
            }
            file.write(json.dumps(line) + "\n")
