"""A verifiers v1 taskset as an Environment (environment.py), and the Episode of one question and one answer."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nightshift.config.rules import TASKSET_FOLDERS, EnvironmentRules, TasksetRules
from nightshift.errors import EngineError, NightshiftError
from nightshift.evaluation.episode import Episode, Example, Message, Split
from nightshift.evaluation.scorer import Scorer, TaskExample
from nightshift.text import clean

PROCESS = "environments/taskset/nightshift_taskset/process.py"
_PACKAGE_FILE = re.compile(r"environments/\w+/.*\.py$")


def frame_of(error: BaseException) -> traceback.FrameSummary | None:
    """Return the innermost code of an environment that an error went through; None for other code."""
    frames = list(traceback.extract_tb(error.__traceback__))
    if isinstance(error, SyntaxError):
        frames.append(traceback.FrameSummary(error.filename or "", error.lineno, ""))
    return next((frame for frame in reversed(frames) if _PACKAGE_FILE.search(frame.filename)), None)


def place_of(frame: traceback.FrameSummary | None) -> str:
    """Return `environments/NAME/nightshift_NAME/FILE:LINE: `; empty without a frame."""
    match = _PACKAGE_FILE.search(frame.filename) if frame else None
    return f"{match.group()}:{frame.lineno}: " if frame and match else ""


class VerifiersTaskset:
    """An Environment of one question and one answer, over a verifiers v1 taskset in its own process."""

    def __init__(self, rules: EnvironmentRules, taskset: TasksetRules, root: Path) -> None:
        self.name, self.package, self.prompt_tokens = rules.name, rules.package, taskset.prompt_tokens
        spec = {
            "place": str(taskset.place(root)),
            "path": [str(path) for path in (*taskset.beside(root), *(root / name for name in TASKSET_FOLDERS))],
            "args": rules.args,
            "reward_range": taskset.reward_range,
            "num_validation": rules.num_validation,
            "num_train": rules.num_train,
        }
        self.scorer = Scorer(rules.name, root / PROCESS, spec)

    def examples(self, split: Split) -> Sequence[Example]:
        examples = self.scorer.load(split)
        if split != "train":  # only training goes on to score at once; the process need not wait for others
            self.scorer.close()
        return examples

    def episode(self, example: Example) -> Question:
        assert isinstance(example, TaskExample)
        return Question(example.messages, example.key, self.scorer)  # the scorer knows the right answer by its key

    def episodes(self, example: Example) -> Sequence[Episode]:
        return (self.episode(example),)

    def slices(self, example: Example) -> Mapping[str, str]:
        return {}

    def prepare(self, source: Path | None, note: Callable[[str], None]) -> None:
        """Let the taskset fetch what it fetches when it is loaded; note what it left out."""
        self.scorer.load("validation", is_online=True)
        for text in self.scorer.notes:
            note(f"{self.name}: {text}")
        self.scorer.close()


class Question:
    """The Episode of one question and one answer."""

    is_other_asked = False  # of a game only

    def __init__(self, messages: Sequence[Message], answer: str, scoring: Any, scorer: Scorer | None = None) -> None:
        """`scoring` is the package's module; a `scorer` gives the score in its place."""
        self._messages, self._answer, self._scoring, self._scorer = messages, answer, scoring, scorer or scoring
        self._text: str | None = None

    def ask(self) -> Sequence[Message] | None:
        return self._messages if self._text is None else None

    def answer(self, text: str) -> None:
        self._text = text

    def score(self) -> float:
        """Return 0..1. EngineError if the scoring raises, or returns something else."""
        try:
            score = self._scorer.score(self._text or "", self._answer)
            if not 0 <= score <= 1:
                raise ValueError(f"score {score!r} is not 0..1")
        except NightshiftError:
            raise
        except (Exception, SystemExit) as error:  # the package's own code
            where = place_of(frame_of(error)) or f"{getattr(self._scoring, '__name__', 'scoring')}: "
            raise EngineError(clean(f"{where}{type(error).__name__}: {error}"), "Mend it in its folder.") from error
        return float(score)

    def is_formatted(self) -> bool | None:
        check = getattr(self._scoring, "is_formatted", None)
        return bool(check(self._text or "")) if check else None
