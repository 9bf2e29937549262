"""Qwen2's forward pass in parts, for the sampler and for log-probabilities: a fraction of transformers' time on a CPU.

The same mathematics as transformers' Qwen2 (tests compare values and gradients), with less waste: padding is not
computed, the prompt of a group is read once, and the three projections of attention, like the two of the gated MLP,
are one product. Of the prompt the last layer computes keys and values only.

A batch has u prompts of at most p tokens, padded on the left. A token's position is its column: rotary embeddings know
distances only, which padding does not change. `packed` tensors (tokens, ...) hold the real tokens only, row after row.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

STATIC_ROPE = ("default", "linear", "yarn", "llama3")  # the same for every length of a batch


def check(config: Any) -> None:
    """ValueError for a model whose forward pass is not the one computed here."""
    if config.model_type != "qwen2":
        raise ValueError(f"config.json of the model has model_type = {config.model_type}. This engine trains qwen2")
    rope = (config.rope_parameters or {}).get("rope_type", "default")
    problems = {
        f"hidden_act = {config.hidden_act}": config.hidden_act != "silu",
        f"attention_dropout = {config.attention_dropout}": config.attention_dropout != 0,
        "sliding attention": any(kind != "full_attention" for kind in config.layer_types),
        f"rope_type = {rope}": rope not in STATIC_ROPE,
    }
    if unlike := [text for text, is_unlike in problems.items() if is_unlike]:
        raise ValueError(
            f"config.json of the model has {', '.join(unlike)}. This engine trains qwen2 with silu, full attention, no "
            f"dropout and a rope_type of {', '.join(STATIC_ROPE)}"
        )


class Qwen2:
    """The weights of a model as they are now; gradients go through to the model."""

    def __init__(self, model: Any, length: int) -> None:
        """`length`: how many positions are needed."""
        config, backbone = model.config, model.model
        self.num_heads, self.num_kv = config.num_attention_heads, config.num_key_value_heads
        self.embed = backbone.embed_tokens
        self.layers = [_fused(layer) for layer in backbone.layers]
        self._eps: float = config.rms_norm_eps
        self._norm, self._head = backbone.norm.weight, model.lm_head.weight
        positions = torch.arange(length, device=model.device)[None]
        cosines, sines = backbone.rotary_emb(self._head, positions)  # (1, length, size)
        # x -> cos x + sin rotate_half(x); the sign of rotate_half moves into the sines.
        half = sines.shape[-1] // 2
        sines = torch.cat([-sines[..., :half], sines[..., half:]], dim=-1)
        self._cosines, self._sines = cosines[0, :, None], sines[0, :, None]

    def heads(self, weights: dict[str, Tensor], hidden: Tensor, positions: Any) -> tuple[Tensor, Tensor]:
        """Queries (tokens, heads, size) of packed tokens, and their keys and values (tokens, 2 * kv heads, size).

        `positions`: one for all tokens, or one for each."""
        normed = rms_norm(hidden, hidden.shape[-1:], weights["attention_norm"], self._eps)
        heads = linear(normed, weights["qkv"], weights["qkv_bias"])
        heads = heads.view(len(heads), self.num_heads + 2 * self.num_kv, self._cosines.shape[-1])
        turned = heads[:, : -self.num_kv]  # queries and keys
        turned = turned * self._cosines[positions] + turned.roll(turned.shape[-1] // 2, -1) * self._sines[positions]
        return turned[:, : self.num_heads], torch.cat([turned[:, self.num_heads :], heads[:, -self.num_kv :]], dim=1)

    def rest(self, weights: dict[str, Tensor], hidden: Tensor, attended: Tensor) -> Tensor:
        """Packed tokens after the layer, from those before it and the output of attention (tokens, heads * size)."""
        hidden = hidden + linear(attended, weights["output"])
        normed = rms_norm(hidden, hidden.shape[-1:], weights["mlp_norm"], self._eps)
        gate, up = linear(normed, weights["gate_up"]).chunk(2, -1)
        return hidden + linear(silu(gate) * up, weights["down"])

    def logits(self, hidden: Tensor) -> Tensor:
        """(tokens, vocabulary) of packed tokens after the last layer."""
        return linear(rms_norm(hidden, hidden.shape[-1:], self._norm, self._eps), self._head)

    def read(self, ids: Tensor, is_real: Tensor) -> list[Tensor]:
        """Keys and values (u, p, 2 * kv heads, size) of each layer, 0 at padding, of prompts (u, p)."""
        length = ids.shape[1]
        positions = torch.arange(length, device=ids.device).expand_as(ids)[is_real]
        causal = torch.ones(length, length, dtype=torch.bool, device=ids.device).tril()
        # Padding sees itself: a softmax over nothing has no gradient.
        mask = causal & is_real[:, None] | torch.eye(length, dtype=torch.bool, device=ids.device)
        hidden, by_layer = self.embed(ids[is_real]), list[Tensor]()
        for weights in self.layers:
            queries, pairs = self.heads(weights, hidden, positions)
            by_layer.append(padded(pairs, is_real))
            if len(by_layer) < len(self.layers):
                attended = self.attend(padded(queries, is_real), by_layer[-1], mask)[is_real]
                hidden = self.rest(weights, hidden, attended)
        return by_layer

    def attend(self, queries: Tensor, pairs: Tensor, mask: Tensor) -> Tensor:
        """(rows, n, heads * size) from queries (rows, n, heads, size), keys and values (rows, m, 2 * kv heads, size),
        and which of m each of n sees (rows, n, m)."""
        keys, values = pairs.transpose(1, 2).chunk(2, dim=1)
        is_shared = self.num_kv < self.num_heads
        if is_shared and queries.is_cuda:  # CUDA's fast kernels take no mask together with shared keys
            keys, values = (each.repeat_interleave(self.num_heads // self.num_kv, 1) for each in (keys, values))
            is_shared = False
        attended = scaled_dot_product_attention(
            queries.transpose(1, 2), keys, values, mask[:, None], enable_gqa=is_shared
        )
        return attended.transpose(1, 2).flatten(2)


def padded(packed: Tensor, is_real: Tensor) -> Tensor:
    """(rows, columns, ...) with 0 where no token is."""
    where = is_real.flatten().nonzero()[:, 0]
    empty = packed.new_zeros(is_real.numel(), *packed.shape[1:])
    return empty.index_copy(0, where, packed).view(*is_real.shape, *packed.shape[1:])


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
