"""What should fit on which card: the sums behind the presets of memory. Computed, not measured.

    uv run benchmarks/gpu_memory.py          print the tables of docs/gpus.md; a test compares the page with them

Qwen2.5-0.5B: hidden 896, 24 layers, 14 heads, 2 key-value heads of 64, intermediate 4,864, vocabulary 151,936, tied
embeddings, 494,032,768 parameters. GB are 1e9 bytes. prime-rl at its pin (P/) and vLLM 0.26. Bytes a token are upper
bounds of what an eager forward pass keeps; torch.compile keeps less.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nightshift.config.rules import NO_CARD
from nightshift.config.rules_toml import Chosen, rules_of
from nightshift.config.train_toml import parse
from nightshift.engines.prime_rl.config import AC, CHUNK, OFFLOAD, PRESETS, ROW, SEQUENCES, SHARE, TOKENS, with_preset
from nightshift.engines.trl.engine import MEMORY

ROOT = Path(__file__).resolve().parents[1]
GSM8K_PRIME_RL, GSM8K_TRL = (
    rules_of(ROOT, Chosen(environments=["gsm8k"]), engine, 2) for engine in ("prime-rl", "trl")
)
GB = 1e9
HIDDEN, LAYERS, KV, INTERMEDIATE, VOCAB, PARAMETERS = 896, 24, 2 * 64, 4864, 151_936, 494_032_768
PROMPT = 448  # nightshift_gsm8k's PROMPT_TOKENS
KV_BYTES = 2 * KV * LAYERS * 2  # keys and values of a token in bfloat16: 12,288
# A layer keeps of a token, in bfloat16 but for the float32 inside both norms: residuals, norms, q, k, v, the answer of
# attention, gate, up, silu and their product (transformers' Qwen2DecoderLayer, read).
LAYER_BYTES = 22 * HIDDEN + 6 * KV + 8 * INTERMEDIATE
CHECKPOINT_BYTES = 2 * HIDDEN  # with recomputation: a layer's input
# Of an entry of a chunk of logits, in the backward pass: bfloat16, float32, probabilities, gradients twice, bfloat16
# (P/trainer/models/layers/lm_head.py:189-222); whole logits are held in the same forms.
LOGIT_BYTES = 20
VOCAB_CHUNK = 8192  # of the vocabulary at a time (lm_head.py:92)
OTHER_GB = 1.0  # assumed: CUDA's context, cuBLAS, fragmentation
SERVER_OTHER_GB = 1.5  # assumed: the same, CUDA graphs
# prime-rl's float32 output layer keeps no copy of its weights (P/inference/patches.py:661).
SAMPLER_COPIES = 4  # assumed: float32 logits of a step, as logits, scaled, log-probabilities, one to spare
PREFILL_BYTES = 8 * INTERMEDIATE + 8 * HIDDEN  # of a token of a prefill, one layer at a time


def logits_gb(row: int, chunk: int | str) -> float:
    """The output layer of one row: whole, or some tokens by some of the vocabulary, with the weights' gradient."""
    if isinstance(chunk, str):
        return row * VOCAB * LOGIT_BYTES / GB
    return (min(row, chunk) * VOCAB_CHUNK * LOGIT_BYTES + VOCAB * HIDDEN * 2) / GB


def activations_gb(tokens: int, *, is_recomputed: bool) -> float:
    """What the blocks keep of so many tokens; with recomputation their inputs, and one block as a whole."""
    each = CHECKPOINT_BYTES * LAYERS + LAYER_BYTES if is_recomputed else LAYER_BYTES * LAYERS
    return tokens * each / GB


def trainer_gb(values: Mapping[str, Any]) -> dict[str, float]:
    """prime-rl's trainer: one row of seq_len at a time, AdamW, float32 (P/trainer/model.py:824)."""
    return {
        "master weights": 4 * PARAMETERS / GB,
        "gradients": 4 * PARAMETERS / GB,
        "Adam": 0.0 if values[OFFLOAD] else 8 * PARAMETERS / GB,
        "bf16 copies": 2 * PARAMETERS / GB,  # FSDP gathers a block at a time: at most all
        "other": OTHER_GB,
        "activations": activations_gb(values[ROW], is_recomputed=values[AC] is not None),
        "logits": logits_gb(values[ROW], values[CHUNK]),
    }


@dataclass(frozen=True)
class Tokens:
    """What vLLM takes at once; its own choice on a card below 70 GiB."""

    num_seqs: int = 256
    num_batched: int = 8192


def server_gb(share: float, card_gb: float, at_once: Tokens) -> dict[str, float]:
    """vLLM's share of the card; the KV cache has what the rest leaves."""
    parts = {
        "weights": 2 * PARAMETERS / GB,
        "logits": at_once.num_seqs * VOCAB * 4 * SAMPLER_COPIES / GB,
        "prefill": at_once.num_batched * PREFILL_BYTES / GB,
        "other": SERVER_OTHER_GB,
    }
    return {**parts, "KV cache": share * card_gb - sum(parts.values())}


