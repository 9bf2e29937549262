"""The contract of environments: a class of tests that the test of each environment inherits (docs/environments.md)."""

import hashlib
import importlib
import inspect
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any, ClassVar, get_args

import pytest

from nightshift.config.rules import EnvironmentRules
from nightshift.config.rules_toml import environments_named
from nightshift.evaluation.environment import Environment, Episode, Example, Split, load

ROOT = Path(__file__).parents[2]
SPLITS = get_args(Split)
PIECES = ("1", "1+", "1,", "(", "-", "=", "\u00d7", "#", "#### ", "#### (", "\\boxed{", "\n")
LONG_TEXTS = [piece * (500_000 // len(piece)) for piece in PIECES]  # work that grows faster than a text never ends
Sets = dict[str, Sequence[Example]]


class EnvironmentContract:
    """Tests of the environment `name`, loaded and scored as a run does.

    `num_validation` and `num_train` replace the sizes of the environment. `num_scored`: validation examples whose
    answers are scored. `digest`: the expected digest of the examples; None accepts any. A subclass may override
    `problem`, `right_answer`, `least_score` and `wrong_answers`.
    """

    name: ClassVar[str]
    num_validation: ClassVar[int | None] = None
    num_train: ClassVar[int | None] = None
    num_scored: ClassVar[int] = 100
    digest: ClassVar[str | None] = None

    def problem(self, environment: Environment, example: Example) -> object:
        """Return what two examples have in common if they ask the same, whatever the wording."""
        return " ".join(str(environment.episode(example).ask()).lower().split())

    def right_answer(self, example: Example, episode: Episode) -> str:
        """Return a text that answers the episode's last chat rightly."""
        return example.answer

    def least_score(self, example: Example, episode: Episode) -> float:
        """Return the lowest score that right answers may get."""
        return 1.0

    def wrong_answers(self, example: Example) -> Iterable[str]:
        """Return texts that must score 0."""
        return ["", " \n", "\x00", "\udcff", f"{example.answer}1", "9" * 99, "nan", "__import__('os')._exit(1)"]

    @classmethod
    def rules(cls) -> EnvironmentRules:
        (rules,) = environments_named(ROOT, [cls.name])
        num_validation = cls.num_validation or rules.num_validation
        return replace(rules, num_validation=num_validation, num_train=cls.num_train or rules.num_train)

    @classmethod
    @contextmanager
    def opened(cls) -> Iterator[Environment]:
        """Yield the environment, and end the process that scores for it. Override it to put data in place first."""
        (environment,) = load(ROOT, [cls.rules()])
        try:
            yield environment
        finally:
            if environment.scorer is not None:
                environment.scorer.close()

    @classmethod
    def load_sets(cls, environment: Environment) -> Sets:
        return {split: environment.examples(split) for split in SPLITS}

    @classmethod
    def digest_of(cls, environment: Environment, sets: Sets) -> str:
        """Return 16 hex digits over the keys, answers and chats of all sets, in order."""
        rows = [
            (split, example.key, example.answer, environment.episode(example).ask())
            for split, examples in sets.items()
            for example in examples
        ]
        return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]

    @pytest.fixture(scope="class")
    @classmethod
    def environment(cls) -> Iterator[Environment]:
        with cls.opened() as environment:
            yield environment

    @pytest.fixture(scope="class")
    @classmethod
    def sets(cls, environment: Environment) -> Sets:
        return cls.load_sets(environment)

    def test_no_problem_is_in_two_splits(self, environment: Environment, sets: Sets) -> None:
        problems = {split: {self.problem(environment, one) for one in sets[split]} for split in SPLITS}
        for first, second in combinations(SPLITS, 2):
            assert not problems[first] & problems[second], f"{first} and {second}"

    def test_every_key_is_unique(self, sets: Sets) -> None:
        keys = [example.key for examples in sets.values() for example in examples]
        assert len(keys) == len({*keys})

    def test_right_answers_score_1(self, environment: Environment, sets: Sets) -> None:
        for example in sets["validation"][: self.num_scored]:
            for episode in environment.episodes(example):
                while episode.ask() is not None:
                    episode.answer(self.right_answer(example, episode))
                assert self.least_score(example, episode) <= episode.score() <= 1.0, example

    def test_wrong_and_hostile_answers_score_0(self, environment: Environment, sets: Sets) -> None:
        texts_of = [(example, self.wrong_answers(example)) for example in sets["validation"][: self.num_scored]]
        for example, texts in [*texts_of, (sets["validation"][0], LONG_TEXTS)]:
            for text in texts:
                for episode in environment.episodes(example):
                    while episode.ask() is not None:
                        episode.answer(text)
                    assert episode.score() == 0.0, (example, text[:99])

    def test_an_episode_without_an_answer_scores_as_an_empty_text(self, environment: Environment, sets: Sets) -> None:
        example = sets["validation"][0]
        episodes = list(zip(environment.episodes(example), environment.episodes(example), strict=True))
        asked = [(episode.ask(), other.ask()) for episode, other in episodes]
        assert all(chat == again for chat, again in asked), "a second episode of the example asks something else"
        chats = [chat for chat, _ in asked if chat is not None]
        assert chats
        assert all(chat[-1]["role"] == "user" and all(message["content"] for message in chat) for chat in chats)
        for episode, other in episodes:
            other.answer("")
            assert episode.score() == other.score()

    def test_another_process_loads_the_same_bytes(self, environment: Environment, sets: Sets) -> None:
        """Python's hashes differ between processes, and no split may depend on them."""
        command = [sys.executable, __file__, inspect.getfile(type(self)), type(self).__name__]
        variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "7"}
        process = subprocess.run(command, capture_output=True, text=True, env=variables)
        assert process.returncode == 0, process.stderr
        digest = self.digest_of(environment, sets)
        assert process.stdout.split() == [digest]
        assert self.digest in (None, digest), "another task: earlier results are no longer comparable"


