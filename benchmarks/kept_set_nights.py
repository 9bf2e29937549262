"""Measure the decision rule in simulated nights: the gain, the reported interval, the commits and the final diff.

    uv run benchmarks/kept_set_nights.py --world default --nights 300
    uv run benchmarks/kept_set_nights.py --world hard --slots 4 --nights 100
    uv run benchmarks/kept_set_nights.py --by-hand
    uv run benchmarks/kept_set_nights.py --rule all --nights 300 --seed 2

No model is trained. A world draws the effects of the proposed changes and the noise of the runs; the rule `kept-set` is
the package's own (nightshift/campaign/posterior.py). Two simple rules can be compared with the rule `kept-set`. Both
keep a candidate whose score on all examples is above a bar, and the candidate's config is then the incumbent:

    best: the bar is the best score so far.
    bar: the bar moves after every run (class MovingBar).

Neither has riders or last runs. Every rule meets the same proposed changes, noise and clock in the night of one number.
Scores are fractions of 1, printed in percentage points.
"""

from __future__ import annotations

import heapq
import math
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import click
import numpy as np
from machine import RESULTS, machine, table, write_result
from numpy.typing import NDArray

from nightshift.campaign.next_run import Run, Stage, measuring_run, next_stage
from nightshift.campaign.posterior import Posterior
from nightshift.campaign.records import Action, Change, Decision
from nightshift.config.decision_rules import RuleConstants

NUM_EXAMPLES = 1319
START = 0.475  # true score of the baseline
NIGHT_SECONDS = 9 * 3600.0
RUN_SECONDS = 675.0 + 0.0152 * NUM_EXAMPLES  # start-up, training and evaluation
ANSWER_SECONDS = 15.0  # of the agent; at several slots it proposes while runs train
SAME_EXAMPLES = 0.60  # correlation of two configs' answers to one example
INHERITED = 0.8  # of a config's luck on the examples, by the config with one change more
HARMFUL = -0.002  # a kept change below this effect is harmful


@dataclass(frozen=True)
class World:
    """How the effects of proposed changes and the noise of runs are distributed. Shares are of the proposed changes; a
    change that is neither helpful nor neutral harms."""

    helpful: float = 0.27
    neutral: float = 0.33
    mean_help: float = 0.006  # of an exponential distribution from 0.2 to 2 pp
    is_heavy_tailed: bool = False  # the effects of helpful changes have a Pareto distribution up to 8 pp
    harm: float = 0.015  # mean of an exponential distribution; one harmful change in ten is a disaster
    bad: tuple[float, float] | None = None  # mean and sd of all harmful effects
    same_effect: float | None = None  # every change has this effect
    crashes: float = 0.08
    seed_sd: float = 0.0125
    drift: float = 0.0  # of the score in a night
    decay: float = 0.0  # of the helpful share, a change
    helpful_from_to: tuple[float, float] | None = None  # the helpful share over the first 46 changes
    has_conflicts: bool = False  # changes of one of six groups do not add up; other pairs have synergies
    full: float = 0.15  # the gain at which nothing helps any more


WORLDS = {
    "default": World(),
    "hard": World(0.12, 0.20, harm=0.025),
    "bad changes": World(0.10, 0.0, bad=(-0.04, 0.02)),
    "half help": World(0.50, 0.226),
    "nothing helps": World(0.0, 0.452),
    "noise x2": World(seed_sd=0.025),
    "conflicts": World(0.35, 0.25, has_conflicts=True),
    "drift +3": World(drift=0.03),
    "agent improves": World(helpful_from_to=(0.08, 0.45)),
    "heavy tail": World(is_heavy_tailed=True, full=0.5),
    "every change -0.3": World(same_effect=-0.003),
    "drawn 1": World(0.46, 0.14, 0.0040, bad=(-0.029, 0.039), crashes=0.09, seed_sd=0.0159, decay=0.010),
    "drawn 4": World(0.43, 0.25, 0.0116, bad=(-0.058, 0.021), crashes=0.05, seed_sd=0.0169, decay=0.008),
}


@dataclass
class Proposal:
    """A proposed change of a simulated night. `pairs`: what it adds beside each earlier change."""

    change: Change
    helps: float  # less, the closer the score is to the world's best
    other: float  # harm, or next to nothing
    luck: float  # on the examples, in standard deviations
    group: int
    pairs: dict[int, float] = field(default_factory=dict)
    crash_seconds: float | None = None


