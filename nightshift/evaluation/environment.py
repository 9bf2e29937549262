"""Environments: what is asked, how an answer is scored, and where the data comes from.

An environment is a folder `environments/<name>/` with one package, `nightshift_<name>`, which stands on its own: it
imports nothing of Nightshift, because prime-rl loads it too, as a verifiers taskset. The harness finds it by its
folder and puts that folder at the end of Python's path; no list of dependencies names it. Somebody's taskset takes no
part in that: it is never imported here (scorer.py). Of a package of its own it reads

    data.PROMPT_TOKENS                 room that a prompt may need, in tokens of the rules' model
    data.load(split, size, **args)     examples with `key` and `answer`; ValueError, one line with its fix
    data.messages(example)             the chat that asks
    data.slices(example)               only where it has more to say than a length: what the example is, by what is told
    data.prepare(source=, progress=)   only where data must be fetched; ValueError, one line with its fix
    scoring.score(text, answer)        0..1; with is_bounded = true in a process of its own, as a taskset's (scorer.py)
    scoring.is_formatted(text)         only where a form is asked for: whether the answer is written in it
    documents.documents(seed)          only where a recipe of engines/trl/base_model.py names it: chats to learn it from

and in place of data.messages and scoring, of a game,

    game.episodes(example)             the games that score an example: each an Episode, with `details()` of how it went
    game.practice(example, opponent, seat, seed)   a game to learn from: an Episode that may ask for the other seat
    ratings.figures(games, ask)        what is shown of all that were played, by name; `ask` has the policy answer chats
    ratings.rating(games)              of it the one number that a curve over training shows; None: it has none
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
from nightshift.errors import EngineError, UsageError
from nightshift.evaluation.episode import Chat, Complete, Episode, Example, Split
from nightshift.evaluation.scorer import Scorer
from nightshift.evaluation.verifiers_environment import PROCESS, Question, SomebodysTaskset

CURVE_STEPS = 4  # earlier steps of a game that an engine keeps: one in each fifth of the training but the first


class SingleTurn:
    """An Environment of one question and one answer, over the modules `data` and `scoring` of its package.

    They are imported when they are first needed: a head compares their bytes with the agreed ones before that.
    `package`: its name for Python and verifiers, and in every evaluation. `scorer`: the process that scores its
    answers, where they are not scored here; who had it score closes it.
    """

    def __init__(self, rules: EnvironmentRules, scorer: Scorer | None = None) -> None:
        self.name, self.package, self.scorer = rules.name, rules.package, scorer
        self._rules = rules

    @cached_property
    def _data(self) -> Any:
        return importlib.import_module(f"{self.package}.data")

    @cached_property
    def _scoring(self) -> Any:
        return importlib.import_module(f"{self.package}.scoring")

    @property
    def prompt_tokens(self) -> int:
        return int(self._data.PROMPT_TOKENS)

    def examples(self, split: Split) -> Sequence[Example]:
        """One set, as large as the rules say, in a fixed order. EngineError when the data is missing or not the
        official data. The sealed set is read through test_split.py only."""
        size = self._rules.num_train if split == "train" else self._rules.num_selection
        examples: Sequence[Example] = _call(self._data.load, split, size, **self._rules.args)
        if len({example.key for example in examples}) != (size or len(examples)) or not examples:
            cause = f"environment {self.name}: {len(examples)} examples of {split} with"
            cause += f" {len({example.key for example in examples})} keys, where {size or 'some'} are asked for"
            raise EngineError(cause, "Mend data.load in its folder.")
        return examples

    def episode(self, example: Example) -> Question:
        return Question(self._data.messages(example), example.answer, self._scoring, self.scorer)

    def episodes(self, example: Example) -> Sequence[Episode]:
        """All that score an example: its score is their mean."""
        return (self.episode(example),)

    def slices(self, example: Example) -> Mapping[str, str]:
        """What the example is, by what is told of it: `{"events": "2"}`. For people; nothing is decided by it."""
        tell = getattr(self._data, "slices", None)
        return {str(name): str(value) for name, value in _call(tell, example).items()} if tell else {}

    def prepare(self, source: Path | None, note: Callable[[str], None]) -> None:
        """Fetch what `examples` reads, from the folder `source` or else from where it is published, unless it is there.
        EngineError when it cannot be had. Generated data needs no preparation."""
        if hasattr(self._data, "prepare"):
            _call(self._data.prepare, source=source, progress=note)
            self.examples("selection")  # with the args of rules.toml


class Game(SingleTurn):
    """An Environment of several turns against an opponent, over `data`, `game` and `ratings` of its package. Of the
    games of all examples `ratings` makes what is shown; nothing is decided by it."""

    @cached_property
    def _game(self) -> Any:
        return importlib.import_module(f"{self.package}.game")

    @cached_property
    def ratings(self) -> Any:
        return importlib.import_module(f"{self.package}.ratings")

    def episode(self, example: Example) -> Any:
        return self.practice(example, "self", 0, 0)

    def episodes(self, example: Example) -> Sequence[Episode]:
        """From each seat, against each of a fixed pool."""
        games: Sequence[Episode] = self._game.episodes(example)
        return games

    def practice(self, example: Example, opponent: str, seat: int, seed: int) -> Any:
        """A game to learn from, in an even or an odd seat; `opponent` `pool`: one of it by `seed`, else a policy."""
        return self._game.practice(example, opponent, seat, seed)


Environment = SingleTurn | SomebodysTaskset


def _games(posed: Sequence[tuple[Environment, Example]]) -> dict[str, Game]:
    return {environment.name: environment for environment, _ in posed if isinstance(environment, Game)}


def game_figures(
    posed: Sequence[tuple[Environment, Example]], played: Sequence[Sequence[Episode]], complete: Complete
) -> dict[str, dict[str, float]]:
    """By environment, what the games among them show of all that was played."""

    def ask(chats: Sequence[Chat]) -> list[str]:
        return [completion.text for completion in complete(chats)]

    return {
        name: game.ratings.figures([each for (one, _), each in zip(posed, played, strict=True) if one is game], ask)
        for name, game in _games(posed).items()
    }


def play_out(episodes: Sequence[Episode], complete: Complete) -> Iterator[tuple[int, Completion]]:
    """Play episodes to their ends, a turn of all that are open at a time: the place of each, and what was said."""
    while asked := [(index, chat) for index, episode in enumerate(episodes) if (chat := episode.ask()) is not None]:
        for (index, _), completion in zip(asked, complete([chat for _, chat in asked]), strict=True):
            episodes[index].answer(completion.text)
            yield index, completion


def add_curve(
    figures: Mapping[str, dict[str, float]],
    posed: Sequence[tuple[Environment, Example]],
    earlier: Mapping[int, Callable[[], None]],
    complete: Complete,
) -> tuple[str, ...]:
    """How the games' ratings came about: those after earlier steps; a line where some of the CURVE_STEPS are lacking.
    It is for display: what fails costs no run."""
    names, lacking = " and ".join(figures), []
    if len(earlier) < CURVE_STEPS:
        lacking.append(f"{len(earlier)} earlier steps were kept, not {CURVE_STEPS}")
    try:
        for step, load_weights in earlier.items():
            load_weights()
            for name, game in _games(posed).items():
                games = [game.episodes(example) for one, example in posed if one is game]
                list(play_out([episode for each in games for episode in each], complete))
                if (rating := game.ratings.rating(games)) is None:
                    lacking.append(f"after step {step} {name} has none: all won or all lost")
                else:
                    figures[name][f"elo_step_{step}"] = rating
    except EngineError as error:
        lacking.append(f"it ends before step {step}: {error}")
    return (f"{names}: the curve of ratings: {'; '.join(lacking)}",) if lacking else ()


def load(root: Path, wanted: Sequence[EnvironmentRules]) -> tuple[Environment, ...]:
    """The wanted environments of the checkout at `root`; from now on Python can import their packages.

    Raises UsageError when there is no such folder, or when Python has a package of that name elsewhere, whose bytes
    no rules hash would cover.
    """
    found: list[Environment] = []
    for rules in wanted:
        if rules.taskset is not None:
            found.append(SomebodysTaskset(rules, rules.taskset, root))
            continue
        for folder in rules.folders:
            _put_on_path(root / folder)
        spec = {"path": [str(root / folder) for folder in rules.folders], "scoring": f"{rules.package}.scoring"}
        scorer = Scorer(rules.name, root / PROCESS, spec) if rules.is_bounded else None
        found.append(Game(rules) if rules.is_game else SingleTurn(rules, scorer))
    return tuple(found)


def _call(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """The package's own error, one line with its fix, becomes ours."""
    try:
        return function(*arguments, **named)
    except (ValueError, TypeError) as error:
        raise EngineError(str(error)) from error


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
