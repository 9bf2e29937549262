"""Environments: examples, scoring and data.

An environment is a folder `environments/<name>/` with a package `nightshift_<name>`. The package imports nothing of
Nightshift, because prime-rl imports it as a verifiers taskset. The harness puts the folder at the end of Python's path;
the environment is not a dependency of Nightshift. Verifiers tasksets of other authors are never imported here
(scorer.py). The harness uses of a package

    data.PROMPT_TOKENS                 tokens that a prompt may need
    data.load(split, size, **args)     examples of train, validation or test, each with `key` and `answer`
    data.messages(example)             the chat that asks the question
    data.slices(example)               optional: groups for the page, `{"events": "2"}`
    data.prepare(source=, progress=)   optional: fetch the data
    scoring.score(text, answer)        the score, 0..1; with is_bounded = true in a separate process (scorer.py)
    scoring.is_formatted(text)         optional: whether the answer has the requested format

and of a game, instead of data.messages and scoring,

    game.episodes(example)             the games that score an example: Episodes with `details()`
    game.practice(example, opponent, seat, seed)   a training game: an Episode that may ask for the other seat
    ratings.figures(games)             figures for the page, by name

`load` and `prepare` raise ValueError with one line: the cause and the fix.
"""

import importlib
import importlib.util
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import chain, groupby
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple, Protocol

from nightshift.campaign.records import Completion, ProgressCallback, Weights
from nightshift.config.rules import TASKSET_FOLDERS, Decoding, EnvironmentRules
from nightshift.errors import EngineError, NightshiftError, UsageError
from nightshift.evaluation.scorer import Played, Scorer
from nightshift.text import clean

PROCESS = "environments/taskset/nightshift_taskset/process.py"
_PACKAGE_FILE = re.compile(r"environments/\w+/.*\.py$")
Split = Literal["train", "validation", "test"]
Message = Mapping[str, str]  # {"role": ..., "content": ...}
Chat = Sequence[Message]
Complete = Callable[[Sequence[Chat]], Sequence[Completion]]  # one completion for each chat, in the same order


class Example(Protocol):
    """One problem, or one opening of a game. `answer`: the right answer, for people who read rollouts."""

    key: str  # the same in every split, order and size
    answer: str


class Episode(Protocol):
    """One example as a policy plays it. An episode may have `details()`, by name."""

    def ask(self) -> Chat | None:
        """Return the chat that the policy continues; None if the episode is over."""

    def answer(self, text: str) -> None:
        """Add the policy's answer to the last chat."""

    def score(self) -> float:
        """Return the score, 0..1. Without an answer: the score of an empty text."""

    def is_formatted(self) -> bool | None:
        """Return whether the answer has the requested format; None if no format is requested."""


class Endpoint(NamedTuple):
    """The OpenAI-compatible server of a trained policy. `tick` gets the number of finished episodes every second, and
    raises EngineError when the run's time is over."""

    base_url: str
    model: str
    tick: Callable[[int], None]


class Policy(Protocol):
    """A trained policy of any engine."""

    def load_final_weights(self) -> Weights:
        """Load the last complete weights of the training. Return the proof of their identity."""

    def complete(self, prompts: Sequence[Chat], decoding: Decoding, progress: ProgressCallback) -> list[Completion]:
        """Return one completion for each prompt, in order. EngineError if the policy cannot answer."""

    def endpoint(self, progress: ProgressCallback) -> Endpoint | None:
        """Return the server that plays episodes of several turns; None if the engine has no server."""
        return None


class Question:
    """The Episode of one question and one answer."""

    is_other_asked = False  # only a game asks for the other seat

    def __init__(self, messages: Chat, answer: str, scoring: Any, scorer: Scorer | None) -> None:
        """`scoring`: the package's module. `scorer`: a process that scores instead."""
        self._messages, self._answer, self._scoring, self._scorer = messages, answer, scoring, scorer or scoring
        self._text: str | None = None

    def ask(self) -> Chat | None:
        return self._messages if self._text is None else None

    def answer(self, text: str) -> None:
        self._text = text

    def score(self) -> float:
        """Return the score, 0..1. EngineError if the scoring raises an error or returns another value."""
        score = _call(self._scorer.score, self._text or "", self._answer)
        with suppress(TypeError, ValueError):
            if 0 <= (value := float(score)) <= 1:
                return value
        name = getattr(self._scoring, "__name__", "scoring")
        raise EngineError(clean(f"{name}: score {score!r} is not 0..1"), "Correct the environment's scoring.")

    def is_formatted(self) -> bool | None:
        check = getattr(self._scoring, "is_formatted", None)
        return bool(check(self._text or "")) if check else None


