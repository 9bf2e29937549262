"""The data types of an experiment. None means not measured. Scores are fractions of 1; seconds are wall-clock time."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from pathlib import Path
from statistics import NormalDist, fmean
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw, Struct, json
from msgspec.structs import force_setattr, replace

from nightshift.config.rules import Fraction, RuleConstants, Rules, Scale
from nightshift.errors import Failure
from nightshift.files import Document
from nightshift.text import clean, counted

JOB_NAME, STARTED_NAME, RESULT_NAME, LOG_NAME = "job.json", "worker.started", "result.json", "worker.log"
ANSWERS_NAME, PAGE_NAME, SUMMARY_NAME, PICTURE_NAME = "evaluation.jsonl", "report.html", "report.md", "progress.png"
NIGHT_NAME, BLOCK_NAME, NOTEBOOK_NAME = "night.json", "night.txt", "notebook.md"
DETACHED_NAME = "detached.log"  # the output of a start with --detach
WEIGHTS_NAME, MODEL_NAME = "weights", "model"  # written by the engine of a run; kept with an experiment
MODELS_GB = 20.0  # limit for all kept models, in 1e9 bytes: about twenty models of 0.5B parameters
CERTIFY_NAME = "certify"  # in runs/. certify/NNNN contains a plan, one folder per run, and the result
PLAN_NAME, RUN_NAME, COMPARISON_NAME = "plan.json", "run.json", "comparison.json"
SIDES = ("baseline", "incumbent")
NO_DIFFERENCE = "no significant difference"  # the verdict of a comparison that is neither better nor worse
JOB_OF = ", job of "  # part of the hardware text of a run on a cluster
LATE_SECONDS = 20.0  # a worker that still runs this long after its deadline is killed
NO_SANDBOX = "none"  # --sandbox: the agent has your rights
NOT_ISOLATED = "not isolated"  # the remark on an agent without a sandbox
Z95 = 1.959964  # half-width of a 95 % interval, in standard deviations
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Count = Annotated[int, Meta(ge=0, le=2**53)]
Figure = Literal["tokens_in", "tokens_out", "dollars"]
FIGURES: tuple[Figure, ...] = ("tokens_in", "tokens_out", "dollars")


def prediction_in(description: str) -> str | None:
    """Return the end of a text that begins with `expect`, after a colon; None without such an end."""
    prediction = re.search(r": (expect.*)", clean(description), re.IGNORECASE)
    return prediction[1] if prediction else None


class Cost(Struct, frozen=True):
    """The cost of one proposal, or the sum over `num_proposals` and their runs."""

    tokens_in: Count | None = None  # including tokens from a cache
    tokens_out: Count | None = None  # including thinking
    dollars: Seconds | None = None  # US dollars, as the agent program reports them
    seconds: Seconds | None = None  # of the agents
    at_least: tuple[Figure, ...] = ()  # lower bounds, because an agent did not report its part
    num_proposals: Count = 1
    run_seconds: Seconds | None = None
    gpu_seconds: Seconds | None = None  # the seconds of each run times its number of GPUs

    def is_whole(self, figure: Figure) -> bool:
        """Return True if every agent that was asked reported `figure`."""
        return figure not in self.at_least and (self.num_proposals == 0 or getattr(self, figure) is not None)

    def __add__(self, other: Cost) -> Cost:
        sums = dict[str, Any](num_proposals=self.num_proposals + other.num_proposals)
        for name in (*FIGURES, "seconds", "run_seconds", "gpu_seconds"):
            values = [value for cost in (self, other) if (value := getattr(cost, name)) is not None]
            sums[name] = sum(values) if values else None
        parts = [f for f in FIGURES if sums[f] is not None and not (self.is_whole(f) and other.is_whole(f))]
        return Cost(**sums, at_least=tuple(parts))

    def __str__(self) -> str:
        """`1.20 h of runs, 2.40 GPU-hours, 0.30 h of agents, 5 proposals, 120,345 tokens in, ..., $1.23`."""
        times = ((self.run_seconds, "h of runs"), (self.gpu_seconds, "GPU-hours"), (self.seconds, "h of agents"))
        parts = [f"{seconds / 3600:.2f} {unit}" for seconds, unit in times if seconds is not None]
        if self.num_proposals:
            parts += [counted(self.num_proposals, "proposal"), *map(self.text, FIGURES)]
        return ", ".join(parts) or "nothing yet"

    def text(self, figure: Figure) -> str:
        """Return `$1.23`, `at least 4,321 tokens out`, or `dollars not reported`."""
        value, name = getattr(self, figure), figure.replace("_", " ")
        if value is None:
            return f"{name} not reported"
        text = f"${value:,.2f}" if figure == "dollars" else f"{value:,} {name}"
        return text if self.is_whole(figure) else f"at least {text}"


NOTHING = Cost(num_proposals=0)


def together(costs: Iterable[Cost | None]) -> Cost | None:
    """Return the cost of one proposal that several agents made; None if no agent was asked."""
    reported = [cost for cost in costs if cost is not None]
    return replace(sum(reported, NOTHING), num_proposals=1) if reported else None


class Proposal(Struct, frozen=True, kw_only=True):
    """The proposer's reasons for an experiment. Every text is cleaned, also when a record is read."""

    description: str = ""  # the hypothesis; for a search, the change
    prediction: str | None = None  # the expected effect on the score
    mechanism: str | None = None  # why the hypothesis should hold
    falsifier: str | None = None  # which result would contradict it
    reported_outcome: str | None = None  # the proposer's view of the result, written with the lesson
    lesson: str | None = None  # one line, written after the verdict
    notes: tuple[str, ...] = ()  # what the agent did in addition to editing train.toml
    proposer: str = ""  # empty for the user's proposals, and for runs that a night adds
    sandbox: str = ""  # of the agent (--sandbox); empty if no agent was asked
    cost: Cost | None = None  # None if no agent was asked

    @property
    def is_isolated(self) -> bool:
        """False for the proposal of an agent without a sandbox."""
        return self.sandbox != NO_SANDBOX

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if isinstance(value := getattr(self, name), str):
                force_setattr(self, name, clean(value))
        force_setattr(self, "notes", tuple(map(clean, self.notes)))


