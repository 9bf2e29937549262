"""The values that an experiment consists of. None means "not measured". Scores are fractions of 1; seconds are
wall-clock time."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from pathlib import Path
from statistics import NormalDist, fmean, median
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
WEIGHTS_NAME, MODEL_NAME = "weights", "model"  # of a run, as its engine left them; of a kept experiment
MODELS_GB = 20.0  # of all kept models, in 1e9 bytes: about twenty models of 0.5B parameters
CERTIFY_NAME = "certify"  # the folder of comparisons in runs/: certify/NNNN has a plan, a folder a run, the result
PLAN_NAME, RUN_NAME, COMPARISON_NAME = "plan.json", "run.json", "comparison.json"
SIDES = ("baseline", "incumbent")
NO_DIFFERENCE = "no significant difference"  # the verdict of a comparison that is neither better nor worse
# A run collapsed if its score is by more than this below the median of its side's other runs: half of what the decision
# rule takes for a typical accident.
COLLAPSE = -min(mean for mean, _, _ in RuleConstants().accidents) / 2
JOB_OF = ", job of "  # in the hardware of a run that was a job of a cluster
LATE_SECONDS = 20.0  # a worker that is this late after its own deadline hangs, and is killed
NO_SANDBOX = "none"  # --sandbox: the agent has your rights
NOT_ISOLATED = "not isolated"  # the remark on an agent without a sandbox
POINTS = re.compile(r"([+-]?\d{1,3}(?:\.\d{1,6})?)(?:\s*(?:pp|percentage points?|points?)\b)", re.IGNORECASE)
_MOMENT = r"^2\d{3}-[01]\d-[0-3]\dT[012]\d:[0-5]\d:[0-5]\d(\.\d+)?[+-]\d\d:\d\d$"  # ISO 8601, UTC
Z95 = 1.959964  # half-width of a 95 % interval, in standard deviations
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Count = Annotated[int, Meta(ge=0, le=2**53)]
Place = Annotated[int, Meta(ge=1, le=2**53)]
Figure = Literal["tokens_in", "tokens_out", "dollars"]
FIGURES: tuple[Figure, ...] = ("tokens_in", "tokens_out", "dollars")


def prediction_in(description: str) -> str | None:
    """Return what follows a colon and begins with `expect` or names a number of pp; None without it."""
    parts = clean(description).split(": ")
    for number, part in enumerate(parts[1:], 1):
        if part.lower().startswith("expect") or POINTS.search(part.replace("\N{MINUS SIGN}", "-")):
            return ": ".join(parts[number:])
    return None


class Cost(Struct, frozen=True):
    """What one proposal cost, or the sum over `num_proposals` and their runs."""

    tokens_in: Count | None = None  # with tokens from a cache
    tokens_out: Count | None = None  # with thinking
    dollars: Seconds | None = None  # US, the agent program's own figure
    seconds: Seconds | None = None  # of the agents
    at_least: tuple[Figure, ...] = ()  # lower bounds: not every agent reported its part
    num_proposals: Count = 1
    run_seconds: Seconds | None = None
    gpu_seconds: Seconds | None = None  # the seconds of each run times its GPUs

    def is_whole(self, figure: Figure) -> bool:
        """True if every agent that was asked reported `figure`."""
        return figure not in self.at_least and (self.num_proposals == 0 or getattr(self, figure) is not None)

    def __add__(self, other: Cost) -> Cost:
        sums = dict[str, Any](num_proposals=self.num_proposals + other.num_proposals)
        for name in (*FIGURES, "seconds", "run_seconds", "gpu_seconds"):
            values = [getattr(cost, name) for cost in (self, other) if getattr(cost, name) is not None]
            sums[name] = sum(values) if values else None
        reported = [figure for figure in FIGURES if sums[figure] is not None]
        return Cost(**sums, at_least=tuple(f for f in reported if not (self.is_whole(f) and other.is_whole(f))))

    def __str__(self) -> str:
        """One line: `1.20 h of runs, 2.40 GPU-hours; 5 proposals: 0.30 h, 120,345 tokens in, 4,321 out, $1.23`."""
        times = ((self.run_seconds, "h of runs"), (self.gpu_seconds, "GPU-hours"), (self.seconds, "h"))
        *machine, hours = ["" if seconds is None else f"{seconds / 3600:.2f} {unit}" for seconds, unit in times]
        tokens = f"{self.text('tokens_in')} tokens in, {self.text('tokens_out')} out"
        if self.tokens_in is None and self.tokens_out is None:
            tokens = "tokens not reported"
        num, agents = self.num_proposals, ", ".join(filter(None, (hours, tokens, self.text("dollars"))))
        proposals = f"{counted(num, 'proposal')}: {agents}" if num else ""
        return "; ".join(filter(None, (", ".join(filter(None, machine)), proposals))) or "nothing yet"

    def text(self, figure: Figure) -> str:
        value = getattr(self, figure)
        if value is None:
            return "dollars not reported" if figure == "dollars" else "?"
        text = f"${value:,.2f}" if figure == "dollars" else f"{value:,}"
        return text if self.is_whole(figure) else f"at least {text}"


NOTHING = Cost(num_proposals=0)


def together(costs: Iterable[Cost | None]) -> Cost | None:
    """Return the cost of one proposal that several agents made; None if no agent was asked."""
    asked = [cost for cost in costs if cost is not None]
    return replace(sum(asked, NOTHING), num_proposals=1) if asked else None


class Proposal(Struct, frozen=True, kw_only=True):
    """Why an experiment is run, in the words of its proposer. Every text is cleaned, also when a record is read."""

    description: str = ""  # the hypothesis; of a search the change
    prediction: str | None = None  # the expected effect on the score
    mechanism: str | None = None  # why the hypothesis should hold
    falsifier: str | None = None  # which result would contradict it
    reported_outcome: str | None = None  # the proposer's view of the result, written with the lesson
    lesson: str | None = None  # one line, written after the verdict
    notes: tuple[str, ...] = ()  # what the agent did besides editing train.toml
    proposer: str = ""  # empty for you, and for runs that a night adds by itself
    sandbox: str = ""  # of the agent (--sandbox); empty if no agent was asked
    cost: Cost | None = None  # None if no agent was asked

    @property
    def is_isolated(self) -> bool:
        """False for the proposal of an agent without a sandbox."""
        return self.sandbox != NO_SANDBOX

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if isinstance(value := getattr(self, name), str) and value:
                force_setattr(self, name, clean(value))
        if self.notes:
            force_setattr(self, "notes", tuple(map(clean, self.notes)))


class Outcome(StrEnum):
    FINISHED = "finished"  # max_steps reached
    BUDGET = "budget"  # the training budget was used up: the normal end
    NO_GRADIENT = "no_gradient"  # nothing was left to learn from; the weights are scored as they are
    DEADLINE = "deadline"  # the hard stop was reached: a crash
    CRASHED = "crashed"  # a process died, or training became impossible

    @property
    def is_success(self) -> bool:
        """True if the run left a policy to evaluate."""
        return self not in (Outcome.DEADLINE, Outcome.CRASHED)


class Verdict(StrEnum):
    KEEP = "keep"
    DISCARD = "discard"
    MEASURED = "measured"  # no new change: the baseline, the incumbent or an earlier config ran again
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
    num_with_gradient: Count = 0  # training: of all steps so far
    num_without_gradient: Count = 0  # training: the last steps in a row (metrics.num_without_gradient)
    note: str = ""  # what else the live line shows, such as a run that stands still


ProgressCallback = Callable[[Progress], None]


class Completion(Struct, frozen=True):
    """One answer of the policy. `truncated`: the answer reached the token limit before its end token."""

    text: str
    num_tokens: int
    truncated: bool


@dataclass(frozen=True, slots=True)
class Training:
    """The result of `Session.train`. `cause` (one line) and `failure` are set if the outcome is no success. `failure`:
    None if the cause is not known; worker.py then settles whose fault it is. `log`: the log, in the run's folder, whose
    last lines show the cause; None if no log does."""

    outcome: Outcome
    num_steps: Count  # policy updates
    training_seconds: Seconds | None = None
    reward_mean: float | None = None  # of all training rollouts
    peak_memory_gb: float | None = None
    cause: str | None = None  # one line; set, as `failure`, if the outcome is no success
    failure: Failure | None = None
    log: Annotated[str, Meta(pattern=r"^[\w.-]+\.log$")] | None = None  # whose last lines show the cause


class Weights(Struct, frozen=True):
    """Which weights were evaluated."""

    step: Count  # after which they were written
    sha256: str
    served_sha256: str | None = None  # as a server reported it; None if the policy reads the files itself


class Part(Struct, frozen=True):
    """The evaluation of one environment of several. The examples of an environment stand together."""

    environment: str
    num_examples: Place
    weight: Scale
    score: Fraction
    stderr: Fraction  # over examples


class Guard(Struct, frozen=True):
    """The score of an environment that is never trained."""

    environment: str
    limit: Scale  # by how much it may fall, a fraction of 1
    score: Fraction
    stderr: Fraction  # over examples


class Evaluation(Struct, frozen=True):
    """Scores of one run's final policy. Two evaluations are paired only if `examples_sha256` is equal."""

    eval_score: Fraction  # of answers in any format; decides. The weighted mean of `parts`, if there are any
    eval_stderr: Fraction  # over examples, by environment; of one environment: sqrt(p (1 - p) / n)
    scores: Raw  # JSON that is decoded on use: a campaign has thousands of records, and few are looked into
    examples_sha256: str  # of keys and right answers, in order
    truncated_share: float
    completion_tokens_mean: float
    weights: Weights
    seconds: float
    strict_score: Fraction | None = None  # of answers in the requested format; None: an environment requests no format
    format_rate: Fraction | None = None  # share of answers in the requested format, right or wrong
    parts: tuple[Part, ...] = ()  # in the order of the examples; empty for one environment
    guards: tuple[Guard, ...] = ()  # not in `scores`
    cut_wrong_share: Fraction | None = None  # of examples with a truncated answer that scored 0
    unscored: tuple[str, ...] = ()  # a line for each environment whose reward failed for some answers, which count 0
    figures: dict[str, dict[str, float]] = {}  # of a game, by environment; for display

    @property
    def example_scores(self) -> tuple[float, ...]:
        """The score of each example, in order. ValueError if they are not fractions."""
        return json.decode(self.scores, type=tuple[Fraction, ...])


