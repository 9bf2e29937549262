"""Makes a tiny base model of the embedded engine: one of those in models/.

    uv run tools/base_model.py models/arithmetic-base [--output DIR] [--num-steps N]


Supervised learning on chats of the environments of a recipe (tools/documents.py): they keep the
form and name what is right often, seldom or hardly ever. What is left for reinforcement learning is to find out
which of the model's own guesses are right.

The number of steps is fixed, not the seconds, so that every machine makes an equally able model. The
figures of the models that ship stand in models/*/README.md.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nightshift.config.rules import EnvironmentRules
from nightshift.evaluation import environment

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

Chat = list[tuple[str, str]]  # what is asked, what is answered

ROOT = Path(__file__).resolve().parents[1]
SEED = 0
WARMUP_STEPS = 30
DECAY_SHARE = 0.6  # of all steps, linear to 0 at the end
MUON_LR = 0.02
ADAMW_LR = 3e-3

MODEL = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "intermediate_size": 336,
    "rope_theta": 10_000.0,
    "initializer_range": 0.05,
    "tie_word_embeddings": True,
}
MAX_VOCABULARY = 640
PAD, EOS = "<|endoftext|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message.role == 'user' -%}{{ 'Question: ' + message.content + '\\nAnswer: ' }}"
    "{%- elif message.role == 'assistant' -%}{{ message.content + '" + EOS + "\\n' }}"
    "{%- else -%}{{ raise_exception('only user and assistant messages') }}{%- endif -%}"
    "{%- endfor -%}"
)


@dataclass(frozen=True, slots=True)
class Recipe:
    """What makes one model: the environments whose documents it reads in turn, more often named twice; for how long."""

    environments: tuple[str, ...]
    max_position_embeddings: int
    num_steps: int
    tokens_per_step: int = 8192  # padded


RECIPES = {
    "models/arithmetic-base": Recipe(("arithmetic",), 512, 300),
    "models/mixed-base": Recipe((*["arithmetic"] * 3, "countdown", *["tictactoe"] * 3), 2048, 2000),
    "models/tictactoe-base": Recipe(("tictactoe",), 512, 400),
}


@click.command()
@click.argument("model", type=click.Choice([*RECIPES]))
@click.option("--output", type=click.Path(path_type=Path, file_okay=False), help="Default: its place in the checkout.")
@click.option("--num-steps", type=click.IntRange(min=1), help="Default: as many as the model that ships was made with.")
def rebuild(model: str, output: Path | None, num_steps: int | None) -> None:
    """Train MODEL and write it in Hugging Face format. 300 steps take 100 s on 2 cores."""
    # Threads that spin while they wait stall each other as soon as anything else wants a core.
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")
    import torch
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM
    from transformers.utils import logging

    recipe, output = RECIPES[model], output or ROOT / model
    num_steps = num_steps or recipe.num_steps
    print(f"training {output}: its bytes belong to the rules, so the next experiment starts a new campaign")
    logging.disable_progress_bar()
    torch.manual_seed(SEED)
    environment.load(ROOT, [EnvironmentRules(name, 0) for name in ("gsm8k", "arithmetic", "countdown", "tictactoe")])
    tokenizer = _tokenizer(recipe)
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    sizes = MODEL | {"max_position_embeddings": recipe.max_position_embeddings}
    config = Qwen2Config(vocab_size=len(tokenizer), use_cache=True, dtype="float32", **sizes, **ids)
    network = Qwen2ForCausalLM(config)
    _train(network, _batches(recipe, tokenizer), num_steps)
    network.generation_config = GenerationConfig(**ids)
    network.save_pretrained(output)
    tokenizer.save_pretrained(output)


def _documents(recipe: Recipe, seed: int) -> Iterator[Chat]:
    """Endless chats, one of each environment in turn; one named twice gives other chats at its second place."""
    import documents

    sources = [getattr(documents, name)(seed + 10 * place) for place, name in enumerate(recipe.environments)]
    return chain.from_iterable(zip(*sources, strict=True))


def _tokenizer(recipe: Recipe) -> PreTrainedTokenizerBase:
    """Byte-level BPE with Qwen2's rule for splitting text, in which every digit is a token of its own.

    Loaders choose Qwen2's tokenizer class by the type of the model and apply its rule, whatever rule
    the vocabulary was made with: so it has to be this one.
    """
    from transformers import Qwen2Tokenizer

    turns = chain.from_iterable(islice(_documents(recipe, SEED), 8000))
    texts = (f"Question: {asked}\nAnswer: {answered}" for asked, answered in turns)
    tokenizer = Qwen2Tokenizer(pad_token=PAD, eos_token=EOS, model_max_length=recipe.max_position_embeddings)
    tokenizer = tokenizer.train_new_from_iterator(texts, MAX_VOCABULARY, show_progress=False)
    tokenizer.padding_side = "left"
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _batches(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (token ids, labels), both (rows, tokens), of chats of about equal length."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    chats, rng = _documents(recipe, SEED + 1), random.Random(SEED)
    while True:
        rows = sorted(_encoded(list(islice(chats, 4096)), tokenizer), key=lambda row: len(row[0]))
        batches = []
        while rows:
            size = recipe.tokens_per_step // len(rows[-1][0])
            batch, rows = rows[-size:], rows[:-size]
            ids, labels = ([torch.tensor(row[column]) for row in batch] for column in (0, 1))
            batches.append(
                (pad_sequence(ids, batch_first=True), pad_sequence(labels, batch_first=True, padding_value=-100))
            )
        rng.shuffle(batches)
        yield from batches


def _encoded(chats: list[Chat], tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[list[int], list[int]]]:
    """(token ids, labels) of each chat; only what is answered is learned."""
    # What is asked and what is answered are encoded apart, as they are at generation.
    asked = [("\n" if turn else "") + f"Question: {text}\nAnswer: " for c in chats for turn, (text, _) in enumerate(c)]
    answered = [text + EOS for chat in chats for _, text in chat]
    turns = zip(tokenizer(asked)["input_ids"], tokenizer(answered)["input_ids"], strict=True)
    for chat in chats:
        ids: list[int] = []
        labels: list[int] = []
        for prompt, answer in islice(turns, len(chat)):
            ids += prompt + answer
            labels += [-100] * len(prompt) + answer
        yield ids, labels


def _train(model: Any, batches: Iterator[tuple[Tensor, Tensor]], num_steps: int) -> None:
    """Muon on the matrices of the blocks and AdamW on the rest."""
    import torch
    from torch.nn.functional import cross_entropy

    from nightshift.engines.trl.grpo import MuonWithAdamW

    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed_tokens" not in name]
    rest = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed_tokens" in name]
    optimizer = MuonWithAdamW(
        torch.optim.Muon(matrices, lr=MUON_LR, momentum=0.9, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=ADAMW_LR, betas=(0.9, 0.98), weight_decay=0.01),
    )
    decay_steps = max(1, round(DECAY_SHARE * num_steps))
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / WARMUP_STEPS, (num_steps - step) / decay_steps)
    )
    model.train()
    for step, (ids, labels) in enumerate(islice(batches, num_steps), start=1):
        # Rows are padded on the right, where causal attention needs no mask.
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        loss = cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == num_steps:
            print(f"supervised step {step} / {num_steps}")
    model.eval()


if __name__ == "__main__":
    rebuild()
