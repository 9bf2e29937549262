"""Campaigns that never trained anything: worlds of ideas, and a clock.

The model of docs/history/decision-rule.md, section 2.

A world says how good ideas are, how noisy runs are and how long they take; `simulate` plays many campaigns
of one rule in it at once. Scores are fractions 0..1, times are seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from nightshift.campaign import decision
from nightshift.campaign.belief import Belief
from nightshift.decision_rules import DecisionRules

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Ints = NDArray[np.int_]

START = 0.475
SAME_CONFIG, OTHER_CONFIG = 0.65, 0.60  # correlation of one example's 0/1 answer between two runs
INHERITED = 0.8  # of a config's own luck on the example set, by its children
_STARTUP, _TRAINING, _PER_EXAMPLE = 75.0, 600.0, 0.0152


@dataclass(frozen=True)
class World:
    """Ideas and noise. Shares are of ideas; what is neither helpful nor neutral harms."""

    helpful: float = 0.27
    neutral: float = 0.33
    least_help: float = 0.002
    mean_help: float = 0.006  # above the least
    most_help: float = 0.02
    mean_harm: float = 0.015
    catastrophes: float = 0.1  # of harmful ideas: -5 to -20 pp
    crashes: float = 0.08
    seed_sd: float = 0.0125
    hours: float = 9.0
    decay: float = 0.0  # the helpful share falls by exp(-decay) an idea
    collapses: float = 0.0  # share of runs that lose 5 to 20 pp by bad luck
    bad: tuple[float, float] | None = None  # mean and sd of what harmful ideas do, in place of the above
    agent_seconds: float = 15.0  # until the next idea is written

    def with_helpful(self, share: float) -> World:
        """Another share of helpful ideas; the rest keeps its proportions."""
        return World(**{**vars(self), "helpful": share, "neutral": self.neutral * (1 - share) / (1 - self.helpful)})


class Rule(Protocol):
    """What decides. All arrays hold one element a campaign."""

    @property
    def incumbent(self) -> Ints: ...  # its index among the configs that were kept, the baseline first
    @property
    def gain(self) -> tuple[Floats, Floats]: ...  # believed, and its standard deviation; NaN where the rule has none
    @property
    def reported(self) -> Floats: ...
    def begin(self, scores: Floats, num_examples: int) -> None: ...  # (campaigns, baseline runs)
    def test(self, active: Bools, score: Floats, e2: Floats, delta: Floats) -> tuple[Bools, Floats]:
        """One run of a child of the incumbent where `active`: (keep, p_better). `delta`, the truth, is the oracle's."""
        ...


@dataclass(frozen=True)
class Player:
    """A rule with what it runs on."""

    rule: Rule
    num_examples: int = 1319
    baseline_runs: int = 2


@dataclass(frozen=True)
class Night:
    """What came of the campaigns: `gain` and `bias` one a campaign; `delta`, `kept`, `p_better` one a decided idea."""

    gain: Floats  # true
    bias: Floats  # reported minus true score of the last incumbent
    believed: Floats  # gain
    sd: Floats  # of that belief
    ideas: float  # a campaign, crashes included
    taken_back: float  # a campaign
    delta: Floats  # true difference to the incumbent it met
    kept: Bools
    p_better: Floats  # NaN where the rule has none


class ShippedRule:
    """nightshift/campaign/decision.py itself, its batch axis being the campaigns."""

    def __init__(self, rules: DecisionRules) -> None:
        self.rules = rules
        self.belief: Belief

    def begin(self, scores: Floats, num_examples: int) -> None:
        """The baselines."""
        self.belief = decision.baseline(scores, num_examples, self.rules)

    def test(self, active: Bools, score: Floats, e2: Floats, delta: Floats) -> tuple[Bools, Floats]:
        """Observe and settle; the belief stays what it was where nothing was run."""
        before = self.belief
        tested = decision.observe(before, before.incumbent, score, e2, self.rules)
        keep = active & tested.keep
        after = decision.settle(tested, keep, self.rules)
        idle, size = ~active, before.means.shape[-1]
        after.means[idle, :, :size] = before.means[idle]
        after.covariance[idle, :, :size, :size] = before.covariance[idle]
        self.belief = replace(
            after,
            weights=np.where(active[:, None], after.weights, before.weights),
            incumbent=np.where(active, after.incumbent, before.incumbent),
            pairing_variance=np.where(active, after.pairing_variance, before.pairing_variance),
        )
        return keep, tested.p_better

    @property
    def incumbent(self) -> Ints:
        """The config that is believed best."""
        return np.asarray(self.belief.incumbent)

    @property
    def gain(self) -> tuple[Floats, Floats]:
        """What the campaign says of its incumbent against its baseline."""
        return self.belief.difference(self.belief.incumbent, 0)

    @property
    def reported(self) -> Floats:
        """What the campaign says of its incumbent."""
        return self.belief.mean


def simulate(player: Player, world: World, num_campaigns: int, seed: int) -> Night:
    """Play campaigns until their clocks run out. The same seed gives every rule the same ideas."""
    return _Nights(player, world, num_campaigns, seed).play()


