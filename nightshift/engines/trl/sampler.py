"""Qwen2's forward pass, sampling, and log-probabilities, several times faster than transformers on a CPU.

The result equals that of transformers' Qwen2 (tests compare values and gradients). It is faster because padding is not
computed, a prompt is read once for its whole group, keys and values are written in place, finished rows are removed
from the batch, and the projections of attention, and those of the gated MLP, are one product. The last layer computes
only keys and values of the prompt. downloads.py refuses models with another forward pass.

A batch has u prompts of at most p tokens, padded on the left. The position of a token is its column: rotary embeddings
depend on distances only, which padding does not change. `packed` tensors (tokens, ...) contain no padding.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear, pad, rms_norm, scaled_dot_product_attention, silu

COMPACT_SHARE = 0.125  # when this share of a batch is finished, the other rows are moved together


class Qwen2:
    """The current weights of a model. Gradients reach the model."""

    def __init__(self, model: Any, length: int) -> None:
        """`length`: the number of positions."""
        config, backbone = model.config, model.model
        self.num_heads, self.num_kv = config.num_attention_heads, config.num_key_value_heads
        self.embed = backbone.embed_tokens
        self.layers = [_fused(layer) for layer in backbone.layers]
        self._eps: float = config.rms_norm_eps
        self._norm, self._head = backbone.norm.weight, model.lm_head.weight
        cosines, sines = backbone.rotary_emb(self._head, torch.arange(length, device=model.device)[None])
        # x -> cos x + sin rotate_half(x); the sines include the sign of rotate_half.
        half = sines.shape[-1] // 2
        sines = torch.cat([-sines[..., :half], sines[..., half:]], dim=-1)
        self._cosines, self._sines = cosines[0, :, None], sines[0, :, None]  # (length, 1, size)

    def heads(self, weights: dict[str, Tensor], hidden: Tensor, positions: Any) -> tuple[Tensor, Tensor]:
        """Return queries (tokens, heads, size) of packed tokens, and keys and values (tokens, 2 * kv heads, size)."""
        normed = rms_norm(hidden, hidden.shape[-1:], weights["attention_norm"], self._eps)
        heads = linear(normed, weights["qkv"], weights["qkv_bias"])
        heads = heads.view(len(heads), self.num_heads + 2 * self.num_kv, self._cosines.shape[-1])
        turned = heads[:, : -self.num_kv]  # queries and keys
        turned = turned * self._cosines[positions] + turned.roll(turned.shape[-1] // 2, -1) * self._sines[positions]
        return turned[:, : self.num_heads], torch.cat([turned[:, self.num_heads :], heads[:, -self.num_kv :]], dim=1)

    def rest(self, weights: dict[str, Tensor], hidden: Tensor, attended: Tensor) -> Tensor:
        """Return packed tokens after a layer, from its input `hidden` and the attention (tokens, heads * size)."""
        hidden = hidden + linear(attended, weights["output"])
        normed = rms_norm(hidden, hidden.shape[-1:], weights["mlp_norm"], self._eps)
        gate, up = linear(normed, weights["gate_up"]).chunk(2, -1)
        return hidden + linear(silu(gate) * up, weights["down"])

    def logits(self, hidden: Tensor) -> Tensor:
        """Return (tokens, vocabulary) of packed tokens after the last layer."""
        return linear(rms_norm(hidden, hidden.shape[-1:], self._norm, self._eps), self._head)

    def read(self, ids: Tensor, is_real: Tensor) -> list[Tensor]:
        """Return keys and values (u, p, 2 * kv heads, size) of each layer, 0 at padding, of prompts (u, p)."""
        length = ids.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=ids.device).tril()
        # Padding attends to itself, because the softmax of an empty row is NaN.
        mask = causal & is_real[:, None] | torch.eye(length, dtype=torch.bool, device=ids.device)
        return self.forward(ids, is_real, mask)[0]

    def forward(
        self, ids: Tensor, is_real: Tensor, mask: Tensor, before: Sequence[Tensor] = ()
    ) -> tuple[list[Tensor], Tensor]:
        """Return keys and values of each layer, and packed tokens after the last layer, of ids (rows, n).

        Args:
            mask: as in `attend`.
            before: keys and values of each layer at earlier positions; without them the last layer is not completed.
        """
        start = before[0].shape[1] if before else 0
        positions = torch.arange(start, start + ids.shape[1], device=ids.device).expand_as(ids)[is_real]
        hidden, by_layer = self.embed(ids[is_real]), list[Tensor]()
        for index, weights in enumerate(self.layers):
            queries, pairs = self.heads(weights, hidden, positions)
            by_layer.append(padded(pairs, is_real))
            if before or index + 1 < len(self.layers):
                context = torch.cat([before[index], by_layer[-1]], dim=1) if before else by_layer[-1]
                attended = self.attend(padded(queries, is_real), context, mask)[is_real]
                hidden = self.rest(weights, hidden, attended)
        return by_layer, hidden

    def attend(self, queries: Tensor, pairs: Tensor, mask: Tensor) -> Tensor:
        """Return the attention (rows, n, heads * size).

        Args:
            queries: (rows, n, heads, size).
            pairs: keys and values (rows, m, 2 * kv heads, size).
            mask: which of m positions each of n queries attends to (rows, n, m).
        """
        keys, values = pairs.transpose(1, 2).chunk(2, dim=1)
        is_shared = self.num_kv < self.num_heads
        if is_shared and queries.is_cuda:  # CUDA's fast kernels do not support a mask with shared keys
            keys, values = (half.repeat_interleave(self.num_heads // self.num_kv, 1) for half in (keys, values))
            is_shared = False
        queries = queries.transpose(1, 2)
        attended = scaled_dot_product_attention(queries, keys, values, mask[:, None], enable_gqa=is_shared)
        return attended.transpose(1, 2).flatten(2)


def padded(packed: Tensor, is_real: Tensor) -> Tensor:
    """Return (rows, columns, ...) from packed tokens, with 0 at padding."""
    empty = packed.new_zeros(is_real.numel(), *packed.shape[1:])
    return empty.index_copy(0, is_real.flatten().nonzero()[:, 0], packed).view(*is_real.shape, *packed.shape[1:])


def _fused(layer: Any) -> dict[str, Tensor]:
    attention, mlp = layer.self_attn, layer.mlp
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    return {
        "attention_norm": layer.input_layernorm.weight,
        "qkv": torch.cat([projection.weight for projection in projections]),
        "qkv_bias": torch.cat([projection.bias for projection in projections]),
        "output": attention.o_proj.weight,
        "mlp_norm": layer.post_attention_layernorm.weight,
        "gate_up": torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]),
        "down": mlp.down_proj.weight,
    }


def log_probs_and_entropies(
    model: Any, ids: Tensor, mask: Tensor, is_trained: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropies in nats of the trained tokens, both (b, n), 0 elsewhere.

    `ids` and `mask` are (b, l): prompts padded on the left, completions padded on the right to the last n columns.
    `is_trained` is (b, n). Entropies have no gradient.
    """
    # The last token of the prompt is read with the completion: each position predicts the next token.
    n = is_trained.shape[1]
    num_prefix = ids.shape[1] - n - 1
    is_real = mask.bool()
    is_read = is_real[:, num_prefix + 1 :]
    prefixes, owner = ids.new_zeros(1, 0), ids.new_zeros(len(ids))  # if all prompts have one token
    if num_prefix > 0:
        real = ids[:, :num_prefix].where(is_real[:, :num_prefix], -1)
        prefixes, owner = torch.unique(real, dim=0, return_inverse=True)
    is_prefix = prefixes >= 0
    qwen2 = Qwen2(model, ids.shape[1] - 1)
    before = [pairs[owner] for pairs in qwen2.read(prefixes, is_prefix)]
    causal = torch.ones(n, n, dtype=torch.bool).tril()
    seen = torch.cat([is_prefix[owner][:, None].expand(-1, n, -1), causal.expand(len(ids), -1, -1)], dim=2)
    _, hidden = qwen2.forward(ids[:, num_prefix:-1], is_read, seen, before)
    all_log_probs = (qwen2.logits(hidden[is_trained[is_read]]) / temperature).log_softmax(-1)
    log_probs = all_log_probs.gather(1, ids[:, num_prefix + 1 :][is_trained][:, None])[:, 0]
    with torch.no_grad():
        entropies = -torch.linalg.vecdot(all_log_probs.exp(), all_log_probs)
    empty = log_probs.new_zeros(is_trained.shape)
    return empty.masked_scatter(is_trained, log_probs), empty.masked_scatter(is_trained, entropies)