class Outcome(StrEnum):
    FINISHED = "finished"  # max_steps reached
    BUDGET = "budget"  # the training budget was used up: the normal end
    NO_GRADIENT = "no_gradient"  # the last steps had no gradient; the weights are scored
    DEADLINE = "deadline"  # the time limit of the whole run was reached: a crash
    CRASHED = "crashed"  # a process died, or training became impossible

    @property
    def is_success(self) -> bool:
        """True if the run left a policy to evaluate."""
        return self not in (Outcome.DEADLINE, Outcome.CRASHED)


class Verdict(StrEnum):
    KEEP = "keep"
    DISCARD = "discard"
    MEASURED = "measured"  # a re-run without a new change
    CRASH = "crash"


class Phase(StrEnum):
    STARTING = "starting"
    TRAINING = "training"
    EVALUATING = "evaluating"


@dataclass(frozen=True, slots=True)
class Progress:
    phase: Phase
    num_steps: Count
    seconds_left: float | None = None
    reward: float | None = None  # mean of the last step, usually 0..1
    num_done: Count | None = None  # evaluation: examples completed
    slot: str = ""  # slot or node, if there are several
    num_with_gradient: Count = 0  # training: among all steps so far
    num_without_gradient: Count = 0  # training: the last steps in a row (metrics.num_without_gradient)
    note: str = ""  # more text for the live line, for example that a run makes no progress


ProgressCallback = Callable[[Progress], None]


class Completion(Struct, frozen=True):
    """One answer of the policy. `truncated`: the answer reached the token limit before its end token."""

    text: str
    num_tokens: int
    truncated: bool


@dataclass(frozen=True, slots=True)
class Training:
    """The result of `Session.train`."""

    outcome: Outcome
    num_steps: Count  # policy updates
    training_seconds: Seconds | None = None
    reward_mean: float | None = None  # of all training rollouts
    peak_memory_gb: float | None = None
    cause: str | None = None  # one line, set if the outcome is no success
    failure: Failure | None = None  # None if the cause is not known: worker.py then finds out whose fault it is
    log: Annotated[str, Meta(pattern=r"^[\w.-]+\.log$")] | None = None  # a file whose last lines show the cause


class Weights(Struct, frozen=True):
    """The weights that were evaluated."""

    step: Count  # after which the weights were written
    sha256: str
    served_sha256: str | None = None  # as the server reported it; None if the policy reads the files itself


class Part(Struct, frozen=True):
    """The evaluation of one of several environments. The examples of an environment are adjacent."""

    environment: str
    num_examples: Count
    weight: Scale
    score: Fraction
    stderr: Fraction  # over examples