def packed(scores: Sequence[float]) -> Raw:
    return Raw(json.encode(scores))


class Rollout(Struct, frozen=True):
    """One answer of the final policy to one problem of the validation split: a line of evaluation.jsonl."""

    environment: str  # its package
    key: str
    score: float
    answer: str
    completion: str
    num_tokens: int | None = None
    truncated: bool = False
    games: tuple[dict[str, str], ...] = ()


class Result(Struct, frozen=True):
    """What a worker returns of one run: `result.json`. `evaluation` is None unless training succeeded."""

    seed: int
    training: Training
    evaluation: Evaluation | None = None
    startup_seconds: Seconds | None = None
    total_seconds: Seconds = 0.0
    hardware: str = ""
    versions: dict[str, str] = {}
    token: str = ""  # of its job
    job_sha256: str = ""  # of the job.json that the worker read
    started: str = ""  # ISO 8601, UTC, by the worker's clock
    slot: str = ""  # slot or node; empty if runs follow each other
    disk_bytes: Count | None = None  # of the run's folder when the run ended


class Effect(Struct, frozen=True):
    """What a change adds to the score, a fraction of 1: posterior mean and standard deviation."""

    mean: float
    sd: float

    @property
    def p_helps(self) -> float:
        """P(the change helps): the probability that its effect is above 0."""
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
    KEEP = "keep"  # a new change joins the incumbent
    DISCARD = "discard"  # a new change does not join
    ADOPT = "adopt"  # a change that left, or never joined, joins
    REVERT = "revert"  # a kept change leaves

    @property
    def past(self) -> str:
        words = {Action.KEEP: "kept", Action.ADOPT: "kept later"}
        return words.get(self, f"{self}ed")