class Conversation(Question):
    """The Episode of a finished rollout of verifiers."""

    def __init__(self, played: Played, scorer: Scorer) -> None:
        super().__init__((), "", None, scorer)
        self.answer(played.text)
        self.played = played
        self.completion = Completion(played.text, played.num_tokens, played.truncated)

    def score(self) -> float:
        """Return the score, 0..1; 0 if the episode failed. EngineError for a reward out of range, or if all failed."""
        if self.played.refused is not None:
            raise EngineError(clean(self.played.refused))
        self._scorer.raise_if_all_failed()
        return self.played.score or 0.0


class Environment:
    """Questions with one answer each, from the modules `data` and `scoring` of a package.

    The modules are imported on first use, after the controller has checked their bytes. `package`: the name for Python
    and verifiers, and in every evaluation. `scorer`: the process that scores; the caller closes it.
    """

    def __init__(self, rules: EnvironmentRules, root: Path) -> None:
        self.name, self.package, self._rules = rules.name, rules.package, rules
        spec = {"path": [str(root / folder) for folder in rules.folders], "scoring": f"{rules.package}.scoring"}
        self.scorer = Scorer(rules.name, root / PROCESS, spec) if rules.is_bounded else None

    def module(self, name: str) -> Any:
        """Return a module of the package."""
        return _call(importlib.import_module, f"{self.package}.{name}")

    @property
    def prompt_tokens(self) -> int:
        taskset = self._rules.taskset
        return int(self.module("data").PROMPT_TOKENS) if taskset is None else taskset.prompt_tokens

    def examples(self, split: Split) -> Sequence[Example]:
        """Return one split with the size of the rules, in a fixed order.

        EngineError: the data is missing or wrong, the number of examples differs, or a key occurs twice.
        """
        size = self._rules.num_train if split == "train" else self._rules.num_validation
        examples: Sequence[Example] = _call(self.module("data").load, split, size, **self._rules.args)
        num_keys = len({example.key for example in examples})
        if num_keys != (size or len(examples)) or not examples:
            cause = f"environment {self.name}: {len(examples)} examples of {split} with {num_keys} different keys"
            raise EngineError(f"{cause}, not {size or 'one or more'}", "Correct data.load of the environment.")
        return examples

    def episode(self, example: Example) -> Episode:
        messages = _call(self.module("data").messages, example)
        return Question(messages, example.answer, self.module("scoring"), self.scorer)

    def episodes(self, example: Example) -> Sequence[Episode]:
        """Return all episodes that score an example. Its score is their mean."""
        return (self.episode(example),)

    def slices(self, example: Example) -> Mapping[str, str]:
        """Return the groups of an example for the page, as `{"events": "2"}`."""
        slices = getattr(self.module("data"), "slices", None)
        return dict(_call(slices, example)) if slices else {}

    def prepare(self, source: Path | None, note: Callable[[str], None]) -> None:
        """Fetch missing data, from the folder `source` or from its publisher. Generated data is not fetched."""
        if hasattr(data := self.module("data"), "prepare"):
            _call(data.prepare, source=source, progress=note)
            self.examples("validation")  # with the args of rules.toml


class Game(Environment):
    """Several turns against an opponent, from the modules `data`, `game` and `ratings` of a package."""

    def episode(self, example: Example) -> Any:
        return self.practice(example, "self", 0, 0)

    def episodes(self, example: Example) -> Sequence[Episode]:
        """Return a game from each seat against each player of a fixed pool."""
        games: Sequence[Episode] = _call(self.module("game").episodes, example)
        return games

    def practice(self, example: Example, opponent: str, seat: int, seed: int) -> Any:
        """Return a training game. `opponent`: "pool" for a player of the pool that `seed` chooses, else a policy."""
        return _call(self.module("game").practice, example, opponent, seat, seed)


