"""Environments: what is asked, how an answer is scored, and where the data comes from.

An environment is a folder `environments/<name>/` with one package, `nightshift_<name>`, which stands on its own: it
imports nothing of Nightshift, because prime-rl loads it too, as a verifiers taskset. The harness finds it by its
folder and puts that folder at the end of Python's path; no list of dependencies names it. Of the package it reads

    data.PROMPT_TOKENS                 room that a prompt may need, in tokens of the rules' model
    data.load(split, size)             examples with `key` and `answer`; ValueError, one line with its fix
    data.messages(example)             the chat that asks
    data.prepare(source=, progress=)   only where data must be fetched; ValueError, one line with its fix
    scoring.score(text, answer)        0..1
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import msgspec

from nightshift.errors import EngineError, UsageError
from nightshift.rules import RULES_NAME, EnvironmentRules

Split = Literal["train", "selection", "sealed"]
Message = Mapping[str, str]  # as in engines: {"role": ..., "content": ...}


class Example(Protocol):
    """One problem. `answer`: what is right, for people who read rollouts."""

    key: str  # the same in every split, order and size
    answer: str


class Environment:
    """A task with its three sets of examples, over the modules `data` and `scoring` of its package."""

    def __init__(self, root: Path, rules: EnvironmentRules) -> None:
        """Of the checkout at `root`; from now on Python can import its package.

        Raises UsageError when there is no such folder, or when Python has a package of that name elsewhere, whose
        bytes no rules hash would cover.
        """
        for folder in rules.folders:
            _put_on_path(root / folder)
        self.package, self._rules = rules.package, rules
        self._data, self._scoring = (importlib.import_module(f"{self.package}.{name}") for name in ("data", "scoring"))
        self.prompt_tokens: int = self._data.PROMPT_TOKENS  # room that a prompt may need in the model's context

    def examples(self, split: Split) -> Sequence[Example]:
        """One set, as large as the rules say, in a fixed order. EngineError when the data is missing or not the
        official data. The sealed set is read through sealed.py only."""
        size = self._rules.num_train if split == "train" else self._rules.num_selection
        examples: Sequence[Example] = _call(self._data.load, split, size)
        return examples

    def messages(self, example: Example) -> Sequence[Message]:
        """The chat that asks."""
        messages: Sequence[Message] = self._data.messages(example)
        return messages

    def score(self, example: Example, text: str) -> float:
        """0..1, for what a policy said."""
        return float(self._scoring.score(text, example.answer))

    def prepare(self, source: Path | None, note: Callable[[str], None]) -> None:
        """Fetch what `examples` reads, from the folder `source` or else from where it is published, unless it is
        there or generated. EngineError when it cannot be had."""
        if hasattr(self._data, "prepare"):
            _call(self._data.prepare, source=source, progress=note)


def _call(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """The package's own error, one line with its fix, becomes ours."""
    try:
        return function(*arguments, **named)
    except ValueError as error:
        raise EngineError(str(error)) from None


def _put_on_path(folder: Path) -> None:
    """At the end: no file of an environment passes for a library."""
    package = folder / f"nightshift_{folder.name}"
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


class _Chosen(msgspec.Struct, forbid_unknown_fields=True):
    environments: Annotated[list[str], msgspec.Meta(max_length=1)] = []


def chosen(root: Path) -> str | None:
    """The environment that rules.toml names; None: what the machine can do. UsageError with what is wrong in it."""
    try:
        names = msgspec.toml.decode((root / RULES_NAME).read_bytes(), type=_Chosen).environments
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{RULES_NAME}: {error}", 'Write environments = ["name"], or [], and nothing else.') from None
    there = sorted(path.parent.name for path in (root / "environments").glob("*/pyproject.toml"))
    if not {*names} <= {*there}:
        raise UsageError(f"{RULES_NAME}: environments/ has no {names[0]!r}", f"Write one of: {', '.join(there)}.")
    return names[0] if names else None