Settings = frozenset[tuple[str, str | None]]  # keys and values: the identity of a change


class Change(Struct, frozen=True, kw_only=True):
    """The keys of train.toml that a proposal set."""

    experiment: int = 0  # the first one that proposed the change; 0 if a `commit` of the user's made it
    keys: dict[str, str | None] = {}  # the new values as train.toml spells them, None for a removed key
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
    """Return each change with the settings that remain of it in a config: a later change wins on a shared key."""
    taken = set[str]()
    pairs = []
    for settings in reversed(list(changes)):
        pairs.append((settings, frozenset(item for item in settings if item[0] not in taken)))
        taken.update(key for key, _ in settings)
    return pairs[::-1]


class Decision(Struct, frozen=True, kw_only=True):
    """What was decided about one change."""

    change: Change
    action: Action
    effect: float | None = None  # posterior mean, less the effect of changes that it replaces; None: the user decided
    effect_stderr: float | None = None  # posterior standard deviation
    commit: str | None = None  # the user's commit that decided this

    @property
    def estimate(self) -> Effect | None:
        """The effect at the time of the decision."""
        return None if self.effect is None or not self.effect_stderr else Effect(self.effect, self.effect_stderr)


class Stage(IntEnum):
    SEARCH = 0  # changes come in and go out
    LAST_BASELINES = 1  # the run measures the baseline: kept changes may still go out
    LAST_INCUMBENTS = 2  # the run measures the incumbent, which is fixed


