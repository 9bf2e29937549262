"""What is expected of prime-rl: whole, and looked up in a checkout of it at the pin, where NIGHTSHIFT_PRIME_RL says or
prepare.py put it.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

import pin
import pytest

from nightshift.config.allowlist import KEYS, OPPONENT, PARAMETERS, RATIO, SOURCE, find_key
from nightshift.config.rules_toml import Chosen, rules_of
from nightshift.config.train_toml import parse
from nightshift.engines.prime_rl.config import effective
from nightshift.engines.prime_rl.install import Installation, Pins
from nightshift.engines.prime_rl.launch import Launch
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
    place: dict[str, Any] = {
        "run_dir": Path("/r"),
        "bin_dir": Path("/b"),
        "environment": {},
        "gpu_ids": (),
        "variables": {},
    }
    launch = Launch(settings=effective(parse(_FULL), rules, prompt_tokens=1), seed=0, port=1, seats={}, **place)
    values = {re.sub(r"\[\d+\]", "", path): value for path, value in leaves(launch.tree)}
    return {k: v for k, v in values.items() if not find_key(k) and (not k.startswith(_OWN) or k == f"{_OWN}id")}


PINS = Pins.read(ROOT / "pyproject.toml")
INSTALLED = Installation.find(ROOT, os.environ).root
FORCED = forced()


def test_the_table_has_every_key_that_is_open_or_forced_and_nothing_twice() -> None:
    found = [row.what for row in pin.rows() if row.is_key]
    ours = {key.path for key in KEYS if key.table in (RATIO, OPPONENT, PARAMETERS)}  # a ratio is in each source there
    assert set(found) == ({key.path for key in KEYS} - ours) | set(FORCED)
    assert len(found) == len(set(found))
    texts = [(row.what, row.at.partition(":")[0]) for row in pin.rows() if not row.is_key]
    assert len(texts) == len(set(texts))
    assert all(hasattr(PINS, name) for what, _ in texts for name in re.findall("<([a-z_]+)>", what))


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
