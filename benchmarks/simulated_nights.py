"""Campaigns that never trained anything: worlds of ideas, and a clock.

A world says how good ideas are, how noisy runs are and how long they take; `simulate` plays many campaigns
of one rule in it at once. Scores are fractions 0..1, times are seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from nightshift.campaign import decision
from nightshift.campaign.recombine import DRAWN_UNTIL
from nightshift.campaign.standing import reported_gain
from nightshift.campaign.worlds import UNUSED, Index, Posterior
from nightshift.config.decision_rules import DecisionRules

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Ints = NDArray[np.int_]
Seed = tuple[int, int]

START = 0.475
SAME_CONFIG, OTHER_CONFIG = 0.65, 0.60  # correlation of one example's 0/1 answer between two runs
INHERITED = 0.8  # of a config's own luck on the example set, by its children
BATCH = 50  # campaigns played in step: what a processor's cache holds
FULL = 0.15  # the gain at which nothing helps any more
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
    interaction: float = 0.0  # of two ideas: sd of what they do to each other, of the geometric mean of what they do

    def with_helpful(self, share: float) -> World:
        """Another share of helpful ideas; the rest keeps its proportions."""
        return World(**{**vars(self), "helpful": share, "neutral": self.neutral * (1 - share) / (1 - self.helpful)})


class Rule(Protocol):
    """What decides. All arrays hold one element a campaign."""

    @property
    def incumbent(self) -> Floats: ...  # the ideas that it is made of, (campaigns, ideas so far): 0 or 1
    @property
    def gain(self) -> tuple[Floats, Floats]: ...  # believed, and its standard deviation; NaN where the rule has none
    @property
    def reported(self) -> Floats: ...
    def begin(self, scores: Floats, num_examples: int) -> None: ...  # (campaigns) of the baselines
    def base(self, used: Floats) -> Floats:
        """The ideas that the next one is tried with, (campaigns, ideas so far); `used`: shares of the nights."""
        ...

    def test(self, active: Bools, score: Floats, e2: Floats, delta: Floats) -> tuple[Bools, Floats]:
        """One run of that set and the next idea where `active`: (keep, p_better). `delta`: the truth, for an oracle."""
        ...


@dataclass(frozen=True)
class Player:
    """A rule with what it runs on."""

    rule: Rule
    num_examples: int = 1319


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
    """nightshift/campaign/decision.py itself, its batch axis being the campaigns.

    `recombines`: it tries ideas on sets that it draws, as a night does; else on the incumbent, as by hand.
    """

    def __init__(self, rules: DecisionRules, recombines: bool = True, seed: int = 0) -> None:
        self.rules, self.recombines, self.rng = rules, recombines, np.random.default_rng((seed, 4))
        self.belief: Posterior

    def begin(self, scores: Floats, num_examples: int) -> None:
        """The baselines."""
        self.belief = decision.baseline(scores, num_examples, self.rules)
        self.num_ideas = 0

    def base(self, used: Floats) -> Floats:
        """As a night chooses it."""
        belief = self.belief
        self.slots = belief.set_of(belief.incumbent)
        if self.recombines:
            effects = np.where((used < DRAWN_UNTIL)[:, None], belief.draw(self.rng), belief.effects)
            self.slots = (effects > 0).astype(float)
            self.slots[:, 0] = 1.0
        return self._ideas(self.slots)

    def test(self, active: Bools, score: Floats, e2: Floats, delta: Floats) -> tuple[Bools, Floats]:
        """One more idea on the set that `base` chose."""
        self.num_ideas += 1
        number = np.where(active, self.num_ideas, UNUSED)
        return self.observed(active, score, e2, self.belief.incumbent, self.slots, number)

    def observed(
        self, active: Bools, score: Floats, e2: Floats, parent: Index, made_from: Floats, number: Ints
    ) -> tuple[Bools, Floats]:
        """Observe and settle; the belief stays what it was where nothing was run."""
        before = self.belief
        tested = decision.observe(before, parent, score, e2, self.rules, made_from=made_from, number=number)
        keep = active & tested.keep
        idle = ~active
        after = tested.belief
        after.means[idle, :, :-1], after.means[idle, :, -1] = before.means[idle], 0.0
        after.covariance[idle] = np.pad(before.covariance[idle], ((0, 0), (0, 0), (0, 1), (0, 1)))
        after = replace(
            after,
            weights=np.where(active[:, None], after.weights, before.weights),
            pairing_variance=np.where(active, after.pairing_variance, before.pairing_variance),
        )
        after = decision.settle(replace(tested, belief=after), keep, self.rules)
        self.belief = replace(after, incumbent=np.where(active, after.incumbent, before.incumbent))
        return keep, tested.p_better

    @property
    def incumbent(self) -> Floats:
        """The config that is believed best."""
        return self._ideas(self.belief.set_of(self.belief.incumbent))

    @property
    def gain(self) -> tuple[Floats, Floats]:
        """What the campaign says of its incumbent against its baseline."""
        return reported_gain(self.belief, self.rules, self.num_ideas)

    @property
    def reported(self) -> Floats:
        """What the campaign says of its incumbent."""
        return self.belief.expected[:, 0] + self.gain[0]

    def _ideas(self, slots: Floats) -> Floats:
        """Sets of the belief's slots as sets of all ideas, in their order."""
        chosen = np.zeros((len(slots), self.num_ideas + 1))
        rows, places = np.nonzero(slots[:, 1:])
        chosen[rows, self.belief.ideas[rows, places + 1]] = 1.0
        return chosen[:, 1:]