class Guard(Struct, frozen=True):
    """The score of an environment that is never trained."""

    environment: str
    limit: Scale  # by how much the score may fall, a fraction of 1
    score: Fraction
    stderr: Fraction  # over examples


class Evaluation(Struct, frozen=True):
    """Scores of one run's final policy. Two evaluations are paired only if `examples_sha256` is equal."""

    eval_score: Fraction  # of answers in any format. The weighted mean of `parts`, if there are any
    eval_stderr: Fraction  # over examples, by environment; for one environment sqrt(p (1 - p) / n)
    scores: Raw  # JSON, decoded on use: a campaign can have thousands of records
    examples_sha256: str  # of keys and right answers, in order
    truncated_share: float
    completion_tokens_mean: float
    weights: Weights
    seconds: float
    strict_score: Fraction | None = None  # of answers in the requested format; None if no format is requested
    parts: tuple[Part, ...] = ()  # in the order of the examples; empty for one environment
    guards: tuple[Guard, ...] = ()  # not in `scores`
    cut_wrong_share: Fraction | None = None  # share of examples with a truncated answer that scored 0
    unscored: tuple[str, ...] = ()  # a line for each environment whose reward failed for some answers (scored 0)
    figures: dict[str, dict[str, float]] = {}  # of a game, by environment; only shown

    @property
    def example_scores(self) -> tuple[float, ...]:
        """The score of each example, in order. Raises ValueError if a score is no fraction."""
        return json.decode(self.scores, type=tuple[Fraction, ...])


def packed(scores: Sequence[float]) -> Raw:
    return Raw(json.encode(scores))


class Rollout(Struct, frozen=True):
    """One answer of the final policy to one validation example: a line of evaluation.jsonl."""

    environment: str  # name of its package
    key: str
    score: float
    answer: str
    completion: str
    num_tokens: int | None = None
    truncated: bool = False
    games: tuple[dict[str, str], ...] = ()


class Result(Struct, frozen=True):
    """The result of one run, which the worker writes: `result.json`. `evaluation` is None unless training succeeded."""

    seed: int
    training: Training
    evaluation: Evaluation | None = None
    startup_seconds: Seconds | None = None
    total_seconds: Seconds = 0.0
    hardware: str = ""
    versions: dict[str, str] = {}
    token: str = ""  # of the job
    job_sha256: str = ""  # of the job.json that the worker read
    started: str = ""  # ISO 8601, UTC, by the worker's clock
    slot: str = ""  # slot or node; empty if there is only one
    disk_bytes: Count | None = None  # of the run's folder when the run ended


class Effect(Struct, frozen=True):
    """The effect of a change on the score, a fraction of 1: posterior mean and standard deviation."""

    mean: float
    sd: float

    @property
    def p_helps(self) -> float:
        """P(it helps): the probability that the effect is above 0."""
        return NormalDist().cdf(self.mean / self.sd)

    def __str__(self) -> str:
        """`+2.4 ± 4.9 pp`; the second number is half of the 95 % interval."""
        return f"{round(100 * self.mean, 1) + 0.0:+.1f} ± {100 * Z95 * self.sd:.1f} pp"

    @property
    def with_p(self) -> str:
        """`+2.4 ± 4.9 pp, P(it helps) 71 %`."""
        return f"{self}, P(it helps) {percent(self.p_helps)}"


def percent(probability: float) -> str:
    """Return `71 %`, rounded down: 59.9 % is not the 60 % at which a change is kept. `> 99 %` and `< 1 %` at the ends:
    no probability is certain."""
    number = math.floor(100 * probability + 1e-9)
    if number < 1:
        return "< 1 %"
    return "> 99 %" if 100 * probability > 99 + 1e-9 else f"{number} %"


class Action(StrEnum):
    KEEP = "keep"  # a new change is kept
    DISCARD = "discard"  # a new change is not kept
    ADOPT = "adopt"  # a change that was discarded or reverted is kept later
    REVERT = "revert"  # a kept change is taken out

    @property
    def past(self) -> str:
        return {Action.KEEP: "kept", Action.ADOPT: "kept later"}.get(self, f"{self}ed")


Settings = frozenset[tuple[str, str | None]]  # keys and values: the identity of a change


