"""train.toml as bytes: only a plain file is read, and every key has the line on which it begins."""

import os
import string
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nightshift.config.toml_text import line_of
from nightshift.config.train_toml import load, parse
from nightshift.errors import ConfigError, ExitCode
from tests.train_tomls import FUZZ, SMALL, assert_clean_lines


def test_load_refuses_what_is_not_a_plain_file(tmp_path: Path) -> None:
    def refused(path: Path) -> str:
        with pytest.raises(ConfigError) as caught:
            load(path)
        assert caught.value.exit_code == ExitCode.USAGE
        assert_clean_lines(str(caught.value))
        return str(caught.value)

    path = tmp_path / "train.toml"
    assert "cannot be read: No such file" in refused(path)
    assert "cannot be read: it is no regular file" in refused(tmp_path)
    (tmp_path / "other.toml").write_bytes(SMALL)
    path.symlink_to(tmp_path / "other.toml")
    assert "it is a symbolic link" in refused(path)
    path.unlink()
    os.mkfifo(path)
    assert "no regular file" in refused(path)  # and does not wait for a writer
    path.unlink()
    with path.open("wb") as file:
        file.truncate(10_000_000)
    assert "has 10,000,000 bytes" in refused(path)


def test_load_keeps_the_bytes_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "train.toml"
    path.write_bytes(SMALL.replace(b"\n", b"\r\n"))
    loaded = load(path)
    assert loaded.source == path.read_bytes()
    assert loaded.hash == parse(SMALL).hash


BARE = st.text(string.ascii_lowercase, min_size=1, max_size=2)
VALUES = st.sampled_from(
    [
        "1", "'#'", '"\\""', '""', "{q = 1}", "{q = 1, r = [\n1]}", "1 # \"\"\" '''",
        '"""\n\n"""', "'''\n[x]\n'''", '"""x""""', '""""x"""""', '"""\\"""\nb = 1"""',
        "[1,\n# ]\n2]", "[[1],\n[2]]", '["]", \'[\', "\\"]"]',
    ]
)  # fmt: skip
STATEMENTS = st.one_of(
    st.tuples(st.lists(BARE, min_size=1, max_size=3), VALUES).map(lambda pair: f"{'.'.join(pair[0])} = {pair[1]}"),
    st.lists(BARE, min_size=1, max_size=2).map(lambda names: f"[{'.'.join(names)}]"),
    BARE.map(lambda name: f"[[{name}]]"),
    st.sampled_from(["", "# comment ' \"", "  ", '"y.z" = 2']),
)


@FUZZ
@given(st.lists(STATEMENTS, max_size=12), st.sampled_from(["\n", "\r\n"]))
def test_line_of_equals_the_first_prefix_that_has_the_key(pieces: list[str], end: str) -> None:
    text = "".join(f"{piece}{end}" for piece in pieces)
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return
    expected: dict[tuple[str, ...], int] = {}
    line = 1
    for index, piece in enumerate(pieces):  # slow but plain: statements are known here
        for path in paths(tomllib.loads("".join(f"{part}\n" for part in pieces[: index + 1]))):
            expected.setdefault(path, line)
        line += piece.count("\n") + 1
    assert {path: line_of(text, path) for path in paths(document)} == expected
    assert line_of(text, ("absent",)) is None


def paths(node: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    if not isinstance(node, dict):
        return []
    return [found for name, value in node.items() for found in [(*path, name), *paths(value, (*path, name))]]
