"""A model that rules.toml names: its folder is looked at before anything loads it."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nightshift.config.rules import Rules
from nightshift.engines.downloads import folder_problem, prepare_model
from nightshift.engines.trl.engine import TrlEngine
from nightshift.errors import EngineError
from tests.rules import ARITHMETIC_TRL, GSM8K_PRIME_RL, ROOT


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(ROOT / "models" / "arithmetic-base", tmp_path / "model"))


def under(folder: Path, rules: Rules = ARITHMETIC_TRL) -> Rules:
    return replace(rules, model=str(folder), model_revision=None)


def write(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_a_good_one_is_taken_and_a_dry_run_names_it(folder: Path) -> None:
    rules = under(folder)
    assert folder_problem(rules, folder) is None
    prepare_model(folder.parent, rules, print)
    engine = TrlEngine(rules, ROOT, {})
    assert engine.check() == []
    assert engine.describe({}, 1, folder, verbose=False)[1:] == [f"model:    {folder}"]


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ({"use_sliding_window": True, "sliding_window": 16}, "has use_sliding_window = True, which the sampler"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "has rope_type = 'dynamic', which"),
        ({"rope_parameters": None, "rope_scaling": {"type": "longrope"}}, "has rope_type = 'longrope', which"),
        ({"hidden_act": "gelu", "attention_dropout": 0.1}, "has hidden_act = 'gelu', attention_dropout = 0.1, which"),
        ({"model_type": "llama"}, "has model_type = 'llama', which"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}, "sliding_window": 16}, None),
    ],
)
def test_what_the_sampler_would_compute_otherwise_is_for_prime_rl(folder, values, found):
    write(folder / "config.json", **values)
    problem = folder_problem(under(folder), folder)
    assert problem is None if found is None else found in str(problem)
    assert folder_problem(under(folder, GSM8K_PRIME_RL), folder) is None


REMOTE = {"auto_map": {"AutoModelForCausalLM": "modeling.Mine"}}


@pytest.mark.parametrize(
    ("spoil", "cause"),
    [
        (lambda folder: (folder / "config.json").unlink(), "is not the folder of a model: "),
        (lambda folder: (folder / "tokenizer.json").unlink(), "has no tokenizer.json. Save model"),
        (lambda folder: (folder / "chat_template.jinja").unlink(), "has no chat template (chat_template.jinja). Save"),
        (lambda folder: (folder / "model.safetensors").unlink(), "has no weights in safetensors. Save"),
        (lambda folder: write(folder / "config.json", **REMOTE), "needs its own code (auto_map), which"),
        (lambda folder: write(folder / "tokenizer_config.json", **REMOTE), "needs its own code (auto_map), which"),
        (
            lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
            "has no weights in safetensors",
        ),
        (lambda folder: (folder / "config.json").write_text('"x"'), "is not the folder of a model"),
    ],
)
def test_what_is_missing_code_a_pickle_and_a_config_that_is_none_are_one_line(folder, spoil, cause):
    spoil(folder)
    rules = under(folder)
    with pytest.raises(EngineError) as raised:
        prepare_model(folder.parent, rules, print)
    assert cause in str(raised.value)
    assert TrlEngine(rules, ROOT, {}).check() == [str(raised.value)]
