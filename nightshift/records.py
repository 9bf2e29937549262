"""The frozen values that travel between the ten steps of an experiment and end in its record.

Not measured is None, never 0. Scores are fractions 0..1; seconds are wall-clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Outcome(StrEnum):
    """How a run ended."""

    FINISHED = "finished"  # max_steps reached
    BUDGET = "budget"  # the training budget was used up: the normal end
    DEADLINE = "deadline"  # the hard stop was reached: a crash
    CRASHED = "crashed"  # a process died, or training became impossible
    INTERRUPTED = "interrupted"  # Ctrl-C, SIGTERM, power cut

    @property
    def is_success(self) -> bool:
        """True if the run left a policy worth evaluating."""
        return self in (Outcome.FINISHED, Outcome.BUDGET)


class Verdict(StrEnum):
    """What an experiment came to."""

    KEEP = "keep"
    DISCARD = "discard"
    CRASH = "crash"


class Failure(StrEnum):
    """Why an experiment is a crash. Only `training` counts against the config."""

    TRAINING = "training"  # not-a-number, out of memory, deadline: the config's own doing
    MACHINERY = "machinery"  # a process was killed, a disk was full: try the same config again
    INTERRUPTED = "interrupted"  # Ctrl-C, SIGTERM, power cut


class Side(StrEnum):
    """Whose config a run trained."""

    CANDIDATE = "candidate"
    INCUMBENT = "incumbent"


class Phase(StrEnum):
    """What a run is doing now; shown on the live line."""

    STARTING = "starting"
    TRAINING = "training"
    EVALUATING = "evaluating"


@dataclass(frozen=True, slots=True)
class Progress:
    """One reading of the live line. `reward` is the last step's mean reward, 0..1."""

    phase: Phase
    num_steps: int
    seconds_left: float | None = None
    reward: float | None = None
    num_done: int | None = None  # evaluation: examples completed


@dataclass(frozen=True, slots=True)
class Decoding:
    """How evaluation samples: greedy when `temperature` is 0."""

    max_completion_tokens: int
    temperature: float = 0.0
    batch_size: int = 250


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer of the policy. `truncated`: it hit the token limit before its end token."""

    text: str
    num_tokens: int
    truncated: bool


@dataclass(frozen=True, slots=True)
class Training:
    """What `Session.train` came to.

    `cause` (one line) and `failure` are set when the outcome is no success. `reward_mean` is the mean reward of all
    training rollouts, `num_steps` counts policy updates.
    """

    outcome: Outcome
    num_steps: int
    training_seconds: float | None = None
    reward_mean: float | None = None
    peak_memory_gb: float | None = None
    cause: str | None = None
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class Weights:
    """Proof of which weights were evaluated: the step they were written after, and their bytes."""

    step: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Scores of one run's final policy on the selection set.

    `scores[i]` belongs to the i-th example of the set; `examples_sha256` hashes the ordered keys, so
    that two evaluations are paired only if they are over the same examples in the same order.
    """

    eval_score: float
    eval_stderr: float  # binomial, over examples: sqrt(p (1 - p) / n)
    scores: tuple[float, ...]
    examples_sha256: str
    truncated_share: float
    completion_tokens_mean: float
    weights: Weights
    seconds: float


@dataclass(frozen=True, slots=True)
class Run:
    """One execution of the engine for one seed. `evaluation` is None unless training succeeded."""

    index: int
    side: Side
    seed: int
    training: Training
    evaluation: Evaluation | None
    startup_seconds: float | None
    total_seconds: float


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict with its numbers; None where the decision made no comparison (crash)."""

    verdict: Verdict
    why: str
    delta: float | None = None  # posterior mean of candidate minus incumbent
    delta_stderr: float | None = None
    p_better: float | None = None
    incumbent_score: float | None = None  # posterior mean of the incumbent, after the runs of this experiment
    diagnostics: dict[str, float] = field(default_factory=dict)
    taken_back_to: int | None = None  # the earlier experiment that is believed best again: it is the incumbent now
    taken_back_score: float | None = None  # posterior mean of that one


@dataclass(frozen=True, slots=True)
class Record:
    """Everything known of one experiment: `runs/NNNN/record.json`.

    `status` is `started` until the verdict is written; a record still `started` whose process is
    gone is closed as a crash (interrupted) by the next start.
    """

    number: int
    status: str  # started | keep | discard | crash
    branch: str  # "" when HEAD is detached
    parent: int | None  # experiment number of the incumbent it was compared with
    description: str
    started: str  # ISO 8601, UTC
    engine: str
    rules_name: str
    rules_hash: str
    config_hash: str
    effective_hash: str
    diff: tuple[str, ...]  # key-level, against the incumbent
    unused_keys: tuple[str, ...]
    commit: str | None  # HEAD when the experiment started
    versions: dict[str, str]
    hardware: str
    runs: tuple[Run, ...] = ()
    judgement: Judgement | None = None
    kept_commit: str | None = None
    failure: Failure | None = None  # for a crash
    settled: str | None = None  # what was done to git and train.toml, or why nothing was
    total_seconds: float | None = None
    effective: dict[str, Any] = field(default_factory=dict)
    prediction: str | None = None  # what the hypothesis in `description` was expected to do
    lesson: str | None = None  # one line, written after the verdict
    notes: tuple[str, ...] = ()  # what the agent did besides editing train.toml
    health: str | None = None  # what the curves of its runs say is wrong (health.py), in a few lines
