"""Score the final policy of a run on the validation split, or for `certify` on the test split.

The policy completes the chats. The environments' scoring computes the scores, in this process or in a scorer process.
The bytes of this file are part of the rules hash.
"""

import hashlib
import json
import math
import time
from collections.abc import Sequence
from itertools import chain, groupby
from operator import itemgetter, mul
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, Literal

from nightshift.campaign.records import Completion, Evaluation, Guard, Part, ProgressCallback, packed
from nightshift.config.rules import EnvironmentRules, Rules
from nightshift.errors import EngineError
from nightshift.evaluation.environment import (
    Conversation,
    Episode,
    Policy,
    Task,
    VerifiersTaskset,
    figures_of,
    load,
    play_out,
)
from nightshift.files import write_atomically


def examples_of(split: Literal["validation", "test"], rules: Rules, root: Path) -> list[Task]:
    """Return the examples of a split by environment, in a fixed order. EngineError for missing data.

    Only a job of `certify` uses the test split. The journal records this use before the worker starts.
    """
    environments = load(root, rules.scored)
    return [(environment, example) for environment in environments for example in environment.examples(split)]


def evaluate(
    session: Policy, tasks: Sequence[Task], rules: Rules, path: Path | None, progress: ProgressCallback
) -> Evaluation:
    """Load the final weights, play and score every example, and write one JSON line for each example to `path`.

    Without `path` nothing is written that may contain an answer: no completion, and only the type of an exception.
    `eval_score` is the mean over examples, for several environments their weighted mean. `strict_score` counts answers
    without the requested format as wrong. The answers of guards are scored, but not written. EngineError: the policy
    cannot be loaded, or leaves chats unanswered.
    """
    began = time.monotonic()
    weights = session.load_final_weights()
    played: list[Sequence[Episode]] = []
    for environment, members in groupby(tasks, key=itemgetter(0)):
        examples = [example for _, example in members]
        if environment.scorer:
            environment.scorer.is_secret = path is None
        if isinstance(environment, VerifiersTaskset):
            played += environment.play(examples, session, rules.decoding, progress)
        else:
            played += [environment.episodes(example) for example in examples]
    completions = [
        [episode.completion for episode in episodes if isinstance(episode, Conversation)] for episodes in played
    ]
    by_episode = [turns for episodes, turns in zip(played, completions, strict=True) for _ in episodes]
    for index, completion in play_out(
        [*chain(*played)], lambda chats: session.complete(chats, rules.decoding, progress)
    ):
        by_episode[index].append(completion)
    all_scores, unscored = _scores(tasks, played, is_secret=path is None)
    guards = tuple(
        Guard(part.environment, (rule.guard or 0.0) / 100, part.score, part.stderr)
        for rule, part in zip(rules.guards, _parts(rules.guards, tasks, all_scores), strict=True)
    )
    num = sum(environment.name in rules.environment_names for environment, _ in tasks)  # without the guards' at the end
    tasks, played, completions, scores = tasks[:num], played[:num], completions[:num], all_scores[:num]
    formatted: list[Any] = [episode.is_formatted() for episode in chain(*played)]
    has_format = len(formatted) == num and None not in formatted
    parts = _parts(rules.environments, tasks, scores)
    strict = _parts(rules.environments, tasks, [*map(mul, scores, formatted)]) if has_format else ()
    if path is not None:
        rows = zip(tasks, completions, played, scores, formatted if has_format else [None] * num, strict=True)
        write_atomically(path, "".join(_line(*row) for row in rows).encode(), sync=False)
    cut = [any(turn.truncated for turn in turns) for turns in completions]
    return Evaluation(
        eval_score=_mean(parts),
        eval_stderr=math.hypot(*(part.weight * part.stderr for part in parts)) / sum(part.weight for part in parts),
        scores=packed(scores),
        examples_sha256=examples_digest(tasks),
        truncated_share=fmean(cut),
        cut_wrong_share=fmean(is_cut and not score for is_cut, score in zip(cut, scores, strict=True)),
        completion_tokens_mean=fmean(sum(turn.num_tokens for turn in turns) for turns in completions),
        weights=weights,
        seconds=time.monotonic() - began,
        strict_score=_mean(strict) if strict else None,
        parts=parts if len(parts) > 1 else (),
        guards=guards,
        unscored=unscored,
        figures=figures_of(tasks, played),
    )


def examples_digest(tasks: Sequence[Task]) -> str:
    """Return the sha256 over the keys and right answers."""
    lines = (f"{environment.package}/{example.key}: {example.answer}" for environment, example in tasks)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _scores(
    tasks: Sequence[Task], played: Sequence[Sequence[Episode]], is_secret: bool
) -> tuple[tuple[float, ...], tuple[str, ...]]:
    """Return each example's score, the mean of its episodes, and a line for each environment with failed rewards."""
    scorers = {environment.name: environment.scorer for environment, _ in tasks if environment.scorer}.values()
    try:
        scores = tuple(fmean(episode.score() for episode in episodes) for episodes in played)
        return scores, tuple(failures for scorer in scorers if (failures := scorer.failures()))
    except EngineError as error:
        if not is_secret:
            raise
        kind = f": {type(error.__cause__).__name__}" if error.__cause__ else ""
        cause = f"rewards of the test split fail or are refused{kind}"
        raise EngineError(cause, "Check other splits: uv run nightshift doctor --environment NAME.") from None
    finally:
        for scorer in scorers:
            scorer.close()


def _parts(
    environments: Sequence[EnvironmentRules], tasks: Sequence[Task], scores: Sequence[float]
) -> tuple[Part, ...]:
    """Return the mean score of each environment, and its standard error over the examples."""
    parts = []
    for rule in environments:
        part = [score for (environment, _), score in zip(tasks, scores, strict=True) if environment.name == rule.name]
        parts.append(Part(rule.name, len(part), rule.weight, fmean(part), pstdev(part) / math.sqrt(len(part))))
    return tuple(parts)


def _mean(parts: Sequence[Part]) -> float:
    return sum(part.weight * part.score for part in parts) / sum(part.weight for part in parts)


def _line(
    task: Task, turns: Sequence[Completion], episodes: Sequence[Any], score: float, is_formatted: bool | None
) -> str:
    environment, example = task
    line = {
        "environment": environment.package,
        "key": example.key,
        "score": score,
        **({} if is_formatted is None else {"formatted": is_formatted}),
        "answer": example.answer,
        "completion": "\n".join(turn.text for turn in turns),
        **({"games": [episode.details() for episode in episodes]} if hasattr(episodes[0], "details") else {}),
        "num_tokens": sum(turn.num_tokens for turn in turns),
        "truncated": any(turn.truncated for turn in turns),
    }
    return json.dumps(line) + "\n"
