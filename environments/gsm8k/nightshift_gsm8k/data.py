"""GSM8K: 8,792 grade-school word problems (Cobbe et al., 2021, https://arxiv.org/abs/2110.14168).

The three sets are disjoint: `validation` is 1,319 problems of the official train file, chosen by the hash of their
question; `train` is the rest of that file (6,154); `test` is the official test file (1,319). The two official files are
in one prepared folder. Every load checks their sha256.
"""

import hashlib
import json
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nightshift_gsm8k.shared import Split, folder_of, head, key_of, shuffled

INSTRUCTION = "Reason step by step, then end with a line `#### <number>` that gives only the final number."
PROMPT_TOKENS = 448  # the longest question has 985 characters; instruction and chat template add about 60 tokens

ENV_VAR = "NIGHTSHIFT_GSM8K"  # names the folder of the two files, if it is not the default folder
SHA256 = {
    "train.jsonl": "17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465",
    "test.jsonl": "3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14",
}
HUB_ID, HUB_REVISION = "openai/gsm8k", "e53f048856ff4f594e959d75785d2c2d37b678ee"

# The size of the test split. Other data gives the same share of its train file.
NUM_VALIDATION, NUM_OFFICIAL_TRAIN = 1319, 7473

_FIX = "Run: uv run prepare.py (downloads 5 MB), or uv run prepare.py --gsm8k DIR (with train.jsonl and test.jsonl)"


@dataclass(frozen=True, slots=True)
class Example:
    """One problem with its worked solution. `answer`: as the solution writes it, e.g. `1,234`."""

    key: str
    question: str
    solution: str
    answer: str


def load(split: Split, size: int | None = None, seed: int = 0) -> list[Example]:
    """Return the first `size` examples of a split; all of them for None. `seed` fixes the order of `train`.

    ValueError with the command to run: no such split or size, or the files are missing or not the official ones.
    """
    test, official = _examples("test.jsonl"), sorted(_examples("train.jsonl"), key=lambda example: example.key)
    validation = official[: len(official) * NUM_VALIDATION // NUM_OFFICIAL_TRAIN]
    held_out = {example.key for example in [*validation, *test]}
    train = shuffled(random.Random(seed), (example for example in official if example.key not in held_out))
    return head({"train": train, "validation": validation, "test": test}, split, size)


def messages(example: Example) -> list[dict[str, str]]:
    """Return the chat that asks the question."""
    return [{"role": "user", "content": f"{example.question}\n\n{INSTRUCTION}"}]


def slices(example: Example) -> dict[str, str]:
    """Group problems by the number of steps of their worked solution."""
    steps = example.solution.strip().count("\n")
    return {"steps": str(steps) if steps < 6 else "6 or more"}


def prepare(source: Path | None = None, progress: Callable[[str], None] = lambda line: None) -> None:
    """Copy the two official files into the prepared folder, from the folder `source` or from the Hugging Face hub.

    Without `source`, files that are official already stay. A folder that NIGHTSHIFT_GSM8K names is only checked.
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
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    progress(f"gsm8k: {folder} is ready")


def _read(folder: Path, name: str) -> bytes:
    try:
        return _verified((folder / name).read_bytes(), name, str(folder / name))
    except OSError as error:
        raise ValueError(f"{folder / name} cannot be read: {error.strerror}. {_FIX}") from None


def _verified(content: bytes, name: str, origin: str) -> bytes:
    if (sha256 := hashlib.sha256(content).hexdigest()) != SHA256[name]:
        raise ValueError(f"{origin} is not the official {name}: sha256 {sha256[:12]}, not {SHA256[name][:12]}. {_FIX}")
    return content


def _examples(name: str) -> list[Example]:
    lines = _read(folder_of("gsm8k", ENV_VAR), name).splitlines()
    rows = [(row["question"], row["answer"]) for row in map(json.loads, lines)]
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
        rows = [{"question": row["question"], "answer": row["answer"]} for row in sets[name.removesuffix(".jsonl")]]
        content = "".join(json.dumps(row) + "\n" for row in rows).encode()  # the exact bytes of the official files
        contents[name] = _verified(content, name, f"{HUB_ID} {name} from the hub")
    return contents
