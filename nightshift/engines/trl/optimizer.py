"""Build optimizer and schedule as trainer/optim and trainer/scheduler.py of prime-rl do."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR

Settings = Mapping[str, Any]


class MuonWithAdamW(Optimizer):
    """Muon and AdamW behind the interface of one optimizer, as prime-rl's Muon is."""

    def __init__(self, muon: Optimizer, adamw: Optimizer) -> None:
        self._optimizers = (muon, adamw)
        super().__init__([*muon.param_groups, *adamw.param_groups], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        # The schedule writes into this optimizer's groups, which accelerate replaces by copies.
        for optimizer, group in zip(self._optimizers, self.param_groups, strict=True):
            optimizer.param_groups[0]["lr"] = group["lr"]
            optimizer.step()


def make_optimizer(settings: Settings, named_parameters: Sequence[tuple[str, Any]]) -> Optimizer:
    """As prime-rl's trainer/optim: every parameter has the same decay; Muon takes the matrices of the blocks.

    torch's Muon stands in for dion's: the same learning-rate adjustment and no Nesterov, other
    Newton-Schulz coefficients.
    """
    lr, weight_decay = settings["lr"], settings["weight_decay"]
    parameters = [parameter for _, parameter in named_parameters]
    if settings["type"] == "sgd":
        momentum, nesterov = settings["momentum"], settings["nesterov"]
        return torch.optim.SGD(parameters, lr, momentum, weight_decay=weight_decay, nesterov=nesterov)
    betas = (settings["betas1"], settings["betas2"])
    if settings["type"] == "adamw":
        return torch.optim.AdamW(parameters, lr, betas, weight_decay=weight_decay, fused=True)
    matrices: list[Any] = []
    rest: list[Any] = []
    for name, parameter in named_parameters:
        is_matrix = parameter.ndim >= 2 and "lm_head" not in name and "embed_tokens" not in name
        (matrices if is_matrix else rest).append(parameter)
    how = {"momentum": settings["mu"], "nesterov": False, "adjust_lr_fn": "match_rms_adamw"}
    muon = torch.optim.Muon(matrices, lr, weight_decay, **how)
    return MuonWithAdamW(muon, torch.optim.AdamW(rest, lr, betas, weight_decay=weight_decay, fused=True))


def make_scheduler(settings: Settings, optimizer: Optimizer, max_steps: Any, lr: float) -> LRScheduler:
    """The same torch schedules, composed in the same way, as prime-rl's; checks.py saw to their ends at `max_steps`."""
    if settings["type"] == "constant":
        return ConstantLR(optimizer, factor=1.0)
    warmup_steps, min_lr = settings["warmup_steps"], settings["min_lr"]
    lowest = min_lr / lr if min_lr > 0 else 1e-8
    phases: list[LRScheduler] = []
    milestones: list[int] = []
    if warmup_steps > 0:
        phases.append(LinearLR(optimizer, start_factor=lowest, end_factor=1.0, total_iters=warmup_steps))
        milestones.append(warmup_steps)
    if settings["type"] == "cosine":
        phases.append(CosineAnnealingLR(optimizer, T_max=max_steps - warmup_steps, eta_min=min_lr))
    elif decay_steps := settings["decay_steps"]:
        constant_steps = max_steps - decay_steps - warmup_steps
        phases.append(LinearLR(optimizer, start_factor=1.0, end_factor=1.0, total_iters=constant_steps))
        phases.append(LinearLR(optimizer, start_factor=1.0, end_factor=lowest, total_iters=decay_steps - 1))
        milestones.append(max_steps - decay_steps)
    return phases[0] if len(phases) == 1 else SequentialLR(optimizer, phases, milestones=milestones)