class VerifiersTaskset(Environment):
    """A verifiers taskset in a separate process."""

    def __init__(self, rules: EnvironmentRules, root: Path) -> None:
        super().__init__(rules, root)
        assert rules.taskset is not None
        spec = asdict(rules.taskset) | {
            "place": str(rules.taskset.place(root)),
            "path": [str(path) for path in (*rules.taskset.beside(root), *(root / name for name in TASKSET_FOLDERS))],
            "args": rules.args,
            "num_validation": rules.num_validation,
            "num_train": rules.num_train,
        }
        self.scorer: Scorer = Scorer(rules.name, root / PROCESS, spec)

    def examples(self, split: Split) -> Sequence[Example]:
        examples = self.scorer.load(split)
        if split != "train":  # only training scores at once
            self.scorer.close()
        return examples

    def episode(self, example: Any) -> Question:
        return Question(example.messages, example.key, None, self.scorer)  # the scorer has the answers by key

    def play(
        self, examples: Sequence[Any], session: Policy, decoding: Decoding, progress: ProgressCallback
    ) -> list[Sequence[Episode]]:
        """Return the episodes that score each example. If the engine has a server, verifiers' rollouts play them."""
        endpoint = session.endpoint(progress)
        if endpoint is None:
            return [self.episodes(example) for example in examples]
        policy = {
            "base_url": endpoint.base_url,
            "model": endpoint.model,
            "temperature": decoding.temperature,
            "max_tokens": decoding.max_completion_tokens,
        }
        played = self.scorer.play([example.key for example in examples], policy, endpoint.tick)
        return [(Conversation(played[example.key], self.scorer),) for example in examples]

    def slices(self, example: Example) -> Mapping[str, str]:
        return {}

    def prepare(self, source: Path | None, note: Callable[[str], None]) -> None:
        """Load the taskset online, so that it fetches its data."""
        self.scorer.close()
        self.scorer.is_online = True
        self.scorer.load("validation")
        self.scorer.close()


Task = tuple[Environment, Example]


def play_out(episodes: Sequence[Episode], complete: Complete) -> Iterator[tuple[int, Completion]]:
    """Play episodes to their end, one turn of every open episode at a time. Yield episode index and completion."""
    while chats := [(index, chat) for index, episode in enumerate(episodes) if (chat := episode.ask()) is not None]:
        completions = complete([chat for _, chat in chats])
        if len(completions) != len(chats):
            raise EngineError(f"the policy completed {len(completions)} of {len(chats)} examples")
        for (index, _), completion in zip(chats, completions, strict=True):
            episodes[index].answer(completion.text)
            yield index, completion


def figures_of(tasks: Sequence[Task], played: Sequence[Sequence[Episode]]) -> dict[str, dict[str, float]]:
    """Return figures of each game and of each environment with several turns, for display. The tasks of an environment
    are adjacent."""
    figures: dict[str, dict[str, float]] = {}
    for environment, group in groupby(zip(tasks, played, strict=True), key=lambda pair: pair[0][0]):
        by_example = [episodes for _, episodes in group]
        conversations = [episode.played for episode in chain(*by_example) if isinstance(episode, Conversation)]
        if isinstance(environment, Game):
            figures[environment.name] = environment.module("ratings").figures(by_example)
        elif any(episode.turns > 1 for episode in conversations):
            figures[environment.name] = {
                "turns_mean": fmean(episode.turns for episode in conversations),
                "tool_calls_mean": fmean(episode.tool_calls for episode in conversations),
                "tool_errors": sum(episode.tool_errors for episode in conversations),
                "failed": sum(episode.failed is not None for episode in conversations),
            }
    return figures


def load(root: Path, wanted: Sequence[EnvironmentRules]) -> tuple[Environment, ...]:
    """Return environments of the checkout at `root`, and make their packages importable.

    UsageError: a folder is missing, or Python would import a package of the same name from elsewhere, whose bytes the
    rules hash does not cover.
    """
    for rules in wanted:
        for folder in rules.folders if rules.taskset is None else ():
            _put_on_path(root / folder)
    kinds = (Game if rules.is_game else VerifiersTaskset if rules.taskset else Environment for rules in wanted)
    return tuple(kind(rules, root) for kind, rules in zip(kinds, wanted, strict=True))


def _call(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Call a package's code, and raise its errors as EngineError: a ValueError of the package with its own message, any
    other error with its file and line."""
    try:
        return function(*arguments, **named)
    except NightshiftError:  # also Interrupted
        raise
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        places = [(match.group(), frame) for frame in frames if (match := _PACKAGE_FILE.search(frame.filename))]
        if isinstance(error, ValueError) and (not places or (places[-1][1].line or "").startswith("raise")):
            raise EngineError(str(error)) from error
        place = f"{places[-1][0]}:{places[-1][1].lineno}: " if places else ""
        raise EngineError(place + clean(f"{type(error).__name__}: {error}", 300), "Correct this line.") from error


def _put_on_path(folder: Path) -> None:
    """Put an environment's folder at the end of the path, so that no file in the folder hides a library."""
    package = folder / f"nightshift_{folder.name}"
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    spec = importlib.util.find_spec(package.name)
    if spec is None or spec.origin is None:
        raise UsageError(f"{package} is not a package", "Restore it: git checkout environments.")
    if Path(spec.origin).parent.resolve() != package.resolve():
        cause = f"Python imports {package.name} from {spec.origin}, not from {package}"
        fix = "Take that folder off PYTHONPATH and out of .venv, then run: uv sync --reinstall."
        raise UsageError(cause, fix)
