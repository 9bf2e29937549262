"""A very short remake of the base model: the files that a loader needs, and a model that has begun to learn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from nightshift_arithmetic import data

pytestmark = pytest.mark.filterwarnings("default")  # libraries warn about each other

NUM_STEPS = 6
MODEL = Path(__file__).parents[2] / "models" / "arithmetic-base"
FILES = {
    *("chat_template.jinja", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json"),
    "tokenizer_config.json",
}


@pytest.fixture(scope="module")
def remake(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    from nightshift.engines.trl.base_model import rebuild

    output = tmp_path_factory.mktemp("base") / "model"
    steps: list[str] = []
    rebuild(output, steps.append, NUM_STEPS)
    return output, steps


def test_the_remake_has_the_files_and_the_shape_of_the_shipped_model(remake: tuple[Path, list[str]]) -> None:
    output, steps = remake
    assert {path.name for path in output.iterdir()} == FILES
    assert steps[1:] == [f"supervised step {NUM_STEPS} / {NUM_STEPS}"]
    assert (output / "config.json").read_bytes() == (MODEL / "config.json").read_bytes()
    # The tokenizer depends on the data only, so the recipe still makes the one that ships.
    assert (output / "tokenizer.json").read_bytes() == (MODEL / "tokenizer.json").read_bytes()
    assert (output / "chat_template.jinja").read_bytes() == (MODEL / "chat_template.jinja").read_bytes()


def _load(folder: Path) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": "Why?"}]
    losses = []
    for example in data.load("selection", 20):
        prompt = tokenizer.apply_chat_template(data.messages(example), add_generation_prompt=True, return_dict=True)
        answer = tokenizer(example.solution)["input_ids"] + [tokenizer.eos_token_id]
        ids, labels = prompt["input_ids"] + answer, [-100] * len(prompt["input_ids"]) + answer
        losses.append(model(input_ids=torch.tensor([ids]), labels=torch.tensor([labels])).loss.item())
    return {
        "text": tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True),
        "digits": len(tokenizer("8347")["input_ids"]),
        "odd": tokenizer.decode(tokenizer("caf\u00e9 \u2603")["input_ids"]),
        "vocabulary": len(tokenizer),
        "logits": model.config.vocab_size,
        "loss": sum(losses) / len(losses),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "ends": [tokenizer.eos_token, model.generation_config.eos_token_id == tokenizer.eos_token_id],
    }


def test_transformers_loads_it_and_a_few_steps_have_taught_it_something(remake: tuple[Path, list[str]]) -> None:
    facts = _load(remake[0])
    assert facts["text"] == "Question: Why?\nAnswer: "
    assert facts["digits"] == 4  # a token a digit
    assert facts["odd"] == "caf\u00e9 \u2603"  # any text survives
    assert facts["logits"] == facts["vocabulary"]
    assert facts["ends"] == ["<|im_end|>", True]
    assert facts["loss"] < 5.5  # an untrained model: ln 514 = 6.2


def test_the_shipped_model_is_small_and_knows_the_format() -> None:
    assert sum(path.stat().st_size for path in MODEL.iterdir()) < 3e6
    facts = _load(MODEL)
    assert 400_000 <= facts["parameters"] <= 1_000_000
    assert facts["loss"] < 0.5