class Run(Struct, frozen=True, kw_only=True):
    """What one run measures. A later change wins on a shared key."""

    kept: tuple[Change, ...] = ()  # of the incumbent, in the order of adoption, or all of a config that is run again
    rider: Change | None = None  # discarded, and measured again
    new: Change | None = None  # proposed; None if it has no keys
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


@dataclass(frozen=True, slots=True)
class Request:
    """What run.py or a night asks of one experiment."""

    proposal: Proposal = field(default_factory=Proposal)
    engine: str | None = None
    gpus: str | None = None
    prime_rl: Path | None = None
    budget_seconds: float | None = None
    again: bool = False
    baseline: bool = False  # run the campaign's baseline again, whatever train.toml holds
    run: Run | None = None  # None: what train.toml says
    only: tuple[str, ...] = ()  # the scope of the direction: the keys and tables that may change; empty for all
    detach: bool = False
    dry_run: bool = False
    verbose: bool = False  # of a dry run
    keys: bool = False
    branch: str | None = None  # that a campaign begins on, or continues on
    pairs: int | None = None  # how many run side by side; None: as the campaign does
    slurm: Path | None = None


class Standing(Struct, frozen=True, kw_only=True):
    """The posterior of incumbent and baseline at one moment; `*_sd` are standard deviations."""

    incumbent: float
    incumbent_sd: float
    baseline: float
    gain: float  # the reported gain: incumbent less baseline
    gain_halfwidth: float  # half of its 95 % interval
    # The estimated gain and half of its interval, if the final check runs contradict it: `gain` is their difference.
    contradicted: tuple[float, float] | None = None
    run_sd: float  # noise of one run's score: seeds and examples


class PlannedCommit(Struct, frozen=True, kw_only=True):
    """The planned commit of one decision."""

    name: str  # the first words of its subject: `keep 0012`
    keys: dict[str, tuple[str | None, str | None]]  # values of train.toml before and after it, as in `Change.keys`
    reason: str  # its message below the subject


class Judgement(Struct, frozen=True, kw_only=True):
    """What was decided after a run, and the posterior at that moment."""

    why: str
    decisions: tuple[Decision, ...] = ()  # in the order of their commits
    kept: tuple[Change, ...] = ()  # the incumbent's changes after the decisions, in the order of adoption
    expected_score: float | None = None  # before the run: of its kept changes, without rider and new change
    standing: Standing | None = None  # after the decisions
    steps: tuple[PlannedCommit, ...] = ()  # the commits that the decisions mean
    refused: tuple[Decision, ...] = ()  # not carried out: no train.toml that the engine runs would hold the rest


class Record(Document, frozen=True, kw_only=True, tag="experiment"):
    """Everything known of one experiment: `runs/NNNN/record.json`."""

    number: int
    status: Annotated[str, Meta(pattern="^(started|keep|discard|measured|crash)$")]  # `started`: without a verdict
    branch: str  # "" if HEAD is detached
    commit: str | None  # HEAD when the experiment started
    started: Annotated[str, Meta(pattern=_MOMENT)]

    # What was proposed.
    parent: int | None  # the last kept experiment before, whose answers are compared; None: this is the first one
    decided_before: int = 0  # how many experiments of this checkout were decided when this one started
    user_decisions: tuple[Decision, ...] = ()  # from the user's commits to train.toml since the experiment before
    proposal: Proposal
    run: Run = Run()
    diff: tuple[str, ...]  # the new change, key by key
    scaled: tuple[str, ...] = ()  # values of train.toml that the rules multiply, a line each
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
    num_starts: Place = 1  # of experiments with these effective settings on this branch, this one included
    total_seconds: Seconds | None = None
    health: str | None = None  # problems that the run's curves show (health.py), in a few lines
    failure: Failure | None = None  # of a crash

    # What was decided, and what git did.
    judgement: Judgement | None = None
    decided: Place | None = None  # its place in the order of decisions; None: it decides nothing
    git_action: str | None = None  # what was done to git and train.toml, or why nothing was
    git_error: str | None = None  # why the planned commits are still owed
    commits: dict[str, str] = msgspec.field(default_factory=dict)  # by decision: `keep 0012` -> id

    @property
    def environments(self) -> tuple[str, ...]:
        """Names of the environments: `arithmetic+gsm8k-trl` has two."""
        return tuple(self.rules_name.partition("-")[0].split("+"))

    @property
    def place(self) -> int:
        """Its place in the order of decisions; 0 if it decides nothing."""
        return self.decided or 0

    @property
    def is_keep(self) -> bool:
        """True if its new change was kept, also if that was reverted later; and for the baseline."""
        return self.status == Verdict.KEEP

    @property
    def decision(self) -> Decision | None:
        """The decision about its new change; None without a new change, and for a crash."""
        decisions = self.judgement.decisions if self.judgement and self.run.new else ()
        return next((d for d in decisions if self.run.new and d.change.keys == self.run.new.keys), None)

    @property
    def moved(self) -> tuple[Decision, ...]:
        """The decisions about other changes, which joined or left."""
        decisions = self.judgement.decisions if self.judgement else ()
        return tuple(d for d in decisions if d.action is not Action.DISCARD and d != self.decision)

    @property
    def is_incumbent(self) -> bool:
        """True if its run held the changes that were kept after it, and nothing else."""
        judged = self.judgement
        return judged is not None and self.status == Verdict.MEASURED and self.run.changes == judged.kept

    @property
    def kept_commit(self) -> str | None:
        return self.commits.get(f"keep {self.decision.change.name}") if self.decision else None

    @property
    def why(self) -> str:
        """The reason for its verdict; empty without a verdict."""
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

    @property
    def environment_scores(self) -> dict[str, float]:
        """Scores by environment, guards included; empty for one environment without a guard."""
        parts = self.evaluation.parts if self.evaluation else ()
        guards = self.evaluation.guards if self.evaluation else ()
        return {part.environment: part.score for part in parts} | {g.environment: g.score for g in guards}

    @property
    def strict_score(self) -> float | None:
        return self.evaluation.strict_score if self.evaluation else None


