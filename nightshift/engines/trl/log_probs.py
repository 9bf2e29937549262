"""Log-probabilities of completions on a CPU, in place of TRL's."""

from typing import Any

import torch
from torch import Tensor

from nightshift.engines.trl.qwen2 import Qwen2, padded


def log_probs_and_entropies(
    model: Any, ids: Tensor, mask: Tensor, is_trained: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies in nats of the completion tokens that are trained, both (b, n), 0 elsewhere.

    `ids` and `mask` are (b, l): prompts padded on the left, completions padded on the right to the last n columns.
    `is_trained` is (b, n). Entropies have no gradient.
    """
    # The last token of the prompt is read with the completion: each position then predicts the token beside it.
    n = is_trained.shape[1]
    num_prefix = ids.shape[1] - n - 1
    is_real = mask.bool()
    is_read = is_real[:, num_prefix + 1 :]
    prefixes, owner = ids.new_zeros(1, 0), ids.new_zeros(len(ids))  # where all prompts are one token
    if num_prefix > 0:
        real = ids[:, :num_prefix].where(is_real[:, :num_prefix], -1)
        prefixes, owner = torch.unique(real, dim=0, return_inverse=True)
    is_prefix = prefixes >= 0
    qwen2 = Qwen2(model, ids.shape[1] - 1)
    read = qwen2.read(prefixes, is_prefix)
    causal = torch.ones(n, n, dtype=torch.bool).tril()
    seen = torch.cat([is_prefix[owner][:, None].expand(-1, n, -1), causal.expand(len(ids), -1, -1)], dim=2)
    positions = torch.arange(num_prefix, num_prefix + n).expand_as(is_read)[is_read]
    hidden = qwen2.embed(ids[:, num_prefix:-1][is_read])
    for weights, before in zip(qwen2.layers, read, strict=True):
        queries, pairs = qwen2.heads(weights, hidden, positions)
        everything = torch.cat([before[owner], padded(pairs, is_read)], dim=1)
        attended = qwen2.attend(padded(queries, is_read), everything, seen)[is_read]
        hidden = qwen2.rest(weights, hidden, attended)
    all_log_probs = (qwen2.logits(hidden[is_trained[is_read]]) / temperature).log_softmax(-1)
    log_probs = all_log_probs.gather(1, ids[:, num_prefix + 1 :][is_trained][:, None])[:, 0]
    with torch.no_grad():
        entropies = -torch.linalg.vecdot(all_log_probs.exp(), all_log_probs)
    empty = log_probs.new_zeros(is_trained.shape)
    return empty.masked_scatter(is_trained, log_probs), empty.masked_scatter(is_trained, entropies)
