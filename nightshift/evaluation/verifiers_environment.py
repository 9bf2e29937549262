"""Somebody's taskset as an Environment (environment.py); and the Episode of one question and one answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nightshift.config.rules import TASKSET_FOLDERS, EnvironmentRules, TasksetRules
from nightshift.errors import EngineError, NightshiftError
from nightshift.evaluation.episode import Episode, Example, Split
from nightshift.evaluation.policy import Message
from nightshift.evaluation.scorer import Scorer, TaskExample
from nightshift.text import clean

PROCESS = "environments/taskset/nightshift_taskset/process.py"


class SomebodysTaskset:
    """An Environment of one question and one answer, over a verifiers v1 taskset in a process of its own."""

    def __init__(self, rules: EnvironmentRules, taskset: TasksetRules, root: Path) -> None:
        self.name, self.package, self.prompt_tokens = rules.name, rules.package, taskset.prompt_tokens
        spec = {
            "place": str(taskset.place(root)),
            "path": [str(path) for path in (*taskset.beside(root), *(root / name for name in TASKSET_FOLDERS))],
            "args": rules.args,
            "reward_range": taskset.reward_range,
            "num_selection": rules.num_selection,
            "num_train": rules.num_train,
        }
        self.scorer = Scorer(rules.name, root / PROCESS, spec)

    def examples(self, split: Split) -> Sequence[Example]:
        """As of any. Only who trains goes on to score at once; for others the process waits for nothing."""
        examples = self.scorer.load(split)
        if split != "train":
            self.scorer.close()
        return examples

    def episode(self, example: Example) -> Question:
        """As of any. The scorer knows the right answer by the example's key."""
        assert isinstance(example, TaskExample)
        return Question(example.messages, example.key, self.scorer)

    def episodes(self, example: Example) -> Sequence[Episode]:
        return (self.episode(example),)

    def slices(self, example: Example) -> Mapping[str, str]:
        return {}

    def prepare(self, source: Path | None, note: Callable[[str], None]) -> None:
        """Whatever the taskset fetches when it is loaded, it fetches now."""
        self.scorer.load("selection", is_online=True)
        self.scorer.close()


class Question:
    """The Episode of an Environment of one question and one answer."""

    is_other_asked = False  # of a game only

    def __init__(self, messages: Sequence[Message], answer: str, scoring: Any, scorer: Scorer | None = None) -> None:
        """By `scoring`, a module; where there is a `scorer` that gives the score."""
        self._messages, self._answer, self._scoring, self._scorer = messages, answer, scoring, scorer or scoring
        self._text: str | None = None

    def ask(self) -> Sequence[Message] | None:
        return self._messages if self._text is None else None

    def answer(self, text: str) -> None:
        self._text = text

    def score(self) -> float:
        """By the package's scoring. EngineError where that fails, or says what is not 0..1."""
        try:
            score = self._scorer.score(self._text or "", self._answer)
            if not 0 <= score <= 1:
                raise ValueError(f"score {score!r} is not 0..1")
        except NightshiftError:
            raise
        except Exception as error:  # the package's own code
            where = getattr(self._scoring, "__name__", "scoring")
            raise EngineError(clean(f"{where}: {type(error).__name__}: {error}"), "Mend it in its folder.") from error
        return float(score)

    def is_formatted(self) -> bool | None:
        check = getattr(self._scoring, "is_formatted", None)
        return bool(check(self._text or "")) if check else None