@dataclass(frozen=True, slots=True)
class Job:
    """What a worker needs to make one run: `job.json`. A worker with another rules hash or hardware refuses."""

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
    # Settings whose start tells whether a failed start is the config's fault. None for a baseline, whose training does
    # not end when no gradient is left.
    incumbent: dict[str, Any] | None = None
    cores: tuple[int, ...] = ()  # to which the run is pinned
    layout: str = ""  # the part of its hardware that no machine reports
    slot: str = ""

    @property
    def sha256(self) -> str:
        return hashlib.sha256(json.encode(self)).hexdigest()


class Plan(Struct, frozen=True, kw_only=True):
    """What a comparison measures: `plan.json`."""

    number: int  # of its folder, and of its use of the test split
    branch: str
    rules_hash: str
    split: Literal["test", "validation"]
    configs: dict[str, str]  # by side
    names: dict[str, str]  # by side: `experiment 0004`, or a commit
    num_seeds: int
    first_seed_index: int
    environment: str = ""  # with the next two: options of `nightshift certify`
    budget_seconds: float | None = None
    revisions: dict[str, str] = {}
    night: str = ""  # `started` of the night that began it; empty for `nightshift certify`


class Estimate(Struct, frozen=True):
    """A difference of scores, a fraction, with its standard error, degrees of freedom and 95 % interval."""

    difference: float
    stderr: float
    df: float
    interval: tuple[float, float]
    note: str = ""  # what was not measured


class ComparedRun(Struct, frozen=True):
    """One run of a finished comparison."""

    side: str
    seed: int
    num_steps: Count
    score: Fraction | None  # None for a crash

    def __str__(self) -> str:
        """`81.0 (698 steps)`: the score in percent."""
        return f"{'crashed' if self.score is None else f'{100 * self.score:.1f}'} ({self.num_steps} steps)"


class FreshRun(ComparedRun, frozen=True):
    """One finished run of a comparison: `run.json`."""

    result: Result
    proof: str | None = None  # what the engine proves of the weights that were scored


class Comparison(Struct, frozen=True, kw_only=True):
    """Incumbent minus baseline by fresh runs of both: `comparison.json`."""

    plan: Plan
    created: str  # ISO 8601, UTC
    environments: tuple[str, ...]
    budget_seconds: float
    model: str
    verdict: str  # better, worse, or no significant difference: a test at `level`
    level: float
    access: int | None  # number of the use of the test split by this campaign; None on the validation split
    estimate: Estimate
    runs: tuple[ComparedRun, ...]
    num_examples: int
    strict_scores: tuple[float, float] | None
    by_environment: dict[str, Estimate]  # not corrected for their number
    guards: dict[str, tuple[float, float]] = {}  # mean scores of baseline and incumbent, by environment
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

    @property
    def collapses(self) -> str:
        """`1 of 5 runs of the incumbent collapsed (by more than 6 pp below ...)`. Empty without two scores."""
        scores = self.scores("incumbent")
        num = sum(score < median(scores[:i] + scores[i + 1 :] or [score]) - COLLAPSE for i, score in enumerate(scores))
        meaning = f"by more than {100 * COLLAPSE:g} pp below the median of the other runs"
        return f"{num} of {len(scores)} runs of the incumbent collapsed ({meaning})" if len(scores) > 1 else ""
