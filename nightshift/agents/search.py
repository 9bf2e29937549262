"""A search without a language model: random draws, Optuna's TPE or a Gaussian process, from the ledger alone."""

import importlib.util
import random
import warnings
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import optuna
from numpy.typing import NDArray

from nightshift.agents.base import Answer, Context, Proposing
from nightshift.agents.history import load_configs
from nightshift.agents.space import Dimension, SearchSpace
from nightshift.agents.throughput import throughput_of
from nightshift.campaign.records import Proposal
from nightshift.config.train_toml import Config, diff, parse
from nightshift.config.values import shorten
from nightshift.errors import ConfigError, UsageError

# Random experiments before a model is asked; Optuna's default of 10 is a good part of a night of 40.
NUM_STARTUP = 8
NUM_LOCAL, NUM_GLOBAL = 400, 100  # candidates of a Gaussian process
_STEP = 0.18  # sd of a local change, of a box
# Below the best quarter of the scores: worse is as bad. A process whose scale holds a collapse tells no good one from
# a better one (benchmarks/proposers.py: without this the median night on the emulator finds 1.1 pp, not 4.9).
_FAR = 0.10
_STAYS_NEAR = 0.8  # of the numbers in a local change; the others go anywhere in their box
_MAX_DRAWS = 20  # that change nothing
_MAX_HYPOTHESIS = 200
_NUM_SAMPLES = 128  # of the best score so far, which noise hides
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class SearchProposer:
    """Changes one to three keys of the incumbent (space.py). `random` draws the values from their boxes; every other
    proposer has to beat it. `tpe` draws them from Optuna's multivariate TPE (Watanabe 2023, arXiv:2304.11127). `search`
    draws many changes and takes the one that a Gaussian process expects to improve most.

    Everything is rebuilt from the ledger for every proposal.
    """

    name: str
    seed: int
    sandbox: ClassVar = ""  # it asks nobody
    is_instant: ClassVar = True

    def __post_init__(self) -> None:
        if self.name == "search" and importlib.util.find_spec("botorch") is None:
            fix = "Install it: uv sync --extra search."
            raise UsageError("--agent search needs BoTorch, which is not installed", fix)

    def propose(self, context: Context) -> Proposing:
        yield from ()
        return (self.answer(context),)

    def answer(self, context: Context) -> Answer:
        """One change; the same ledger and seed give the same change. A new direction is a random draw."""
        space = space_of(context)
        # A seed of its own for every proposal, also for one that follows a refusal; a resumed night repeats none.
        own = f"{self.seed} {len(context.campaign.decided)} {len(context.refusals)}"
        if in_flight := _open(context):
            own += f" {context.number + len(context.waiting)}"
        rng = random.Random(own)
        begins_decay = space.begins_decay(rng)
        is_random = self.name == "random" or context.new_direction or len(context.campaign.decided) < NUM_STARTUP
        source = context.source
        for _ in range(_MAX_DRAWS):
            if is_random:
                params = space.change(rng, lambda dimension, now: _anywhere(dimension, rng), begins_decay)
            elif self.name == "tpe":
                asked = _tpe(context, space, in_flight, rng.getrandbits(32))
                params = space.change(rng, lambda dimension, now, asked=asked: asked[dimension.name], begins_decay)  # type: ignore[misc]
            else:
                params = _best(context, space, in_flight, rng, begins_decay)
            try:
                source = space.build(params)
            except ConfigError as error:
                return Answer(b"", cause=str(error))
            if parse(source).hash != space.base.hash:
                break
        changes = "; ".join(change.line for change in diff(space.base, parse(source)))
        return Answer(source, Proposal(description=shorten(f"{self.name}: {changes}", _MAX_HYPOTHESIS)))


def space_of(context: Context) -> SearchSpace:
    return SearchSpace.for_engine(context.used_keys, parse(context.source), throughput_of(context).plan)


def scores(context: Context) -> list[tuple[Config, float]]:
    """Every decided config, riders included, with the posterior mean of its score, a fraction of 1. A crash counts as
    the worst of them."""
    campaign = context.campaign
    means = {
        record.number: campaign.posterior.predict(record.run.changes)[0]
        for record in campaign.decided
        if campaign.posterior is not None and record.score is not None
    }
    worst = min((means[number] for number in context.configs if number in means), default=None)
    return [] if worst is None else [(config, means.get(number, worst)) for number, config in context.configs.items()]


def _open(context: Context) -> list[Config]:
    """The configs that run now, or wait for a slot."""
    in_flight = list(load_configs(context.ledger, context.in_flight).values())
    return in_flight + [parse(waiting.source or b"") for waiting in context.waiting]


