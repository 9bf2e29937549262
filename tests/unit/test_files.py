"""The door for files and texts of others: a regular file, of limited size and nesting; nothing is written through."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import convert, inspect, structs

from nightshift.campaign.metrics import Sample, Step
from nightshift.campaign.records import Comparison, Job, Progress, Proposal, Record
from nightshift.engines.doctor import Doctor
from nightshift.errors import UsageError
from nightshift.files import open_regular, parse_json, parse_toml, read_file, read_json, read_rows
from nightshift.night.state import NightState
from nightshift.text import clean


@pytest.mark.parametrize("plant", [Path.symlink_to, lambda path, outside: os.mkfifo(path)], ids=["link", "fifo"])
@pytest.mark.parametrize("mode", ["rb", "ab"])
def test_only_a_regular_file_is_opened(tmp_path: Path, plant: Callable[[Path, Path], None], mode: str) -> None:
    path, outside = tmp_path / "worker.log", tmp_path / "outside"
    outside.write_bytes(b"precious")
    plant(path, outside)
    with pytest.raises(OSError, match=r"worker\.log"):
        open_regular(path, mode)
    assert outside.read_bytes() == b"precious"
    for text in (b"one", b"two"):
        with open_regular(tmp_path / "log", "ab") as file:
            file.write(text)
    assert read_file(tmp_path / "log") == b"onetwo"


def test_a_file_above_the_limit_is_not_read(tmp_path: Path) -> None:
    (path := tmp_path / "huge.json").touch()
    os.truncate(path, 1 << 40)
    with pytest.raises(OSError, match="it has 1,099,511,627,776 bytes"):
        read_file(path)
    with pytest.raises(UsageError, match=r"huge\.json is damaged: it has 1,099,511,627,776 bytes\. Delete it"):
        read_json(path, dict, "Delete it.")
    assert read_rows(path, dict) == []


def test_text_that_is_nested_too_deeply_is_refused_as_any_other_that_cannot_be_read(tmp_path: Path) -> None:
    (path := tmp_path / "rows.jsonl").write_bytes(b"{}\n" + b"[" * 200_000 + b"\n{}\n")
    assert read_rows(path, dict) == [{}, {}]
    for parse in (lambda: parse_json(b"[" * 200_000, object), lambda: parse_toml(b"a = " + b"[" * 200_000)):
        with pytest.raises(ValueError, match="it is nested too deeply"):
            parse()
    path.write_bytes(b'{"a":' * 200_000)
    with pytest.raises(UsageError, match=r"rows\.jsonl is damaged: it is nested too deeply\. Delete it"):
        read_json(path, dict, "Delete it.")


TEXTS = {
    "a\x1b[31mb\x1b[0m \x1b]8;;http://x\x1b\\link\x1b]8;;\x07": "ab link",
    "one\ntwo\r\nthree\tfour\u2028five\x85six": "one two three four five six",
    "right\u202eto\u2066left\u200bzero\ufeff\U000e0041": "righttoleftzero",
    "\udcff\ud800 lone": "lone",
    "\x9b2J\x00\x07\x7f": "2J",
    "λ 日本 é ✓": "λ 日本 é ✓",
    " \n ": "",
}


def test_a_foreign_text_is_one_plain_line() -> None:
    assert {text: clean(text) for text in TEXTS} == TEXTS


@given(st.text(alphabet=st.characters(), max_size=300) | st.text(alphabet="\x1b[]m0;\\\x07 \nx\ud800\u202e"))
def test_whatever_it_is(text: str) -> None:
    cleaned = clean(text, 50)
    cleaned.encode()
    assert cleaned.isprintable()
    assert len(cleaned) <= 50
    assert clean(cleaned, 50) == cleaned


def test_a_proposal_and_an_error_hold_clean_text_only() -> None:
    hostile = {
        "description": "a\x1b[2J\nb" + "x" * 20_000,
        "prediction": "\ud7ff\u202e+1 pp\n",
        "notes": ["n\u202e1", "\n"],
    }
    said = Proposal(**hostile | {"notes": tuple(hostile["notes"])})
    for proposal in (said, convert(hostile, Proposal), structs.replace(Proposal(), **hostile)):
        assert (proposal.description[:4], len(proposal.description)) == ("a bx", 1000)
        assert (proposal.prediction, proposal.notes) == ("+1 pp", ("n1", ""))
    assert Proposal(prediction="\udcff+1 pp").prediction == "+1 pp"
    assert Proposal().prediction is None
    assert str(UsageError("a\x1b[31m\udcff\nb", "Fix\u202e it.")) == "a b. Fix it."


def test_a_decoded_dataclass_with_defaults_has_slots_without_which_msgspec_would_not_write_them() -> None:
    nodes: list[Any] = [*inspect.multi_type_info([Comparison, Doctor, Job, NightState, Progress, Record, Sample, Step])]
    kinds: dict[type, Any] = {}
    while nodes:
        node = nodes.pop()
        if isinstance(node, inspect.StructType | inspect.DataclassType):
            nodes += [field.type for field in node.fields if node.cls not in kinds]
            kinds[node.cls] = node
        elif isinstance(node, inspect.Type | tuple):
            nodes += node if isinstance(node, tuple) else structs.astuple(node)
    decoded = [kind for kind, node in kinds.items() if isinstance(node, inspect.DataclassType)]
    assert {"Rules", "Step", "Training", "Wait"} <= {kind.__name__ for kind in decoded}
    bare = [kind for kind in decoded if any("__slots__" not in vars(base) for base in kind.__mro__[:-1])]
    assert [kind for kind in bare if not all(field.required for field in kinds[kind].fields)] == []
