"""MATH: 12,500 competition problems in five levels (Hendrycks et al., 2021, https://arxiv.org/abs/2103.03874).

The problems come from the user's own copy; Nightshift holds none of them. Of the chosen `levels`, `validation` is 1,000
problems of the official train split, by the hash of their text and of each level its share; `train` is the rest of that
split; `test` is 1,000 of the official test split, chosen alike, without MATH-500, which models have seen.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, get_args

from nightshift_math.scoring import extract_answer

Split = Literal["train", "validation", "test"]

INSTRUCTION = "Reason step by step, and put your final answer within \\boxed{}."
# A longer problem is left out: no tokenizer of bytes makes more tokens than bytes, so a prompt always has its room.
# The longest problem of MATH-500 has 1,733 bytes.
MAX_PROBLEM_BYTES, PROMPT_TOKENS = 1900, 2048

ENV_VAR = "NIGHTSHIFT_MATH"  # the folder with what `prepare` wrote, if it is not the default one
NUM_OFFICIAL = {"train": 7500, "test": 5000}
NUM_VALIDATION = 1000
LEVELS = (1, 2, 3)  # as [tool.nightshift] has them
MATH_VERIFY = "0.9.0"
# Keys of MATH-500's problems, of the hub's HuggingFaceH4/MATH-500: test.jsonl of sha256 35dc41080a36.
MATH_500 = Path(__file__).with_name("math_500.txt")

_NAME, _SUM = "math.jsonl", "math.sha256"
_FIX = "Run: uv run prepare.py --math DIR (of your copy: train/NAME/N.json and test/..., or train.jsonl and test.jsonl)"


@dataclass(frozen=True, slots=True)
class Example:
    """One problem. `key` is a digest of its text, `split` the official one, `level` 1 to 5, 0 where none is known."""

    key: str
    split: str
    level: int
    subject: str
    problem: str
    answer: str


def load(split: Split, size: int | None = None, seed: int = 0, levels: Sequence[int] = LEVELS) -> list[Example]:
    """The first `size` examples of one set; all of them for None.

    `train` comes in an order fixed by `seed`. Raises ValueError for a split, size or levels that do not exist, and for
    data that is missing or not what `prepare` wrote: one line with the command that helps.
    """
    if split not in get_args(Split):
        raise ValueError(f"split = {split!r} does not exist. Use one of: {', '.join(get_args(Split))}")
    if not levels or not all(isinstance(level, int) and 1 <= level <= 5 for level in levels):
        raise ValueError(f"levels = {levels!r} is no list of levels. Write some of [1, 2, 3, 4, 5]")
    _check_math_verify()
    every = list(_read())
    known, public = {one.key for one in every if one.split == "test"}, {*MATH_500.read_text().split()}
    mine = [one for one in every if one.level in levels and len(one.problem.encode()) <= MAX_PROBLEM_BYTES]
    test = _in_shares([one for one in mine if one.split == "test" and one.key not in public])
    official = _in_shares([one for one in mine if one.split == "train" and one.key not in known])
    for name, found, least in (("test", test, NUM_VALIDATION), ("train", official, 2 * NUM_VALIDATION)):
        if len(found) < least:
            have = f"levels = {list(levels)} have {len(found)} problems of {name} that can be used"
            raise ValueError(f"{have}, and {least} are needed. Add levels")
    validation, rest = official[:NUM_VALIDATION], official[NUM_VALIDATION:]
    rng = random.Random(seed)  # of which only `random()` is promised to be the same on every Python
    rest.sort(key=lambda _: rng.random())
    examples = {"train": rest, "validation": validation, "test": test[:NUM_VALIDATION]}[split]
    if size is not None and not 0 < size <= len(examples):
        raise ValueError(
            f"size = {size} is not available in {split} of levels {list(levels)}. Use 1 to {len(examples)}"
        )
    return examples[:size]


def messages(example: Example) -> list[dict[str, str]]:
    """The chat that asks the question: one user message."""
    return [{"role": "user", "content": f"{example.problem}\n\n{INSTRUCTION}"}]


def slices(example: Example) -> dict[str, str]:
    """What people group problems by."""
    return {"level": str(example.level), "subject": example.subject}


def prepared_folder() -> Path:
    """Where the data is read: the folder that NIGHTSHIFT_MATH names, else one in the user's cache."""
    named = os.environ.get(ENV_VAR)
    if named:
        return Path(named).expanduser()
    usual, given = Path.home() / ".cache", Path(os.environ.get("XDG_CACHE_HOME", ""))
    places = [cache / "nightshift" / "math" for cache in (given, usual) if cache.is_absolute()]
    return next((place for place in places if place.is_dir()), places[0])  # it lay in ~/.cache, whatever was given


