"""When a run is hopeless: what the rewards of its training say of its score long before the end.

At some shares of the budget the mean training reward of a candidate is compared with its parent's of that time. What
a difference there foretells of the score, and with which error, was fitted on recorded runs and judged on others
(docs/measured.md). A stopped run is booked as that much information on the difference to its parent; a run goes on
while that leaves it a chance that is worth its time. The head works out beforehand below which mean reward that is not
so, and a worker compares: it needs no belief.
"""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import NormalDist, fmean

from nightshift.campaign.campaign import Campaign
from nightshift.foretelling import Foretelling, Rung, window
from nightshift.records import Outcome, Record, Result, Training
from nightshift.train_toml.config import Config, changed_keys
from nightshift.train_toml.locks import CURRICULUM, OPPONENT, RATIO

SPARED_EVERY = 10  # runs that would be stopped: one is trained to its end all the same
PRICE = 0.1  # what a whole run is worth elsewhere, of prior_sd: 0.08 to 0.12 gain the same in simulation
_NUM_HALVINGS = 12
_STANDARD = NormalDist()
_LEAST = 1e-12  # standard deviation that is divided by
# Of what trains: with another one the mean reward of a step means something else.
_OTHER_REWARDS = (
    "seq_len",
    RATIO,
    CURRICULUM,
    OPPONENT,
    "orchestrator.train.filter_zero_advantages",
    "orchestrator.algo.length_penalty",
    "orchestrator.train.sampling.max_completion_tokens",
)
# The rewards of the same policy are others for a part of the run, so twice the difference is asked for.
_SHIFTED = ("orchestrator.train.sampling.temperature", "orchestrator.group_size", "trainer.scheduler", "max_steps")
_WARMUP = "trainer.scheduler.warmup_steps"


def is_spared(record: Record) -> bool:
    """Whether it is trained to its end even if it is hopeless: so a night measures its own wrong stops. A proposer that
    chose its hash for that would lose time, and gain nothing."""
    return int(record.config_hash, 16) % SPARED_EVERY == 0


def rungs(
    campaign: Campaign, record: Record, candidate: Config, parent: Config, early_stop: tuple[Foretelling, ...]
) -> tuple[Rung, ...]:
    """Those at the run of an experiment that is about to start; none where rewards do not compare, and where the run is
    worth more than its chance to be kept: of what was tried before, of known ideas."""
    parents = [kept for kept in campaign.kept if kept.number == record.parent]
    factor = comparable(candidate, parent)
    is_known = campaign.tried(record.config_hash) is not None or not record.diff or campaign.is_repeat(record)
    if not parents or factor is None or is_known:
        return ()
    found = []
    for foretelling in early_stop:
        if (reward := reference(parents[0], foretelling.share)) is not None:
            rung = Rung(foretelling, reward, 0.0, factor, int(candidate.get(_WARMUP) or 0))
            found.append(replace(rung, least=least_reward(campaign, record, rung)))
    return tuple(found)


def reference(parent: Record, share: float) -> float | None:
    """The mean reward of a config that was run, over its runs, at that share of the budget."""
    found = [value for run in parent.runs if (value := window(run.curve, share)) is not None]
    return fmean(found) if found else None


def comparable(candidate: Config, parent: Config) -> float | None:
    """How many times the difference must be as large as between runs that differ in nothing else; None where rewards do
    not compare."""
    changed = changed_keys(parent, candidate)
    if any(key.startswith(_OTHER_REWARDS) for key in changed):
        return None
    return 2.0 if any(key.startswith(_SHIFTED) for key in changed) else 1.0


def least_reward(campaign: Campaign, record: Record, rung: Rung, price: float = PRICE) -> float:
    """The mean reward below which the run of this experiment is not worth the rest of its time, at most its parent's; 0
    where it always is."""
    low, high, worth = 0.0, rung.parent_reward, price * record.decision.prior_sd * (1 - rung.foretelling.share)
    for _ in range(_NUM_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if promise(campaign, record, rung, middle) >= worth else (middle, high)
    return low


def promise(campaign: Campaign, record: Record, rung: Rung, reward: float) -> float:
    """What the end of a run is expected to add to the best score, a fraction, given its mean reward so far: the
    improvement over its parent that its own score is expected to show.

    Mockus 1978, with the spread of the posterior mean after the run (Frazier 2018, arXiv:1807.02811, section 4.2).
    """
    stopped = Training(Outcome.STOPPED, num_steps=0)
    tested = campaign.test(replace(record, runs=(Result(0, stopped, forecast=rung.forecast(reward)),)))
    mean, sd = float(tested.delta), float(tested.delta_stderr)
    noise = float((tested.belief.weights * tested.belief.run_variance(record.decision)).sum())
    moves = max(sd**2 / math.sqrt(sd**2 + noise), _LEAST)
    return moves * (_STANDARD.pdf(mean / moves) + mean / moves * _STANDARD.cdf(mean / moves))
