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

from nightshift.config.allowlist import ANY, FORMER, KEYS, LOCKS, Key, Kind, default
from nightshift.config.train_toml import ABSENT, Config, changes_of, diff, line_of, load, parse, set_values
from nightshift.errors import ConfigError, ExitCode
from tests.prime_rl_plans import open_configs
from tests.train_tomls import FUZZ, SHIPPED, SMALL, assert_clean_lines

LENGTH = "orchestrator.train.sampling.max_completion_tokens"


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
    ("change", "and_so"),
    [
        ({"trainer.model.lora.rank": 8}, {"trainer.model.lora": {}}),
        ({"trainer.model.ac.freq": 2}, {"trainer.model.ac": {}}),
        ({"trainer.model.ac.freq": ABSENT}, {}),  # of a table that is off, which stays so
        ({"trainer.optim.weight_decay": ABSENT}, {}),
        ({LENGTH: None}, {LENGTH: ABSENT}),
        ({"trainer.model.compile": None}, {}),
        ({"trainer.optim.nesterov": False, "trainer.optim.type": "sgd"}, {}),
        ({"trainer.model.lora.target_modules": ("q_proj", "v_proj")}, {"trainer.model.lora": {}}),
    ],
)
def test_switches_and_removes(change: dict[str, Any], and_so: dict[str, Any]) -> None:
    wanted = {**parse(SHIPPED).values, **change, **and_so}
    wanted = {path: value for path, value in wanted.items() if value is not ABSENT}
    assert parse(set_values(SHIPPED, change)).values == wanted


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
    for change in ({"trainer.optim.lr": -1.0}, {"orchestrator.group_size": 7}, {"trainer.optim.lr": 'x" # "'}):
        with pytest.raises(ConfigError):
            set_values(SMALL, change)
    with pytest.raises(KeyError):
        set_values(SMALL, {"model.name": None})
    with pytest.raises(ConfigError, match="locked"):
        set_values(SMALL, {"model.name": "x"})


PROPOSALS = st.fixed_dictionaries(
    {},
    optional={
        "trainer.optim.lr": st.floats(1e-9, 1e-2),
        "trainer.optim.weight_decay": st.floats(0, 1),
        "trainer.optim.max_norm": st.one_of(st.none(), st.floats(0.01, 100)),
        "orchestrator.batch_size": st.integers(1, 200).map(lambda n: n * 4),
        "orchestrator.train.filter_zero_advantages": st.booleans(),
        "max_steps": st.one_of(st.none(), st.integers(1, 1000)),
        "trainer.model.lora": st.sampled_from([None, {}]),
        "trainer.model.compile": st.sampled_from([None, {}]),
        "trainer.model.reduce_dtype": st.sampled_from(["bfloat16", "float32"]),
    },
)


@settings(FUZZ, max_examples=40)
@given(PROPOSALS)
def test_keeps_comments_and_order(change: dict[str, Any]) -> None:
    before = parse(SHIPPED)
    after = parse(set_values(SHIPPED, change))
    assert comments(after.source) == comments(SHIPPED)
    kept = [path for path in after.values if path in before.values]
    assert kept == [path for path in before.values if path in after.values]
    unset = {path for path, value in change.items() if value is None and default(path, before.resolved) is None}
    expected = {**before.values, **{path: value for path, value in change.items() if path not in unset}}
    assert after.values == {path: value for path, value in expected.items() if path not in unset}
    assert set_values(after.source, change) == after.source


def comments(source: bytes) -> list[str]:
    return re.findall(r"#.*", source.decode())


def test_a_comment_stays_in_its_column() -> None:
    source = b"[orchestrator]\ngroup_size = 4\n[trainer.optim]\nlr = 3e-6         # peak\nmax_norm = 1.0 # norm\n"
    edited = set_values(source, {"trainer.optim.lr": 2.38e-5, "trainer.optim.max_norm": 0.129})
    assert edited.endswith(b"\nlr = 2.38e-5      # peak\nmax_norm = 0.129 # norm\n")
    assert b"\nlr = 3e-6         # peak\n" in set_values(edited, {"trainer.optim.lr": 3e-6})


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


