"""Environments: what is asked, how an answer is scored, and where the data comes from.

An environment is a folder `environments/<name>/` with one package, `nightshift_<name>`, which stands on its own: it
imports nothing of Nightshift, because prime-rl loads it too, as a verifiers taskset. The harness finds it by its
folder and puts that folder at the end of Python's path; no list of dependencies names it. Of the package it reads

    data.PROMPT_TOKENS                 room that a prompt may need, in tokens of the rules' model
    data.load(split, size)             examples with `key` and `answer`; ValueError, one line with its fix
    data.messages(example)             the chat that asks
    data.prepare(source=, progress=)   only where data must be fetched; ValueError, one line with its fix
    scoring.score(text, answer)        0..1
    scoring.is_formatted(text)         only where a form is asked for: whether the answer is written in it
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec

from nightshift.errors import EngineError, UsageError
from nightshift.files import read_file
from nightshift.rules import RULES_NAME, EnvironmentRules

Split = Literal["train", "selection", "sealed"]
Message = Mapping[str, str]  # as in engines: {"role": ..., "content": ...}


class Example(Protocol):
    """One problem, or one opening of a game. `answer`: what is right, for people who read rollouts."""

    key: str  # the same in every split, order and size
    answer: str


class Episode(Protocol):
    """One example in the hands of a policy."""

    def ask(self) -> Sequence[Message] | None:
        """The chat that the policy shall continue; None once the episode is over."""
        ...

    def answer(self, text: str) -> None:
        """What the policy said to the last chat."""
        ...

    def score(self) -> float:
        """0..1; what was not answered scores as an empty text."""
        ...

    def is_formatted(self) -> bool | None:
        """Whether the answer is written as asked; None where no form is asked for."""
        ...


class Environment(Protocol):
    """A task with its three sets of examples."""

    name: str
    package: str  # its name for Python and verifiers, and in every evaluation

    @property
    def prompt_tokens(self) -> int:
        """Room that a prompt may need in the model's context."""
        ...

    def examples(self, split: Split) -> Sequence[Example]:
        """One set, as large as the rules say, in a fixed order. EngineError when the data is missing or not the
        official data. The sealed set is read through sealed.py only."""
        ...

    def episode(self, example: Example) -> Episode:
        """A fresh episode of one of its examples."""
        ...

    def prepare(self, source: Path | None, note: Callable[[str], None]) -> None:
        """Fetch what `examples` reads, from the folder `source` or else from where it is published, unless it is
        there. EngineError when it cannot be had."""
        ...


class SingleTurn:
    """An Environment of one question and one answer, over the modules `data` and `scoring` of its package.

    They are imported when they are first needed: a head compares their bytes with the agreed ones before that.
    """

    def __init__(self, rules: EnvironmentRules) -> None:
        self.name, self.package = rules.name, rules.package
        self._rules = rules

    @cached_property
    def _data(self) -> Any:
        return importlib.import_module(f"{self.package}.data")

    @cached_property
    def _scoring(self) -> Any:
        return importlib.import_module(f"{self.package}.scoring")

    @property
    def prompt_tokens(self) -> int:
        """See Environment."""
        return int(self._data.PROMPT_TOKENS)

    def examples(self, split: Split) -> Sequence[Example]:
        """See Environment."""
        size = self._rules.num_train if split == "train" else self._rules.num_selection
        examples: Sequence[Example] = _call(self._data.load, split, size)
        return examples

    def episode(self, example: Example) -> Question:
        """See Environment."""
        return Question(self._data.messages(example), example.answer, self._scoring)

    def prepare(self, source: Path | None, note: Callable[[str], None]) -> None:
        """See Environment; generated data needs no preparation."""
        if hasattr(self._data, "prepare"):
            _call(self._data.prepare, source=source, progress=note)


class Question:
    """The Episode of a SingleTurn."""

    def __init__(self, messages: Sequence[Message], answer: str, scoring: Any) -> None:
        self._messages, self._answer, self._scoring = messages, answer, scoring
        self._text: str | None = None

    def ask(self) -> Sequence[Message] | None:
        """The question, until it is answered."""
        return self._messages if self._text is None else None

    def answer(self, text: str) -> None:
        """The one answer."""
        self._text = text

    def score(self) -> float:
        """By the package's scoring."""
        return float(self._scoring.score(self._text or "", self._answer))

    def is_formatted(self) -> bool | None:
        """By the package's scoring, where it says."""
        check = getattr(self._scoring, "is_formatted", None)
        return bool(check(self._text or "")) if check else None


def load(root: Path, wanted: Sequence[EnvironmentRules]) -> tuple[Environment, ...]:
    """The wanted environments of the checkout at `root`; from now on Python can import their packages.

    Raises UsageError when there is no such folder, or when Python has a package of that name elsewhere, whose bytes
    no rules hash would cover.
    """
    found: list[Environment] = []
    for rules in wanted:
        for folder in rules.folders:
            _put_on_path(root / folder)
        found.append(SingleTurn(rules))
    return tuple(found)


def _call(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """The package's own error, one line with its fix, becomes ours."""
    try:
        return function(*arguments, **named)
    except ValueError as error:
        raise EngineError(str(error)) from None


def _put_on_path(folder: Path) -> None:
    """At the end: no file of an environment passes for a library."""
    package = folder / EnvironmentRules(folder.name, 0).package
    if not (package / "__init__.py").is_file():
        raise UsageError(f"{package} is no package", "Restore it: git checkout environments.")
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    spec = importlib.util.find_spec(package.name)
    place = Path(spec.origin).parent if spec is not None and spec.origin is not None else None
    if place is None or not place.samefile(package):
        raise UsageError(
            f"Python imports {package.name} from {place}, not from {package}",
            "Take that folder off PYTHONPATH and out of .venv, then run: uv sync --reinstall.",
        )


def data_problem(environment: Environment) -> EngineError | None:
    """What is wrong with the environment's data: it is missing, or not the official data. Reads only."""
    try:
        environment.examples("selection")
    except EngineError as error:
        return error
    return None


class _Chosen(msgspec.Struct, forbid_unknown_fields=True):
    environments: list[str] = []
    memory_gb: Literal[0, 16, 24, 48, 80] = 0


def _read_chosen(root: Path) -> _Chosen:
    try:
        return msgspec.toml.decode(read_file(root / RULES_NAME), type=_Chosen)
    except (OSError, ValueError, RecursionError) as error:
        fix = 'Write environments = ["name"], or [], memory_gb = 0, 16, 24, 48 or 80, and nothing else.'
        raise UsageError(f"{RULES_NAME}: {error}", fix) from None


def chosen_memory_gb(root: Path) -> int:
    """The card that rules.toml wants experiments to fit on; 0: whatever is here. UsageError as `chosen`."""
    return _read_chosen(root).memory_gb


def chosen(root: Path) -> tuple[str, ...]:
    """The environments that rules.toml names; none: what the machine can do. UsageError with what is wrong in it."""
    names = _read_chosen(root).environments
    there = sorted(path.parent.name for path in (root / "environments").glob("*/pyproject.toml"))
    for name in names:
        if name not in there:
            near = get_close_matches(name, there, 1)
            fix = f'Did you mean "{near[0]}"?' if near else f"Write one of: {', '.join(there)}."
            raise UsageError(f"{RULES_NAME}: environments/ has no {json.dumps(name)}", fix)
    if len(names) > 1:
        raise UsageError(f"{RULES_NAME}: environments = {json.dumps(names)}: one is scored at a time", "Name one.")
    return tuple(names)
