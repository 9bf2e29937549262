"""What is expected of prime-rl, looked up in a tree that is made of the expectations themselves, and of renames in it.

With a checkout of prime-rl at the pin, where NIGHTSHIFT_PRIME_RL says or prepare.py put it, in that one too.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from nightshift.cli import commands
from nightshift.engines.prime_rl.installation import Installation, Pins
from nightshift.errors import UsageError
from nightshift.pin import lookup
from nightshift.pin.schema import Schema
from nightshift.train_toml.keys import KEYS
from nightshift.train_toml.locks import OPPONENT, RATIO
from nightshift.train_toml.values import Key, Kind

ROOT = Path(__file__).parents[2]
PINS = Pins.read(ROOT / "pyproject.toml")
INSTALLED = Installation.find(PINS, os.environ).root
FORCED = lookup.forced()
NAMES = {Kind.INT: "int", Kind.FLOAT: "float", Kind.BOOL: "bool", Kind.CHOICE: "str", Kind.LIST: "list[str]"}
# What is renamed where, and the row that must be named for it: keys, a variant, a marker, a metric, a path, an
# endpoint, a log's text, a program, a field of a trace.
RENAMES = (
    ("C/rl.py", "    kl_tau:", "    kl_weight:", "trainer.loss.kl_tau"),
    ("C/rl.py", "    batch_size:", "    rollout_batch_size:", "orchestrator.batch_size"),
    ("C/rl.py", "Literal['muon']", "Literal['muon2']", "trainer.optim.type"),
    ("P/transports/weights/filesystem.py", "STABLE", ".finished", 'stable_file = save_dir / "STABLE"'),
    ("P/trainer/rl/train.py", "optim/grad_norm", "optim/norm", 'optim_metrics["optim/grad_norm"] ='),
    ("P/utils/pathing.py", "broadcasts", "weights", 'return output_dir / "broadcasts"'),
    ("P/inference/vllm/server.py", "/update_weights", "/v1/weights", '@router.post("/update_weights")'),
    ("P/orchestrator/orchestrator.py", "Starting orch", "Started orch", "Starting orchestrator loop"),
    ("pyproject.toml", "env-server =", "env_server =", 'env-server = "prime_rl.entrypoints.env_server:main"'),
    ("V/trace.py", "stop_condition", "stopped_by", "stop_condition: str | None"),
)


def expanded(at: str) -> str:
    return lookup._path(at)


def leaf(path: str, variant: str | None) -> str:
    """The annotation and default of a key without keys below it."""
    entries = [k for k in KEYS if k.path == path]
    entries = [k for k in entries if not k.only_if or variant in (None, *k.only_if[1])] or entries
    if not entries:
        value = FORCED[path]
        kind = {list: "list[str]", dict: "dict[str, str]"}.get(type(value), type(value).__name__)
        return "str | None = None" if value is None else kind
    [key] = entries[:1]
    if path.endswith(".type"):
        return f"Literal[{variant or key.choices[0]!r}] = {key.default!r}"
    kind = f"Literal{list(key.choices)}" if key.kind is Kind.CHOICE else NAMES[key.kind]
    if key.kind is Kind.INT and key.choices:
        kind += f" | Literal{list(key.choices)}"
    default = "" if key.default is None or key.kind is Kind.LIST else f" = {key.default!r}"
    return f"{kind}{' | None' if key.nullable else ''}{default}"


def is_under(path: str, selector: str, variant: str) -> bool:
    """Whether a key or any below it exists under a variant."""
    entries: list[Key] = [k for k in KEYS if k.path == path or k.path.startswith(f"{path}.")]
    conditions = [k.only_if for k in entries if k.only_if and k.only_if[0] == selector]
    return not conditions or any(variant in values for _, values in conditions)


def classes(prefix: str, paths: list[str], name: str) -> Iterator[str]:
    """Classes that have exactly the keys of `paths`, all below `prefix`; the last is called `name`."""
    children = dict.fromkeys(p.removeprefix(f"{prefix}.").partition(".")[0] for p in paths)
    selector = f"{prefix}.type"
    choices = next((k.choices for k in KEYS if k.path == selector), ())
    fields: dict[str, str] = {}
    for child in children:
        path = f"{prefix}.{child}" if prefix else child
        below = [p for p in paths if p.startswith(f"{path}.")]
        if below:
            inner = re.sub(r"\W", "_", path)
            if [p for p in below if p.startswith(f"{path}.*")]:
                yield from classes(f"{path}.*", [p for p in below if p != f"{path}.*"], inner)
                fields[child] = f"dict[str, {inner}]"
            else:
                yield from classes(path, below, inner)
                own = next((k for k in KEYS if k.path == path), None)
                fields[child] = f"{inner} | None = {None if own.default is None else inner + '()'}" if own else inner
    for variant in choices if len(choices) > 1 else (None,):
        yield f"class {name}{variant or ''}(BaseConfig):"
        for child in children:
            path = f"{prefix}.{child}" if prefix else child
            if variant is None or is_under(path, selector, variant):
                yield f"    {child}: {fields.get(child) or leaf(path, variant)}"
    if len(choices) > 1:
        yield f"{name} = Annotated[{' | '.join(f'{name}{v}' for v in choices)}, Field(discriminator='type')]"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A checkout in which every text stands at its line, in a string, and RLConfig has all keys. Nothing is copied."""
    files: dict[str, list[str]] = {}
    for row in lookup.rows():
        path, number = expanded(row.at).rsplit(":", 1)
        lines = files.setdefault(path, ['_ = r"""' if path.endswith(".py") else ""])
        if not row.is_key:
            text = re.sub("<([a-z_]+)>", lambda name: getattr(PINS, name[1]), row.what).split("\n")
            lines += [""] * (int(number) + len(text) - 1 - len(lines))
            for offset, part in enumerate(text, start=int(number) - 1):
                lines[offset] += part
    for path, lines in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        end = ['"""'] if path.endswith(".py") else []
        if path == expanded("C/rl.py"):
            end += classes("", [row.what for row in lookup.rows() if row.is_key], "RLConfig")
        (tmp_path / path).write_text("\n".join([*lines, *end]) + "\n")
    return tmp_path


