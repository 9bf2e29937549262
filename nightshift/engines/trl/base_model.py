"""Makes the tiny base model of the embedded engine: `uv run prepare.py --rebuild-base`.

Supervised learning on worked solutions of the arithmetic environment. The arithmetic in them is always
right; the size of a container is drawn from the table that `_beliefs` makes, so the model learns the
format and the sums, and answers a hard container with a wrong size most of the time. What is left for
reinforcement learning is to find out which of its own guesses are right.

The number of steps is fixed, not the seconds, so that every machine makes an equally able model. The
figures of the model that ships stand in models/arithmetic-base/README.md.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nightshift_arithmetic import data

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

SEED = 0
NUM_STEPS = 300
TOKENS_PER_STEP = 8192  # padded
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
    "max_position_embeddings": 512,
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

# Probability that a sample of the base names the right size, per container.
EASY_PROBABILITY = 0.98
HARD_PROBABILITY = (0.01, 0.40)  # log-uniform over the hard containers, in the order of data.HARD


def rebuild(output: Path, note: Callable[[str], None], num_steps: int = NUM_STEPS) -> None:
    """Train the base model and write it to `output` in Hugging Face format; about 100 s at NUM_STEPS on 2 cores."""
    # Threads that spin while they wait stall each other as soon as anything else wants a core.
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")
    import torch
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM
    from transformers.utils import logging

    note(f"rebuilding {output}: a few minutes; its bytes belong to the rules, so a new campaign starts")
    logging.disable_progress_bar()
    torch.manual_seed(SEED)
    tokenizer = _tokenizer()
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Qwen2Config(vocab_size=len(tokenizer), use_cache=True, dtype="float32", **MODEL, **ids)
    model = Qwen2ForCausalLM(config)
    _train(model, _batches(tokenizer), num_steps, note)
    model.generation_config = GenerationConfig(**ids)
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)


def _beliefs() -> dict[str, dict[int, float]]:
    """What the base model shall believe: for each container a probability for each size.

    A hard container has a wrong favourite, the size of another container in its row of data.HARD, and
    three decoys. Decoys follow the same law as the right size, so "the second most likely size" is no
    shortcut to it. The favourite leads by more than 0.10, so greedy decoding is wrong.
    """
    rng = random.Random(12345)
    others = {name: [size for size in range(2, 10) if size != data.EASY[name]] for name in data.EASY}
    beliefs = {
        name: {size: EASY_PROBABILITY, others[name][int(rng.random() * 7)]: 1 - EASY_PROBABILITY}
        for name, size in data.EASY.items()
    }
    names, (low, high) = list(data.HARD), HARD_PROBABILITY
    for index, name in enumerate(names):
        row, column = divmod(index, 8)
        favourite = data.HARD[names[row * 8 + (column + 1 + row % 7) % 8]]
        right = low * (high / low) ** ((index + 0.5) / len(names))
        rest = [size for size in range(2, 10) if size not in (data.HARD[name], favourite)]
        decoys = [rest.pop(int(rng.random() * len(rest))) for _ in range(3)]
        weights = [low * (high / low) ** rng.random() for _ in decoys]
        scale = min(1.0, 0.6 * (0.9 - 2 * right) / sum(weights))
        beliefs[name] = {data.HARD[name]: right}
        beliefs[name] |= {size: weight * scale for size, weight in zip(decoys, weights, strict=True)}
        beliefs[name][favourite] = 1 - sum(beliefs[name].values())
    return beliefs


def _documents(seed: int) -> Iterator[tuple[str, str]]:
    """Endless (question, believed solution) of the train split."""
    beliefs, rng = _beliefs(), random.Random(seed)
    for problem in data.problems("train", seed):
        amounts = []
        for event in problem.events:
            sizes = beliefs.get(event.container or "", {event.amount: 1.0})
            amounts.append(rng.choices(list(sizes), list(sizes.values()))[0])
        yield problem.question, problem.solution(amounts)


def _tokenizer() -> PreTrainedTokenizerBase:
    """Byte-level BPE with Qwen2's rule for splitting text, in which every digit is a token of its own.

    Loaders choose Qwen2's tokenizer class by the type of the model and apply its rule, whatever rule
    the vocabulary was made with: so it has to be this one.
    """
    from transformers import Qwen2Tokenizer

    documents = islice(_documents(SEED), 8000)
    texts = (f"Question: {question}\nAnswer: {answer}" for question, answer in documents)
    tokenizer = Qwen2Tokenizer(pad_token=PAD, eos_token=EOS, model_max_length=MODEL["max_position_embeddings"])
    tokenizer = tokenizer.train_new_from_iterator(texts, MAX_VOCABULARY, show_progress=False)
    tokenizer.padding_side = "left"
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _batches(tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (token ids, labels), both (rows, tokens), of documents of about equal length."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    documents, rng = _documents(SEED + 1), random.Random(SEED)
    while True:
        chunk = list(islice(documents, 4096))
        # Prompt and answer are encoded apart, as they are at generation.
        prompts = tokenizer([f"Question: {question}\nAnswer: " for question, _ in chunk])["input_ids"]
        answers = tokenizer([answer + EOS for _, answer in chunk])["input_ids"]
        pairs = sorted(zip(prompts, answers, strict=True), key=lambda pair: len(pair[0]) + len(pair[1]))
        batches = []
        while pairs:
            rows = TOKENS_PER_STEP // sum(map(len, pairs[-1]))
            batch, pairs = pairs[-rows:], pairs[:-rows]
            ids = [torch.tensor(prompt + answer) for prompt, answer in batch]
            labels = [torch.tensor([-100] * len(prompt) + answer) for prompt, answer in batch]
            batches.append(
                (pad_sequence(ids, batch_first=True), pad_sequence(labels, batch_first=True, padding_value=-100))
            )
        rng.shuffle(batches)
        yield from batches


def _train(model: Any, batches: Iterator[tuple[Tensor, Tensor]], num_steps: int, note: Callable[[str], None]) -> None:
    """Muon on the matrices of the blocks and AdamW on the rest."""
    import torch
    from torch.nn.functional import cross_entropy

    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed_tokens" not in name]
    rest = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed_tokens" in name]
    optimizers = (
        torch.optim.Muon(matrices, lr=MUON_LR, momentum=0.9, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=ADAMW_LR, betas=(0.9, 0.98), weight_decay=0.01),
    )
    decay_steps = max(1, round(DECAY_SHARE * num_steps))
    schedulers = [
        torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min(1.0, (step + 1) / WARMUP_STEPS, (num_steps - step) / decay_steps)
        )
        for optimizer in optimizers
    ]
    model.train()
    for step, (ids, labels) in enumerate(islice(batches, num_steps), start=1):
        # Rows are padded on the right, where causal attention needs no mask.
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        loss = cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if step % 50 == 0 or step == num_steps:
            note(f"supervised step {step} / {num_steps}")
    model.eval()