def _tpe(context: Context, space: SearchSpace, in_flight: list[Config], seed: int) -> dict[str, Any]:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    # The liar keeps proposals apart that are in flight at the same time.
    sampler = optuna.samplers.TPESampler(
        seed=seed, multivariate=True, n_startup_trials=NUM_STARTUP, constant_liar=bool(in_flight)
    )
    study, distributions = optuna.create_study(sampler=sampler, direction="maximize"), space.distributions
    running = optuna.trial.TrialState.RUNNING
    known: list[tuple[Config, dict[str, Any]]] = [(config, {"value": score}) for config, score in scores(context)]
    for config, result in [*known, *((config, {"state": running}) for config in in_flight)]:
        if (params := space.params(config)) is not None:
            used = {name: distributions[name] for name in params}
            study.add_trial(optuna.create_trial(params=params, distributions=used, **result))
    return study.ask(distributions).params


def _best(
    context: Context, space: SearchSpace, in_flight: list[Config], rng: random.Random, begins_decay: bool
) -> dict[str, Any]:
    """The most promising of many changes, near and far. A crash counts as the worst measured score."""
    runs = list[tuple[Config, float, float]]()  # with score and variance
    seed_variance, configs = context.rules.decision.seed_sd**2, context.configs
    for record in context.campaign.decided:
        if record.number in configs and (evaluation := record.evaluation) is not None:
            variance = seed_variance + evaluation.eval_stderr**2
            runs.append((configs[record.number], evaluation.eval_score, variance))
    worst = min(score for _, score, _ in runs)
    measured = {config.hash for config, _, _ in runs}
    runs += [(config, worst, seed_variance) for config in configs.values() if config.hash not in measured]
    changes = [space.change(rng, lambda d, now: _near(d, now, rng), begins_decay) for _ in range(NUM_LOCAL)]
    changes += [space.change(rng, lambda d, now: _anywhere(d, rng), begins_decay) for _ in range(NUM_GLOBAL)]
    places, pending = [space.places(config) for config, _, _ in runs], [space.places(each) for each in in_flight]
    candidates = np.array([space.places_with(params) for params in changes])
    values, variances = (np.array([row[column] for row in runs]) for column in (1, 2))
    values = np.maximum(values, np.sort(values)[-max(len(values) // 4, 1) :].mean() - _FAR)
    pending_places = np.array(pending).reshape(len(pending), len(space.dimensions))
    return changes[_most_promising(np.array(places), values, variances, pending_places, candidates)]


def _most_promising(places: Floats, scores: Floats, variances: Floats, pending: Floats, candidates: Floats) -> int:
    """The index of the candidate, (c, d), that a Gaussian process expects to improve most; the same arguments give the
    same one.

    `places` (n, d) and `pending` (m, d) lie in the unit cube as well, `scores` and the `variances` of their noise are
    (n,). The process has BoTorch's own kernel and priors (Hvarfner et al. 2024, arXiv:2402.02229); the acquisition is
    noisy log expected improvement (Ament et al. 2023, arXiv:2310.20708), which leaves aside what is in flight.
    """
    with warnings.catch_warnings(action="ignore"):  # of libraries about each other; BoTorch tries a failed fit again
        import torch
        from botorch.acquisition.logei import qLogNoisyExpectedImprovement
        from botorch.fit import fit_gpytorch_mll
        from botorch.models import SingleTaskGP
        from botorch.models.transforms import Standardize
        from botorch.sampling.normal import SobolQMCNormalSampler
        from gpytorch.mlls import ExactMarginalLogLikelihood

        known = (torch.tensor(values) for values in (places, scores[:, None], variances[:, None], pending, candidates))
        x, y, noise, open_, asked = known
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = SingleTaskGP(x, y, noise, outcome_transform=Standardize(1))
            fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
            sampler = SobolQMCNormalSampler(torch.Size([_NUM_SAMPLES]), seed=0)
            value = qLogNoisyExpectedImprovement(
                model, x, sampler=sampler, X_pending=open_ if len(open_) else None, prune_baseline=True
            )
            with torch.no_grad():
                return int(value(asked[:, None, :]).argmax())


def _anywhere(dimension: Dimension, rng: random.Random) -> Any:
    return dimension.at(rng.random())


def _near(dimension: Dimension, now: Any, rng: random.Random) -> Any:
    """Close to the present parameter, mostly; another choice."""
    if now is None or dimension.is_choice or rng.random() > _STAYS_NEAR:
        return _anywhere(dimension, rng)
    if dimension.is_exponent:
        return dimension.param(dimension.value(now + rng.choice((-1, 1))))
    return dimension.at(min(max(dimension.place(now) + rng.gauss(0.0, _STEP), 0.0), 1.0))
