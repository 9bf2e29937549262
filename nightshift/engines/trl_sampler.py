"""Batched sampling from a small causal language model, several times faster than `generate` on a CPU.

Every prompt is read once for its whole group, finished rows leave the batch, and keys and values are
written into a preallocated cache instead of being concatenated at every token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

COMPACT_SHARE = 0.125  # of the batch must be finished before its rows are worth moving


@dataclass(frozen=True, slots=True)
class Sample:
    """Token ids of one completion, its end token included unless it was `truncated`."""

    ids: list[int]
    truncated: bool


class _BufferLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values of one layer, (rows, heads, positions, size), in a buffer with room for all positions."""

    def __init__(self, prompt: DynamicLayer, group_size: int, num_new: int) -> None:
        super().__init__()
        self.is_initialized = True
        self.length: int = prompt.get_seq_length()
        self.keys, self.values = (
            _with_room(tensor, group_size, self.length + num_new) for tensor in (prompt.keys, prompt.values)
        )

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        start, self.length = self.length, self.length + key_states.shape[2]
        self.keys[:, :, start : self.length] = key_states
        self.values[:, :, start : self.length] = value_states
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    def get_seq_length(self) -> int:
        return self.length

    def batch_select_indices(self, indices: Tensor) -> None:
        self.keys, self.values = (self._select(tensor, indices) for tensor in (self.keys, self.values))

    def _select(self, tensor: Tensor, indices: Tensor) -> Tensor:
        kept = tensor[: len(indices)]
        kept[:, :, : self.length] = tensor[indices, :, : self.length]
        return kept


def _with_room(tensor: Tensor, repeats: int, capacity: int) -> Tensor:
    rows, heads, length, size = tensor.shape
    buffer = tensor.new_empty(rows, repeats, heads, capacity, size)
    buffer[:, :, :, :length] = tensor[:, None]
    return buffer.flatten(0, 1)


@torch.no_grad()
def sample(
    model: Any, prompts: Sequence[list[int]], group_size: int, max_tokens: int, temperature: float, end_ids: set[int]
) -> list[Sample]:
    """`group_size` completions of each prompt, in the order of the prompts; greedy at temperature 0."""
    device = model.device
    width = max(map(len, prompts))
    prompt_ids = torch.tensor([[0] * (width - len(ids)) + ids for ids in prompts], device=device)
    lengths = torch.tensor([len(ids) for ids in prompts], device=device)
    mask = torch.arange(width, device=device) >= width - lengths[:, None]
    cache: Cache = DynamicCache()
    logits = model(input_ids=prompt_ids, attention_mask=mask, past_key_values=cache, logits_to_keep=1).logits[:, -1]
    cache = Cache(layers=[_BufferLayer(layer, group_size, max_tokens) for layer in cache.layers])
    logits, mask = logits.repeat_interleave(group_size, 0), mask.repeat_interleave(group_size, 0)

    ends = torch.tensor(sorted(end_ids), device=device)
    rows = torch.arange(len(logits), device=device)  # which completion each row of the batch is
    tokens = torch.full((len(logits), max_tokens), ends[0].item(), device=device)
    alive = torch.ones_like(rows, dtype=torch.bool)
    for position in range(max_tokens):
        chosen = _choose(logits, temperature)
        tokens[rows, position] = chosen
        alive &= ~torch.isin(chosen, ends)
        num_alive = int(alive.sum())
        if num_alive == 0 or position + 1 == max_tokens:
            break
        if num_alive <= (1 - COMPACT_SHARE) * len(rows):
            kept = alive.nonzero().squeeze(1)
            rows, chosen, mask, alive = rows[kept], chosen[kept], mask[kept], alive[kept]
            cache.batch_select_indices(kept)
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
        logits = model(input_ids=chosen[:, None], attention_mask=mask, past_key_values=cache).logits[:, -1]
    return [_cut(row, end_ids) for row in tokens.tolist()]


def _cut(row: list[int], end_ids: set[int]) -> Sample:
    """A finished row may go on after its end token until the batch is compacted."""
    for position, token in enumerate(row):
        if token in end_ids:
            return Sample(row[: position + 1], truncated=False)
    return Sample(row, truncated=True)


def _choose(logits: Tensor, temperature: float) -> Tensor:
    """One token id a row."""
    if temperature == 0:
        return logits.argmax(dim=-1)
    # By inverting the distribution function: one random number a row, where multinomial draws one a token.
    cumulated = torch.softmax(logits.float() / temperature, dim=-1).cumsum(dim=-1)
    threshold = torch.rand(len(logits), 1, device=logits.device) * cumulated[:, -1:]
    return torch.searchsorted(cumulated, threshold, right=True).squeeze(1).clamp(max=logits.shape[-1] - 1)
