"""MATH: 12,500 competition problems in five levels (Hendrycks et al., 2021, https://arxiv.org/abs/2103.03874).

The problems come from the user's own copy: Nightshift contains none of them. Only problems of the chosen `levels` are
used. `validation` is 1,000 problems of the official train split, chosen by the hash of their text, with each level in
proportion; `train` is the rest of that split; `test` is 1,000 problems of the official test split, chosen in the same
way, without MATH-500, because models have seen those problems.
"""

import hashlib
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from nightshift_gsm8k.shared import Split, folder_of, head, key_of, shuffled

from nightshift_math.scoring import extract_answer

INSTRUCTION = "Reason step by step, and put your final answer within \\boxed{}."
# A longer problem is left out. A byte-level tokenizer makes at most as many tokens as bytes, so every prompt fits.
MAX_PROBLEM_BYTES, PROMPT_TOKENS = 1900, 2048

ENV_VAR = "NIGHTSHIFT_MATH"  # names the folder of the prepared data, if it is not the default folder
NUM_OFFICIAL = {"train": 7500, "test": 5000}
NUM_VALIDATION = 1000
LEVELS = (1, 2, 3)  # the default in [tool.nightshift]
MATH_VERIFY = "0.9.0"
# The keys of MATH-500's problems: HuggingFaceH4/MATH-500 on the hub, test.jsonl with sha256 35dc41080a36.
MATH_500 = Path(__file__).with_name("math_500.txt")

_NAME, _SUM = "math.jsonl", "math.sha256"
_FIX = "Run: uv run prepare.py --math DIR (of your copy: train/NAME/N.json and test/..., or train.jsonl and test.jsonl)"


@dataclass(frozen=True, slots=True)
class Example:
    """One problem. `split`: the official split. `level`: 1 to 5; 0 if the level is unknown."""

    key: str
    split: str
    level: int
    subject: str
    problem: str
    answer: str


def load(split: Split, size: int | None = None, seed: int = 0, levels: Sequence[int] = LEVELS) -> list[Example]:
    """Return the first `size` examples of one split; all of them for None. `seed` fixes the order of `train`.

    ValueError with the command to run: no such split, size or level, or the data is missing or was changed.
    """
    if not isinstance(levels, Sequence) or not levels or {*map(repr, levels)} - {*"12345"}:
        raise ValueError(f"levels = {levels!r} is not a list of levels. Write some of [1, 2, 3, 4, 5]")
    examples, public = _read(), {*MATH_500.read_text().split()}
    test_keys = {example.key for example in examples if example.split == "test"}
    examples = [e for e in examples if e.level in levels and len(e.problem.encode()) <= MAX_PROBLEM_BYTES]
    test = _in_shares([e for e in examples if e.split == "test" and e.key not in public])
    official = _in_shares([e for e in examples if e.split == "train" and e.key not in test_keys])
    if min(len(test), len(official) // 2) < NUM_VALIDATION:
        cause = f"levels = {list(levels)} have {len(official)} usable problems of train and {len(test)} of test"
        raise ValueError(f"{cause}, not {2 * NUM_VALIDATION} and {NUM_VALIDATION}. Add levels")
    train = shuffled(random.Random(seed), official[NUM_VALIDATION:])
    sets = {"train": train, "validation": official[:NUM_VALIDATION], "test": test[:NUM_VALIDATION]}
    return head(sets, split, size)


def messages(example: Example) -> list[dict[str, str]]:
    """Return the chat that asks the question."""
    return [{"role": "user", "content": f"{example.problem}\n\n{INSTRUCTION}"}]


def slices(example: Example) -> dict[str, str]:
    """Group problems by level and subject."""
    return {"level": str(example.level), "subject": example.subject}


def prepare(source: Path | None = None, progress: Callable[[str], None] = lambda line: None) -> None:
    """Read the user's copy in the folder `source`, and write the prepared data and its sha256. ValueError: not MATH."""
    if source is None:  # only check the prepared data
        _read()
        return
    examples = [example for split in NUM_OFFICIAL for example in _examples(source, split)]
    for split, size in NUM_OFFICIAL.items():
        if (number := sum(example.split == split for example in examples)) != size:
            raise ValueError(f"{source}: {split} has {number} problems, MATH has {size}. {_FIX}")
    examples.sort(key=lambda example: (example.split, example.key, example.answer))
    content = "".join(json.dumps(asdict(example)) + "\n" for example in examples).encode()
    folder, sha256 = folder_of("math", ENV_VAR), hashlib.sha256(content).hexdigest()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _NAME).write_bytes(content)
    (folder / _SUM).write_text(f"{sha256}  {_NAME}\n")
    progress(f"math: {folder} is ready, sha256 {sha256[:12]}")


def _read() -> list[Example]:
    version = next((distribution.version for distribution in metadata.distributions(name="math-verify")), "none")
    if version != MATH_VERIFY:
        raise ValueError(f"math needs math-verify {MATH_VERIFY}, not {version}. Run: uv sync --extra math")
    folder = folder_of("math", ENV_VAR)
    try:
        content, sha256 = (folder / _NAME).read_bytes(), (folder / _SUM).read_text().partition(" ")[0]
    except OSError as error:
        raise ValueError(f"{folder / _NAME} cannot be read: {error.strerror}. {_FIX}") from None
    if hashlib.sha256(content).hexdigest() != sha256:
        raise ValueError(f"{folder / _NAME} was changed after prepare.py wrote it: another sha256. {_FIX}")
    return [Example(**json.loads(line)) for line in content.decode().splitlines()]  # all characters are ASCII


def _in_shares(examples: Sequence[Example]) -> list[Example]:
    """Return each text once, in an order whose every prefix has the levels in proportion."""
    unique = {example.key: example for example in examples}
    levels = [sorted(key for key, example in unique.items() if example.level == level) for level in range(6)]
    places = sorted(((rank + 0.5) / len(keys), key) for keys in levels for rank, key in enumerate(keys))
    return [unique[key] for _, key in places]


def _examples(source: Path, split: str) -> Iterator[Example]:
    """Yield the problems of a split in the user's copy."""
    lines = source / f"{split}.jsonl"
    for path in [lines] if lines.is_file() else sorted((source / split).glob("*/*.json")):
        number = 1
        try:
            text = path.read_text("utf-8")
            for number, line in enumerate(text.split("\n") if path == lines else [text], 1):  # noqa: B007
                if line.strip():
                    yield _example(split, json.loads(line))
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} cannot be read: {error}. {_FIX}") from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            cause = f"{path}:{number} is not a problem of MATH: {type(error).__name__} {error}"
            raise ValueError(f"{cause}. {_FIX}") from None


def _example(split: str, row: Any) -> Example:
    """Return the example of a row. Copies on the hub have `subject` for `type`, and some have `2` for `Level 2`."""
    problem, level = row["problem"], str(row["level"]).removeprefix("Level ")
    answer = extract_answer(row["solution"].replace("\\fbox", "\\boxed")) if "box" in row["solution"] else None
    if answer is None:
        raise ValueError("the solution has no answer in \\boxed{}")
    subject = row["type"] if "type" in row else row["subject"]
    return Example(key_of(problem), split, int(level) if level in {*"12345"} else 0, str(subject), problem, answer)