def prepare(source: Path | None = None, progress: Callable[[str], None] = lambda line: None) -> None:
    """Put what is read of one's own copy in the folder `source` in its place, and beside it its sha256.

    Without `source` looks whether it is there. Raises ValueError, one line with its fix, for what is not MATH.
    """
    _check_math_verify()
    if source is None:
        list(_read())
        return
    examples = [_example(split, *row) for split in NUM_OFFICIAL for row in _rows(source, split)]
    for split, wanted in NUM_OFFICIAL.items():
        if (found := sum(one.split == split for one in examples)) != wanted:
            raise ValueError(f"{source}: {split} has {found} problems, MATH has {wanted}. {_FIX}")
    examples.sort(key=lambda one: (one.split, one.key, one.answer))
    content = "".join(json.dumps(asdict(one)) + "\n" for one in examples).encode()
    folder, digest = prepared_folder(), hashlib.sha256(content).hexdigest()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _NAME).write_bytes(content)
        (folder / _SUM).write_text(f"{digest}  {_NAME}\n")
    except OSError as error:
        raise ValueError(f"cannot write {folder}: {error.strerror}. Free or choose another folder: {ENV_VAR}") from None
    public = {*MATH_500.read_text().split()}
    found = len(public & {one.key for one in examples if one.split == "test"})
    rest = "" if found == len(public) else ", and may hold the others: their text is another here"
    progress(f"math: {folder} is ready, sha256 {digest[:12]}; the test split has none of {found} of MATH-500{rest}")


def _check_math_verify() -> None:
    found = next((one.version for one in metadata.distributions(name="math-verify")), "none")
    if found != MATH_VERIFY:
        raise ValueError(f"math needs math-verify {MATH_VERIFY}, here is {found}. Run: uv sync --extra math")


def _read() -> Iterator[Example]:
    folder = prepared_folder()
    try:
        content, noted = (folder / _NAME).read_bytes(), (folder / _SUM).read_text()
    except OSError as error:
        raise ValueError(f"{folder / _NAME} cannot be read: {error.strerror}. {_FIX}") from None
    if hashlib.sha256(content).hexdigest() != noted.partition(" ")[0]:
        raise ValueError(f"{folder / _NAME} is not what prepare.py wrote: another sha256. {_FIX}")
    for line in content.decode().splitlines():  # of JSON in ASCII
        yield Example(**json.loads(line))


def _in_shares(examples: Sequence[Example]) -> list[Example]:
    """Each text once, in an order of which every beginning has of each level its share."""
    unique = list({one.key: one for one in examples}.values())
    total, rank = Counter(one.level for one in unique), Counter[int]()
    placed = []
    for one in sorted(unique, key=lambda one: one.key):
        placed.append(((rank[one.level] + 0.5) / total[one.level], one.key, one))
        rank[one.level] += 1
    return [one for *_, one in sorted(placed, key=lambda place: place[:2])]


def _rows(source: Path, split: str) -> Iterator[tuple[str, Any]]:
    """What the copy holds of a split, each with where it was found."""
    lines = source / f"{split}.jsonl"
    for path in [lines] if lines.is_file() else sorted((source / split).glob("*/*.json")):
        try:
            text = path.read_text("utf-8")
            for number, row in enumerate(text.split("\n") if path == lines else [text], 1):
                if row.strip():
                    yield f"{path}:{number}", json.loads(row)
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(f"{path} cannot be read: {error}. {_FIX}") from None


def _example(split: str, where: str, row: Any) -> Example:
    """The hub's copies have `subject` for `type`, and some of them a level without the word."""
    try:
        problem, level = row["problem"], str(row["level"]).removeprefix("Level ")
        answer = extract_answer(row["solution"].replace("\\fbox", "\\boxed")) if "box" in row["solution"] else None
        subject = row["type"] if "type" in row else row["subject"]
        normalised = " ".join(problem.lower().split())  # white space and case make no other problem
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{where} is no problem of MATH: {type(error).__name__} {error}. {_FIX}") from None
    if answer is None:
        raise ValueError(f"{where}: its solution ends in no \\boxed{{}} answer. {_FIX}")
    key = hashlib.sha256(normalised.encode()).hexdigest()[:16]
    return Example(key, split, int(level) if level in {*"12345"} else 0, str(subject), problem, answer)