class _Nights:
    """Many campaigns in step: the true scores and clocks that the rule does not see."""

    def __init__(self, player: Player, world: World, size: int, seed: int) -> None:
        self.player, self.world, self.size, self.seed = player, world, size, seed
        self.luck = np.random.default_rng((seed, 1))
        self.run_seconds = _STARTUP + _TRAINING + _PER_EXAMPLE * player.num_examples
        self.end, self.clock = world.hours * 3600, np.full(size, player.baseline_runs * self.run_seconds)
        # Of every config that was kept: true score, own luck on the example set (in its sd). A column each.
        most = int(self.end / self.run_seconds) + 1
        self.q, self.own = np.full((size, most), START), np.zeros((size, most))
        self.num_kept = np.ones(size, int)
        self.ideas = self.taken_back = 0
        self.log: list[tuple[Floats, Bools, Floats]] = []

    def play(self) -> Night:
        rule, size, baseline_runs = self.player.rule, self.size, self.player.baseline_runs
        runs = [self.run(self.q[:, 0], self.own[:, 0]) for _ in range(baseline_runs)]
        rule.begin(np.stack(runs, axis=1), self.player.num_examples)
        index = 0
        while (alive := self.clock + self.world.agent_seconds + self.run_seconds <= self.end).any():
            self.try_idea(alive, index)
            index += 1
        delta, kept, p_better = (np.concatenate(column) for column in zip(*self.log, strict=True))
        q = self.q[np.arange(size), rule.incumbent]
        said = (rule.reported - q, *rule.gain)
        return Night(q - START, *said, self.ideas / size, self.taken_back / size, delta, kept, p_better)

    def run(self, q: Floats, own: Floats) -> Floats:
        """Scores of one run of each campaign's config."""
        spread, luck = q * (1 - q) / self.player.num_examples, self.luck
        y = q + own * np.sqrt((SAME_CONFIG - OTHER_CONFIG) * spread) + luck.normal(0, self.world.seed_sd, self.size)
        y = y + luck.normal(0, 1, self.size) * np.sqrt((1 - SAME_CONFIG) * spread)
        collapsed = luck.random(self.size) < self.world.collapses
        return np.clip(np.where(collapsed, y - luck.uniform(0.05, 0.20, self.size), y), 0.0, 1.0)

    def try_idea(self, alive: Bools, index: int) -> None:
        """One experiment in every campaign of `alive`."""
        rule, before = self.player.rule, self.player.rule.incumbent
        q, own = (values[np.arange(self.size), before] for values in (self.q, self.own))
        delta, crash, crash_seconds, child = _idea(self.world, q, own, self.seed, index)
        self.clock += np.where(alive, self.world.agent_seconds + np.where(crash, crash_seconds, self.run_seconds), 0.0)
        self.ideas += int(alive.sum())
        active, candidate = alive & ~crash, np.clip(q + delta, 0.01, 0.99)
        keep, p_better = rule.test(active, self.run(candidate, child), self.e2(q, before), delta)
        self.log.append((delta[active], keep[active], p_better[active]))
        where = keep.nonzero()[0], self.num_kept[keep]
        self.q[where], self.own[where] = candidate[keep], child[keep]
        self.num_kept += keep
        self.taken_back += int((~keep & (rule.incumbent != before)).sum())

    def e2(self, q: Floats, parent: Ints) -> Floats:
        """What `pairing` would find in the per-example scores: the variance of a paired difference, a run."""
        k = np.where(parent == 0, 1 / self.player.baseline_runs, 1.0)
        own = 2 * (1 - INHERITED) * (SAME_CONFIG - OTHER_CONFIG)
        variance: Floats = q * (1 - q) / self.player.num_examples * (own / (1 + k) + 1 - SAME_CONFIG)
        return variance


def _idea(world: World, q: Floats, own: Floats, seed: int, index: int) -> tuple[Floats, Bools, Floats, Floats]:
    """The next idea: (true difference, crashes?, seconds of a crash, its own luck)."""
    rng, size = np.random.default_rng((seed, 2, index)), len(q)
    kind, catastrophe = rng.random(size), rng.random(size) < world.catastrophes
    helpful = world.helpful * math.exp(-world.decay * index)
    help_ = np.minimum(world.least_help + rng.exponential(world.mean_help, size), world.most_help)
    help_ = help_ * np.clip(1 - (q - START) / 0.15, 0, 1)
    harm = np.where(catastrophe, rng.uniform(0.05, 0.20, size), rng.exponential(world.mean_harm, size))
    harm = harm if world.bad is None else -np.random.default_rng((seed, 3, index)).normal(*world.bad, size)
    neutral = rng.normal(0, 0.0015, size)
    # What stops helping as ideas are used up becomes neutral.
    delta = np.where(kind < helpful, help_, np.where(kind < world.helpful + world.neutral, neutral, -harm))
    crash, crash_seconds = rng.random(size) < world.crashes, _STARTUP + _TRAINING * rng.random(size) ** 2
    rng.normal(size=size)  # a draw that an earlier rule needed: without it every recorded figure would be another
    child = INHERITED * own + math.sqrt(1 - INHERITED**2) * rng.standard_normal(size)
    return delta, crash, crash_seconds, child
