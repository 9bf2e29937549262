"""What is expected of prime-rl, looked up in a tree that is made of the expectations themselves, and of renames in it.

With a checkout of prime-rl at the pin, where NIGHTSHIFT_PRIME_RL says or prepare.py put it, in that one too.
"""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pin
import pytest
from click.testing import CliRunner

from nightshift.config.allowlist import KEYS, OPPONENT, RATIO, SOURCE, find_key
from nightshift.config.rules_toml import Chosen, rules_of
from nightshift.config.train_toml import parse
from nightshift.engines.prime_rl.config import effective
from nightshift.engines.prime_rl.install import Installation, Pins
from nightshift.engines.prime_rl.launch import Launch, Ports
from tests.prime_rl_plans import leaves

ROOT = Path(__file__).parents[2]
_OWN = f"{SOURCE}.env.taskset."  # keys of our own environment package, but for its id
# The engine sets all that it can for this train.toml: adapters and pools bring keys of their own.
_FULL = b"""[orchestrator]
group_size = 2
[trainer.model.lora]
[orchestrator.train.source.curriculum.sampler]
type = "difficulty_pool"
[orchestrator.train.source.curriculum.sampler.pools.all]
threshold = 1.0
weight = 1.0
"""


def forced() -> dict[str, Any]:
    """Every key that the engine sets besides train.toml's, dotted, with a value that it sets."""
    rules = rules_of(ROOT, Chosen(environments=["gsm8k", "arithmetic"]), "prime-rl", 2)
    place: dict[str, Any] = {"run_dir": Path("/r"), "bin_dir": Path("/b"), "environment": {}, "gpu_ids": ()}
    launch = Launch(settings=effective(parse(_FULL), rules, prompt_tokens=1), seed=0, ports=Ports(1, 2, 3, 4), **place)
    values = {re.sub(r"\[\d+\]", "", path): value for path, value in leaves(launch.tree)}
    return {k: v for k, v in values.items() if not find_key(k) and (not k.startswith(_OWN) or k == f"{_OWN}id")}


PINS = Pins.read(ROOT / "pyproject.toml")
INSTALLED = Installation.find(PINS, os.environ).root
FORCED = forced()
# What is renamed where, and the row that must be named for it: keys, a variant, a marker, a metric, an
# endpoint, a program.
RENAMES = (
    ("C/rl.py", "    kl_tau:", "    kl_weight:", "trainer.loss.kl_tau"),
    ("C/rl.py", "    batch_size:", "    rollout_batch_size:", "orchestrator.batch_size"),
    ("P/transports/weights/filesystem.py", "STABLE", ".finished", 'stable_file = save_dir / "STABLE"'),
    ("P/trainer/rl/train.py", "optim/grad_norm", "optim/norm", 'optim_metrics["optim/grad_norm"] ='),
    ("P/inference/vllm/server.py", "/update_weights", "/v1/weights", '@router.post("/update_weights")'),
    ("pyproject.toml", "env-server =", "env_server =", 'env-server = "prime_rl.entrypoints.env_server:main"'),
)