class Sample(NamedTuple):
    """Token ids of one completion, with its end token unless `truncated`."""

    ids: list[int]
    truncated: bool


@torch.no_grad()
def sample(
    model: Any, prompts: Sequence[list[int]], group_size: int, max_tokens: int, temperature: float, end_ids: set[int],
    look: Callable[[], None] = lambda: None,
) -> list[Sample]:  # fmt: skip
    """Return `group_size` completions of each prompt, in the order of the prompts; greedy at temperature 0.

    `look` is called before every token, and may raise.
    """
    decoder = _Decoder(model, prompts, group_size, max_tokens)
    ends, chosen = torch.tensor(sorted(end_ids), device=model.device), decoder.last
    rows = torch.arange(len(chosen), device=model.device)  # the completion of each row of the batch
    tokens = torch.full((len(chosen), max_tokens), ends[0].item(), device=model.device)
    alive = torch.ones_like(rows, dtype=torch.bool)
    for position in range(max_tokens):
        look()
        logits = decoder.step(chosen)
        if temperature == 0:
            chosen = logits.argmax(dim=-1)
        else:  # inverts the distribution function with one random number per row; multinomial draws one per token
            cumulated = torch.softmax(logits.float() / temperature, dim=-1).cumsum(dim=-1)
            threshold = torch.rand(len(logits), 1, device=logits.device) * cumulated[:, -1:]
            chosen = torch.searchsorted(cumulated, threshold, right=True).squeeze(1).clamp(max=logits.shape[-1] - 1)
        tokens[rows, position] = chosen
        alive &= ~torch.isin(chosen, ends)
        num_alive = int(alive.sum())
        if num_alive == 0:
            break
        if num_alive <= (1 - COMPACT_SHARE) * len(rows):
            kept = alive.nonzero().squeeze(1)
            rows, chosen, alive = rows[kept], chosen[kept], alive[kept]
            decoder.keep(kept)
    samples = []
    for row in tokens.tolist():  # a finished row may have more tokens, sampled before the batch was compacted
        length = next((position for position, token in enumerate(row, 1) if token in end_ids), None)
        samples.append(Sample(row[:length], truncated=length is None))
    return samples