def test_load_refuses_what_is_not_a_plain_file(tmp_path: Path) -> None:
    path = tmp_path / "train.toml"
    (tmp_path / "other.toml").write_bytes(SMALL)
    for cause in ("No such file", "it is a symbolic link"):
        with pytest.raises(ConfigError, match=f"train.toml cannot be read: {cause}") as caught:
            load(path)
        assert caught.value.exit_code == ExitCode.USAGE
        path.unlink(missing_ok=True)
        path.symlink_to(tmp_path / "other.toml")


def test_load_keeps_the_bytes_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "train.toml"
    path.write_bytes(SMALL.replace(b"\n", b"\r\n"))
    loaded = load(path)
    assert loaded.source == path.read_bytes()
    assert loaded.hash == parse(SMALL).hash


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
    ("x", "f", "r"): 12, ("x", "f", "s"): 12, ("x", "f", "s", "t u"): 12, ("l",): 14, ("x", "i"): 18,
    ("x", "i", "j"): 18, ("d",): None,
}  # fmt: skip


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_the_line_of_a_key_is_that_of_the_statement_that_has_it_first(end: str) -> None:
    text = DOCUMENT.replace("\n", end)
    assert {path: line_of(text, path) for path in LINES} == LINES
    assert {*paths(tomllib.loads(text))} == {path for path, line in LINES.items() if line}


