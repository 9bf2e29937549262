"""train.toml as text: rewritten with the values asked for, compared, read from a plain file, and its lines."""

import json
import re
import tomllib
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nightshift.config.allowlist import ANY, FORMER, KEYS, LOCKS, Key, is_accepted
from nightshift.config.train_toml import ABSENT, Config, changes_of, diff, line_numbers, load, parse, set_values
from nightshift.errors import ConfigError, ExitCode
from tests.prime_rl_plans import open_configs
from tests.train_tomls import FUZZ, SHIPPED, SMALL, assert_clean_lines


def test_puts_a_new_key_into_its_table_above_the_next_comment() -> None:
    source = SMALL + b"\n# about the schedule\n[trainer.scheduler]\ntype = 'constant'\n"
    changed = set_values(source, {"trainer.optim.weight_decay": 0.1, "max_steps": 40}).decode()
    assert "# peak\n\nweight_decay = 0.1\n\n# about the schedule\n[trainer.scheduler]" in changed
    assert changed.startswith("seq_len = 512\n\nmax_steps = 40\n\n[orchestrator]")


@pytest.mark.parametrize(
    "added",
    [{"max_steps": 2}, {"trainer.optim.betas2": 0.5}, {"trainer.loss.adv_tau": 0.5}, {"trainer.model.lora": {}}],
)
@pytest.mark.parametrize("above", ["", "# about the schedule\n", "\n\n"])
def test_removing_an_added_key_restores_the_bytes(added: dict[str, Any], above: str) -> None:
    source = SHIPPED.replace(b"[trainer.scheduler]", f"{above}[trainer.scheduler]".encode()) + above.encode()
    changed = set_values(source, added)
    assert changed != source
    assert set_values(changed, dict.fromkeys(added, ABSENT)) == source
    assert set_values(source, dict.fromkeys(added, ABSENT)) == source


@pytest.mark.parametrize(
    "source",
    [
        b"orchestrator = {group_size = 4, batch_size = 8} # c\ntrainer.optim.lr = 1e-6 # d\n",
        b"[orchestrator]\ngroup_size = 4\nbatch_size = 8\n[trainer]\noptim.lr = 1e-6\nmodel = {lora = {rank = 4}}\n",
        b"trainer.optim.lr = 1e-6\n[orchestrator]\ngroup_size = 4\n[trainer.model.lora]\n[orchestrator.algo]",
    ],
)
def test_copes_with_inline_and_dotted_tables(source: bytes) -> None:
    change = {
        "trainer.optim.weight_decay": 0.1,
        "orchestrator.max_off_policy_steps": 3,
        "trainer.model.lora.alpha": 8.0,
    }
    before, after = parse(source), parse(set_values(source, change))
    assert after.values == {**before.values, "trainer.model.lora": {}, **change}


def test_refuses_what_a_person_could_not_write() -> None:
    for change in ({"trainer.optim.lr": -1.0}, {"trainer.optim.lr": 'x" # "'}, {"model.name": "x"}):
        with pytest.raises(ConfigError):
            set_values(SMALL, change)


def test_keeps_comments_and_order_and_does_nothing_twice() -> None:
    before, num_checked = parse(SHIPPED), 0
    for config in open_configs().values():
        change = {path: value for path, value in config.values.items() if path not in before.values}
        try:
            after = parse(set_values(SHIPPED, change))
        except ConfigError:  # a key of a variant that the shipped file does not select
            continue
        assert comments(after.source) == comments(SHIPPED)
        assert [path for path in after.values if path in before.values] == list(before.values)
        assert after.values == {**before.values, **change}
        assert set_values(after.source, change) == after.source
        num_checked += 1
    assert num_checked > 20


def comments(source: bytes) -> list[str]:
    return re.findall(r"#.*", source.decode())


def lines(old: Config, new: Config) -> list[str]:
    return [change.line for change in diff(old, new)]


def test_diff_is_written_as_a_person_would() -> None:
    old = parse(SMALL + b"max_norm = 0.5\nweight_decay = 0.01\n")
    new = parse(
        SMALL.replace(b"3e-6", b"0.000005") + b"betas1 = 0.8\n[trainer.model]\nac = 'None'\nac_offloading = 'None'\n"
        b"[trainer.model.lora]\nrank = 8\n[orchestrator.train.source.curriculum.gates.zero]\n"
    )
    assert lines(old, new) == [
        "trainer.optim.lr 3e-6 -> 5e-6",
        "+orchestrator.train.source.curriculum.gates.zero on",
        "+trainer.optim.betas1 0.8 (default 0.9)",
        "+trainer.model.ac unset (default by preset)",
        "+trainer.model.ac_offloading unset (default by preset)",
        "+trainer.model.lora on (default unset)",
        "+trainer.model.lora.rank 8 (default 16)",
        "-trainer.optim.max_norm 0.5 (default 1.0)",
    ]
    assert lines(new, old)[0] == "trainer.optim.lr 5e-6 -> 3e-6"
    one, other = parse(SMALL + b"type = 'adamw'\n"), parse(SMALL + b"type = 'muon'\n")
    assert "trainer.optim.type adamw -> muon" in lines(one, other)


def test_every_difference_is_read_again_as_it_was_written() -> None:
    num_checked = 0
    for old, new in pairwise([parse(SMALL), *open_configs().values()]):
        changes = diff(old, new)
        assert changes_of([*(change.line for change in changes), "junk"]) == changes
        assert {change.key for change in diff(new, old)} == {change.key for change in changes}
        num_checked += len(changes)
    assert num_checked > 100