def broken(root: Path) -> dict[str, str]:
    return {f.row.what: f"{f.state} {f.detail}" for f in lookup.look_up(root, PINS)[0] if f.breaks}


def test_the_table_has_every_key_that_is_open_or_forced_and_nothing_twice() -> None:
    found = [row.what for row in lookup.rows() if row.is_key]
    ours = {key.path for key in KEYS if key.table in (RATIO, OPPONENT)}  # the ratio stands in each source there
    assert set(found) == ({key.path for key in KEYS} - ours) | set(FORCED)
    assert len(found) == len(set(found))
    texts = [(row.what, row.at.partition(":")[0]) for row in lookup.rows() if not row.is_key]
    assert len(texts) == len(set(texts))


def test_every_row_stands_in_a_tree_made_of_the_rows(tree: Path) -> None:
    findings, _ = lookup.look_up(tree, PINS)
    assert broken(tree) == {}
    assert {f.state for f in findings if not f.row.is_key} == {"there"}


@pytest.mark.parametrize(("at", "old", "new", "named"), RENAMES, ids=[rename[-1] for rename in RENAMES])
def test_a_rename_is_named_and_nothing_else(tree: Path, at: str, old: str, new: str, named: str) -> None:
    path = tree / expanded(at)
    path.write_text(path.read_text().replace(old, new))
    found = broken(tree)
    assert named in found
    table = named.rpartition(".")[0]
    assert all(what == named or (table and what.startswith(table)) for what in found), found


def test_all_ten_are_named_at_once_by_the_command(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for at, old, new, _ in RENAMES:
        path = tree / expanded(at)
        path.write_text(path.read_text().replace(old, new))
    answer = CliRunner().invoke(commands, ["pin", "--checkout", str(tree)])
    assert answer.exit_code == 1
    for *_, named in RENAMES:
        assert " ".join(named.split()) in answer.stdout
    assert "new      trainer.loss.kl_weight: neither open nor locked" in answer.stdout


def test_a_comment_and_a_docstring_prove_nothing(tree: Path) -> None:
    path = tree / expanded("P/transports/weights/filesystem.py")
    row = 'stable_file = save_dir / "STABLE"'
    path.write_text(f'# {row}\ndef notify():\n    """As ever: {row}"""\n')
    assert row in broken(tree)
    path.write_text(f"url = 'a#b'; {row}  # written last\n")
    assert row not in broken(tree)


def test_another_default_type_bound_or_choice_is_told(tree: Path) -> None:
    path, key = tree / expanded("C/rl.py"), "trainer.model.optimization_dtype"
    for old, new, what, words in (
        (
            "    weight_decay: float = 0.01",
            "    weight_decay: float = 0.5",
            "trainer.optim.weight_decay",
            "changed default 0.5",
        ),
        ("    group_size: int = 1", "    group_size: str = 'all'", "orchestrator.group_size", "missing type str"),
        (
            "    adv_tau: float = 1.0",
            "    adv_tau: float = Field(1.0, le=0.5)",
            "trainer.loss.adv_tau",
            "missing bound le 0.5",
        ),
        ("'bfloat16', 'float32'] = 'float32'", "'float32'] = 'float32'", key, "missing no value bfloat16"),
    ):
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))
        assert broken(tree)[what].startswith(words)
        path.write_text(text)


