"""Campaigns that never trained anything: worlds of ideas, and a clock. The model of docs/decision-rule.md, section 2.

A world says how good ideas are, how noisy runs are and how long they take; `simulate` plays many campaigns
of one rule in it at once. Scores are fractions 0..1, times are seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from remembering_rule import to_front
from vectorised_rule import CANDIDATE, INCUMBENT, NOBODY, Bools, Floats, Ints

START = 0.475
SAME_CONFIG, OTHER_CONFIG = 0.65, 0.60  # correlation of one example's 0/1 answer between two runs
INHERITED = 0.8  # of a config's own luck on the example set, by its children
_STARTUP, _TRAINING, _PER_EXAMPLE, _AGENT = 75.0, 600.0, 0.0152, 15.0


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

    def with_helpful(self, share: float) -> World:
        """Another share of helpful ideas; the rest keeps its proportions."""
        return World(**{**vars(self), "helpful": share, "neutral": self.neutral * (1 - share) / (1 - self.helpful)})


class Rule(Protocol):
    """What decides. All arrays hold one element a campaign; `mask` says which ones it is about."""

    @property
    def reported(self) -> Floats: ...
    @property
    def p_better(self) -> Floats: ...
    def begin(self, scores: Floats, num_examples: int) -> None: ...
    def compare(self) -> None: ...
    def observe_candidate(self, mask: Bools, y: Floats, e2: Floats) -> None: ...
    def observe_incumbent(self, mask: Bools, y: Floats) -> None: ...
    def decide(self, can_replicate: Bools) -> tuple[Bools, Ints]: ...
    def settle(self, mask: Bools, keep: Bools) -> Ints: ...  # how many incumbents back the best one is


@dataclass(frozen=True)
class Player:
    """A rule with what it runs on: `early_stop` ends training half-way where the forecast is below it."""

    rule: Rule
    num_examples: int = 1319
    baseline_runs: int = 2
    max_runs: int = 3
    early_stop: float | None = None


@dataclass(frozen=True)
class Night:
    """What came of the campaigns: `gain` and `bias` one a campaign; `delta`, `kept`, `p_better` one a decided idea."""

    gain: Floats  # true
    bias: Floats  # reported minus true score of the last incumbent
    ideas: float  # a campaign, crashes included
    replicates: float  # a campaign
    taken_back: float  # a campaign
    delta: Floats  # true difference to the incumbent it met
    kept: Bools
    p_better: Floats  # NaN where training was stopped early, or where the rule has none


def simulate(player: Player, world: World, num_campaigns: int, seed: int) -> Night:
    """Play campaigns until their clocks run out. The same seed gives every rule the same ideas."""
    return _Nights(player, world, num_campaigns, seed).play()


class _Nights:
    """Many campaigns in step: the true scores and clocks that the rule does not see."""

    def __init__(self, player: Player, world: World, size: int, seed: int) -> None:
        self.player, self.world, self.size, self.seed = player, world, size, seed
        self.luck = np.random.default_rng((seed, 1))
        memory = getattr(player.rule, "memory", 1)
        # Incumbents, the present one first: true score, own luck on the example set (in its sd), number of runs.
        self.q, self.own = np.full((size, memory), START), np.zeros((size, memory))
        self.num_runs = np.full((size, memory), player.baseline_runs)
        self.run_seconds = _STARTUP + _TRAINING + _PER_EXAMPLE * player.num_examples
        self.end, self.clock = world.hours * 3600, np.full(size, player.baseline_runs * self.run_seconds)
        self.ideas = self.replicates = self.taken_back = 0
        self.log: list[tuple[Floats, Bools, Floats]] = []

    def play(self) -> Night:
        rule, size = self.player.rule, self.size
        runs = [self.run(self.q[:, 0], self.own[:, 0]) for _ in range(self.player.baseline_runs)]
        rule.begin(np.stack(runs, axis=1), self.player.num_examples)
        index = 0
        while (alive := self.clock + _AGENT + self.run_seconds <= self.end).any():
            self.try_idea(alive, index)
            index += 1
        delta, kept, p_better = (np.concatenate(column) for column in zip(*self.log, strict=True))
        counts = (self.ideas / size, self.replicates / size, self.taken_back / size)
        return Night(self.q[:, 0] - START, rule.reported - self.q[:, 0], *counts, delta, kept, p_better)

    def run(self, q: Floats, own: Floats) -> Floats:
        """Scores of one run of each campaign's config."""
        spread, luck = q * (1 - q) / self.player.num_examples, self.luck
        y = q + own * np.sqrt((SAME_CONFIG - OTHER_CONFIG) * spread) + luck.normal(0, self.world.seed_sd, self.size)
        y = y + luck.normal(0, 1, self.size) * np.sqrt((1 - SAME_CONFIG) * spread)
        collapsed = luck.random(self.size) < self.world.collapses
        return np.clip(np.where(collapsed, y - luck.uniform(0.05, 0.20, self.size), y), 0.0, 1.0)

    def try_idea(self, alive: Bools, index: int) -> None:
        """One experiment in every campaign of `alive`."""
        rule, stop = self.player.rule, self.player.early_stop
        q, own = self.q[:, 0], self.own[:, 0]
        delta, crash, crash_seconds, forecast, child = _idea(self.world, q, own, self.seed, index)
        stopped = (forecast < stop) & ~crash if stop is not None else np.zeros(self.size, bool)
        seconds = np.where(crash, crash_seconds, np.where(stopped, _STARTUP + _TRAINING / 2, self.run_seconds))
        self.clock = np.where(alive, self.clock + _AGENT + seconds, self.clock)
        self.ideas += int(alive.sum())
        active = alive & ~crash & ~stopped
        candidate = np.clip(q + delta, 0.01, 0.99)
        rule.compare()
        rule.observe_candidate(active, self.run(candidate, child), self.e2())
        keep, candidate_runs = self.replicate(active, candidate, child)
        decided = alive & ~crash
        p_better = np.where(active, rule.p_better, np.nan)
        self.log.append((delta[decided], (keep & active)[decided], p_better[decided]))
        best = rule.settle(active, keep)
        kept = active & keep
        for name, new in (("q", candidate), ("own", child), ("num_runs", candidate_runs)):
            values = getattr(self, name)
            shifted = np.concatenate([new[:, None], values[:, :-1]], axis=1)
            values = np.where(kept[:, None], shifted, values)
            setattr(self, name, np.take_along_axis(values, to_front(best, values.shape[1]), axis=1))
        self.taken_back += int((best > 0).sum())

    def replicate(self, open_: Bools, candidate: Floats, child: Floats) -> tuple[Bools, Ints]:
        """Further runs as long as the rule wants them; (keep, runs of the candidate)."""
        rule, player = self.player.rule, self.player
        num_runs, candidate_runs = np.ones(self.size, int), np.ones(self.size, int)
        while True:
            has_time = self.clock + self.run_seconds <= self.end
            keep, side = rule.decide(open_ & (num_runs < player.max_runs) & has_time)
            open_ = open_ & (side != NOBODY)
            if not open_.any():
                return keep, candidate_runs
            again, of_incumbent = open_ & (side == CANDIDATE), open_ & (side == INCUMBENT)
            rule.observe_candidate(again, self.run(candidate, child), self.e2())
            rule.observe_incumbent(of_incumbent, self.run(self.q[:, 0], self.own[:, 0]))
            candidate_runs = candidate_runs + again
            self.num_runs[:, 0] += of_incumbent
            self.clock = np.where(open_, self.clock + self.run_seconds, self.clock)
            num_runs = num_runs + open_
            self.replicates += int(open_.sum())

    def e2(self) -> Floats:
        """What decision.py would find in the per-example scores: the variance of a paired difference, a run."""
        q, k = self.q[:, 0], 1 / self.num_runs[:, 0]
        own = 2 * (1 - INHERITED) * (SAME_CONFIG - OTHER_CONFIG)
        variance: Floats = q * (1 - q) / self.player.num_examples * (own / (1 + k) + 1 - SAME_CONFIG)
        return variance


