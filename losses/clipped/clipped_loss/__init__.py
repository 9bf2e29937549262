"""PPO's clipped objective (Schulman et al. 2017, arXiv:1707.06347, equation 7) as a loss of prime-rl's trainer."""

import math

import torch
from prime_rl.trainer.rl.loss import LossInputs, LossOutputs


def clipped(inputs: LossInputs, clip: float = 0.2) -> LossOutputs:
    """Return the loss of one rollout: the sum over its trained tokens of -min(ratio A, clip(ratio, 1 ± clip) A).

    The ratio is that of a token's probabilities in the trainer and in the server that sampled it; A is its advantage.
    prime-rl divides the sum by the number of trained tokens of the batch.
    """
    ratio = torch.exp(inputs.trainer_logprobs - inputs.inference_logprobs)
    bounded = ratio.clamp(1 - clip, 1 + clip)
    objective = torch.minimum(ratio * inputs.advantages, bounded * inputs.advantages)
    weights = 1.0 if inputs.loss_weights is None else inputs.loss_weights
    mask = inputs.loss_mask
    is_clipped = (bounded * inputs.advantages < ratio * inputs.advantages)[mask].float()
    # Without a trained token there is nothing to take the mean of. The name is that of prime-rl's own losses.
    metrics = {"is_masked": is_clipped.sum() / mask.sum().clamp(min=1)}
    return LossOutputs(loss=-(objective * weights)[mask].sum(), metrics=metrics)


def plain(inputs: LossInputs) -> LossOutputs:
    """Return the same without the bound: the policy gradient with importance weights."""
    return clipped(inputs, clip=math.inf)
