"""Score a run's final policy on the selection set, and write one line an example.

The policy completes; the scores are computed here, in the harness's own process, with the scoring of
each environment. The bytes of this file are part of the rules hash.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path

from nightshift.engines import Message, ProgressCallback, Session
from nightshift.environments import Environment, Example, load
from nightshift.errors import EngineError
from nightshift.files import write_atomically
from nightshift.records import Completion, Evaluation, packed
from nightshift.rules import Rules

Posed = tuple[Environment, Example]
Chat = Sequence[Message]
NUM_AGAIN = 32  # questions that a baseline is asked twice: is greedy decoding the same in another company?


def selection_set(rules: Rules, root: Path) -> list[Posed]:
    """The examples that decide, environment by environment, in a fixed order; the sealed ones: sealed.py.

    Raises EngineError when the data is missing or is not what the environment expects.
    """
    found = load(root, rules.environments)
    return [(environment, example) for environment in found for example in environment.examples("selection")]


def evaluate(
    session: Session,
    examples: Sequence[Posed],
    rules: Rules,
    path: Path | None,
    progress: ProgressCallback,
    num_again: int = 0,
) -> Evaluation:
    """Load the final weights, play an episode of every example to its end, score, and write `path` (JSON lines).

    Without `path` no answer is written. `eval_score` is the mean over examples; `strict_score` takes for wrong
    what is not written as asked. The first `num_again` questions are put once more, alone: how many get the same
    answer. Raises EngineError when the policy cannot be loaded or answers another number of questions than it was
    asked.
    """
    began = time.monotonic()
    weights = session.load_final_weights()
    episodes = [environment.episode(example) for environment, example in examples]
    said: list[list[Completion]] = [[] for _ in episodes]
    once: list[tuple[Chat, Completion]] = []
    while asked := [(index, chat) for index, episode in enumerate(episodes) if (chat := episode.ask()) is not None]:
        completions = _complete(session, [chat for _, chat in asked], rules, progress)
        once = once or [(chat, said) for (_, chat), said in zip(asked, completions, strict=True)][:num_again]
        for (index, _), completion in zip(asked, completions, strict=True):
            episodes[index].answer(completion.text)
            said[index].append(completion)
    again = _complete(session, [chat for chat, _ in once], rules, progress) if once else []
    same = [one.text == other.text for (_, one), other in zip(once, again, strict=True)]
    scores = tuple(episode.score() for episode in episodes)
    n, mean = len(scores), sum(scores) / len(scores)
    formatted = [answered for episode in episodes if (answered := episode.is_formatted()) is not None]
    has_form = len(formatted) == n
    lines = [
        {
            "environment": environment.package,
            "key": example.key,
            "score": score,
            **({"formatted": formatted[index]} if has_form else {}),
            "answer": example.answer,
            "completion": "\n".join(turn.text for turn in turns),
            "num_tokens": sum(turn.num_tokens for turn in turns),
            "truncated": any(turn.truncated for turn in turns),
        }
        for index, ((environment, example), turns, score) in enumerate(zip(examples, said, scores, strict=True))
    ]
    if path is not None:
        write_atomically(path, "".join(json.dumps(line) + "\n" for line in lines).encode(), sync=False)
    keys = "\n".join(f"{environment.package}/{example.key}" for environment, example in examples)
    return Evaluation(
        eval_score=mean,
        eval_stderr=math.sqrt(mean * (1 - mean) / n),
        scores=packed(scores),
        examples_sha256=hashlib.sha256(keys.encode()).hexdigest(),
        truncated_share=sum(any(c.truncated for c in turns) for turns in said) / n,
        completion_tokens_mean=sum(c.num_tokens for turns in said for c in turns) / n,
        weights=weights,
        seconds=time.monotonic() - began,
        strict_score=sum(itertools.compress(scores, formatted)) / n if has_form else None,
        formatted_share=sum(formatted) / n if has_form else None,
        repeated_share=sum(same) / len(same) if same else None,
    )


def _complete(
    session: Session, chats: Sequence[Chat], rules: Rules, progress: ProgressCallback
) -> Sequence[Completion]:
    completions = session.complete(chats, rules.decoding, progress)
    if len(completions) != len(chats):
        raise EngineError(f"the policy completed {len(completions)} of {len(chats)} examples")
    return completions
