"""Believe in effects of ideas, and try every new idea on a set of the best of them: what that gains over the chain.

    uv run benchmarks/idea_effects.py

The state is [the baseline, the effect of each idea]; a config is a set of ideas. The kernel is the shipped one,
nightshift/campaign/decision.py, in all its worlds. Every experiment trains a set and one new idea; the incumbent is, of
the configs that were run, the one with the best posterior mean. The ideas, crashes and luck are those that the shipped
rule meets in simulated_nights.py. Prints the table and writes results/idea_effects.json after every world, where it
goes on after a stop. What came of it: docs/history/effects-of-ideas.md.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
from decision_rules import DEFAULT, RULES, WORLDS
from machine import RESULTS, machine, write_result
from simulated_nights import INHERITED, START, Bools, Floats, Ints, Player, ShippedRule, World, _idea, _Nights

from nightshift.campaign import decision

JUDGED = {
    **{name: WORLDS[name] for name in ("default", "hard", "helpful 10%", "seed sd 2", "decay")},
    "N(-4, 2)": replace(DEFAULT, helpful=0.10, neutral=0.0, bad=(-0.04, 0.02)),
    "N(-12, 6)": replace(DEFAULT, helpful=0.10, neutral=0.0, bad=(-0.12, 0.06)),
}
MORE = {"agent 60 s": replace(DEFAULT, agent_seconds=60.0), "interactions": DEFAULT}  # not part of the bar
INTERACTION = 0.3  # there: sd of what two ideas do to each other, of the geometric mean of what they do, 2 pp at most
BATCH = 250  # nights played in step
NEVER = -1.0  # what an idea that crashed is believed to do: no set takes it, and the one that it was in is no incumbent
FULL = 0.15  # the gain at which nothing helps any more, in simulated_nights.py


CHAIN, BEST = "chain", "drawn, then greedy"
# An idea joins the set where its effect is above 0: until this share of the night as drawn from the belief (Thompson),
# then by its mean.
VARIANTS = {BEST: 0.87, "greedy": 0.0, "drawn": 1.0}


def with_run(sets: Floats, chosen: Floats) -> Floats:
    """What was run, and `chosen` with the next idea: (campaigns, runs, 1 + ideas), the baseline first, in both axes."""
    joined = np.pad(chosen, ((0, 0), (0, 1)), constant_values=1.0)
    return np.concatenate([np.pad(sets, ((0, 0), (0, 0), (0, 1))), joined[:, None]], axis=1)


class IdeaEffects:
    """The rule. Arrays hold one element a campaign."""

    def __init__(self, drawn_until: float, seed: int) -> None:
        self.drawn_until, self.rng = drawn_until, np.random.default_rng((seed, 4))

    def begin(self, scores: Floats, num_examples: int) -> None:
        """The baselines."""
        self.sets = np.ones((len(scores), 1, 1))
        self.belief = decision.baseline(scores, num_examples, RULES)

    def propose(self, used: Floats) -> Floats:
        """The set that the next idea joins, (campaigns, 1 + ideas), when that share of the night is used."""
        belief, values = self.belief, self.belief.expected
        if self.drawn_until:
            rows, chance = np.arange(len(values)), self.rng.random((len(values), 1))
            world = (chance > belief.weights.cumsum(axis=1)).sum(axis=1).clip(0, belief.weights.shape[1] - 1)
            root = np.linalg.cholesky(belief.covariance[rows, world] + 1e-12 * np.eye(values.shape[1]))
            drawn = belief.means[rows, world] + (root @ self.rng.standard_normal((*values.shape, 1)))[..., 0]
            values = np.where((used < self.drawn_until)[:, None], drawn, values)
        chosen = (values > 0).astype(float)
        chosen[:, 0] = 1.0
        return chosen

    def test_set(self, active: Bools, chosen: Floats, score: Floats, e2: Floats) -> None:
        """The shipped kernel on the set as if it were a config; what the child is above it is the idea's effect."""
        self.sets = with_run(self.sets, chosen)
        before, x, at = self.belief, chosen[:, None], np.full(len(score), chosen.shape[1])
        column = (before.covariance @ x[..., None])[..., 0]
        joint = np.pad(before.covariance, ((0, 0), (0, 0), (0, 1), (0, 1)))
        joint[..., -1, :-1] = joint[..., :-1, -1] = column
        joint[..., -1, -1] = (column * x).sum(axis=2)
        of_set = np.concatenate([before.means, (before.means * x).sum(axis=2, keepdims=True)], axis=2)
        after = decision.observe(replace(before, means=of_set, covariance=joint), at, score, e2, RULES).belief
        # The set's row and column, the last but one, become the effect's: child minus set.
        means, covariance = after.means[..., :-1].copy(), after.covariance[..., :-1, :-1].copy()
        means[..., -1] = after.means[..., -1] - after.means[..., -2]
        spread = after.covariance[..., -1, -1] + covariance[..., -1, -1] - 2 * after.covariance[..., -1, -2]
        covariance[..., -1, :] = after.covariance[..., -1, :-1] - after.covariance[..., -2, :-1]
        covariance[..., :, -1], covariance[..., -1, -1] = covariance[..., -1, :], np.maximum(spread, 0.0)
        idle = ~active
        means[idle, :, -1], covariance[idle, :, -1], covariance[idle, :, :, -1] = NEVER, 0.0, 0.0
        means[idle, :, :-1], covariance[idle, :, :-1, :-1] = before.means[idle], before.covariance[idle]
        weights = np.where(active[:, None], after.weights, before.weights)
        e2 = np.where(active, after.pairing_variance, before.pairing_variance)
        self.belief = replace(after, means=means, covariance=covariance, weights=weights, pairing_variance=e2)

    @property
    def incumbent(self) -> Ints:
        """The run whose config is believed best, the baseline being 0."""
        return (self.sets @ self.belief.expected[..., None])[..., 0].argmax(axis=1)

    @property
    def reported(self) -> Floats:
        """The posterior mean of that config."""
        return self.belief.expected[:, 0] + self.gain[0]

    @property
    def gain(self) -> tuple[Floats, Floats]:
        """Of its gain on the baseline, the sum of its ideas' effects: posterior mean and standard deviation."""
        belief, x = self.belief, self.sets[np.arange(len(self.sets)), self.incumbent][:, None, 1:]
        in_worlds = (belief.means[..., 1:] * x).sum(axis=2)
        variance = ((belief.covariance[..., 1:, 1:] @ x[..., None])[..., 0] * x).sum(axis=2)
        mean = (belief.weights * in_worlds).sum(axis=1)
        return mean, np.sqrt((belief.weights * (variance + (in_worlds - mean[:, None]) ** 2)).sum(axis=1))