def test_a_key_that_one_variant_of_two_lost_is_told(tree: Path) -> None:
    path = tree / expanded("C/rl.py")
    head, name, tail = path.read_text().partition("class trainer_lossipo(")
    path.write_text(head + name + tail.replace("kl_tau:", "kl_weight:", 1))
    assert broken(tree) == {"trainer.loss.kl_tau": "missing not under trainer.loss.type = ipo"}


def test_a_key_whose_table_takes_any_name_is_not_there_by_that(tree: Path) -> None:
    path, table = tree / expanded("C/rl.py"), "class inference_vllm(BaseConfig):\n"
    text = path.read_text()
    path.write_text(text.replace(table, f"{table}    model_config = ConfigDict(extra='allow')\n"))
    assert broken(tree) == {}
    path.write_text(
        path.read_text().replace("    enforce_eager:", "    eager:").replace("    max_num_seqs:", "    seqs:")
    )
    assert broken(tree) == {
        "inference.vllm.enforce_eager": "changed named no longer, but passed through as it is"  # max_num_seqs never was
    }


def test_what_moved_breaks_nothing_and_its_line_can_be_renewed(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "table.toml"
    shutil.copyfile(lookup.TABLE, copy)
    monkeypatch.setattr(lookup, "TABLE", copy)
    path = tree / "pyproject.toml"
    path.write_text("\n\n" + path.read_text())
    findings, _ = lookup.look_up(tree, PINS)
    moved = [f.row.at for f in findings if f.state == "moved" and f.row.at.startswith("pyproject.toml")]
    assert len(moved) == 5
    lookup.renew(findings)
    again, _ = lookup.look_up(tree, PINS)
    assert {f.state for f in again} == {"there"}
    assert [(r.user, r.what) for r in lookup.rows()] == [(f.row.user, f.row.what) for f in findings]


def test_a_missing_submodule_is_no_answer(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    shutil.rmtree(tree / "deps")
    rows = {row.what for row in lookup.rows() if row.at.startswith("V/")}
    found = broken(tree)
    assert set(found) == rows
    assert all(words.startswith("unseen") for words in found.values())
    assert CliRunner().invoke(commands, ["pin", "--checkout", str(tree)]).exit_code == 1


@pytest.mark.parametrize(
    "source",
    [None, "class RLConfig(:", "A = A\nclass RLConfig:\n    a: A\n", "class RLConfig(RLConfig):\n    a: int\n"],
)
def test_what_is_no_prime_rl_is_said_in_one_line(tmp_path: Path, source: str | None) -> None:
    if source is not None:
        path = tmp_path / expanded("C/rl.py")
        path.parent.mkdir(parents=True)
        path.write_text(source)
    with pytest.raises(UsageError, match="--checkout DIR"):
        lookup.look_up(tmp_path, PINS)


@pytest.mark.skipif(not INSTALLED.is_dir(), reason="no prime-rl here")
def test_at_the_pin_every_row_stands_at_its_line_once_and_the_sources_say_what_the_classes_say() -> None:
    findings, new = lookup.look_up(INSTALLED, PINS)
    assert [(f.row.what, f.state, f.detail) for f in findings if f.state != "there"] == []
    assert new == []
    for row in lookup.rows():
        if not row.is_key and "<" not in row.what:
            assert len(lookup._lines(INSTALLED / expanded(row.at).partition(":")[0], row.what)) == 1, row
    recorded = json.loads((ROOT / "tests" / "fixtures" / "rlconfig-keys.json").read_text())
    assert {re.sub(r"<[^>]*>|\[\]", "", name) for name in recorded} <= set(Schema(INSTALLED).fields)