def simulate(player: Player, world: World, num_campaigns: int, seed: int) -> Night:
    """Play campaigns until their clocks run out. The same seed gives every rule the same ideas."""
    sizes = [min(BATCH, num_campaigns - start) for start in range(0, num_campaigns, BATCH)]
    nights = [_Nights(player, world, size, (seed, batch)).play() for batch, size in enumerate(sizes)]
    joined = {
        field.name: np.average(values, weights=sizes) if np.ndim(values[0]) == 0 else np.concatenate(values)
        for field in fields(Night)
        if (values := [getattr(night, field.name) for night in nights])
    }
    return Night(**joined)


class _Nights:
    """Many campaigns in step: the true scores and clocks that the rule does not see.

    A set's truth is that of a chain that kept its ideas in their order. Each adds its effect; help shrinks with the
    level that it meets; luck on the examples is inherited from the set without its last idea.
    """

    def __init__(self, player: Player, world: World, size: int, seed: Seed) -> None:
        self.player, self.world, self.size, self.seed = player, world, size, seed
        self.luck = np.random.default_rng((*seed, 1))
        self.run_seconds = _STARTUP + _TRAINING + _PER_EXAMPLE * player.num_examples
        self.end, self.clock = world.hours * 3600, np.full(size, self.run_seconds)
        self.effects: list[tuple[Floats, ...]] = []  # of each idea: help, other effect, own luck, interactions, scale
        self.ideas = self.taken_back = 0
        self.log: list[tuple[Floats, Bools, Floats]] = []

    def play(self) -> Night:
        rule, size = self.player.rule, self.size
        rule.begin(self.run(np.full(size, START), np.zeros(size)), self.player.num_examples)
        index = 0
        while (alive := self.clock + self.world.agent_seconds + self.run_seconds <= self.end).any():
            self.try_idea(alive, index)
            index += 1
        delta, kept, p_better = (np.concatenate(column) for column in zip(*self.log, strict=True))
        q = self.truth(rule.incumbent)[0]
        said = (rule.reported - q, *rule.gain)
        return Night(q - START, *said, self.ideas / size, self.taken_back / size, delta, kept, p_better)

    def run(self, q: Floats, own: Floats) -> Floats:
        """Scores of one run of each campaign's config."""
        spread, luck = q * (1 - q) / self.player.num_examples, self.luck
        y = q + own * np.sqrt((SAME_CONFIG - OTHER_CONFIG) * spread) + luck.normal(0, self.world.seed_sd, self.size)
        y = y + luck.normal(0, 1, self.size) * np.sqrt((1 - SAME_CONFIG) * spread)
        collapsed = luck.random(self.size) < self.world.collapses
        return np.clip(np.where(collapsed, y - luck.uniform(0.05, 0.20, self.size), y), 0.0, 1.0)

    def truth(self, chosen: Floats) -> tuple[Floats, Floats]:
        """(True score, own luck) of each campaign's set, (campaigns, ideas)."""
        q, own = np.full(self.size, START), np.zeros(self.size)
        for i, (help_, other, luck, pairs, _) in enumerate(self.effects[: chosen.shape[1]]):
            joins = chosen[:, i] > 0
            effect = help_ * np.clip(1 - (q - START) / FULL, 0, 1) + other + (pairs * chosen[:, :i]).sum(axis=1)
            q = np.where(joins, np.clip(q + effect, 0.01, 0.99), q)
            own = np.where(joins, INHERITED * own + luck, own)
        return q, own

    def try_idea(self, alive: Bools, index: int) -> None:
        """One experiment in every campaign of `alive`."""
        rule, before = self.player.rule, self.player.rule.incumbent
        crash, crash_seconds = self.meet(index)
        base = rule.base(self.clock / self.end)
        self.clock += np.where(alive, self.world.agent_seconds + np.where(crash, crash_seconds, self.run_seconds), 0.0)
        self.ideas += int(alive.sum())
        active, (q, _) = alive & ~crash, self.truth(before)
        tried = np.concatenate([base, np.ones((self.size, 1))], axis=1)
        candidate, own = self.truth(tried)
        keep, p_better = rule.test(active, self.run(candidate, own), self.e2(q, before, tried), candidate - q)
        self.log.append(((candidate - q)[active], keep[active], p_better[active]))
        self.taken_back += int((~keep & (rule.incumbent[:, :index] != before).any(axis=1)).sum())

    def meet(self, index: int) -> tuple[Bools, Floats]:
        """The next idea: (crashes?, seconds of a crash). What it does joins `effects`."""
        none = np.zeros(self.size)
        fresh, crash, crash_seconds, luck = _idea(self.world, none + START, none, self.seed, index)
        other = _idea(self.world, none + START + FULL, none, self.seed, index)[0]  # where nothing helps any more
        scale = np.sqrt(np.minimum(np.abs(fresh), 0.02))
        normal = np.random.default_rng((*self.seed, 5, index)).standard_normal((self.size, index))
        scales = np.array([idea[-1] for idea in self.effects]).T.reshape(self.size, index)
        pairs = self.world.interaction * normal * scale[:, None] * scales
        self.effects.append((fresh - other, other, luck, pairs, scale))
        return crash, crash_seconds

    def e2(self, q: Floats, parent: Floats, tried: Floats) -> Floats:
        """What `pairing` would find in the scores of two sets: the variance of a paired difference, a run."""
        apart = np.abs(np.pad(parent, ((0, 0), (0, 1))) - tried).sum(axis=1)  # ideas; each leaves 0.8 of the luck
        own = 2 * (1 - INHERITED**apart) * (SAME_CONFIG - OTHER_CONFIG)
        variance: Floats = q * (1 - q) / self.player.num_examples * (own / 2 + 1 - SAME_CONFIG)
        return variance