class _Decoder:
    """The state of a batch between two tokens, and the forward pass for the next token of each row."""

    def __init__(self, model: Any, prompts: Sequence[list[int]], group_size: int, max_tokens: int) -> None:
        """Read all prompts but their last tokens, each once for its group."""
        self._position = max(map(len, prompts)) - 1
        capacity, device = self._position + max_tokens, model.device
        self._qwen2 = Qwen2(model, capacity)
        ids = torch.tensor([[0] * (self._position + 1 - len(prompt)) + prompt for prompt in prompts], device=device)
        lengths = torch.tensor([len(prompt) - 1 for prompt in prompts], device=device)
        mask = torch.arange(capacity, device=device) >= self._position - lengths[:, None]
        self.last: Tensor = ids[:, -1].repeat_interleave(group_size)  # the last token of each row's prompt
        # Attention would convert a boolean mask to these biases again for every token.
        bias = torch.zeros(mask.shape, device=device).masked_fill(~mask, -torch.inf)
        self._mask = bias.repeat_interleave(group_size, 0)[:, None, None]
        self._cache = [
            # (rows, heads, positions, size), with room for the new positions
            [
                pad(half, (0, 0, 0, max_tokens)).repeat_interleave(group_size, 0)
                for half in pairs.transpose(1, 2).chunk(2, dim=1)
            ]
            for pairs in self._qwen2.read(ids[:, :-1], mask[:, : self._position])
        ]

    def step(self, tokens: Tensor) -> Tensor:
        """Return logits (rows, vocabulary) after one more token of each row."""
        qwen2, end = self._qwen2, self._position + 1
        hidden, mask = qwen2.embed(tokens), self._mask[..., :end]
        for weights, (keys, values) in zip(qwen2.layers, self._cache, strict=True):
            queries, pairs = qwen2.heads(weights, hidden, self._position)
            keys[:, :, self._position], values[:, :, self._position] = pairs.chunk(2, dim=1)
            # The dimension of positions contains the heads that share keys and values, so nothing is repeated.
            queries = queries.reshape(len(tokens), qwen2.num_kv, -1, queries.shape[-1])
            attended = scaled_dot_product_attention(queries, keys[:, :, :end], values[:, :, :end], mask)
            hidden = qwen2.rest(weights, hidden, attended.flatten(1))
        self._position = end
        return qwen2.logits(hidden)

    def keep(self, rows: Tensor) -> None:
        """Drop every other row of the batch."""
        self._mask = self._mask[rows]
        for layer in self._cache:
            for index, tensor in enumerate(layer):
                layer[index] = tensor[: len(rows)]  # in place: keeps the room for new positions
                layer[index][:, :, : self._position] = tensor[rows, :, : self._position]