class Nature:
    """The truth of one night: what the proposed changes do, and what a run measures."""

    def __init__(self, world: World, seed: tuple[int, int]) -> None:
        self.world = world
        self.proposals: list[Proposal] = []
        self._changes = np.random.default_rng((*seed, 0))
        self._noise = np.random.default_rng((*seed, 1))

    def propose(self) -> Proposal:
        """Draw the next proposed change."""
        world, rng, number = self.world, self._changes, len(self.proposals)
        helpful = top = world.helpful
        if world.helpful_from_to is not None:
            first, last = world.helpful_from_to
            helpful = top = first + (last - first) * min(number / 45, 1.0)
        helpful *= math.exp(-world.decay * number)
        kind = rng.random()
        helps = other = 0.0
        if world.same_effect is not None:
            other = rng.normal(world.same_effect, 0.0005)
        elif kind < helpful and world.is_heavy_tailed:
            helps = min(0.0015 * (1 - rng.random()) ** (-1 / 1.2), 0.08)
        elif kind < helpful:
            helps = min(0.002 + world.mean_help * rng.exponential(), 0.02)
        elif kind < top + world.neutral:
            other = rng.normal(0.0, 0.0015)
        elif world.bad is not None:
            other = rng.normal(*world.bad)
        else:
            other = -rng.uniform(0.05, 0.2) if rng.random() < 0.1 else -world.harm * rng.exponential()
        change = Change(experiment=number + 1, keys={f"key_{number + 1}": "1"})
        proposal = Proposal(change, helps, other, 0.6 * rng.standard_normal(), int(rng.integers(6)))
        if world.has_conflicts:
            proposal.pairs = self._pairs(proposal)
        if rng.random() < world.crashes:
            proposal.crash_seconds = 75.0 + 600.0 * rng.random() ** 2
        self.proposals.append(proposal)
        return proposal

    def _pairs(self, new: Proposal) -> dict[int, float]:
        pairs = {}
        effect = new.helps + new.other
        for earlier in self.proposals:
            before = earlier.helps + earlier.other
            if new.group == earlier.group:
                pairs[earlier.change.experiment] = -min(effect, before) if min(effect, before) > 0 else 0.0
            elif self._changes.random() < 0.08:
                pairs[earlier.change.experiment] = self._changes.normal(0.0, 0.008)
        return pairs

    def truth(self, changes: Sequence[Change]) -> tuple[float, float]:
        """Return a config's true score, and its luck on the examples in standard deviations."""
        score, luck = START, 0.0
        members = sorted(change.experiment for change in changes)
        for number in members:
            proposal = self.proposals[number - 1]
            room = min(max(1 - (score - START) / self.world.full, 0.0), 1.0)
            together = sum(proposal.pairs.get(other, 0.0) for other in members if other < number)
            score = min(max(score + proposal.helps * room + proposal.other + together, 0.01), 0.99)
            luck = INHERITED * luck + proposal.luck
        return score, luck

    def measure(self, changes: Sequence[Change], seconds: float) -> float:
        """Return the score of a run that starts at `seconds`."""
        score, luck = self.truth(changes)
        variance = score * (1 - score) / NUM_EXAMPLES
        score += luck * math.sqrt(0.05 * variance) + self.world.drift * seconds / NIGHT_SECONDS
        score += self._noise.normal(0.0, self.world.seed_sd)
        score += self._noise.normal(0.0, math.sqrt((1 - SAME_EXAMPLES - 0.05) * variance))
        return min(max(score, 0.0), 1.0)


class Rule(Protocol):
    """What decides in a night: the methods of Posterior that `play` calls."""

    @property
    def kept(self) -> tuple[Change, ...]: ...
    def gain(self, num_slots: int = 1) -> tuple[float, float]: ...
    def begin(self, run: Run) -> None: ...
    def rider(self, new: Change, in_flight: Sequence[Run] = ()) -> Change | None: ...
    def observe(self, run: Run, score: float, time_hours: float) -> tuple[Decision, ...]: ...


class AboveBest:
    """Keep a candidate whose score is above the best score so far."""

    def __init__(self, score: float) -> None:
        self.kept: tuple[Change, ...] = ()
        self._first = self._bar = score

    def gain(self, num_slots: int = 1) -> tuple[float, float]:
        """Return the bar less the baseline's score, and NaN: the rule has no interval."""
        return self._bar - self._first, math.nan

    def begin(self, run: Run) -> None:
        """Do nothing: the rule has no stages."""

    def rider(self, new: Change, in_flight: Sequence[Run] = ()) -> Change | None:
        """Return None: the rule measures a change once."""
        return None

    def observe(self, run: Run, score: float, time_hours: float) -> tuple[Decision, ...]:
        """Make the run's config the incumbent if its score is above the bar."""
        assert run.new is not None, "the rule has no last runs"
        above = score - self._bar
        self._bar += self._move(above)
        if above <= 0:
            return (Decision(change=run.new, action=Action.DISCARD),)
        before, self.kept = self.kept, tuple(run.changes)
        reverted = [change for change in before if change not in self.kept]  # at several slots
        added = [change for change in self.kept if change not in before]
        return (
            *(Decision(change=change, action=Action.REVERT) for change in reverted),
            *(Decision(change=change, action=Action.KEEP) for change in added),
        )

    def _move(self, above: float) -> float:
        return max(above, 0.0)


