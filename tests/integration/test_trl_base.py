"""A very short remake of the base model: the files that a loader needs, and a model that has begun to learn."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ENVIRONMENTS

NUM_STEPS = 6
ENV = {**os.environ, "PYTHONPATH": ENVIRONMENTS}
MODEL = Path(__file__).parents[2] / "models" / "arithmetic-base"
FILES = {
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}


@pytest.fixture(scope="module")
def remake(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    output = tmp_path_factory.mktemp("base") / "model"
    code = (
        "import sys; from pathlib import Path; from nightshift.engines.trl.base_model import rebuild; "
        f"rebuild(Path(sys.argv[1]), print, {NUM_STEPS})"
    )
    command = [sys.executable, "-c", code, output]
    done = subprocess.run(command, env=ENV, capture_output=True, text=True, check=True)
    return output, done.stdout


def test_the_remake_has_the_files_and_the_shape_of_the_shipped_model(remake: tuple[Path, str]) -> None:
    output, steps = remake
    assert {path.name for path in output.iterdir()} == FILES
    assert steps.splitlines()[1:] == [f"supervised step {NUM_STEPS} / {NUM_STEPS}"]
    assert (output / "config.json").read_bytes() == (MODEL / "config.json").read_bytes()
    # The tokenizer depends on the data only, so the recipe still makes the one that ships.
    assert (output / "tokenizer.json").read_bytes() == (MODEL / "tokenizer.json").read_bytes()
    assert (output / "chat_template.jinja").read_bytes() == (MODEL / "chat_template.jinja").read_bytes()


CHECK = """
import json, sys
import torch
from nightshift_arithmetic import data
from transformers import AutoModelForCausalLM, AutoTokenizer

model, tokenizer = AutoModelForCausalLM.from_pretrained(sys.argv[1]), AutoTokenizer.from_pretrained(sys.argv[1])
text = tokenizer.apply_chat_template([{"role": "user", "content": "Why?"}], tokenize=False, add_generation_prompt=True)
losses = []
for example in data.load("selection", 20):
    prompt = tokenizer.apply_chat_template(data.messages(example), add_generation_prompt=True, return_dict=True)
    answer = tokenizer(example.solution)["input_ids"] + [tokenizer.eos_token_id]
    ids = prompt["input_ids"] + answer
    labels = [-100] * len(prompt["input_ids"]) + answer
    losses.append(model(input_ids=torch.tensor([ids]), labels=torch.tensor([labels])).loss.item())
print(json.dumps({
    "text": text,
    "digits": len(tokenizer("8347")["input_ids"]),
    "odd": tokenizer.decode(tokenizer("caf\\u00e9 \\u2603")["input_ids"]),
    "vocabulary": len(tokenizer),
    "logits": model.config.vocab_size,
    "loss": sum(losses) / len(losses),
    "parameters": sum(parameter.numel() for parameter in model.parameters()),
    "ends": [tokenizer.eos_token, model.generation_config.eos_token_id == tokenizer.eos_token_id],
}))
"""


def _load(folder: Path) -> dict[str, object]:
    done = subprocess.run([sys.executable, "-c", CHECK, folder], env=ENV, capture_output=True, text=True, check=True)
    facts: dict[str, object] = json.loads(done.stdout)
    return facts


def test_transformers_loads_it_and_a_few_steps_have_taught_it_something(remake: tuple[Path, str]) -> None:
    facts = _load(remake[0])
    assert facts["text"] == "Question: Why?\nAnswer: "
    assert facts["digits"] == 4  # a token a digit
    assert facts["odd"] == "caf\u00e9 \u2603"  # any text survives
    assert facts["logits"] == facts["vocabulary"]
    assert facts["ends"] == ["<|im_end|>", True]
    assert isinstance(facts["loss"], float)
    assert facts["loss"] < 5.5  # an untrained model: ln 514 = 6.2


def test_the_shipped_model_is_small_and_knows_the_format() -> None:
    assert sum(path.stat().st_size for path in MODEL.iterdir()) < 3e6
    facts = _load(MODEL)
    assert isinstance(facts["parameters"], int)
    assert 400_000 <= facts["parameters"] <= 1_000_000
    assert isinstance(facts["loss"], float)
    assert facts["loss"] < 0.5