class Change(Struct, frozen=True, kw_only=True):
    """The keys of train.toml that a proposal set."""

    experiment: int = 0  # the first experiment that proposed the change; 0 if the user made it in `commit`
    keys: dict[str, str | None] = {}  # the new values as train.toml spells them; None for a removed key
    commit: str | None = None

    @property
    def name(self) -> str:
        """`0012`, or `commit 1a2b3c4`."""
        return f"commit {self.commit[:7]}" if self.commit else f"{self.experiment:04d}"

    @property
    def identity(self) -> Settings:
        return frozenset(self.keys.items())

    @property
    def settings(self) -> str:
        """`trainer.optim.lr = 5e-6, max_steps = unset`."""
        return ", ".join(f"{key} = {'unset' if value is None else value}" for key, value in self.keys.items())

    def __str__(self) -> str:
        """`0003: trainer.optim.lr = 5e-6`."""
        return f"{self.name}: {self.settings}"


def settings_of(changes: Iterable[Change]) -> dict[str, str | None]:
    """Return the keys and values that changes set together."""
    return {key: value for change in changes for key, value in change.keys.items()}


def remaining(changes: Iterable[Settings]) -> list[tuple[Settings, Settings]]:
    """Return each change with those of its settings that apply: if two changes set the same key, the later one wins."""
    set_later = set[str]()
    pairs = []
    for settings in reversed(list(changes)):
        pairs.append((settings, frozenset(item for item in settings if item[0] not in set_later)))
        set_later.update(key for key, _ in settings)
    return pairs[::-1]


class Decision(Struct, frozen=True, kw_only=True):
    """The decision about one change."""

    change: Change
    action: Action
    effect: float | None = None  # posterior mean, minus the effect of replaced changes; None if the user decided
    effect_stderr: float | None = None  # posterior standard deviation
    commit: str | None = None  # the user's commit that made the decision

    @property
    def estimate(self) -> Effect | None:
        """The effect at the time of the decision."""
        return None if self.effect is None or not self.effect_stderr else Effect(self.effect, self.effect_stderr)


class Stage(IntEnum):
    SEARCH = 0  # changes are kept and reverted
    LAST_BASELINES = 1  # the run measures the baseline; changes may still be reverted
    LAST_INCUMBENTS = 2  # the run measures the incumbent, which does not change any more


class Run(Struct, frozen=True, kw_only=True):
    """The changes that one run measures. If two changes set the same key, the later one wins."""

    kept: tuple[Change, ...] = ()  # of the incumbent, in the order in which they were kept; or of a config run again
    rider: Change | None = None  # a discarded change that is tested again
    new: Change | None = None  # the proposed change; None if the proposal changes no key
    stage: Stage = Stage.SEARCH

    @property
    def changes(self) -> tuple[Change, ...]:
        """The changes of the run's config, in the order in which they apply."""
        return (*self.kept, *filter(None, (self.rider, self.new)))

    @property
    def with_rider(self) -> str:
        """` (also re-testing 0003)`, to follow the new change or the score; empty without a re-test."""
        return f" (also re-testing {self.rider.name})" if self.rider else ""

    @property
    def is_baseline(self) -> bool:
        return not self.changes


@dataclass(frozen=True)
class Request:
    """What run.py or a night asks of one experiment."""

    proposal: Proposal = field(default_factory=Proposal)
    engine: str | None = None
    gpus: str | None = None
    prime_rl: Path | None = None
    budget_seconds: float | None = None
    again: bool = False
    baseline: bool = False  # run the campaign's baseline again, whatever train.toml contains
    run: Run | None = None  # None: train.toml determines the run
    only: tuple[str, ...] = ()  # the keys and tables that the direction allows to change; empty for all
    detach: bool = False
    dry_run: bool = False
    verbose: bool = False  # of a dry run
    keys: bool = False
    branch: str | None = None  # the campaign's branch, new or not
    pairs: int | None = None  # number of slots; None: as the campaign began
    slurm: Path | None = None


class Standing(Struct, frozen=True, kw_only=True):
    """The posterior of incumbent and baseline at one moment; `*_sd` are standard deviations."""

    incumbent: float
    incumbent_sd: float
    baseline: float
    gain: float  # the reported gain of the incumbent over the baseline
    gain_halfwidth: float  # half of its 95 % interval
    # The estimated gain and half of its interval, if the final check runs contradict it. Then `gain` is the difference
    # of these runs.
    contradicted: tuple[float, float] | None = None
    run_sd: float  # noise of one run's score: seeds and examples