def _idea(world: World, q: Floats, own: Floats, seed: int, index: int) -> tuple[Floats, Bools, Floats, Floats, Floats]:
    """The next idea: (true difference, crashes?, seconds of a crash, half-way forecast, its own luck)."""
    rng, size = np.random.default_rng((seed, 2, index)), len(q)
    kind, catastrophe = rng.random(size), rng.random(size) < world.catastrophes
    helpful = world.helpful * math.exp(-world.decay * index)
    help_ = np.minimum(world.least_help + rng.exponential(world.mean_help, size), world.most_help)
    help_ = help_ * np.clip(1 - (q - START) / 0.15, 0, 1)
    harm = np.where(catastrophe, rng.uniform(0.05, 0.20, size), rng.exponential(world.mean_harm, size))
    neutral = rng.normal(0, 0.0015, size)
    # What stops helping as ideas are used up becomes neutral.
    delta = np.where(kind < helpful, help_, np.where(kind < world.helpful + world.neutral, neutral, -harm))
    crash, crash_seconds = rng.random(size) < world.crashes, _STARTUP + _TRAINING * rng.random(size) ** 2
    # Half-way forecast: unbiased, correlation 0.7 with the truth over all ideas of the default world (sd 2.9 pp).
    forecast = delta + rng.normal(0, 0.030, size)
    child = INHERITED * own + math.sqrt(1 - INHERITED**2) * rng.standard_normal(size)
    return delta, crash, crash_seconds, forecast, child