def _idea(world: World, q: Floats, own: Floats, seed: Seed, index: int) -> tuple[Floats, Bools, Floats, Floats]:
    """The next idea: (true difference, crashes?, seconds of a crash, its own luck)."""
    rng, size = np.random.default_rng((*seed, 2, index)), len(q)
    kind, catastrophe = rng.random(size), rng.random(size) < world.catastrophes
    helpful = world.helpful * math.exp(-world.decay * index)
    help_ = np.minimum(world.least_help + rng.exponential(world.mean_help, size), world.most_help)
    help_ = help_ * np.clip(1 - (q - START) / FULL, 0, 1)
    harm = np.where(catastrophe, rng.uniform(0.05, 0.20, size), rng.exponential(world.mean_harm, size))
    harm = harm if world.bad is None else -np.random.default_rng((*seed, 3, index)).normal(*world.bad, size)
    neutral = rng.normal(0, 0.0015, size)
    # What stops helping as ideas are used up becomes neutral.
    delta = np.where(kind < helpful, help_, np.where(kind < world.helpful + world.neutral, neutral, -harm))
    crash, crash_seconds = rng.random(size) < world.crashes, _STARTUP + _TRAINING * rng.random(size) ** 2
    rng.normal(size=size)  # a draw that an earlier rule needed: without it every recorded figure would be another
    child = INHERITED * own + math.sqrt(1 - INHERITED**2) * rng.standard_normal(size)
    return delta, crash, crash_seconds, child