class PlannedCommit(Struct, frozen=True, kw_only=True):
    """The planned commit of one decision."""

    name: str  # the start of the subject: `keep 0012`
    keys: dict[str, tuple[str | None, str | None]]  # values before and after the commit, as in `Change.keys`
    reason: str  # the message below the subject


class Judgement(Struct, frozen=True, kw_only=True):
    """The decisions after a run, and the posterior at that moment."""

    why: str
    decisions: tuple[Decision, ...] = ()  # in the order of their commits
    kept: tuple[Change, ...] = ()  # the incumbent's changes after the decisions, in the order in which they were kept
    expected_score: float | None = None  # predicted before the run for its kept changes, without rider and new change
    standing: Standing | None = None  # after the decisions
    steps: tuple[PlannedCommit, ...] = ()  # the commits that carry out the decisions
    refused: tuple[Decision, ...] = ()  # not carried out: the other changes would leave no valid train.toml


class Record(Document, frozen=True, kw_only=True, tag="experiment"):
    """All data of one experiment: `runs/NNNN/record.json`."""

    number: int
    status: str  # a Verdict; `started`: no verdict yet
    branch: str  # "" if HEAD is detached
    commit: str | None  # HEAD when the experiment started
    started: str  # ISO 8601, UTC

    # What was proposed.
    parent: int | None  # the last kept experiment, with whose answers it is compared; None for the first experiment
    decided_before: int = 0  # how many experiments of this checkout were decided when this one started
    user_decisions: tuple[Decision, ...] = ()  # by the user's commits to train.toml since the experiment before
    proposal: Proposal
    run: Run = Run()
    diff: tuple[str, ...]  # the new change, one line per key
    scaled: tuple[str, ...] = ()  # values of train.toml that the rules multiply, one line each
    unused_keys: tuple[str, ...] = ()
    config_hash: str
    effective: dict[str, Any] = msgspec.field(default_factory=dict)

    # Rules, engine and hardware.
    rules_name: str
    rules_hash: str
    decision_rules: RuleConstants
    budget_seconds: Seconds | None = None
    engine: str
    versions: dict[str, str]
    hardware: str

    # What was measured.
    result: Result | None = None  # None until the run is collected
    num_starts: Count = 1  # number of experiments with these effective settings on this branch, including this one
    total_seconds: Seconds | None = None
    health: str | None = None  # the health digest, a few lines (health.py)
    failure: Failure | None = None  # of a crash

    # What was decided, and what git did.
    judgement: Judgement | None = None
    decided: Count | None = None  # position in the order of decisions; None if the experiment decides nothing
    git_action: str | None = None  # what Nightshift did to git and train.toml, or why it did nothing
    git_error: str | None = None  # why the planned commits are still owed
    commits: dict[str, str] = msgspec.field(default_factory=dict)  # commit ids by decision: `keep 0012` -> id

    @property
    def campaign(self) -> tuple[str, str]:
        """Branch and rules hash: the campaign of the experiment."""
        return self.branch, self.rules_hash

    @property
    def environments(self) -> tuple[str, ...]:
        """Names of the environments: the rules `arithmetic+gsm8k-trl` have two."""
        return tuple(self.rules_name.partition("-")[0].split("+"))

    @property
    def place(self) -> int:
        """Position in the order of decisions; 0 if the experiment decides nothing."""
        return self.decided or 0

    @property
    def is_keep(self) -> bool:
        """True for the baseline, and if the new change was kept, even if it was reverted later."""
        return self.status == Verdict.KEEP

    @property
    def decision(self) -> Decision | None:
        """The decision about the new change; None without a new change, and for a crash."""
        new, decisions = self.run.new, self.judgement.decisions if self.judgement else ()
        return next((decision for decision in decisions if new and decision.change.keys == new.keys), None)

    @property
    def moved(self) -> tuple[Decision, ...]:
        """The decisions that kept or reverted other changes."""
        decisions = self.judgement.decisions if self.judgement else ()
        return tuple(d for d in decisions if d.action is not Action.DISCARD and d != self.decision)

    @property
    def is_incumbent(self) -> bool:
        """True if the run contained exactly the changes that are kept after it, and no new change."""
        judged = self.judgement
        return judged is not None and self.status == Verdict.MEASURED and self.run.changes == judged.kept

    @property
    def kept_commit(self) -> str | None:
        return self.commits.get(f"keep {self.decision.change.name}") if self.decision else None

    @property
    def why(self) -> str:
        """The reason for the verdict; empty without a verdict."""
        return self.judgement.why if self.judgement else ""

    @property
    def starts(self) -> str:
        """`start 2 of this config`; empty for the first start."""
        return f"start {self.num_starts} of this config" if self.num_starts > 1 else ""

    @property
    def evaluation(self) -> Evaluation | None:
        return self.result.evaluation if self.result else None

    @property
    def score(self) -> float | None:
        return self.evaluation.eval_score if self.evaluation else None


