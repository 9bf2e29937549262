"""Score a run's final policy on the selection set, and write one line an example.

The policy completes; the scores are computed here, in the harness's own process, with the scoring of
each environment. The bytes of this file are part of the rules hash.
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
from nightshift.evaluation.environment import Environment, add_curve, game_figures, play_out
from nightshift.evaluation.environment import load as load_environments
from nightshift.evaluation.episode import Chat, Episode, Example
from nightshift.evaluation.policy import Policy
from nightshift.files import write_atomically

Posed = tuple[Environment, Example]
Played = Sequence[Sequence[Episode]]
Row = tuple[Posed, Sequence[Completion], Sequence[Any], float, bool | None]  # of an example; None: no form asked


def selection_set(rules: Rules, root: Path) -> list[Posed]:
    """The examples that decide, environment by environment, in a fixed order; the sealed ones: test_split.py.

    Raises EngineError when the data is missing or is not what the environment expects.
    """
    found = load_environments(root, rules.environments)
    return [(environment, example) for environment in found for example in environment.examples("selection")]


def evaluate(
    session: Policy,
    examples: Sequence[Posed],
    rules: Rules,
    path: Path | None,
    progress: ProgressCallback,
) -> Evaluation:
    """Load the final weights, play an episode of every example to its end, score, and write `path` (JSON lines).

    Without `path` nothing is written that may hold an answer: no completion, and of what a reward raised only the type.
    `eval_score` is the mean over examples, of several environments their weighted mean; `strict_score` takes for wrong
    what is not written as asked. Raises EngineError when the policy cannot be loaded or answers another number of
    questions than asked.
    """
    began = time.monotonic()
    weights = session.load_final_weights()
    complete = partial(_complete, session, rules, progress)
    played = [environment.episodes(example) for environment, example in examples]
    episodes = [episode for each in played for episode in each]
    whose = [index for index, each in enumerate(played) for _ in each]  # the example of each episode
    said: list[list[Completion]] = [[] for _ in examples]
    for index, completion in play_out(episodes, complete):
        said[whose[index]].append(completion)
    scores, unscored = _scores(examples, played, is_secret=path is None)
    n, parts = len(scores), _parts(rules, examples, scores)
    formatted = [answered for episode in episodes if (answered := episode.is_formatted()) is not None]
    has_form = len(formatted) == n == len(episodes)
    as_asked = _parts(rules, examples, [s * f for s, f in zip(scores, formatted, strict=True)]) if has_form else None
    if path is not None:
        _write(path, zip(examples, said, played, scores, formatted if has_form else [None] * n, strict=True))
    figures = game_figures(examples, played, complete)
    if figures and path is not None:
        unscored += add_curve(figures, examples, session.earlier, complete)
    return Evaluation(
        eval_score=_mean(parts),
        eval_stderr=math.hypot(*(part.weight * part.stderr for part in parts)) / sum(part.weight for part in parts),
        scores=packed(scores),
        examples_sha256=examples_digest(examples),
        truncated_share=sum(any(c.truncated for c in turns) for turns in said) / n,
        completion_tokens_mean=sum(c.num_tokens for turns in said for c in turns) / n,
        weights=weights,
        seconds=time.monotonic() - began,
        strict_score=_mean(as_asked) if as_asked else None,
        format_rate=sum(formatted) / n if has_form else None,
        parts=parts if len(parts) > 1 else (),
        unscored=unscored,
        figures=figures,
    )


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


def examples_digest(examples: Sequence[Posed]) -> str:
    """sha256 over what is asked, by its key, and what is right."""
    lines = (f"{one.package}/{example.key}: {example.answer}" for one, example in examples)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _scores(posed: Sequence[Posed], played: Played, is_secret: bool) -> tuple[tuple[float, ...], tuple[str, ...]]:
    """The score of every example, the mean of its episodes; a line an environment of which some could not be scored."""
    scorers = {environment.name: environment.scorer for environment, _ in posed if environment.scorer}.values()
    try:
        scores = tuple(fmean(episode.score() for episode in each) for each in played)
        return scores, tuple(told for scorer in scorers if (told := scorer.failures(is_secret)))
    except EngineError as error:
        if not is_secret:
            raise
        kind = f": {type(error.__cause__).__name__}" if error.__cause__ else ""
        cause = f"rewards of sealed examples fail or are refused{kind}"
        raise EngineError(cause, "Look at others: uv run nightshift doctor --environment NAME.") from None
    finally:
        for scorer in scorers:
            scorer.close()


def _mean(parts: Sequence[Part]) -> float:
    return sum(part.weight * part.score for part in parts) / sum(part.weight for part in parts)


def _parts(rules: Rules, examples: Sequence[Posed], scores: Sequence[float]) -> tuple[Part, ...]:
    """By environment: mean score, and its standard error over the examples."""
    parts = []
    for environment in rules.environments:
        own = [score for (posed, _), score in zip(examples, scores, strict=True) if posed.name == environment.name]
        stderr = pstdev(own) / math.sqrt(len(own))
        parts.append(Part(environment.name, len(own), environment.weight, fmean(own), stderr))
    return tuple(parts)


def _complete(session: Policy, rules: Rules, progress: ProgressCallback, chats: Sequence[Chat]) -> list[Completion]:
    completions = session.complete(chats, rules.decoding, progress)
    if len(completions) != len(chats):
        raise EngineError(f"the policy completed {len(completions)} of {len(chats)} examples")
    return completions
