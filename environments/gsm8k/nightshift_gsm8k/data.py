"""GSM8K: 8,792 grade-school word problems (Cobbe et al., 2021, https://arxiv.org/abs/2110.14168).

The three sets are disjoint: `validation` is 1,319 problems of the official train file, chosen by the hash of their
question; `train` is the rest of that file (6,154); `test` is the official test file (1,319). The two official files are
in one prepared folder. Every load checks their sha256.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nightshift_gsm8k.shared import Split, check_size, check_split, folder_of, key_of, shuffled, write_data

INSTRUCTION = "Reason step by step, then end with a line `#### <number>` that gives only the final number."
# Tokens that a prompt may need. The longest question has 985 characters in 183 words; the instruction and the chat
# template add about 60 tokens.
PROMPT_TOKENS = 448

ENV_VAR = "NIGHTSHIFT_GSM8K"  # names the folder of the two files, if it is not the default folder
SHA256 = {
    "train.jsonl": "17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465",
    "test.jsonl": "3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14",
}
HUB_ID, HUB_REVISION = "openai/gsm8k", "e53f048856ff4f594e959d75785d2c2d37b678ee"

# The size of the test split. Other data gives the same share of its train file.
NUM_VALIDATION, NUM_OFFICIAL_TRAIN = 1319, 7473

_FIX = "Run: uv run prepare.py --gsm8k DIR (a folder with the official train.jsonl and test.jsonl)"


@dataclass(frozen=True, slots=True)
class Example:
    """One problem with its worked solution. `answer`: as the solution writes it, e.g. `1,234`."""

    key: str
    question: str
    solution: str
    answer: str


def load(split: Split, size: int | None = None, seed: int = 0) -> list[Example]:
    """Return the first `size` examples of a split; all of them for None.

    `seed` fixes the order of `train`, because trainers do not shuffle; the other splits have one order. ValueError with
    the command to run: the split or the size does not exist, or the files are missing or not the official ones.
    """
    check_split(split)
    examples = test = _examples("test.jsonl")
    if split != "test":
        official = sorted(_examples("train.jsonl"), key=lambda example: example.key)
        num_validation = len(official) * NUM_VALIDATION // NUM_OFFICIAL_TRAIN
        examples = official[:num_validation]
        if split == "train":
            held_out = {example.key for example in [*examples, *test]}
            examples = [example for example in official if example.key not in held_out]
            examples = shuffled(random.Random(seed), examples)
    check_size(split, size, len(examples))
    return examples[:size]


def messages(example: Example) -> list[dict[str, str]]:
    """Return the chat that asks the question."""
    return [{"role": "user", "content": f"{example.question}\n\n{INSTRUCTION}"}]


def slices(example: Example) -> dict[str, str]:
    """Group problems by the number of steps of their worked solution."""
    steps = example.solution.strip().count("\n")
    return {"steps": str(steps) if steps < 6 else "6 or more"}


def prepare(source: Path | None = None, progress: Callable[[str], None] = lambda line: None) -> None:
    """Copy the two official files into the prepared folder, from the folder `source` or from the Hugging Face hub.

    Files that are there already are only checked, and so is a folder that NIGHTSHIFT_GSM8K names. ValueError: the hub
    cannot be reached, or the data is not the official data.
    """
    folder = folder_of("gsm8k", ENV_VAR)
    if source is None:
        try:
            for name in SHA256:
                _read(folder, name)
            return
        except ValueError:
            if os.environ.get(ENV_VAR):
                raise
    contents = {name: _read(source, name) for name in SHA256} if source else _download(progress)
    write_data(folder, contents)
    progress(f"gsm8k: {folder} is ready")


def _read(folder: Path, name: str) -> bytes:
    path = folder / name
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}. {_FIX}") from None
    return _verified(content, name, str(path))


def _verified(content: bytes, name: str, origin: str) -> bytes:
    sha256 = hashlib.sha256(content).hexdigest()
    if sha256 != SHA256[name]:
        raise ValueError(f"{origin} is not the official {name}: sha256 {sha256[:12]}, not {SHA256[name][:12]}. {_FIX}")
    return content


def _examples(name: str) -> list[Example]:
    # Not splitlines(), which also splits at characters that may be part of a JSON string.
    lines = _read(folder_of("gsm8k", ENV_VAR), name).decode().split("\n")
    rows = [(row["question"], row["answer"]) for row in map(json.loads, filter(None, lines))]
    return [Example(key_of(text), text, solution, solution.rpartition("#### ")[2].strip()) for text, solution in rows]


def _download(progress: Callable[[str], None]) -> dict[str, bytes]:
    progress(f"gsm8k: downloading {HUB_ID} (about 5 MB, once)")
    try:
        import datasets

        sets: Any = datasets.load_dataset(HUB_ID, "main", revision=HUB_REVISION)
    except Exception as error:  # the hub's client raises the errors of many libraries
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"cannot load {HUB_ID} from the hub: {reason}. {_FIX}") from None
    contents = {}
    for name in SHA256:
        rows = sets[name.removesuffix(".jsonl")]
        # The exact bytes of the official files: one sha256 checks a download and a folder.
        lines = [json.dumps({"question": row["question"], "answer": row["answer"]}) + "\n" for row in rows]
        contents[name] = _verified("".join(lines).encode(), name, f"{HUB_ID} {name} from the hub")
    return contents
