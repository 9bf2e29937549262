"""What the packages of several environments share: lazy imports, splits, random numbers, folders of data."""

import hashlib
import os
import random
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, TypeVar

T = TypeVar("T")
Split = Literal["train", "validation", "test"]

_SEED_WORDS = {"train": "train", "validation": "selection", "test": "sealed"}  # other words: other problems


def lazy(package: str, names: Sequence[str]) -> Callable[[str], Any]:
    """Return the __getattr__ of a package that imports verifiers on first use, with its module `taskset`."""

    def get(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = "nightshift_gsm8k.harness" if name == "ChatHarness" else f"{package}.taskset"
        return getattr(import_module(module), name)

    return get


def digest(text: str) -> str:
    """Return the sha256 of a text in hex digits."""
    return hashlib.sha256(text.encode()).hexdigest()


def key_of(text: str) -> str:
    """Return the key of a problem: texts that differ only in case or white space are the same problem."""
    return digest(" ".join(text.lower().split()))[:16]


def check(split: str, size: int | None, sizes: Mapping[str, int]) -> None:
    """Raise ValueError for a split that is not in `sizes`, or for a size that it does not have. None: the whole."""
    if split not in sizes:
        raise ValueError(f"split = {split!r} does not exist. Use one of: {', '.join(sizes)}")
    if size is not None and not 0 < size <= sizes[split]:
        raise ValueError(f"size = {size} is not available in {split}. Use 1 to {sizes[split]}")


def head(sets: Mapping[str, list[T]], split: str, size: int | None) -> list[T]:
    """Return the first `size` examples of one of the sets; all of them for None. ValueError as in `check`."""
    check(split, size, {name: len(examples) for name, examples in sets.items()})
    return sets[split][:size]


def pick(rng: random.Random, values: Sequence[T]) -> T:
    """Return a random value. Only `Random.random()` is promised to be the same on every Python."""
    return values[int(rng.random() * len(values))]


def shuffled(rng: random.Random, values: Iterable[T]) -> list[T]:
    """Return the values in random order."""
    return sorted(values, key=lambda _: rng.random())


def generate(draw: Callable[[random.Random], Any], split: Split, seed: int) -> Iterator[Any]:
    """Yield endless problems whose `split` is the given split. Problems repeat."""
    rng = random.Random(int(digest(f"{_SEED_WORDS[split]} {seed}"), 16))
    while True:
        problem = draw(rng)
        if problem.split == split:
            yield problem


def distinct(problems: Iterator[T], identity: Callable[[T], Hashable], size: int) -> list[T]:
    """Return the first `size` problems that differ in their identity."""
    first: dict[Hashable, T] = {}
    while len(first) < size:
        problem = next(problems)
        first.setdefault(identity(problem), problem)
    return list(first.values())


def folder_of(name: str, variable: str) -> Path:
    """Return the folder of a data set: the one that an environment variable names, else one in the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return Path(os.environ.get(variable) or cache / "nightshift" / name).expanduser()


def messages(example: Any) -> list[dict[str, str]]:
    """Return the chat that asks the question."""
    return [{"role": "user", "content": example.question}]