def paths(node: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    if not isinstance(node, dict):
        return []
    return [found for name, value in node.items() for found in [(*path, name), *paths(value, (*path, name))]]


# Hostile files

NAMES = st.from_regex(r"\A[A-Za-z][A-Za-z0-9_-]{0,8}\Z")
ANY_VALUE = st.sampled_from([
    "true", "0", "-1", "2", "64", "1_000", "0x10", "1e-6", "0.5", "nan", "inf", "1e400", "9223372036854775808", "''",
    "'None'", "'adamw'", "[]", "[1]", "['q_proj']", "{}", "{a=1}", "[[1]]", "[{}]", "2026-01-01", "12:30:00",
]) | st.text(st.characters(exclude_categories=("Cs",)), max_size=20).map(json.dumps)  # fmt: skip
LOCKED = sorted({path for lock in LOCKS for path in lock.paths} | {*FORMER})
TWINS = {"a": "\u0430", "e": "\u0435", "o": "\u043e", "l": "1", "_": "-"}
OPEN = [(re.compile(re.escape(key.path).replace(r"\*", r"[A-Za-z][A-Za-z0-9_-]{0,39}")), key) for key in KEYS]


def allowed_values(key: Key) -> st.SearchStrategy[str]:
    if key.kind is Kind.TABLE:
        return st.just("{}")
    if key.kind is Kind.BOOL:
        return st.sampled_from(("true", "false"))
    if key.kind is Kind.CHOICE:
        return st.sampled_from(key.choices).map(json.dumps)
    if key.kind is Kind.LIST:
        return st.lists(st.sampled_from(key.choices), min_size=1, unique=True).map(json.dumps)
    low = next(bound for bound in (key.minimum, key.above, -1000) if bound is not None)
    high = next(bound for bound in (key.maximum, key.below, 10_000) if bound is not None)
    return st.integers(int(low), int(high)).map(str) if key.kind is Kind.INT else st.floats(low, high).map(repr)


@st.composite
def assignments(draw: st.DrawFn) -> tuple[list[str], str]:
    """An open key, a misspelled or a locked one, with a value that the key may or may not take."""
    key = draw(st.sampled_from(KEYS))
    path = [draw(NAMES) if part == ANY else part for part in key.path.split(".")]
    match draw(st.sampled_from(("open", "open", "open", "locked", "misspelled", "dot in a name"))):
        case "locked":
            path = draw(st.sampled_from(LOCKED)).replace(ANY, "trainer").split(".")
        case "dot in a name":
            path = [*path[:-2], ".".join(path[-2:])]
        case "misspelled":
            part, index = draw(st.integers(0, len(path) - 1)), draw(st.integers(0, 40))
            name = path[part]
            index %= len(name)
            letter = draw(st.sampled_from(("", name[index] * 2, TWINS.get(name[index], "\u200b"), ".")))
            path[part] = name[:index] + letter + name[index + 1 :]
    return path, draw(draw(st.sampled_from((ANY_VALUE, allowed_values(key), allowed_values(key)))))


@st.composite
def mutants(draw: st.DrawFn) -> bytes:
    """A train.toml as a careful or a careless agent writes it, in one of the spellings of TOML."""
    text = "orchestrator.group_size = 4\norchestrator.batch_size = 256\n" * draw(st.sampled_from((1, 1, 1, 0)))
    for path, value in draw(st.lists(assignments(), min_size=1, max_size=2)):
        spell = draw(st.sampled_from((json.dumps, lambda part: part)))
        *tables, leaf = map(spell, path)
        head, line = ".".join(tables), f"{leaf} = {value}\n"
        spellings = (
            f"{head}.{line}",
            f"{head}.{line}",
            f"[{head}]\n{line}",
            f"[[{head}]]\n{line}",
            f"{head} = {{{line[:-1]}}}\n",
        )
        text += draw(st.sampled_from(spellings)) if head else line
    return text.encode()


@st.composite
def damaged_files(draw: st.DrawFn) -> bytes:
    """The shipped file with bytes or lines replaced, added or removed."""
    pieces: list[Any] = draw(st.sampled_from((list(SHIPPED), SHIPPED.splitlines(keepends=True))))
    is_bytes = isinstance(pieces[0], int)
    for _ in range(draw(st.integers(1, 5))):
        start, length = draw(st.integers(0, len(pieces))), draw(st.sampled_from((0, 1, 1, 40)))
        added = list(draw(st.binary(max_size=8))) if is_bytes else draw(st.lists(st.sampled_from(pieces), max_size=2))
        pieces[start : start + length] = added or pieces[:1]
    return bytes(pieces) if is_bytes else b"".join(pieces)


def is_allowed(path: str, value: Any) -> bool:
    """Judge one value of an accepted file by the table of keys alone, without the code that accepted it."""
    [key] = [key for pattern, key in OPEN if pattern.fullmatch(path)]
    if value == "None":
        return key.nullable or "None" in key.choices
    if isinstance(value, str):
        return value in key.choices
    if isinstance(value, list):
        return key.kind is Kind.LIST and set(value) <= {*key.choices}
    if isinstance(value, bool | dict):
        return key.kind is (Kind.BOOL if isinstance(value, bool) else Kind.TABLE)
    bounds = (key.minimum, key.maximum, key.above, key.below)
    least, most, above, below = (float(bound) if bound is not None else None for bound in bounds)
    return (
        key.kind in ((Kind.FLOAT, Kind.INT) if isinstance(value, int) else (Kind.FLOAT,))
        and (least is None or value >= least) and (most is None or value <= most)
        and (above is None or value > above) and (below is None or value < below)
        and abs(value) < float("inf")
    )  # fmt: skip


@settings(FUZZ, max_examples=400)
@given(mutants() | damaged_files() | st.binary(max_size=200))
def test_a_hostile_file_is_refused_in_clean_lines_or_has_open_keys_with_allowed_values_only(source: bytes) -> None:
    try:
        config = parse(source)
    except ConfigError as error:
        assert_clean_lines(str(error))
        return
    document = tomllib.loads(source.decode())
    nodes = {path: node(document, path) for path in paths(document)}
    for path, value in nodes.items():
        is_key = any(pattern.fullmatch(".".join(path)) for pattern, _ in OPEN)
        assert is_key or isinstance(value, dict), path  # a table around keys
        assert not is_key or is_allowed(".".join(path), value), path
        assert not any("." in part for part in path)
    assert set(map(".".join, nodes)).isdisjoint(LOCKED)
    assert parse(set_values(source, {})).hash == config.hash


def node(document: Any, path: tuple[str, ...]) -> Any:
    return node(document[path[0]], path[1:]) if path else document