def test_load_keeps_the_bytes_of_a_plain_file_and_refuses_another(tmp_path: Path) -> None:
    path = tmp_path / "train.toml"
    (tmp_path / "other.toml").write_bytes(SMALL.replace(b"\n", b"\r\n"))
    loaded = load(tmp_path / "other.toml")
    assert (loaded.source.count(b"\r\n"), loaded.hash) == (SMALL.count(b"\n"), parse(SMALL).hash)
    for cause in ("No such file", "it is a symbolic link"):
        with pytest.raises(ConfigError, match=f"train.toml cannot be read: {cause}") as caught:
            load(path)
        assert caught.value.exit_code == ExitCode.USAGE
        path.unlink(missing_ok=True)
        path.symlink_to(tmp_path / "other.toml")


DOCUMENT = r'''
a = 1  # comment ' " """
"y.z" = "\"#"
b.c = """

""\"""
d = 1"""
["x"]
e = [1,
# ]
2, ["]", '[', "\"]"]]
f = {q = '"', r = [
1], s."t u" = 3}
[[l]]
g = """"x""""  # "[
[[l]]
h = '#'
[x.i.j]
'''
LINES = {
    ("a",): 2, ("y.z",): 3, ("b",): 4, ("b", "c"): 4, ("x",): 8, ("x", "e"): 9, ("x", "f"): 12, ("x", "f", "q"): 12,
    ("x", "f", "r"): 12, ("x", "f", "s"): 12, ("x", "f", "s", "t u"): 12, ("l",): 14, ("l", "g"): 15,
    ("l", "h"): 17, ("x", "i"): 18, ("x", "i", "j"): 18,
}  # fmt: skip


def test_the_line_of_a_key_is_that_of_the_statement_that_has_it_first() -> None:
    for text in (DOCUMENT, DOCUMENT.replace("\n", "\r\n")):
        assert line_numbers(text) == LINES


def nodes(tree: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    items: dict[str, Any] = tree if isinstance(tree, dict) else {}
    below = [{(*path, name): value, **nodes(value, (*path, name))} for name, value in items.items()]
    return {key: value for part in below for key, value in part.items()}


NAMES = st.from_regex(r"\A[A-Za-z][A-Za-z0-9_-]{0,8}\Z")
ANY_VALUE = st.sampled_from([
    "true", "0", "-1", "2", "64", "1_000", "0x10", "1e-6", "0.5", "nan", "inf", "1e400", "9223372036854775808", "''",
    "'None'", "'adamw'", "[]", "[1]", "['q_proj']", "{}", "{a=1}", "[[1]]", "[{}]", "2026-01-01", "12:30:00",
]) | st.text(st.characters(exclude_categories=("Cs",)), max_size=20).map(json.dumps)  # fmt: skip
LOCKED = sorted({path for lock in LOCKS for path in lock.paths} | {*FORMER})
OPEN = [(re.compile(re.escape(key.path).replace(r"\*", r"[A-Za-z][A-Za-z0-9_-]{0,39}")), key) for key in KEYS]


def written_values(key: Key) -> list[str]:
    """Values at the ends of a key's range or among its choices, and a few of other types."""
    ends = (key.minimum, key.maximum, key.above, key.below, key.default, *key.choices, list(key.choices), "None", True)
    return [json.dumps(value) for value in (*ends, {}) if value is not None]


@st.composite
def mutants(draw: st.DrawFn) -> bytes:
    """A train.toml with an open, a misspelled or a locked key, in one of the spellings of TOML."""
    key = draw(st.sampled_from(KEYS))
    path = draw(st.sampled_from((key.path, key.path, key.path, f"{key.path}s", draw(st.sampled_from(LOCKED)))))
    value = draw(ANY_VALUE | st.sampled_from(written_values(key)))
    spell = draw(st.sampled_from((json.dumps, lambda part: part)))
    *tables, leaf = (spell(draw(NAMES) if part == ANY else part) for part in path.split("."))
    head, line = ".".join(tables), f"{leaf} = {value}\n"
    spellings = (f"{head}.{line}", f"[{head}]\n{line}", f"[[{head}]]\n{line}", f"{head} = {{{line[:-1]}}}\n")
    text = "orchestrator.group_size = 4\norchestrator.batch_size = 256\n"
    return (text + (draw(st.sampled_from(spellings)) if head else line)).encode()


@settings(FUZZ, max_examples=400)
@given(mutants() | st.binary(max_size=200))
def test_a_hostile_file_is_refused_in_clean_lines_or_has_open_keys_with_allowed_values_only(source: bytes) -> None:
    try:
        config = parse(source)
    except ConfigError as error:
        assert_clean_lines(str(error))
        return
    found = nodes(tomllib.loads(source.decode()))
    for path, value in found.items():
        keys = [key for pattern, key in OPEN if pattern.fullmatch(".".join(path))]
        assert keys or isinstance(value, dict), path  # a table around keys
        assert all(is_accepted(key, {} if isinstance(value, dict) else value) for key in keys), path
        assert not any("." in part for part in path)
    assert set(map(".".join, found)).isdisjoint(LOCKED)
    assert parse(set_values(source, {})).hash == config.hash
