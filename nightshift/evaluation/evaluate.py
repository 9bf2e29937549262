"""Score a run's final policy on the validation split, or for certify on the test split.

The policy completes. The scores are computed here, in the harness's own process or its scorer, by the scoring of each
environment. The bytes of this file are part of the rules hash.
"""

import hashlib
import json
import math
import time
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from nightshift.campaign.records import Completion, Evaluation, Part, ProgressCallback, packed
from nightshift.config.rules import Rules
from nightshift.errors import EngineError
from nightshift.evaluation.environment import Task, add_curve, game_figures, load, play_out
from nightshift.evaluation.episode import Chat, Episode, Policy
from nightshift.files import write_atomically

# Of one example: completions, episodes, score, and whether its answer has the requested format (None: none requested).
Row = tuple[Task, Sequence[Completion], Sequence[Any], float, bool | None]


def examples_of_validation_split(rules: Rules, root: Path) -> list[Task]:
    """Return the examples that decide, environment by environment, in a fixed order. EngineError for missing data."""
    environments = load(root, rules.environments)
    return [(environment, example) for environment in environments for example in environment.examples("validation")]


def evaluate(
    session: Policy,
    tasks: Sequence[Task],
    rules: Rules,
    path: Path | None,
    progress: ProgressCallback,
) -> Evaluation:
    """Load the final weights, play every example to its end, score it, and write one JSON line an example to `path`.

    Without `path` nothing is written that may hold an answer: no completion, and of an exception only its type.
    `eval_score` is the mean over examples, of several environments their weighted mean. `strict_score` counts answers
    without the requested format as wrong. Raises EngineError if the policy cannot be loaded or leaves chats unanswered.
    """
    began = time.monotonic()
    weights = session.load_final_weights()
    complete = partial(_complete, session, rules, progress)
    played = [environment.episodes(example) for environment, example in tasks]
    episodes = [episode for of_example in played for episode in of_example]
    example_of = [index for index, of_example in enumerate(played) for _ in of_example]
    completions: list[list[Completion]] = [[] for _ in tasks]
    for index, completion in play_out(episodes, complete):
        completions[example_of[index]].append(completion)
    scores, unscored = _scores(tasks, played, is_secret=path is None)
    n, parts = len(scores), _parts(rules, tasks, scores)
    formatted = [answer for episode in episodes if (answer := episode.is_formatted()) is not None]
    has_format = len(formatted) == n == len(episodes)
    strict = _parts(rules, tasks, [s * f for s, f in zip(scores, formatted, strict=True)]) if has_format else ()
    if path is not None:
        is_formatted = formatted if has_format else [None] * n
        _write(path, zip(tasks, completions, played, scores, is_formatted, strict=True))
    figures = game_figures(tasks, played, complete)
    if figures and path is not None:
        unscored += add_curve(figures, tasks, session.earlier, complete)
    return Evaluation(
        eval_score=_mean(parts),
        eval_stderr=math.hypot(*(part.weight * part.stderr for part in parts)) / sum(part.weight for part in parts),
        scores=packed(scores),
        examples_sha256=examples_digest(tasks),
        truncated_share=sum(any(c.truncated for c in turns) for turns in completions) / n,
        completion_tokens_mean=sum(c.num_tokens for turns in completions for c in turns) / n,
        weights=weights,
        seconds=time.monotonic() - began,
        strict_score=_mean(strict) if strict else None,
        format_rate=sum(formatted) / n if has_format else None,
        parts=parts if len(parts) > 1 else (),
        unscored=unscored,
        figures=figures,
    )


def examples_digest(tasks: Sequence[Task]) -> str:
    """Return sha256 over the keys and right answers."""
    lines = (f"{environment.package}/{example.key}: {example.answer}" for environment, example in tasks)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _scores(
    tasks: Sequence[Task], played: Sequence[Sequence[Episode]], is_secret: bool
) -> tuple[tuple[float, ...], tuple[str, ...]]:
    """Return each example's score, the mean of its episodes; and a line on each environment whose rewards failed."""
    scorers = {environment.name: environment.scorer for environment, _ in tasks if environment.scorer}.values()
    try:
        scores = tuple(fmean(episode.score() for episode in episodes) for episodes in played)
        return scores, tuple(failures for scorer in scorers if (failures := scorer.failures(is_secret)))
    except EngineError as error:
        if not is_secret:
            raise
        kind = f": {type(error.__cause__).__name__}" if error.__cause__ else ""
        cause = f"rewards of the test split fail or are refused{kind}"
        raise EngineError(cause, "Look at others: uv run nightshift doctor --environment NAME.") from None
    finally:
        for scorer in scorers:
            scorer.close()


def _parts(rules: Rules, tasks: Sequence[Task], scores: Sequence[float]) -> tuple[Part, ...]:
    """Return mean score and its standard error over the examples, by environment."""
    parts = []
    for rule in rules.environments:
        own = [score for (environment, _), score in zip(tasks, scores, strict=True) if environment.name == rule.name]
        parts.append(Part(rule.name, len(own), rule.weight, fmean(own), pstdev(own) / math.sqrt(len(own))))
    return tuple(parts)


def _mean(parts: Sequence[Part]) -> float:
    return sum(part.weight * part.score for part in parts) / sum(part.weight for part in parts)


def _complete(session: Policy, rules: Rules, progress: ProgressCallback, chats: Sequence[Chat]) -> list[Completion]:
    completions = session.complete(chats, rules.decoding, progress)
    if len(completions) != len(chats):
        raise EngineError(f"the policy completed {len(completions)} of {len(chats)} examples")
    return completions


def _write(path: Path, rows: Iterable[Row]) -> None:
    lines = [
        {
            "environment": environment.package,
            "key": example.key,
            "score": score,
            **({} if is_formatted is None else {"formatted": is_formatted}),
            "answer": example.answer,
            "completion": "\n".join(turn.text for turn in turns),
            **({"games": [e.details() for e in episodes]} if hasattr(episodes[0], "details") else {}),
            "num_tokens": sum(turn.num_tokens for turn in turns),
            "truncated": any(turn.truncated for turn in turns),
        }
        for (environment, example), turns, episodes, score, is_formatted in rows
    ]
    write_atomically(path, "".join(json.dumps(line) + "\n" for line in lines).encode(), sync=False)
