"""A search without a language model: Optuna's TPE, which learns from the campaign, or chance."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import optuna

from nightshift.errors import ConfigError
from nightshift.proposers import Context, Proposal
from nightshift.proposers.history import load_configs
from nightshift.proposers.space import SearchSpace
from nightshift.train_toml.config import Config, diff, parse
from nightshift.train_toml.values import shorten

# Experiments before TPE says anything; Optuna's own 10 are a good part of a night of 40.
NUM_STARTUP = 8
_MAX_HYPOTHESIS = 200


@dataclass(frozen=True, slots=True)
class SearchProposer:
    """Draws from the search space: as `tpe` by Optuna's multivariate TPE (Watanabe 2023, arXiv:2304.11127), as `random`
    by chance, which every other proposer has to beat.

    The study is rebuilt from the ledger for every proposal, so nothing can be lost and nothing is kept.
    """

    name: str
    seed: int

    def propose(self, context: Context, is_stopping: Callable[[], bool]) -> Proposal:
        """One draw; the same ledger and seed give the same one. A new direction is a random draw."""
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        space = space_of(context)
        distributions = space.distributions
        # A seed of its own for every proposal, also for one that follows a refusal; a resumed night repeats none.
        own = f"{self.seed} {len(context.campaign.decided)} {len(context.refusals)}"
        in_flight = list(load_configs(context.ledger, context.in_flight).values())
        in_flight += [parse(waiting.source or b"") for waiting in context.waiting]
        own += f" {context.number + len(context.waiting)}" if in_flight else ""
        seed = random.Random(own).getrandbits(32)
        sampler: optuna.samplers.BaseSampler = optuna.samplers.RandomSampler(seed)
        if self.name == "tpe" and not context.new_direction:
            # The liar keeps proposals apart that are in flight at the same time.
            sampler = optuna.samplers.TPESampler(
                seed=seed, multivariate=True, n_startup_trials=NUM_STARTUP, constant_liar=bool(in_flight)
            )
        study = optuna.create_study(sampler=sampler, direction="maximize")
        for config, score in scores(context):
            if (params := space.params(config)) is not None:
                used = {name: distributions[name] for name in params}
                study.add_trial(optuna.create_trial(params=params, distributions=used, value=score))
        for config in in_flight:
            if (params := space.params(config)) is not None:
                used = {name: distributions[name] for name in params}
                running = optuna.trial.TrialState.RUNNING
                study.add_trial(optuna.create_trial(params=params, distributions=used, state=running))
        try:
            source = space.build(study.ask(distributions).params)
        except ConfigError as error:
            return Proposal(b"", cause=str(error))
        changes = "; ".join(change.line for change in diff(space.incumbent, parse(source)))
        return Proposal(source, shorten(f"{self.name}: {changes}", _MAX_HYPOTHESIS))


def space_of(context: Context) -> SearchSpace:
    """The search space around the incumbent."""
    steps = [run.training.num_steps for run in context.incumbent.runs if run.evaluation is not None]
    num_steps = sum(steps) / len(steps) if steps else None
    return SearchSpace.for_engine(context.used_keys, parse(context.source), num_steps)


def scores(context: Context) -> list[tuple[Config, float]]:
    """Every decided config with the posterior mean of its score, a fraction; a crash counts as the worst measured."""
    means = {
        record.number: judgement.incumbent_score + (judgement.delta or 0.0)
        for record in context.campaign.decided
        if (judgement := record.judgement) and judgement.incumbent_score is not None
    }
    configs = load_configs(context.ledger, context.campaign.decided)
    worst = min((means[number] for number in configs if number in means), default=None)
    return [] if worst is None else [(config, means.get(number, worst)) for number, config in configs.items()]
