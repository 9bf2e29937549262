"""Who proposes the next train.toml: the protocol, and the two proposers without a language model.

A proposer sees the ledger only, and gives a whole train.toml back. Everything it says is checked
like any other train.toml before it runs; agent.py has the proposer that asks a coding agent.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from nightshift.campaign.ledger import Ledger
from nightshift.errors import ConfigError
from nightshift.proposers.space import Dimension, SearchSpace
from nightshift.records import Record
from nightshift.rules import Rules
from nightshift.train_toml.config import Config, parse
from nightshift.train_toml.diff import diff
from nightshift.train_toml.values import Value, shorten

if TYPE_CHECKING:
    import optuna

# Experiments before TPE says anything; Optuna's own 10 are a good part of a night of 40.
NUM_STARTUP = 8
_MAX_HYPOTHESIS = 200


@dataclass(frozen=True, slots=True)
class Context:
    """What the next proposal is made from.

    `records`: the closed experiments of this branch and rules hash, in order, failures included.
    `refusals`: why earlier proposals for this same experiment were not taken, one line each.
    """

    number: int  # of the experiment to come
    incumbent: Record
    source: bytes  # the incumbent's train.toml
    records: tuple[Record, ...]
    rules: Rules
    ledger: Ledger
    used_keys: AbstractSet[str] | None = None  # what the engine uses; None: every open key
    refusals: tuple[str, ...] = ()
    new_direction: bool = False  # nothing was kept for long: try something else
    seconds_left: float | None = None  # until the night ends


@dataclass(frozen=True, slots=True)
class Proposal:
    """A proposed train.toml; `source` is None where there was no edit at all.

    `cause`: why it cannot be taken, in one line. `lesson` is about the experiment before; `notes` name what the
    proposer did beside its one task.
    """

    source: bytes | None
    hypothesis: str = ""
    prediction: str | None = None
    lesson: str | None = None
    notes: tuple[str, ...] = ()
    cause: str | None = None


class Proposer(Protocol):
    """Makes one proposal at a time; keeps no state that the ledger does not hold."""

    @property
    def name(self) -> str:
        """What the person calls it."""
        ...

    def propose(self, context: Context, is_stopping: Callable[[], bool]) -> Proposal:
        """The next proposal. Returns soon, without one, once `is_stopping` says so.

        Raises EngineError when the machinery is missing or broken.
        """
        ...


@dataclass(frozen=True, slots=True)
class RandomProposer:
    """Draws from the search space: what every other proposer has to beat."""

    seed: int
    name: str = "random"

    def propose(self, context: Context, is_stopping: Callable[[], bool]) -> Proposal:
        """One draw; the same ledger and seed give the same one."""
        draws = random.Random(_seed(self.seed, context))
        return _built(self.name, space_of(context), lambda dimension: dimension.sample(draws))


@dataclass(frozen=True, slots=True)
class TpeProposer:
    """Optuna's multivariate TPE (Watanabe 2023, arXiv:2304.11127) over the search space.

    The study is rebuilt from the ledger for every proposal, so nothing can be lost and nothing is kept.
    """

    seed: int
    name: str = "tpe"

    def propose(self, context: Context, is_stopping: Callable[[], bool]) -> Proposal:
        """One suggestion; the same ledger and seed give the same one. A new direction is a random draw."""
        import optuna  # half a second, and only this proposer needs it

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        space, seed = space_of(context), _seed(self.seed, context)
        distributions = space.distributions()
        sampler: optuna.samplers.BaseSampler = optuna.samplers.RandomSampler(seed)
        if not context.new_direction:
            sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True, n_startup_trials=NUM_STARTUP)
        study = optuna.create_study(sampler=sampler, direction="maximize")
        for config, score in scores(context):
            params = space.params(config)
            if params is not None:
                used = {name: distributions[name] for name in params}
                study.add_trial(optuna.create_trial(params=params, distributions=used, value=score))
        trial = study.ask()
        return _built(self.name, space, lambda dimension: dimension.value(_suggest(trial, dimension)))


def scores(context: Context) -> list[tuple[Config, float]]:
    """Every decided config with the posterior mean of its score, a fraction; a crash counts as the worst measured."""
    found: list[tuple[Config, float | None]] = []
    for record in context.records:
        try:
            config = parse(context.ledger.source(record.number))
        except ConfigError:  # an older allow-list let it pass
            continue
        judgement = record.judgement
        score = None if judgement is None else judgement.incumbent_score
        if score is not None and judgement is not None and judgement.delta is not None:
            score += judgement.delta
        found.append((config, score))
    measured = [score for _, score in found if score is not None]
    return [(config, min(measured) if score is None else score) for config, score in found] if measured else []


def _suggest(trial: optuna.Trial, dimension: Dimension) -> Any:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    box = dimension.distribution()
    if isinstance(box, CategoricalDistribution):
        return trial.suggest_categorical(dimension.name, box.choices)
    if isinstance(box, IntDistribution):
        return trial.suggest_int(dimension.name, box.low, box.high)
    assert isinstance(box, FloatDistribution)
    return trial.suggest_float(dimension.name, box.low, box.high, log=box.log)


def _built(name: str, space: SearchSpace, choose: Callable[[Dimension], Value]) -> Proposal:
    try:
        source = space.build(choose)
    except ConfigError as error:
        return Proposal(b"", cause=str(error))
    changes = "; ".join(change.line for change in diff(space.incumbent, parse(source)))
    return Proposal(source, shorten(f"{name}: {changes}", _MAX_HYPOTHESIS))


def space_of(context: Context) -> SearchSpace:
    """The search space around the incumbent."""
    steps = [run.training.num_steps for run in context.incumbent.runs if run.evaluation is not None]
    num_steps = sum(steps) / len(steps) if steps else None
    return SearchSpace.for_engine(context.used_keys, parse(context.source), num_steps)


def _seed(seed: int, context: Context) -> int:
    """A seed of its own for every proposal, also for one that follows a refusal; a resumed night repeats none."""
    return random.Random(f"{seed} {len(context.records)} {len(context.refusals)}").getrandbits(32)
