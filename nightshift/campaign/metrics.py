"""metrics.jsonl: one line a training step, in the same terms for every engine."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from nightshift.files import read_rows, write_atomically

METRICS_NAME, PROGRESS_NAME, SAMPLES_NAME = "metrics.jsonl", "progress.json", "rollouts.jsonl"
NO_GRADIENT_STEPS = 10  # in a row; prime-rl ends itself after as many empty batches in a row
_ALL = 1 - 1e-9  # a share of 1, up to rounding, because it may be a sum of shares


@dataclass(frozen=True, slots=True)
class Step:
    """One policy update and its rollouts. None means not measured. Seconds are on the clock of the budget
    (Rules.budget_clock), shares are fractions of 1, rewards are means over all rollouts of the step, before filters."""

    step: Annotated[int, msgspec.Meta(ge=0, le=2**53)]  # exact also as a float
    time: float | None = None  # seconds since training began
    reward_mean: float | None = None
    reward_std: float | None = None
    all_right_share: float | None = None  # share of groups, which have no gradient
    all_wrong_share: float | None = None
    equal_share: float | None = None  # share of groups with equal rewards, whose advantages are 0
    completion_tokens_mean: float | None = None
    truncated_share: float | None = None
    entropy: float | None = None  # per token
    kl: float | None = None  # between the trained policy and the policy that sampled
    grad_norm: float | None = None  # before clipping
    lr: float | None = None
    loss: float | None = None
    tokens_per_second: float | None = None
    generate_seconds: float | None = None  # trl only: prime-rl generates and trains at the same time
    train_seconds: float | None = None
    broadcast_seconds: float | None = None  # prime-rl: writing the weights for the server
    wait_for_rollouts_seconds: float | None = None  # prime-rl: the trainer is idle
    wait_for_policy_seconds: float | None = None  # prime-rl: the orchestrator is idle
    off_policy_mean: float | None = None  # prime-rl: age of the rollouts, in policy versions
    masked_share: float | None = None  # prime-rl: tokens that the loss dropped
    error_share: float | None = None  # failed rollouts; trl: failed rewards
    server_error_share: float | None = None  # prime-rl: rollouts whose request the server did not answer
    branches_mean: float | None = None  # prime-rl: samples per rollout; above 1 if the tokens of earlier turns change
    rewards: dict[str, float] | None = None  # means by environment

    @property
    def has_gradient(self) -> bool | None:
        """True if the rollouts of this step changed the policy; None if this was not measured."""
        if self.grad_norm == 0 or (self.equal_share is not None and self.equal_share >= _ALL):
            return False
        return None if self.grad_norm is None and self.equal_share is None else True


def num_without_gradient(steps: Sequence[Step]) -> int:
    """Return how many of the last steps in a row had no gradient. A step that was not measured ends the row."""
    return next((i for i, step in enumerate(reversed(steps)) if step.has_gradient is not False), len(steps))


@dataclass(frozen=True)
class Sample:
    """One of the training rollouts that a run stores. `reward` is None if scoring failed."""

    step: Annotated[int, msgspec.Meta(ge=0, le=2**53)]
    problem: str
    completion: str
    reward: float | None
    truncated: bool


def write_steps(path: Path, steps: list[Step]) -> None:
    """Write the whole file. Values that were not measured or are not finite become null."""
    write_atomically(path, b"".join(msgspec.json.encode(step) + b"\n" for step in steps), sync=False)


def read_steps(path: Path) -> list[Step]:
    """Return the steps in order."""
    return read_rows(path, Step)