class Chain(ShippedRule):
    """The shipped rule, its configs told as sets: every new idea joins the incumbent."""

    def begin(self, scores: Floats, num_examples: int) -> None:
        """The baselines."""
        super().begin(scores, num_examples)
        self.sets, self.kept = np.ones((len(scores), 1, 1)), np.zeros((len(scores), 99), int)

    @property
    def incumbent(self) -> Ints:
        """The run of the config that is believed best."""
        return self.kept[np.arange(len(self.kept)), self.belief.incumbent]

    def propose(self, used: Floats) -> Floats:
        """The incumbent's."""
        return self.sets[np.arange(len(self.sets)), self.incumbent]

    def test_set(self, active: Bools, chosen: Floats, score: Floats, e2: Floats) -> None:
        """One run; a kept config is the next of the chain's."""
        self.sets = with_run(self.sets, chosen)
        keep = self.test(active, score, e2, score)[0]
        self.kept[keep, np.asarray(self.belief.incumbent)[keep]] = chosen.shape[1]


class RecombinedNights(_Nights):
    """The nights of simulated_nights.py, where an idea may join any set. A column of `q` a run, the baseline first.

    A set's truth is that of a chain that kept its ideas in their order. Each adds its effect; help shrinks with the
    level that it meets; luck on the examples is inherited from the set without its last idea.
    """

    def __init__(self, rule: IdeaEffects | Chain, world: World, size: int, seed: int, interaction: float = 0.0) -> None:
        super().__init__(Player(rule), world, size, seed)
        self.rule, self.interaction = rule, interaction
        self.q, self.own = np.full((size, 1), START), np.zeros((size, 1))
        self.effects: list[tuple[Floats, ...]] = []  # of each idea: help, other effect, own luck, interactions, scale

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
        none = np.zeros(self.size)
        fresh, crash, crash_seconds, luck = _idea(self.world, none + START, none, self.seed, index)
        other = _idea(self.world, none + START + FULL, none, self.seed, index)[0]  # where nothing helps any more
        scale = np.sqrt(np.minimum(np.abs(fresh), 0.02))
        normal = np.random.default_rng((self.seed, 5, index)).standard_normal((self.size, index))
        scales = np.array([idea[-1] for idea in self.effects]).T.reshape(self.size, index)
        self.effects.append((fresh - other, other, luck, self.interaction * normal * scale[:, None] * scales, scale))
        chosen = self.rule.propose(self.clock / self.end)
        self.clock += np.where(alive, self.world.agent_seconds + np.where(crash, crash_seconds, self.run_seconds), 0.0)
        self.ideas += int(alive.sum())
        active, (q, _) = alive & ~crash, self.truth(chosen[:, 1:])
        candidate, own = self.truth(np.concatenate([chosen[:, 1:], np.ones((self.size, 1))], axis=1))
        e2 = self.e2(q, chosen[:, 1:].sum(axis=1).astype(int))
        self.rule.test_set(active, chosen, self.run(candidate, own), e2)
        self.q = np.concatenate([self.q, candidate[:, None]], axis=1)
        kept = self.rule.incumbent == index + 1
        self.log.append(((candidate - q)[active], kept[active], q[active] * np.nan))