def classes(prefix: str, paths: list[str], name: str) -> Iterator[str]:
    """Classes that have exactly the keys of `paths`, all below `prefix`; the last is called `name`."""
    choices = next((key.choices for key in KEYS if key.path == f"{prefix}.type"), ())
    fields: dict[str, str] = {}
    for child in dict.fromkeys(path.removeprefix(f"{prefix}.").partition(".")[0] for path in paths):
        path = f"{prefix}.{child}" if prefix else child
        below = [each for each in paths if each.startswith(f"{path}.")]
        inner, is_mapping = re.sub(r"\W", "_", path), f"{path}.*" in paths
        if below:
            entry = f"{path}.*" if is_mapping else path
            yield from classes(entry, [each for each in below if each != f"{path}.*"], inner)
        fields[child] = f"dict[str, {inner}]" if is_mapping else f"{inner} | None" if below else "Literal['x'] | int"
    find_key = [f"{name}{choice}" for choice in choices] or [name]
    for variant in find_key:
        yield f"class {variant}(BaseConfig):"
        yield from (f"    {child}: {kind} = None" for child, kind in fields.items())
    if choices:
        yield f"{name} = Annotated[{' | '.join(find_key)}, Field(discriminator='type')]"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A checkout in which every text stands at its line, in a string, and RLConfig has all keys. Nothing is copied."""
    files: dict[str, list[str]] = {}
    for row in pin.rows():
        path, number = pin.expanded(row.at).rsplit(":", 1)
        lines = files.setdefault(path, ['_ = r"""' if path.endswith(".py") else ""])
        if not row.is_key:
            text = re.sub("<([a-z_]+)>", lambda name: getattr(PINS, name[1]), row.what).split("\n")
            lines += [""] * (int(number) + len(text) - 1 - len(lines))
            for offset, part in enumerate(text, start=int(number) - 1):
                lines[offset] += part
    for path, lines in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        end = ['"""'] if path.endswith(".py") else []
        if path == pin.expanded("C/rl.py"):
            end += classes("", [row.what for row in pin.rows() if row.is_key], "RLConfig")
        (tmp_path / path).write_text("\n".join([*lines, *end]) + "\n")
    return tmp_path


def broken(root: Path) -> dict[str, str]:
    return {f.row.what: f"{f.state} {f.detail}" for f in pin.look_up(root, PINS)[0] if f.state in pin.BROKEN}


def test_the_table_has_every_key_that_is_open_or_forced_and_nothing_twice() -> None:
    found = [row.what for row in pin.rows() if row.is_key]
    ours = {key.path for key in KEYS if key.table in (RATIO, OPPONENT)}  # the ratio stands in each source there
    assert set(found) == ({key.path for key in KEYS} - ours) | set(FORCED)
    assert len(found) == len(set(found))
    texts = [(row.what, row.at.partition(":")[0]) for row in pin.rows() if not row.is_key]
    assert len(texts) == len(set(texts))


def test_every_row_stands_in_a_tree_made_of_the_rows_and_all_renames_are_named_at_once(tree, monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    findings, _ = pin.look_up(tree, PINS)
    assert broken(tree) == {}
    assert {f.state for f in findings if not f.row.is_key} == {"there"}
    for at, old, new, _ in RENAMES:
        path = tree / pin.expanded(at)
        path.write_text(path.read_text().replace(old, new))
    answer = CliRunner().invoke(pin.main, ["--checkout", str(tree)])
    assert answer.exit_code == 1
    for *_, named in RENAMES:
        assert " ".join(named.split()) in answer.stdout
    assert "new      trainer.loss.kl_weight: neither open nor locked" in answer.stdout


def test_a_comment_and_a_docstring_prove_nothing(tree: Path) -> None:
    path = tree / pin.expanded("P/transports/weights/filesystem.py")
    row = 'stable_file = save_dir / "STABLE"'
    path.write_text(f'# {row}\ndef notify():\n    """As ever: {row}"""\n')
    assert row in broken(tree)
    path.write_text(f"url = 'a#b'; {row}  # written last\n")
    assert row not in broken(tree)


@pytest.mark.skipif(not INSTALLED.is_dir(), reason="no prime-rl here")
def test_at_the_pin_every_row_stands_at_its_line_once_and_the_sources_say_what_the_classes_say() -> None:
    findings, new = pin.look_up(INSTALLED, PINS)
    assert [(f.row.what, f.state, f.detail) for f in findings if f.state != "there"] == []
    assert new == []
    for row in pin.rows():
        if not row.is_key and "<" not in row.what:
            assert len(pin.lines_of(INSTALLED / pin.expanded(row.at).partition(":")[0], row.what)) == 1, row
    recorded = json.loads((ROOT / "tests" / "fixtures" / "rlconfig-keys.json").read_text())
    assert {re.sub(r"<[^>]*>|\[\]", "", name) for name in recorded} <= set(pin.Schema(INSTALLED).lines)
