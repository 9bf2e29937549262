"""GSM8K: the sets never overlap, only the official bytes are accepted, and every failure is one line with its fix."""

import hashlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args
from unittest.mock import Mock

import pytest
from nightshift_gsm8k import data
from nightshift_gsm8k.data import load, prepare

from tests.datasets import GSM8K, small_gsm8k

OFFICIAL = os.environ.get(data.ENV_VAR, "")
needs_official = pytest.mark.skipif(not OFFICIAL, reason="NIGHTSHIFT_GSM8K names no folder with the official files")
SPLITS = get_args(data.Split)


@pytest.fixture
def trusted() -> Iterator[Path]:
    with small_gsm8k() as folder:
        yield folder


@pytest.fixture
def cache(trusted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return where the data belongs of a user who named no folder."""
    monkeypatch.delenv(data.ENV_VAR)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / ".cache" / "nightshift" / "gsm8k"


def write(path: Path, answers: dict[str, str]) -> None:
    path.write_text("\n".join(json.dumps({"question": ask, "answer": answer}) for ask, answer in answers.items()))


def test_a_held_out_question_is_never_trained_on_however_it_is_spaced(tmp_path: Path) -> None:
    answers = {f"What is {number} plus 0?": f"#### {number}" for number in range(60)}
    answers["WHAT is 70  plus 0? "] = "#### 70"
    write(tmp_path / "train.jsonl", answers)
    write(tmp_path / "test.jsonl", {"What is 70 plus 0?": "#### 70"})
    with small_gsm8k(tmp_path):
        chosen = load("validation")[0].question
    write(tmp_path / "train.jsonl", answers | {f" {chosen.upper()}": "#### 0"})
    with small_gsm8k(tmp_path):
        keys = {split: {example.key for example in load(split)} for split in SPLITS}
        assert len(keys["validation"]) == 9  # of 10 rows, two of which ask the same
        assert not keys["train"] & (keys["validation"] | keys["test"])


def test_the_seed_orders_train_only_the_sets_together_hold_all_and_steps_are_counted(trusted: Path) -> None:
    orders = [[example.key for example in load("train", seed=seed)] for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == sorted(orders[2])
    assert load("train", 4, seed=3) == load("train", seed=3)[:4]
    for split in ("validation", "test"):
        assert load(split, seed=0) == load(split, seed=1)
    assert [len(load(split)) for split in SPLITS] == [10, 2, 4]
    steps = {e.question[:11]: data.slices(e) for e in [*load("train"), *load("validation")]}
    assert (steps["Rosa plants"], steps["A ferry car"]) == ({"steps": "2"}, {"steps": "1"})


@pytest.mark.parametrize(
    ("folder", "cause"),
    [
        (GSM8K, rf"{GSM8K}/test.jsonl is not the official test.jsonl"),
        (GSM8K / "nowhere", "nowhere/test.jsonl cannot be read: No such file"),
    ],
)
def test_other_or_missing_bytes_are_refused_in_one_line_that_names_the_command(folder, cause, monkeypatch):
    monkeypatch.setenv(data.ENV_VAR, str(folder))
    with pytest.raises(ValueError, match=f"{cause}.*uv run prepare.py --gsm8k DIR") as refused:
        load("test")
    assert "\n" not in str(refused.value)


def test_prepare_copies_and_repairs_and_writes_nothing_else_and_into_no_folder_that_the_environment_names(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (mine := tmp_path / "mine").mkdir()
    (mine / "train.jsonl").write_text("mine")
    with pytest.raises(ValueError, match=r"is not the official train.jsonl"):
        prepare(mine)
    assert not cache.exists()
    prepare(GSM8K)
    assert len(load("train")) == 10
    (cache / "test.jsonl").write_text("damaged")
    prepare(GSM8K)
    assert sorted(path.name for path in cache.iterdir()) == ["test.jsonl", "train.jsonl"]
    assert len(load("test")) == 4
    monkeypatch.setenv(data.ENV_VAR, str(mine))
    with pytest.raises(ValueError, match=r"is not the official train.jsonl"):
        prepare()
    assert [path.read_text() for path in mine.iterdir()] == ["mine"]


def test_rows_from_the_hub_give_the_bytes_of_the_official_files(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(name: str, config: str, revision: str) -> dict[str, list[Any]]:
        assert (name, config, revision) == ("openai/gsm8k", "main", data.HUB_REVISION)
        lines = {split: (GSM8K / f"{split}.jsonl").read_text().splitlines() for split in ("train", "test")}
        return {split: [json.loads(line) for line in of_split] for split, of_split in lines.items()}

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    notes: list[str] = []
    prepare(progress=notes.append)
    for name in data.SHA256:
        assert (cache / name).read_bytes() == (GSM8K / name).read_bytes()
    refuse = Mock(side_effect=ConnectionError("Couldn't reach\nthe hub"))
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=refuse))
    prepare(progress=notes.append)  # nothing is missing: nothing is loaded
    assert len(notes) == 2
    (cache / "train.jsonl").unlink()
    with pytest.raises(ValueError, match=r"cannot load openai/gsm8k from the hub: Couldn't reach the hub.*--gsm8k"):
        prepare()


@pytest.mark.slow
@needs_official
def test_the_official_sets_have_their_sizes_and_share_no_problem() -> None:
    sets = {split: load(split) for split in SPLITS}
    assert [len(sets[split]) for split in ("train", "validation", "test")] == [6154, 1319, 1319]
    assert len({example.key for examples in sets.values() for example in examples}) == 8792
    # Fixed for ever: another selection would be another benchmark.
    chosen = "\n".join(example.key for example in sets["validation"])
    assert hashlib.sha256(chosen.encode()).hexdigest()[:16] == "3a501b870fa59d21"