class MovingBar(AboveBest):
    """Keep a candidate whose score is above a bar that follows the scores. After a keep the bar rises by 0.4 of the
    distance. A discard up to 0.8 pp below the bar moves nothing. After a discard further below, the bar falls by 0.1 of
    the distance beyond 0.8 pp, at most by 0.2 pp. The constants are those of
    class MovingBar in benchmarks/decision_rules.py of version 0.2.0."""

    def _move(self, above: float) -> float:
        return 0.4 * above if above > 0 else 0.1 * min(max(above + 0.008, -0.02), 0.0)


RULES: dict[str, Callable[[float, RuleConstants], Rule]] = {
    "kept-set": lambda score, rules: Posterior(score, math.sqrt(score * (1 - score) / NUM_EXAMPLES), rules),
    "best": lambda score, _: AboveBest(score),
    "bar": lambda score, _: MovingBar(score),
}


def play(
    world: World,
    seed: tuple[int, int],
    num_slots: int,
    by_hand: bool,
    rules: RuleConstants,
    name: str = "kept-set",
) -> dict[str, float]:
    """Play one night of the rule `name` and return its figures. By hand: no rider and no last runs."""
    nature = Nature(world, seed)
    rule = RULES[name](nature.measure((), 0.0), rules)
    searches_only = by_hand or name != "kept-set"
    # Ends of the runs in flight; the second number makes the order of equal ends unambiguous.
    in_flight: list[tuple[float, int, float, Run, bool]] = []
    num_started = 1
    num_last = 0
    actions: list[Action] = []

    def start(seconds: float) -> None:
        nonlocal num_started, num_last
        num_left = math.floor((NIGHT_SECONDS - seconds) / RUN_SECONDS) * num_slots
        if num_left <= 0:
            return
        stage = Stage.SEARCH if searches_only else next_stage(num_started, num_last, num_left, num_slots)
        crash_seconds = None
        if stage is Stage.SEARCH:
            seconds += ANSWER_SECONDS if num_slots == 1 else 0.0
            if seconds + RUN_SECONDS > NIGHT_SECONDS:
                return
            proposal = nature.propose()
            rider = None if by_hand else rule.rider(proposal.change, [run for *_, run, _ in in_flight])
            run = Run(kept=rule.kept, rider=rider, new=proposal.change)
            crash_seconds = proposal.crash_seconds
        else:
            num_last += 1
            run = measuring_run(rule.kept, stage)
        rule.begin(run)
        end = seconds + (RUN_SECONDS if crash_seconds is None else crash_seconds)
        heapq.heappush(in_flight, (end, num_started, seconds, run, crash_seconds is not None))
        num_started += 1

    for slot in range(num_slots):
        start(RUN_SECONDS + slot * ANSWER_SECONDS)
    while in_flight:
        end, _, seconds, run, is_crash = heapq.heappop(in_flight)
        if not is_crash:
            score = nature.measure(list(run.changes), seconds)
            actions += [decision.action for decision in rule.observe(run, score, seconds / 3600)]
        start(end)
    kept = rule.kept
    true_gain = nature.truth(kept)[0] - START
    reported, half = rule.gain(num_slots)
    effects = [START + true_gain - nature.truth([c for c in kept if c != change])[0] for change in kept]
    return {
        "gain": true_gain,
        "told_too_high": reported - true_gain,
        "half_interval": half,
        "holds": float(abs(reported - true_gain) <= half),
        "commits_in": sum(action in (Action.KEEP, Action.ADOPT) for action in actions),
        "commits_out": actions.count(Action.REVERT),
        "changes": len(kept),
        "harmful": sum(effect < HARMFUL for effect in effects),
        "runs": num_started,
    }