def trl_gb(memory: str, completion: int) -> dict[str, float]:
    """The two moments at which TRL needs most: an update, and sampling. Its loss takes whole logits in float32."""
    fixed = (4 + 4 + 8 + 2) * PARAMETERS / GB + OTHER_GB
    rows, sampled, _ = MEMORY[memory]
    length = PROMPT + completion
    return {
        "update": fixed
        + activations_gb(rows * length, is_recomputed=True)
        + rows * completion * VOCAB * LOGIT_BYTES / GB,
        "sampling": fixed + sampled * length * KV_BYTES / GB + sampled * VOCAB * 4 * SAMPLER_COPIES / GB,
        "evaluation": fixed
        + GSM8K_TRL.decoding.batch_size * (PROMPT + GSM8K_TRL.decoding.max_completion_tokens) * KV_BYTES / GB,
    }


def _cards() -> list[tuple[str, int, int]]:
    names = [name for name in PRESETS if name != NO_CARD]
    return [(name, int(name.split()[0]), int(name.split()[2])) for name in names]


def _rows(header: str, rows: list[list[object]]) -> str:
    names = [name.strip() for name in header.split("|")]
    lines = [names, ["---"] * len(names), *([str(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def trainer_table() -> str:
    """Of train.toml as shipped, on every preset."""
    rows: list[list[object]] = []
    for name, num_cards, card_gb in _cards():
        values = with_preset(parse(b"[orchestrator]\ngroup_size = 4\n"), name)
        parts = trainer_gb(values)
        server = float(values[SHARE]) * card_gb if num_cards == 1 else 0.0  # type: ignore[arg-type]
        total = sum(parts.values()) + server
        cells = [f"{part:.1f}" for part in (*parts.values(), server)]
        rows.append([name, *cells, f"{total:.1f} of {card_gb}", f"{100 * total / card_gb:.0f} %"])
    parts_named = "master weights | gradients | Adam | bf16 copies | other | activations | logits"
    return _rows(f"preset | {parts_named} | server beside it | sum | of the card", rows)


def server_table() -> str:
    """Where the server's share goes, and how many tokens its cache holds."""
    rows: list[list[object]] = []
    for name, _, card_gb in _cards():
        share = float(with_preset(parse(b"[orchestrator]\ngroup_size = 4\n"), name)[SHARE])  # type: ignore[arg-type]
        parts = server_gb(share, card_gb, Tokens(1024, 16_384) if card_gb == 80 else Tokens())
        num = parts["KV cache"] * GB / KV_BYTES
        context = PROMPT + GSM8K_PRIME_RL.max_completion_tokens
        cells = [f"{part:.1f}" for part in parts.values()]
        rows.append([name, f"{share:g}", f"{share * card_gb:.1f}", *cells, f"{num:,.0f}", f"{num / context:.0f}"])
    parts_named = "weights | logits | prefill | other | KV cache"
    return _rows(f"preset | share | GB | {parts_named} | tokens | of {context:,} each", rows)


def caps_table() -> str:
    """What a preset gives and allows."""
    rows: list[list[object]] = []
    for name, _, _ in _cards():
        values, caps = with_preset(parse(b"[orchestrator]\ngroup_size = 4\n"), name), PRESETS[name].caps
        adam = f"{'CPU' if values[OFFLOAD] else 'GPU'}{', always' if OFFLOAD in caps else ''}"
        allowed = [f"{caps[key]:,}" if key in caps else "any" for key in (ROW, SEQUENCES, TOKENS, CHUNK, SHARE)]
        recomputed = "no" if values[AC] is None else "yes"
        rows.append([name, recomputed, adam, f"{PRESETS[name].kept_row:,}", *allowed, f"{values[SHARE]:g}"])
    header = "preset | ac | Adam on | seq_len without ac | seq_len with ac | max_num_seqs | max_num_batched_tokens"
    return _rows(f"{header} | chunk of logits | share at most | share", rows)


def trl_table() -> str:
    """TRL on one GPU, at completions of 512 tokens and at the longest that it may sample."""
    rows: list[list[object]] = []
    for name, (*at_once, longest) in MEMORY.items():
        if name != NO_CARD:
            short, long = (max(trl_gb(name, num).values()) for num in (512, 1024))
            cap = "any" if longest > 2048 else f"{longest:,}"
            rows.append([name, *at_once, cap, f"{short:.1f}", f"{long:.1f}"])
    return _rows("preset | trained at once | sampled at once | max_completion_tokens | GB at 512 | GB at 1,024", rows)


def logits_table() -> str:
    """Why the output layer is cut into chunks: bytes by the whole vocabulary."""
    rows: list[list[object]] = [
        [f"{row:,}", f"{logits_gb(row, 8192):.1f}", f"{logits_gb(row, 'disabled'):.1f}"] for row in (2048, 8192, 32_768)
    ]
    return _rows('seq_len | GB in chunks of 8,192 x 8,192 | GB whole ("disabled"), 151,936 a token', rows)


TABLES: dict[str, Callable[[], str]] = {
    "caps": caps_table,
    "trainer": trainer_table,
    "server": server_table,
    "logits": logits_table,
    "trl": trl_table,
}


def table(name: str) -> str:
    """One table of docs/gpus.md."""
    return TABLES[name]()


if __name__ == "__main__":
    sys.stdout.write("\n\n".join(f"{name}:\n\n{table(name)}" for name in TABLES) + "\n")