@dataclass(frozen=True, slots=True)
class Job:
    """The input of a worker for one run: `job.json`. A worker with another rules hash or hardware refuses the job."""

    rules: Rules
    rules_hash: str
    settings: dict[str, Any]
    seed: int
    deadline_seconds: float
    token: str  # a random word that the result repeats
    split: Literal["validation", "test"] = "validation"
    name: str = ""  # of the job in SLURM; empty on this machine
    hardware: str | None = None  # the campaign's; None for its baseline
    gpus: str | None = None  # --gpus
    # Settings of the incumbent, which are started to find out whether a failed start is the config's fault. None for a
    # baseline, whose training does not end early without a gradient.
    incumbent: dict[str, Any] | None = None
    cores: tuple[int, ...] = ()  # to which the run is pinned
    layout: str = ""  # number and cores of the slots: the part of the hardware text that the machine does not report
    slot: str = ""

    @property
    def sha256(self) -> str:
        return hashlib.sha256(json.encode(self)).hexdigest()


class Plan(Struct, frozen=True, kw_only=True):
    """The plan of a comparison: `plan.json`."""

    number: int  # of the folder, and of the use of the test split
    branch: str
    rules_hash: str
    split: Literal["test", "validation"]
    configs: dict[str, str]  # by side
    names: dict[str, str]  # by side: `experiment 0004`, or a commit
    num_seeds: int
    first_seed_index: int
    environment: str = ""  # this and the next two are options of `nightshift certify`
    budget_seconds: float | None = None
    revisions: dict[str, str] = {}
    night: str = ""  # `started` of the night that began the comparison; empty for `nightshift certify`


class Estimate(Struct, frozen=True):
    """A difference of scores, a fraction, with its standard error, degrees of freedom and 95 % interval."""

    difference: float
    stderr: float
    df: float
    interval: tuple[float, float]
    note: str = ""  # what was not measured


class ComparedRun(Struct, frozen=True):
    """One finished run of a comparison: `run.json`."""

    side: str
    seed: int
    num_steps: Count = 0
    score: Fraction | None = None  # None for a crash
    note: str = ""  # the cause of a crash, or what the engine showed about the scored weights

    def __str__(self) -> str:
        """`81.0 (698 steps)`: the score in percent."""
        return f"{'crashed' if self.score is None else f'{100 * self.score:.1f}'} ({self.num_steps} steps)"


class Comparison(Struct, frozen=True, kw_only=True):
    """The gain of the incumbent over the baseline in fresh runs of both: `comparison.json`."""

    plan: Plan
    created: str  # ISO 8601, UTC
    verdict: str  # better, worse, or no significant difference: a test at `level`
    level: float
    access: int | None  # 1 for the campaign's first use of the test split; None on the validation split
    estimate: Estimate
    runs: tuple[ComparedRun, ...]
    num_examples: int
    strict_scores: tuple[float, ...] | None  # by side
    by_environment: dict[str, Estimate]  # without a correction for the number of environments
    guards: dict[str, tuple[float, ...]] = {}  # mean scores of baseline and incumbent, by environment
    notes: tuple[str, ...]

    def runs_of(self, side: str) -> list[ComparedRun]:
        return [run for run in self.runs if run.side == side]

    def scores(self, side: str) -> list[float]:
        return [run.score for run in self.runs_of(side) if run.score is not None]

    def score(self, side: str) -> float:
        return fmean(self.scores(side))

    @property
    def runs_text(self) -> str:
        """`baseline 60.3 (286 steps), 60.8 (285 steps); incumbent 81.0 (698 steps), crashed (12 steps)`, in percent."""
        return "; ".join(f"{side} {', '.join(map(str, self.runs_of(side)))}" for side in SIDES)

    @property
    def crashes(self) -> str:
        """`1 of 4 runs of the incumbent crashed`; empty without a crash."""
        counts = [(side, len(self.runs_of(side)), len(self.scores(side))) for side in SIDES]
        return "; ".join(f"{of - n} of {of} runs of the {side} crashed" for side, of, n in counts if n < of)
