"""A very short remake of each base model: the files that a loader needs, and a model that has begun to learn."""

from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from nightshift.errors import UsageError

pytestmark = pytest.mark.filterwarnings("default")  # libraries warn about each other

NUM_STEPS = 6
ROOT = Path(__file__).parents[2]
# A model, and the environment whose documents it is asked: of the tokens there a game's are mostly moves of chance.
MODELS = {
    "models/arithmetic-base": "arithmetic",
    "models/mixed-base": "countdown",
    "models/tictactoe-base": "tictactoe",
}
FILES = {
    *("chat_template.jinja", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json"),
    "tokenizer_config.json",
}


@pytest.fixture(scope="module", params=MODELS)
def remake(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> tuple[str, Path, list[str]]:
    from nightshift.engines.trl.base_model import rebuild

    output = tmp_path_factory.mktemp("base") / "model"
    steps: list[str] = []
    rebuild(ROOT, request.param, steps.append, output, NUM_STEPS)
    return request.param, output, steps


def test_the_remake_has_the_files_and_the_shape_of_the_shipped_model(remake: tuple[str, Path, list[str]]) -> None:
    name, output, steps = remake
    shipped = ROOT / name
    assert {path.name for path in output.iterdir()} == FILES
    assert steps[1:] == [f"supervised step {NUM_STEPS} / {NUM_STEPS}"]
    assert (output / "config.json").read_bytes() == (shipped / "config.json").read_bytes()
    # The tokenizer depends on the data only, so the recipe still makes the one that ships.
    assert (output / "tokenizer.json").read_bytes() == (shipped / "tokenizer.json").read_bytes()
    assert (output / "chat_template.jinja").read_bytes() == (shipped / "chat_template.jinja").read_bytes()


def _load(folder: Path, environment: str) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": "Why?"}]
    losses = []
    for (asked, answered), *_ in islice(import_module(f"nightshift_{environment}.documents").documents(99), 50):
        question = [{"role": "user", "content": asked}]
        prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=True)
        answer = tokenizer(answered)["input_ids"] + [tokenizer.eos_token_id]
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


def test_transformers_loads_it_and_a_few_steps_have_taught_it_something(remake: tuple[str, Path, list[str]]) -> None:
    facts = _load(remake[1], MODELS[remake[0]])
    assert facts["text"] == "Question: Why?\nAnswer: "
    assert facts["digits"] == 4  # a token a digit
    assert facts["odd"] == "caf\u00e9 \u2603"  # any text survives
    assert facts["logits"] == facts["vocabulary"]
    assert facts["ends"] == ["<|im_end|>", True]
    assert facts["loss"] < 5.5  # an untrained model: ln 514 = 6.2


def test_a_model_without_a_recipe_is_refused_in_one_line(tmp_path: Path) -> None:
    from nightshift.engines.trl.base_model import rebuild

    with pytest.raises(UsageError, match=r"Qwen/Qwen2 is not made here\. Write model = one of models/arithmetic-base,"):
        rebuild(ROOT, "Qwen/Qwen2", print, tmp_path / "model", 1)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("name", MODELS)
def test_the_shipped_model_is_small_and_knows_the_format(name: str) -> None:
    assert sum(path.stat().st_size for path in (ROOT / name).iterdir()) < 2e6
    facts = _load(ROOT / name, MODELS[name])
    assert 350_000 <= facts["parameters"] <= 1_000_000
    assert facts["loss"] < 0.5
