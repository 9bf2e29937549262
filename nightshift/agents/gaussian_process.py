"""Which of many candidates a Gaussian process expects to improve most: BoTorch's, of the optional extra `search`.

The process over the unit cube of the search space has BoTorch's own kernel and priors (Hvarfner et al. 2024,
arXiv:2402.02229); the noise of each score is known. The acquisition is noisy log expected improvement (Ament et al.
2023, arXiv:2310.20708), which leaves aside what is in flight.
"""

import importlib.util
import warnings

import numpy as np
from numpy.typing import NDArray

from nightshift.errors import UsageError

Floats = NDArray[np.float64]
_NUM_SAMPLES = 128  # of the best score so far, which noise hides


def require() -> None:
    """UsageError where BoTorch is not installed."""
    if importlib.util.find_spec("botorch") is None:
        raise UsageError("--agent search needs BoTorch, which is not installed", "Install it: uv sync --extra search.")


def most_promising(places: Floats, scores: Floats, variances: Floats, pending: Floats, candidates: Floats) -> int:
    """The index of a candidate, (c, d); `places` (n, d) and `pending` (m, d) lie in the unit cube as well, `scores` and
    the `variances` of their noise are (n,). The same arguments give the same one."""
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
