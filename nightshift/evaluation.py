"""Score a run's final policy on the selection set, and write one line an example.

The policy completes; the scores are computed here, in the harness's own process, with the scoring of
each environment. The bytes of this file are part of the rules hash.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

from nightshift.engines import ProgressCallback, Session
from nightshift.environments import Environment, Example, Split
from nightshift.errors import EngineError
from nightshift.records import Completion, Evaluation
from nightshift.rules import Rules

Monotonic = Callable[[], float]
Posed = tuple[Environment, Example]


def examples_of(rules: Rules, root: Path, split: Split) -> list[Posed]:
    """The examples of one set, in a fixed order, each with its environment; the sealed set is read in sealed.py only.

    Raises EngineError when the data is missing or is not what the environment expects.
    """
    environment = Environment(root, rules.environment)
    return [(environment, example) for example in environment.examples(split)]


def evaluate(
    session: Session,
    examples: Sequence[Posed],
    rules: Rules,
    path: Path,
    progress: ProgressCallback,
    clock: Monotonic,
) -> Evaluation:
    """Load the final weights, complete the prompt of every example, score, and write `path` (JSON lines).

    `eval_score` is the mean over examples. Raises EngineError when the policy cannot be loaded or answers
    another number of questions than it was asked.
    """
    began = clock()
    weights = session.load_final_weights()
    prompts = [environment.messages(example) for environment, example in examples]
    completions = session.complete(prompts, rules.decoding, progress)
    if len(completions) != len(examples):
        raise EngineError(f"the policy completed {len(completions)} of {len(examples)} examples")
    answered = zip(examples, completions, strict=True)
    scores = tuple(environment.score(example, completion.text) for (environment, example), completion in answered)
    n, mean = len(scores), sum(scores) / len(scores)
    _write(path, examples, completions, scores)
    keys = "\n".join(f"{environment.package}/{example.key}" for environment, example in examples)
    return Evaluation(
        eval_score=mean,
        eval_stderr=math.sqrt(mean * (1 - mean) / n),
        scores=scores,
        examples_sha256=hashlib.sha256(keys.encode()).hexdigest(),
        truncated_share=sum(completion.truncated for completion in completions) / n,
        completion_tokens_mean=sum(completion.num_tokens for completion in completions) / n,
        weights=weights,
        seconds=clock() - began,
    )


def _write(path: Path, examples: Sequence[Posed], completions: Sequence[Completion], scores: Sequence[float]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for (environment, example), completion, score in zip(examples, completions, scores, strict=True):
            line = {
                "environment": environment.package,
                "key": example.key,
                "score": score,
                "answer": example.answer,
                "completion": completion.text,
                "num_tokens": completion.num_tokens,
                "truncated": completion.truncated,
            }
            file.write(json.dumps(line) + "\n")
