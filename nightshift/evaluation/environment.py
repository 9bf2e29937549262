"""Environments: their examples, how an answer is scored, and where their data comes from.

An environment is a folder `environments/<name>/` with one package, `nightshift_<name>`. It imports nothing of
Nightshift, because prime-rl loads it, too, as a verifiers taskset. The harness finds it by its folder and puts that
folder at the end of Python's path; no list of dependencies names it. A verifiers taskset of other people is never
imported here (scorer.py). Of a package of its own the harness reads

    data.PROMPT_TOKENS                 room that a prompt may need, in tokens of the rules' model
    data.load(split, size, **args)     examples of train, validation or test, each with `key` and `answer`
    data.messages(example)             the chat that asks
    data.slices(example)               optional: groups that the page shows, `{"events": "2"}`
    data.prepare(source=, progress=)   only where data must be fetched
    scoring.score(text, answer)        0..1; with is_bounded = true in its own process, as a taskset's (scorer.py)
    scoring.is_formatted(text)         only where a format is requested: whether the answer has it
    documents.documents(seed)          only where a recipe of tools/base_model.py names it: chats to learn it from

and of a game, in place of data.messages and scoring,

    game.episodes(example)             the games that score an example: each an Episode, with `details()` of how it went
    game.practice(example, opponent, seat, seed)   a game to learn from: an Episode that may ask for the other seat
    ratings.figures(games, ask)        figures for the page, by name; `ask` has the policy answer chats
    ratings.rating(games)              the one of them that a curve over training shows; None: there is none

`load` and `prepare` refuse by a ValueError: one line with its fix.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from nightshift.campaign.records import Completion
from nightshift.config.rules import EnvironmentRules
from nightshift.errors import EngineError, NightshiftError, UsageError
from nightshift.evaluation.episode import Chat, Complete, Episode, Example, Split
from nightshift.evaluation.scorer import Scorer
from nightshift.evaluation.verifiers_environment import PROCESS, Question, VerifiersTaskset, frame_of, place_of
from nightshift.text import clean

CURVE_STEPS = 4  # earlier steps of a game that an engine keeps: one in each fifth of the training but the first


class SingleTurn:
    """An Environment of one question and one answer, over the modules `data` and `scoring` of its package.

    The modules are imported when they are first needed, after the controller compared their bytes. `package`: its name
    for Python and verifiers, and in every evaluation. `scorer`: the process that scores, which the caller closes.
    """

    def __init__(self, rules: EnvironmentRules, scorer: Scorer | None = None) -> None:
        self.name, self.package, self.scorer = rules.name, rules.package, scorer
        self._rules = rules

    def _module(self, name: str) -> Any:
        return _call(importlib.import_module, f"{self.package}.{name}")

    @cached_property
    def _data(self) -> Any:
        return self._module("data")

    @cached_property
    def _scoring(self) -> Any:
        return self._module("scoring")

    @property
    def prompt_tokens(self) -> int:
        return int(self._data.PROMPT_TOKENS)

    def examples(self, split: Split) -> Sequence[Example]:
        """Return one split, as large as the rules say, in a fixed order. Only test_split.py reads the test split.

        Raises EngineError for missing or wrong data, another number of examples, or a key twice.
        """
        size = self._rules.num_train if split == "train" else self._rules.num_validation
        examples: Sequence[Example] = _call(self._data.load, split, size, **self._rules.args)
        num_keys = len({example.key for example in examples})
        if num_keys != (size or len(examples)) or not examples:
            cause = f"environment {self.name}: {len(examples)} examples of {split} with"
            cause += f" {num_keys} keys, where {size or 'some'} are asked for"
            raise EngineError(cause, "Mend data.load in its folder.")
        return examples

    def episode(self, example: Example) -> Question:
        return Question(self._data.messages(example), example.answer, self._scoring, self.scorer)

    def episodes(self, example: Example) -> Sequence[Episode]:
        """Return all episodes that score an example. Its score is their mean."""
        return (self.episode(example),)

    def slices(self, example: Example) -> Mapping[str, str]:
        """Return the groups of the example that the page shows, as `{"events": "2"}`."""
        slices = getattr(self._data, "slices", None)
        return {str(name): str(value) for name, value in _call(slices, example).items()} if slices else {}

    def prepare(self, source: Path | None, note: Callable[[str], None]) -> None:
        """Fetch missing data, from the folder `source` or from where it is published. Generated data needs none."""
        if hasattr(self._data, "prepare"):
            _call(self._data.prepare, source=source, progress=note)
            self.examples("validation")  # with the args of rules.toml


class Game(SingleTurn):
    """An Environment of several turns against an opponent, over `data`, `game` and `ratings` of its package."""

    @cached_property
    def _game(self) -> Any:
        return self._module("game")

    @cached_property
    def ratings(self) -> Any:
        return self._module("ratings")

    def episode(self, example: Example) -> Any:
        return self.practice(example, "self", 0, 0)

    def episodes(self, example: Example) -> Sequence[Episode]:
        """Return a game from each seat against each player of a fixed pool."""
        games: Sequence[Episode] = self._game.episodes(example)
        return games

    def practice(self, example: Example, opponent: str, seat: int, seed: int) -> Any:
        """Return a game to learn from. `opponent` "pool" is a player of the pool by `seed`, any other a policy."""
        return self._game.practice(example, opponent, seat, seed)


Environment = SingleTurn | VerifiersTaskset
Task = tuple[Environment, Example]


def play_out(episodes: Sequence[Episode], complete: Complete) -> Iterator[tuple[int, Completion]]:
    """Play episodes to their ends, a turn of all open ones at a time. Yield index of the episode and completion."""
    while asked := [(index, chat) for index, episode in enumerate(episodes) if (chat := episode.ask()) is not None]:
        for (index, _), completion in zip(asked, complete([chat for _, chat in asked]), strict=True):
            episodes[index].answer(completion.text)
            yield index, completion


def _games(tasks: Sequence[Task]) -> dict[str, Game]:
    return {environment.name: environment for environment, _ in tasks if isinstance(environment, Game)}


def game_figures(
    tasks: Sequence[Task], played: Sequence[Sequence[Episode]], complete: Complete
) -> dict[str, dict[str, float]]:
    """Return the figures of the games among the environments, by environment. They are for display."""

    def ask(chats: Sequence[Chat]) -> list[str]:
        return [completion.text for completion in complete(chats)]

    figures = {}
    for name, game in _games(tasks).items():
        games = [episodes for (environment, _), episodes in zip(tasks, played, strict=True) if environment is game]
        figures[name] = game.ratings.figures(games, ask)
    return figures


def add_curve(
    figures: Mapping[str, dict[str, float]],
    tasks: Sequence[Task],
    earlier: Mapping[int, Callable[[], None]],
    complete: Complete,
) -> tuple[str, ...]:
    """Add the games' ratings after earlier steps to `figures`, for display: a failure here costs no run.

    Return a line if some of the CURVE_STEPS are missing.
    """
    missing = []
    if len(earlier) < CURVE_STEPS:
        missing.append(f"{len(earlier)} earlier steps were kept, not {CURVE_STEPS}")
    try:
        for step, load_weights in earlier.items():
            load_weights()
            for name, game in _games(tasks).items():
                games = [game.episodes(example) for environment, example in tasks if environment is game]
                list(play_out([episode for episodes in games for episode in episodes], complete))
                if (rating := game.ratings.rating(games)) is None:
                    missing.append(f"after step {step} {name} has none: all won or all lost")
                else:
                    figures[name][f"elo_step_{step}"] = rating
    except EngineError as error:
        missing.append(f"it ends before step {step}: {error}")
    return (f"{' and '.join(figures)}: the curve of ratings: {'; '.join(missing)}",) if missing else ()


def load(root: Path, wanted: Sequence[EnvironmentRules]) -> tuple[Environment, ...]:
    """Return the wanted environments of the checkout at `root`. From now on Python can import their packages.

    Raises: UsageError if there is no such folder, if its package uses the former names of splits, or if Python has a
    package of that name elsewhere, whose bytes no rules hash would cover.
    """
    environments: list[Environment] = []
    for rules in wanted:
        if rules.taskset is not None:
            environments.append(VerifiersTaskset(rules, rules.taskset, root))
            continue
        for folder in rules.folders:
            _put_on_path(root / folder)
        spec = {"path": [str(root / folder) for folder in rules.folders], "scoring": f"{rules.package}.scoring"}
        scorer = Scorer(rules.name, root / PROCESS, spec) if rules.is_bounded else None
        environments.append(Game(rules) if rules.is_game else SingleTurn(rules, scorer))
    return tuple(environments)


def _call(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Call a package's code. A ValueError that it raises itself is one line with its fix; others get their place."""
    try:
        return function(*arguments, **named)
    except NightshiftError:  # above all Interrupted
        raise
    except (Exception, SystemExit) as error:
        frame = frame_of(error)
        if isinstance(error, ValueError) and (frame is None or (frame.line or "").startswith("raise")):
            raise EngineError(str(error)) from error
        cause = clean(f"{type(error).__name__}: {error}", 300)
        raise EngineError(f"{place_of(frame)}{cause}", "Mend it there.") from error


def _put_on_path(folder: Path) -> None:
    """Put an environment's folder at the end of the path, so that no file in it passes for a library."""
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