def play(name: str, world: str, nights: int, seed: int) -> Floats:
    """True gain, believed gain and its standard deviation of each night, in percentage points."""
    gains, interaction = [], INTERACTION if world == "interactions" else 0.0
    for batch in range(seed, seed + -(-nights // BATCH)):
        rule = Chain(RULES) if name == CHAIN else IdeaEffects(VARIANTS[name], batch)
        night = RecombinedNights(rule, {**JUDGED, **MORE}[world], min(BATCH, nights), batch, interaction).play()
        gains.append((100 * night.gain, 100 * night.believed, 100 * night.sd))
    return np.concatenate(gains, axis=1)


def judge(world: str, nights: int, seed: int) -> dict[str, Any]:
    """One world: every rule, paired with the chain; the moments that a shrinkage is fitted on are of other seeds."""
    rows, chain, fit = dict[str, Any](), np.zeros(nights), world in JUDGED
    for name in (CHAIN, *VARIANTS):
        number = -(-nights // (8 if name not in (CHAIN, BEST) else 1 if fit else 4))
        true, believed, sd = play(name, world, number, seed)
        chain = true if name == CHAIN else chain
        row: dict[str, Any] = {"nights": number}
        for of, values in (("gain", true), ("lead", true - chain[:number]), ("overclaim", believed - true)):
            row |= {of: float(values.mean()), f"{of}_stderr": float(values.std(ddof=1)) / number**0.5}
        row |= {"interval_holds": float((np.abs(believed - true) <= 1.96 * sd).mean()), "sd": float(sd.mean())}
        if fit and name in (CHAIN, BEST):
            was, said, _ = play(name, world, min(nights, BATCH), seed + 1000)
            row["moments"] = [float((said * was).mean()), float((said**2).mean())]
        rows[name] = row
        click.echo(f"{world}: {name} {row['gain']:.2f}, lead {row['lead']:+.3f}", err=True)
    return rows


def report(worlds: Mapping[str, Any]) -> str:
    """The table; it adds the share of the believed gain that is to be reported, fitted on the other worlds."""
    lines = [
        f"{'':34}{'nights':>7}{'gain':>7}{'lead':>7}{'':8}{'overclaim':>10}{'to report':>11}{'then':>7}{'95 %':>7}"
    ]
    for world, rows in worlds.items():
        for name, row in rows.items():
            others = [worlds[w][name].get("moments") for w in worlds if w in JUDGED and w != world]
            share = float(np.divide(*np.sum(others, axis=0))) if others and None not in others else 1.0
            row["share"], row["then"] = share, share * (row["gain"] + row["overclaim"]) - row["gain"]
            lead = f"{row['nights']:7}{row['gain']:7.2f}{row['lead']:+7.2f} ± {row['lead_stderr']:.3f}"
            said = f"{row['overclaim']:+10.2f}{share:11.2f}{row['then']:+7.2f}{row['interval_holds']:7.3f}"
            lines.append(f"{world + ', ' + name:34}{lead}{said}")
    return "\n".join(lines)


@click.command(help=__doc__)
@click.option("--nights", default=2000, show_default=True, help="A world, of the chain and of the best; a quarter else")
@click.option("--seed", default=20260, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), default=RESULTS / "idea_effects.json")
def main(nights: int, seed: int, output: Path) -> None:
    """Simulate what is missing, print, write."""
    kind, command = machine(), f"uv run benchmarks/idea_effects.py --nights {nights} --seed {seed}"
    old = json.loads(output.read_text()) if output.exists() else {}
    worlds = old["worlds"] if old.get("command") == command else {}
    for world in {**JUDGED, **MORE}:
        if world not in worlds:
            worlds[world] = judge(world, nights, seed)
            report(worlds)
            write_result(output, command, {"worlds": worlds}, kind)
    click.echo(report(worlds))


if __name__ == "__main__":
    main()
