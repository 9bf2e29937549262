"""GSM8K: the sets never overlap, only the official bytes are accepted, and every failure is one line with its fix."""

import hashlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
from nightshift_gsm8k import data
from nightshift_gsm8k.data import load, messages, prepare

FIXTURE = Path(__file__).parents[1] / "fixtures" / "gsm8k"
OFFICIAL = os.environ.get(data.ENV_VAR, "")
needs_official = pytest.mark.skipif(not OFFICIAL, reason="NIGHTSHIFT_GSM8K names no folder with the official files")
SPLITS = get_args(data.Split)
Trust = Callable[[Path], Path]


@pytest.fixture
def trust(monkeypatch: pytest.MonkeyPatch) -> Trust:
    """Takes a folder as it is for the official data, in its place."""

    def trusted(folder: Path) -> Path:
        digests = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in data.SHA256}
        monkeypatch.setattr(data, "SHA256", digests)
        monkeypatch.setenv(data.ENV_VAR, str(folder))
        return folder

    return trusted


@pytest.fixture
def trusted(trust: Trust) -> Path:
    return trust(FIXTURE)


@pytest.fixture
def cache(trusted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the data belongs of a user who named no folder."""
    monkeypatch.delenv(data.ENV_VAR)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / ".cache" / "nightshift" / "gsm8k"


def questions(split: data.Split) -> list[str]:
    return [example.question for example in load(split)]


def write(folder: Path, name: str, rows: list[tuple[str, str]]) -> None:
    lines = [json.dumps({"question": question, "answer": answer}) + "\n" for question, answer in rows]
    (folder / name).write_text("".join(lines))


def test_the_sets_share_no_problem_and_together_hold_all(trusted: Path) -> None:
    sets = [set(questions(split)) for split in SPLITS]
    assert [len(one) for one in sets] == [10, 2, 4]
    assert len(set.union(*sets)) == 16


def test_a_held_out_question_is_never_trained_on_however_it_is_spaced(trust: Trust, tmp_path: Path) -> None:
    rows = [(f"What is {number} plus 0?", f"#### {number}") for number in range(60)]
    write(tmp_path, "train.jsonl", [*rows, ("WHAT is 70  plus 0? ", "#### 70")])
    write(tmp_path, "test.jsonl", [("What is 70 plus 0?", "#### 70")])
    trust(tmp_path)
    assert len({example.key for example in load("validation")}) == 10
    chosen = questions("validation")[0]
    write(tmp_path, "train.jsonl", [*rows, ("WHAT is 70  plus 0? ", "#### 70"), (f" {chosen.upper()}", "#### 0")])
    trust(tmp_path)
    keys = [{example.key for example in load(split)} for split in SPLITS]
    assert not keys[0] & keys[1]
    assert not keys[0] & keys[2]
    assert not any("70" in question for question in questions("train"))


def test_the_seed_orders_train_only(trusted: Path) -> None:
    orders = [[example.key for example in load("train", seed=seed)] for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == sorted(orders[2])
    for split in ("validation", "test"):
        first, second = (load(split, seed=seed) for seed in (0, 1))
        assert first == second


def test_a_smaller_size_is_a_prefix_and_a_larger_one_is_refused(trusted: Path) -> None:
    assert load("train", 4, seed=3) == load("train", seed=3)[:4]
    for size in (0, -1, 11):
        with pytest.raises(ValueError, match=rf"size = {size} is not available in train. Use 1 to 10"):
            load("train", size)


def test_the_steps_of_a_worked_solution_are_counted(trusted: Path) -> None:
    told = {e.question[:11]: data.slices(e) for e in [*data.load("train"), *data.load("validation")]}
    assert (told["Rosa plants"], told["A ferry car"]) == ({"steps": "2"}, {"steps": "1"})


def test_the_chat_asks_the_question_with_the_instruction_and_gives_nothing_away(trusted: Path) -> None:
    example = load("test", 1)[0]
    assert messages(example) == [{"role": "user", "content": f"{example.question}\n\n{data.INSTRUCTION}"}]
    assert example.solution not in messages(example)[0]["content"]


def test_other_bytes_are_refused_in_one_line_that_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(data.ENV_VAR, str(FIXTURE))
    with pytest.raises(ValueError, match=f"{FIXTURE / 'test.jsonl'} is not the official test.jsonl") as refused:
        load("test")
    assert "uv run prepare.py --gsm8k DIR" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_missing_file_is_named_with_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(data.ENV_VAR, str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"nowhere/test.jsonl cannot be read: No such file.*uv run prepare.py --gsm8k"):
        load("train")


def test_prepare_copies_a_folder_and_repairs_a_damaged_one(cache: Path) -> None:
    prepare(FIXTURE)
    assert len(load("train")) == 10
    (cache / "test.jsonl").write_text("damaged")
    prepare(FIXTURE)
    assert sorted(path.name for path in cache.iterdir()) == ["test.jsonl", "train.jsonl"]
    assert len(load("test")) == 4


def test_prepare_refuses_a_source_of_other_data_and_writes_nothing(cache: Path, tmp_path: Path) -> None:
    for name in data.SHA256:
        (tmp_path / name).write_text("other")
    with pytest.raises(ValueError, match=r"is not the official train.jsonl"):
        prepare(tmp_path)
    assert not cache.exists()


def test_prepare_never_writes_into_a_folder_that_the_environment_names(trusted, tmp_path, monkeypatch):
    (tmp_path / "train.jsonl").write_text("mine")
    monkeypatch.setenv(data.ENV_VAR, str(tmp_path))
    with pytest.raises(ValueError, match=r"is not the official train.jsonl"):
        prepare()
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


def test_rows_from_the_hub_give_the_bytes_of_the_official_files(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(name: str, config: str, revision: str) -> dict[str, list[dict[str, str]]]:
        assert (name, config, revision) == ("openai/gsm8k", "main", data.HUB_REVISION)
        return {
            split: [json.loads(line) for line in (FIXTURE / f"{split}.jsonl").read_text().splitlines()]
            for split in ("train", "test")
        }

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    notes: list[str] = []
    prepare(progress=notes.append)
    for name in data.SHA256:
        assert (cache / name).read_bytes() == (FIXTURE / name).read_bytes()
    assert len(notes) == 2
    monkeypatch.delitem(sys.modules, "datasets")
    prepare(progress=notes.append)  # nothing is missing: nothing is loaded
    assert len(notes) == 2


def test_a_hub_that_cannot_be_reached_is_one_line_that_names_the_other_way(cache, monkeypatch):
    def load_dataset(*args: object, **kwargs: object) -> None:
        raise ConnectionError("Couldn't reach\nthe hub")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(ValueError, match="cannot load openai/gsm8k from the hub: Couldn't reach the hub") as failed:
        prepare()
    assert "--gsm8k" in str(failed.value)
    assert "\n" not in str(failed.value)


@needs_official
def test_the_official_sets_have_their_sizes_and_share_no_problem() -> None:
    sets = {split: load(split) for split in SPLITS}
    assert [len(sets[split]) for split in ("train", "validation", "test")] == [6154, 1319, 1319]
    assert len({example.key for examples in sets.values() for example in examples}) == 8792
    # Fixed for ever: another selection would be another benchmark.
    chosen = "\n".join(example.key for example in sets["validation"])
    assert hashlib.sha256(chosen.encode()).hexdigest()[:16] == "3a501b870fa59d21"