class PackageContract(EnvironmentContract):
    """Tests of an environment with a folder of its own in environments/, whose `data.load` takes a size and a seed."""

    def load(self, environment: Environment, split: str, size: int | None, **more: Any) -> Sequence[Example]:
        data = importlib.import_module(f"{environment.package}.data")
        examples: Sequence[Example] = data.load(split, size, **self.rules().args, **more)
        return examples

    def test_a_smaller_set_is_part_of_the_larger(self, environment: Environment, sets: Sets) -> None:
        keys = [example.key for example in self.load(environment, "validation", 2)]
        assert keys == [example.key for example in sets["validation"][:2]]
        train = {example.key for example in sets["train"]}
        assert train > {example.key for example in self.load(environment, "train", 2)}

    def test_a_set_that_is_not_there_is_refused_in_one_line(self, environment: Environment, sets: Sets) -> None:
        for split, size in (("test", 0), ("test", -1), *((split, 10**9) for split in SPLITS), ("sealed", 1)):
            words = r"(size = \S+ is not available in|split = 'sealed' does not).* Use "
            with pytest.raises(ValueError, match=words) as e:
                self.load(environment, split, size)
            assert "\n" not in str(e.value)

    def test_another_seed_trains_on_no_held_out_problem(self, environment: Environment, sets: Sets) -> None:
        held_out = {self.problem(environment, one) for name in ("validation", "test") for one in sets[name]}
        train = self.load(environment, "train", self.rules().num_train, seed=1)
        assert not held_out & {self.problem(environment, example) for example in train}


def main() -> None:
    """Print the digest of the sets that the contract `sys.argv[2]` in the file `sys.argv[1]` loads."""
    contract = runpy.run_path(sys.argv[1])[sys.argv[2]]
    with contract.opened() as environment:
        print(contract.digest_of(environment, contract.load_sets(environment)))


if __name__ == "__main__":
    main()
