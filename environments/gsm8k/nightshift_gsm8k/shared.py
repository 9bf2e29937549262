"""What the packages of several environments share: lazy imports, splits, random numbers, folders of data."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

T = TypeVar("T")
Split = Literal["train", "validation", "test"]

# These words seed the generators: other words would generate other problems.
_SEED_WORDS: dict[str, str] = {"train": "train", "validation": "selection", "test": "sealed"}


def lazy(package: str, names: Sequence[str]) -> Callable[[str], Any]:
    """Return the __getattr__ of a package that imports its module `taskset`, and so verifiers, on first use."""

    def get(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.taskset"), name)

    return get


def digest(text: str) -> str:
    """Return the sha256 of a text in hex digits."""
    return hashlib.sha256(text.encode()).hexdigest()


def key_of(text: str) -> str:
    """Return the key of a problem: texts that differ only in case or white space are the same problem."""
    return digest(" ".join(text.lower().split()))[:16]


def check_split(split: str) -> None:
    """Raise ValueError for a split that does not exist."""
    if split not in get_args(Split):
        raise ValueError(f"split = {split!r} does not exist. Use one of: {', '.join(get_args(Split))}")


def check_size(split: str, size: int | None, largest: int) -> None:
    """Raise ValueError for a size that a split does not have. None is the whole split."""
    if size is not None and not 0 < size <= largest:
        raise ValueError(f"size = {size} is not available in {split}. Use 1 to {largest}")


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
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get(variable) or cache / "nightshift" / name).expanduser()


def write_data(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Write the files of a data set."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (folder / name).write_bytes(content)


def messages(example: Any) -> list[dict[str, str]]:
    """Return the chat that asks the question."""
    return [{"role": "user", "content": example.question}]
