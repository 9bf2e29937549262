"""GSM8K: 8,792 grade-school word problems (Cobbe et al., 2021, https://arxiv.org/abs/2110.14168).

Three disjoint sets: `validation` is 1,319 problems of the official train file, chosen by the hash of
their question; `train` is the rest of that file (6,154); `test` is the official test file (1,319).
The two official files lie in one prepared folder and are checked by their sha256 at every load.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

Split = Literal["train", "validation", "test"]

INSTRUCTION = "Reason step by step, then end with a line `#### <number>` that gives only the final number."
# Room for a prompt in the model's context. The longest question has 985 characters in 183 words; the instruction
# and the chat template add about 60 tokens.
PROMPT_TOKENS = 448

ENV_VAR = "NIGHTSHIFT_GSM8K"  # the folder with the two files, if it is not the default one
SHA256 = {
    "train.jsonl": "17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465",
    "test.jsonl": "3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14",
}
HUB_ID, HUB_REVISION = "openai/gsm8k", "e53f048856ff4f594e959d75785d2c2d37b678ee"

# As many as the test split has. A folder of other data gives the same share of its train file.
NUM_VALIDATION, NUM_OFFICIAL_TRAIN = 1319, 7473

_FIX = "Run: uv run prepare.py --gsm8k DIR (a folder with the official train.jsonl and test.jsonl)"


@dataclass(frozen=True, slots=True)
class Example:
    """One problem with its worked solution. `key` is a digest of the question; `answer` as written, e.g. `1,234`."""

    key: str
    question: str
    solution: str
    answer: str


def load(split: Split, size: int | None = None, seed: int = 0) -> list[Example]:
    """The first `size` examples of one set; all of them for None.

    `train` comes in an order fixed by `seed`, because trainers keep the order they are given; the other
    sets have one order. Raises ValueError for a split or size that does not exist, and for files that are missing
    or not the official ones: one line with the command that helps.
    """
    if split not in get_args(Split):
        raise ValueError(f"split = {split!r} does not exist. Use one of: {', '.join(get_args(Split))}")
    examples = test = _examples("test.jsonl")
    if split != "test":
        official = sorted(_examples("train.jsonl"), key=lambda example: example.key)
        num_validation = len(official) * NUM_VALIDATION // NUM_OFFICIAL_TRAIN
        examples = official[:num_validation]
        if split == "train":
            held_out = {example.key for example in [*examples, *test]}
            examples = [example for example in official if example.key not in held_out]
            rng = random.Random(seed)  # of which only `random()` is promised to be the same on every Python
            examples.sort(key=lambda _: rng.random())
    if size is not None and not 0 < size <= len(examples):
        raise ValueError(f"size = {size} is not available in {split}. Use 1 to {len(examples)}")
    return examples[:size]


def messages(example: Example) -> list[dict[str, str]]:
    """The chat that asks the question: one user message."""
    return [{"role": "user", "content": f"{example.question}\n\n{INSTRUCTION}"}]


def slices(example: Example) -> dict[str, str]:
    """What people group problems by: the lines of the worked solution, but for that of the answer."""
    steps = example.solution.strip().count("\n")
    return {"steps": str(steps) if steps < 6 else "6 or more"}


def prepared_folder() -> Path:
    """Where the two files are read: the folder that NIGHTSHIFT_GSM8K names, else one in the user's cache."""
    named = os.environ.get(ENV_VAR)
    if named:
        return Path(named).expanduser()
    usual, given = Path.home() / ".cache", Path(os.environ.get("XDG_CACHE_HOME", ""))
    places = [cache / "nightshift" / "gsm8k" for cache in (given, usual) if cache.is_absolute()]
    return next((place for place in places if place.is_dir()), places[0])  # it lay in ~/.cache, whatever was given


def prepare(source: Path | None = None, progress: Callable[[str], None] = lambda line: None) -> None:
    """Put the two official files in their place, from the folder `source` or else from the Hugging Face hub.

    Does nothing when they are there already; a folder that NIGHTSHIFT_GSM8K names is only checked. Raises
    ValueError when the hub cannot be reached or when what it or a folder holds is not the official data.
    """
    folder = prepared_folder()
    if source is None:
        try:
            for name in SHA256:
                _read(folder, name)
            return
        except ValueError:
            if os.environ.get(ENV_VAR):
                raise
    contents = {name: _read(source, name) for name in SHA256} if source else _download(progress)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            (folder / name).write_bytes(content)
    except OSError as error:
        raise ValueError(f"cannot write {folder}: {error.strerror}. Free or choose another folder: {ENV_VAR}") from None
    progress(f"gsm8k: {folder} is ready")


def _read(folder: Path, name: str) -> bytes:
    path = folder / name
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}. {_FIX}") from None
    return _verified(content, name, str(path))


def _verified(content: bytes, name: str, origin: str) -> bytes:
    digest = hashlib.sha256(content).hexdigest()
    if digest != SHA256[name]:
        raise ValueError(f"{origin} is not the official {name}: sha256 {digest[:12]}, not {SHA256[name][:12]}. {_FIX}")
    return content


def _examples(name: str) -> list[Example]:
    # Not splitlines(): it also splits at characters that may stand inside a JSON string.
    lines = _read(prepared_folder(), name).decode().split("\n")
    return [_example(row["question"], row["answer"]) for row in map(json.loads, filter(None, lines))]


def _example(question: str, solution: str) -> Example:
    normalised = " ".join(question.lower().split())  # white space and case make no other problem
    key = hashlib.sha256(normalised.encode()).hexdigest()[:16]
    return Example(key, question, solution, solution.rpartition("#### ")[2].strip())


def _download(progress: Callable[[str], None]) -> dict[str, bytes]:
    progress(f"gsm8k: downloading {HUB_ID} (about 5 MB, once)")
    try:
        import datasets

        sets: Any = datasets.load_dataset(HUB_ID, "main", revision=HUB_REVISION)
    except Exception as error:  # the hub's client raises what its libraries raise; all of it means: no data
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"cannot load {HUB_ID} from the hub: {reason}. {_FIX}") from None
    contents = {}
    for name in SHA256:
        rows = sets[name.removesuffix(".jsonl")]
        # The very bytes of the official files, so that one sha256 checks both ways to get them.
        lines = [json.dumps({"question": row["question"], "answer": row["answer"]}) + "\n" for row in rows]
        contents[name] = _verified("".join(lines).encode(), name, f"{HUB_ID} {name} from the hub")
    return contents
