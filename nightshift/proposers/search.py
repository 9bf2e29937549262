"""A search that learns from the campaign: Optuna's TPE."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nightshift.errors import ConfigError
from nightshift.proposers import Context, Proposal
from nightshift.proposers.random import proposal_of, seed_of, space_of
from nightshift.proposers.space import Dimension
from nightshift.train_toml.config import Config, parse

if TYPE_CHECKING:
    import optuna

# Experiments before TPE says anything; Optuna's own 10 are a good part of a night of 40.
NUM_STARTUP = 8


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
        space, seed = space_of(context), seed_of(self.seed, context)
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
        return proposal_of(self.name, space, lambda dimension: dimension.value(_suggest(trial, dimension)))


def scores(context: Context) -> list[tuple[Config, float]]:
    """Every decided config with the posterior mean of its score, a fraction; a crash counts as the worst measured."""
    found: list[tuple[Config, float | None]] = []
    for record in context.campaign.decided:
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
