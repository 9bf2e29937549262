"""The arithmetic environment's problems: right, reproducible, and never in two splits."""

import hashlib
import re
from typing import get_args

import pytest
from nightshift_arithmetic import data
from nightshift_arithmetic.scoring import score
from nightshift_countdown import data as countdown

SPLITS = get_args(data.Split)


@pytest.fixture(scope="module")
def examples() -> dict[str, list[data.Example]]:
    return {split: data.load(split, 2000) for split in SPLITS}


def test_no_question_and_no_rewording_is_in_two_splits(examples: dict[str, list[data.Example]]) -> None:
    def skeleton(question: str) -> str:
        names, items, verbs = "|".join(data._NAMES), "|".join(data._ITEMS), data._VERBS
        question = re.sub(names, "N", re.sub(items, "I", question))
        return re.sub("|".join(verbs[-1]), "-", re.sub("|".join(verbs[+1]), "+", question))

    for text in (lambda question: question, skeleton):
        sets = {split: {text(example.question) for example in examples[split]} for split in SPLITS}
        assert not sets["train"] & sets["validation"]
        assert not sets["train"] & sets["test"]
        assert not sets["validation"] & sets["test"]
    keys = [example.key for split in SPLITS for example in examples[split]]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("seed", [0, 1])
def test_splits_stay_apart_for_any_seed(examples: dict[str, list[data.Example]], seed: int) -> None:
    held_out = {example.question for split in ("validation", "test") for example in examples[split]}
    assert not held_out & {example.question for example in data.load("train", 3000, seed + 100)}


def test_solutions_are_right_by_an_independent_reading(examples: dict[str, list[data.Example]]) -> None:
    for example in examples["validation"]:
        start, *rest = re.findall(r"(\w+) (?:(\d+)|a (\w+) of) \w+\.", example.question)
        assert start[0] == "has"
        total, lines = int(start[1]), []
        for verb, number, container in rest:
            amount = int(number) if number else data.CONTAINERS[container]
            sign = "+" if verb in data._VERBS[+1] else "-"
            result = total + amount if sign == "+" else total - amount
            assert 0 <= result < 100
            lines.append(f"<<{total}{sign}{amount}={result}>>")
            total = result
        assert 1 <= len(lines) <= 3
        assert example.solution == "\n".join([*lines, f"#### {total}"])
        assert example.answer == str(total)
        assert score(example.solution, example.answer) == 1.0
        assert score(f"#### {total + 1}", example.answer) == 0.0


# A change of these digests is a change of the task: old results are no longer comparable.
DIGESTS = {
    data: {"train": "89d4c8d6365108fc", "validation": "5c8c31c9a74a7d9a", "test": "de82a55dd190e267"},
    countdown: {"train": "765524b2e48f035e", "validation": "cacc01dc6b841081", "test": "c091e35a7a14f5ee"},
}


@pytest.mark.parametrize("generated", DIGESTS, ids=lambda module: module.__name__)
def test_the_same_problems_on_every_machine_and_python(generated):
    """Python's hashes, random in every process, have no part in them."""
    for split, digest in DIGESTS[generated].items():
        text = "\n".join(example.question for example in generated.load(split, 500))
        assert hashlib.sha256(text.encode()).hexdigest()[:16] == digest


@pytest.mark.parametrize("generated", DIGESTS, ids=lambda module: module.__name__)
def test_a_smaller_size_is_a_prefix_and_what_a_split_does_not_hold_is_refused(generated):
    examples, largest = generated.load("validation", 60), generated.MAX_SIZE["test"]
    assert generated.load("validation", 20) == examples[:20] != generated.load("validation", 20, seed=1)
    assert len({example.key for example in generated.load("test", largest)}) == largest
    for size in (0, -1, largest + 1):
        with pytest.raises(ValueError, match=f"size = {size} .* Use 1 to {largest}"):
            generated.load("test", size)
    with pytest.raises(ValueError, match="split = 'sealed' does not exist"):
        generated.load("sealed", 1)
    with pytest.raises(TypeError):
        generated.load(size=1)
