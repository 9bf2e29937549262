"""metrics.jsonl: one line a training step, in the same terms for every engine."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from nightshift.files import read_rows, write_atomically

METRICS_NAME, PROGRESS_NAME, SAMPLES_NAME = "metrics.jsonl", "progress.json", "rollouts.jsonl"
NO_GRADIENT_STEPS = 10  # in a row; as many empty batches in a row end prime-rl itself
_ALL = 1 - 1e-9  # a share of 1, up to rounding: it may be a sum of shares


@dataclass(frozen=True, slots=True)
class Step:
    """One policy update and its rollouts. None is "not measured". Seconds are on the budget's clock
    (Rules.budget_clock), shares are fractions of 1, rewards are means over all rollouts of the step, before filters."""

    step: Annotated[int, msgspec.Meta(ge=0, le=2**53)]  # exact also as a float
    time: float | None = None  # seconds since training began
    reward_mean: float | None = None
    reward_std: float | None = None
    all_right_share: float | None = None  # of groups: no gradient in them
    all_wrong_share: float | None = None
    equal_share: float | None = None  # of groups: all rewards equal, so that their advantages are 0
    completion_tokens_mean: float | None = None
    truncated_share: float | None = None
    entropy: float | None = None  # per token
    kl: float | None = None  # between the policy that trains and the policy that sampled
    grad_norm: float | None = None  # before clipping
    lr: float | None = None
    loss: float | None = None
    tokens_per_second: float | None = None
    generate_seconds: float | None = None  # trl: prime-rl generates beside training
    train_seconds: float | None = None
    broadcast_seconds: float | None = None  # prime-rl: writing the weights for the server
    wait_for_rollouts_seconds: float | None = None  # prime-rl: the trainer idles
    wait_for_policy_seconds: float | None = None  # prime-rl: the orchestrator idles
    off_policy_mean: float | None = None  # prime-rl: age of the rollouts, in policy versions
    masked_share: float | None = None  # prime-rl: tokens that the loss dropped
    error_share: float | None = None  # failed rollouts; trl: failed rewards
    server_error_share: float | None = None  # prime-rl: rollouts whose request the server did not answer
    branches_mean: float | None = None  # prime-rl: samples a rollout; above 1 a later turn has other tokens
    rewards: dict[str, float] | None = None  # means by environment

    @property
    def has_gradient(self) -> bool | None:
        """Whether the rollouts of this step changed the policy; None if that was not measured."""
        if self.grad_norm == 0 or (self.equal_share is not None and self.equal_share >= _ALL):
            return False
        return None if self.grad_norm is None and self.equal_share is None else True


def num_without_gradient(steps: Sequence[Step]) -> int:
    """Count the last steps in a row that had no gradient. A step that was not measured ends the row."""
    return next((i for i, step in enumerate(reversed(steps)) if step.has_gradient is not False), len(steps))


@dataclass(frozen=True, slots=True)
class Sample:
    """One of the few training rollouts that a run keeps. `reward` is None if scoring failed."""

    step: Annotated[int, msgspec.Meta(ge=0, le=2**53)]
    problem: str
    completion: str
    reward: float | None
    truncated: bool


def write_steps(path: Path, steps: list[Step]) -> None:
    """Write the whole file. A value that was not measured, or is not finite, is null."""
    write_atomically(path, b"".join(msgspec.json.encode(step) + b"\n" for step in steps), sync=False)


def read_steps(path: Path) -> list[Step]:
    """Return the steps in order; of a step that was written twice (resumed runs) the last line."""
    steps = {step.step: step for step in read_rows(path, Step)}
    return [steps[number] for number in sorted(steps)]
