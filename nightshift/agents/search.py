"""A search without a language model: Optuna's samplers over one space, from the ledger alone."""

import importlib.util
import random
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, FloatDistribution

from nightshift.agents.base import Answer, Context, Proposing
from nightshift.agents.history import load_configs
from nightshift.agents.space import SearchSpace
from nightshift.agents.throughput import throughput_of
from nightshift.campaign.records import Proposal
from nightshift.config.allowlist import shorten
from nightshift.config.train_toml import Config, diff, parse
from nightshift.errors import ConfigError, UsageError

# Random experiments before a model is asked; Optuna's default of 10 is a good part of a night of 40.
NUM_STARTUP = 8
NUM_CANDIDATES = 500  # of the Gaussian process
# Below the best quarter of the scores: a worse score counts as this bad, so that the Gaussian process tells a good
# score from a better one. Without this limit 37 nights of benchmarks/proposers.py gain 0.3 ± 0.4 pp less.
_FAR = 0.10
_MAX_DRAWS = 20  # of which each changes nothing, or has keys that do not agree
_MAX_HYPOTHESIS = 200


@dataclass(frozen=True, slots=True)
class SearchProposer:
    """Changes one to three keys of the incumbent (space.py) to values from an Optuna sampler. `random` draws the values
    from their boxes; every other proposer has to beat it. `tpe` draws them from TPE, key by key (Watanabe 2023,
    arXiv:2304.11127). `search` draws many changes, and takes the one that a Gaussian process expects to improve most.
    """

    name: str
    seed: int
    sandbox: ClassVar = ""  # it asks nobody
    is_instant: ClassVar = True

    def __post_init__(self) -> None:
        if self.name == "search" and importlib.util.find_spec("scipy") is None:
            raise UsageError("--agent search needs SciPy, which is not installed", "Run: uv sync --extra search.")

    def propose(self, context: Context) -> Proposing:
        yield from ()
        return (self.answer(context),)

    def answer(self, context: Context) -> Answer:
        """Return one change; the same ledger and seed give the same change. A new direction is a random draw."""
        space = space_of(context)
        # A seed of its own for every proposal, also for one that follows a refusal; a resumed night repeats none.
        seed = f"{self.seed} {len(context.campaign.decided)} {len(context.refusals)}"
        if context.in_flight or context.waiting:
            seed += f" {context.number + len(context.waiting)}"
        rng = random.Random(seed)
        is_random = context.new_direction or len(context.campaign.decided) < NUM_STARTUP
        draw = _DRAWS["random" if is_random else self.name]
        cause = "no draw changed train.toml"
        for _ in range(_MAX_DRAWS):
            try:
                source = space.build(draw(context, space, rng))
            except ConfigError as error:
                cause = str(error)
                continue
            if changes := diff(space.base, parse(source)):
                description = f"{self.name}: {', '.join(change.line for change in changes)}"
                return Answer(source, Proposal(description=shorten(description, _MAX_HYPOTHESIS)))
        return Answer(b"", cause=cause)


def space_of(context: Context) -> SearchSpace:
    return SearchSpace.for_engine(context.used_keys, parse(context.source), throughput_of(context).plan)


def scores(context: Context) -> list[tuple[Config, float]]:
    """Return every decided config, riders included, with the posterior mean of its score, a fraction of 1. A crash
    counts as the worst score, and no score as farther below the best ones than _FAR."""
    campaign = context.campaign
    means = {
        record.number: campaign.posterior.predict(record.run.changes)[0]
        for record in campaign.decided
        if campaign.posterior is not None and record.score is not None and record.number in context.configs
    }
    if not means:
        return []
    best = sorted(means.values())[-max(len(context.configs) // 4, 1) :]
    least, worst = float(np.mean(best)) - _FAR, min(means.values())
    return [(config, max(means.get(number, worst), least)) for number, config in context.configs.items()]


def _random(context: Context, space: SearchSpace, rng: random.Random) -> dict[str, float]:
    return space.change(rng, {dimension.name: rng.random() for dimension in space.dimensions})


def _tpe(context: Context, space: SearchSpace, rng: random.Random) -> dict[str, float]:
    seed = rng.getrandbits(32)  # multivariate: 2.2 ± 0.5 pp less in 40 nights; the liar tells proposals in flight apart
    sampler = optuna.samplers.TPESampler(n_startup_trials=1, seed=seed, multivariate=False, constant_liar=True)
    return space.change(rng, _ask(context, space, sampler))


def _search(context: Context, space: SearchSpace, rng: random.Random) -> dict[str, float]:
    changes, base = [_random(context, space, rng) for _ in range(NUM_CANDIDATES)], space.places(space.base)
    ranking = _Ranking([base | change for change in changes], rng.getrandbits(32))
    _ask(context, space, ranking)
    return changes[ranking.best]


class _Ranking(optuna.samplers.GPSampler):
    """Optuna's Gaussian process and its acquisition, the logarithm of the expected improvement (Ament et al. 2023,
    arXiv:2310.20708), over given candidates alone. `best` is the index of the most promising one."""

    def __init__(self, candidates: Sequence[Mapping[str, float]], seed: int) -> None:
        super().__init__(seed=seed, n_startup_trials=1)
        self.candidates = candidates
        self.best = 0

    def _optimize_acqf(self, acqf: Any, best_params: Any) -> Any:
        """Override Optuna's own optimization over the whole cube; the first argument stands for as many trials."""
        points = acqf.search_space.get_normalized_params(self.candidates, self.candidates)
        self.best = int(acqf.eval_acqf_no_grad(points).argmax())
        return points[self.best]


_DRAWS = {"random": _random, "tpe": _tpe, "search": _search}


def _ask(context: Context, space: SearchSpace, sampler: optuna.samplers.BaseSampler) -> dict[str, float]:
    """Return the point of the unit cube that the sampler proposes, after the campaign's runs and those in flight."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)  # a fit that fails keeps Optuna's first kernel
    study = optuna.create_study(sampler=sampler, direction="maximize")
    distributions: dict[str, BaseDistribution] = {d.name: FloatDistribution(0, 1) for d in space.dimensions}
    in_flight = [*load_configs(context.ledger, context.in_flight).values()]
    in_flight += [parse(answer.source) for answer in context.waiting if answer.source]
    trials: list[tuple[Config, dict[str, Any]]] = [(config, {"value": score}) for config, score in scores(context)]
    trials += [(config, {"state": optuna.trial.TrialState.RUNNING}) for config in in_flight]
    for config, result in trials:
        with suppress(ValueError):  # a config that has left the space
            study.add_trial(optuna.create_trial(params=space.places(config), distributions=distributions, **result))
    return study.ask(distributions).params