def summarise(
    world: str, rule: str, nights: list[dict[str, float]], reference: list[dict[str, float]] | None
) -> dict[str, Any]:
    """Return the means over the nights of a world; scores in percentage points. `reference`: nights of the rule
    kept-set, whose gains are subtracted night by night. The row of a rule without an interval has None there."""
    means = {figure: float(np.mean([night[figure] for night in nights])) for figure in nights[0]}
    gains = np.array([night["gain"] for night in nights])
    has_interval = not math.isnan(means["half_interval"])
    paired = None if reference is None else gains - np.array([night["gain"] for night in reference])
    return {
        "world": world,
        "rule": rule,
        "nights": len(nights),
        "gain": 100 * means["gain"],
        "stderr": standard_error(gains),
        "minus_kept_set": None if paired is None else float(100 * paired.mean()),
        "minus_stderr": None if paired is None else standard_error(paired),
        "holds": 100 * means["holds"] if has_interval else None,
        "told_too_high": 100 * means["told_too_high"],
        "half_interval": 100 * means["half_interval"] if has_interval else None,
        "commits_in": means["commits_in"],
        "commits_out": means["commits_out"],
        "changes": means["changes"],
        "harmful": 100 * means["harmful"] / means["changes"] if means["changes"] else None,
        "runs": means["runs"],
    }


def standard_error(gains: NDArray[np.float64]) -> float | None:
    """Return the standard error of the mean in percentage points; None for one night."""
    return float(100 * gains.std(ddof=1) / math.sqrt(len(gains))) if len(gains) > 1 else None


COLUMNS = {
    "world": "<20",
    "rule": "<10",
    "nights": ">7",
    "gain": ">+8.2f",
    "stderr": ">8.2f",
    "minus_kept_set": ">16.2f",
    "minus_stderr": ">14.2f",
    "holds": ">7.0f",
    "told_too_high": ">15.2f",
    "half_interval": ">15.1f",
    "commits_in": ">12.1f",
    "commits_out": ">13.1f",
    "changes": ">9.1f",
    "harmful": ">10.0f",
}


def simulate(
    names: Sequence[str],
    num_nights: int,
    seed: int,
    num_slots: int,
    by_hand: bool,
    rules: RuleConstants,
    report: Callable[[str], None],
    compared: Sequence[str] = ("kept-set",),
) -> list[dict[str, Any]]:
    """Play the nights of some worlds and return one row a world and rule. `report` is told the progress."""
    rows = []
    for world in names:
        nights: dict[str, list[dict[str, float]]] = {rule: [] for rule in compared}
        for number in range(num_nights):
            for rule in compared:
                nights[rule].append(play(WORLDS[world], (seed, number), num_slots, by_hand, rules, rule))
            if (number + 1) % 10 == 0:
                report(f"{world}: {number + 1} of {num_nights} nights")
        for rule in compared:
            reference = None if rule == "kept-set" else nights.get("kept-set")
            rows.append(summarise(world, rule, nights[rule], reference))
    return rows


@click.command(help=__doc__)
@click.option("--world", "names", type=click.Choice([*WORLDS]), multiple=True, help="Default: every world.")
@click.option("--rule", default="kept-set", show_default=True, type=click.Choice([*RULES, "all"]))
@click.option("--nights", default=60, show_default=True, type=click.IntRange(1))
@click.option("--seed", default=1, show_default=True)
@click.option("--slots", default=1, show_default=True, type=click.IntRange(1))
@click.option("--by-hand", is_flag=True, help="No rider and no last runs.")
@click.option("--keep-at", default=RuleConstants().keep_at, show_default=True, type=click.FloatRange(0, 1))
@click.option("--revert-below", default=RuleConstants().revert_below, show_default=True, type=click.FloatRange(0, 1))
@click.option("--output", type=click.Path(path_type=Path), help="Default: benchmarks/results/kept_set_nights*.json.")
def main(
    names: tuple[str, ...],
    rule: str,
    nights: int,
    seed: int,
    slots: int,
    by_hand: bool,
    keep_at: float,
    revert_below: float,
    output: Path | None,
) -> None:
    """Play the nights, print a table and write the figures."""
    kind = machine()
    rules = replace(RuleConstants(), keep_at=keep_at, revert_below=revert_below)
    compared = [*RULES] if rule == "all" else [rule]
    worlds = names or [*WORLDS]
    rows = simulate(worlds, nights, seed, slots, by_hand, rules, lambda line: click.echo(line, err=True), compared)
    suffix = "" if rule == "kept-set" else "_rules" if rule == "all" else f"_{rule}"
    suffix += "_by_hand" if by_hand else f"_{slots}_slots" if slots > 1 else ""
    output = output or RESULTS / f"kept_set_nights{suffix}.json"
    command = shlex.join(["uv", "run", "benchmarks/kept_set_nights.py", *sys.argv[1:]])
    figures = {"seed": seed, "slots": slots, "by_hand": by_hand, "keep_at": keep_at, "revert_below": revert_below}
    write_result(output, command, {**figures, "worlds": rows}, kind)
    click.echo(table(rows, COLUMNS))


if __name__ == "__main__":
    main()
