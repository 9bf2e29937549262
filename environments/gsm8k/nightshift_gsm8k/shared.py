"""What the packages of several environments share: names and sizes of splits, random numbers, folders of data."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol, TypeVar, get_args

T = TypeVar("T")
Split = Literal["train", "validation", "test"]

# These words seed the generators: other words would generate other problems.
_SEED_WORDS: dict[str, str] = {"train": "train", "validation": "selection", "test": "sealed"}


class Generated(Protocol):
    """A generated problem."""

    @property
    def split(self) -> Split:
        """The only split that may contain this problem."""
        ...


P = TypeVar("P", bound=Generated)


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


def shuffled(examples: Iterable[T], seed: int) -> list[T]:
    """Return examples in an order that `seed` fixes."""
    rng = random.Random(seed)
    return sorted(examples, key=lambda _: rng.random())


def generate(draw: Callable[[random.Random], P], split: Split, seed: int) -> Iterator[P]:
    """Yield endless problems of one split. Problems repeat."""
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


def question(text: str) -> list[dict[str, str]]:
    """Return the chat that asks a question: one user message."""
    return [{"role": "user", "content": text}]


def folder_of(name: str, variable: str) -> Path:
    """Return the folder of a data set: the one that an environment variable names, else one in the user's cache."""
    if named := os.environ.get(variable):
        return Path(named).expanduser()
    default, given = Path.home() / ".cache", Path(os.environ.get("XDG_CACHE_HOME", ""))
    folders = [cache / "nightshift" / name for cache in (given, default) if cache.is_absolute()]
    # Earlier versions ignored XDG_CACHE_HOME: data in ~/.cache is not fetched again.
    return next((folder for folder in folders if folder.is_dir()), folders[0])


def write_data(folder: Path, contents: Mapping[str, bytes], variable: str) -> None:
    """Write the files of a data set. ValueError if the disk refuses."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            (folder / name).write_bytes(content)
    except OSError as error:
        fix = f"Free disk space, or name another folder: {variable}"
        raise ValueError(f"cannot write {folder}: {error.strerror}. {fix}") from None
