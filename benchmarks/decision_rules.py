"""Measure the decision rule in simulated nights: the gain, the reported interval, the commits and the final diff.

    uv run benchmarks/decision_rules.py --rule all --nights 300 --seed 2
    uv run benchmarks/decision_rules.py --slots 4 --nights 100 --bounds 0.7/0.5 --bounds 0.6/0.4
    uv run benchmarks/decision_rules.py --world default --answer-seconds 15 --answer-seconds 180 --ahead

No model is trained. A world draws the effects of the proposed changes and the noise of the runs. The rule `kept-set` is
the package's own (nightshift/campaign/posterior.py). Other rules meet the same changes, noise and clock:

    no rider: the rule `kept-set` without riders.
    best: keep a candidate whose score on all examples is above the best score so far.
    bar: the same with a bar that moves after every run (class MovingBar).
    in X out Y: the rule `kept-set` with other bounds on P(it helps), by --bounds X/Y.

The rules `best` and `bar` make the candidate's config the incumbent. They have neither riders nor last runs. Scores are
fractions of 1, printed in percentage points.
"""

from __future__ import annotations

import heapq
import math
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import recorded
from machine import RESULTS, machine, standard_error, table, write_result

from nightshift.campaign.posterior import Posterior, measuring_run, next_stage
from nightshift.campaign.records import Action, Change, Decision, Run, Stage
from nightshift.config.rules import GSM8K_PRIOR_SD, RuleConstants

NUM_EXAMPLES = 1319
START = 0.475  # true score of the baseline
SAME_EXAMPLES = 0.60  # correlation of two configs' answers to one example
INHERITED = 0.8  # of a config's luck on the examples, by the config with one change more
PUSHED, OPTIMUM = 0.06, 4.0  # the largest gain by the shared quantity, and where: one push is 0.5 to 1.5
EDGE, EDGE_LOSS = 3.0, 0.15  # beyond this value the score falls
HARMFUL = -0.002  # a kept change below this effect is harmful
HELPFUL = 0.002  # a measured change above this effect is missed if it is not kept at the end


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
    pushing: float = 0.0  # share of changes whose only effect is to push one quantity that all of them share
    noise_spread: float = 0.0  # sd of the log of the factor of the seed noise, a change; of a config 0.4 to 2.5
    full: float = 0.15  # the gain at which nothing helps any more
    scale: float = 1.0  # of all effects
    night_seconds: float = 9 * 3600.0
    run_seconds: float = 675.0 + 0.0152 * NUM_EXAMPLES  # start-up, training and evaluation

    @property
    def rules(self) -> RuleConstants:
        """The constants for effects of this size. The world's own noise is known only if its effects are scaled."""
        rules = RuleConstants()
        return rules if self.scale == 1 else rules.scaled(self.scale * GSM8K_PRIOR_SD, self.seed_sd)


def drawn_world(number: int) -> World:
    """Draw a world at random. The worlds 5 and 6 were drawn after the constants of the rule were fixed."""
    rng = np.random.default_rng((38, number))
    helpful = rng.uniform(0.1, 0.5)
    neutral = rng.uniform(0.0, 0.3)
    mean_help = rng.uniform(0.003, 0.012)
    bad = (-rng.uniform(0.02, 0.06), rng.uniform(0.02, 0.06))
    crashes = rng.uniform(0.04, 0.14)
    seed_sd = rng.uniform(0.007, 0.020)
    decay = rng.uniform(0.0, 0.03)
    return World(helpful, neutral, mean_help, bad=bad, crashes=crashes, seed_sd=seed_sd, decay=decay)


def arithmetic_world() -> World:
    """Return the default world at arithmetic's ratio of effect to noise: nights of an hour, runs of 75 s."""
    prior_sd, seed_sd = recorded.scales()
    scale = prior_sd / GSM8K_PRIOR_SD
    return World(seed_sd=seed_sd, full=1.5, scale=scale, night_seconds=3600.0, run_seconds=75.0)


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
    "drawn 5": drawn_world(5),
    "drawn 6": drawn_world(6),
    "arithmetic": arithmetic_world(),
    "cliff": World(pushing=0.4),
    "noise by config": World(noise_spread=0.3),
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
    push: float = 0.0  # of the shared quantity
    noise: float = 1.0  # factor of the seed noise


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
        helps *= world.scale
        other *= world.scale
        change = Change(experiment=number + 1, keys={f"key_{number + 1}": "1"})
        proposal = Proposal(change, helps, other, 0.6 * rng.standard_normal(), int(rng.integers(6)))
        if world.has_conflicts:
            proposal.pairs = self._pairs(proposal)
        if world.pushing and rng.random() < world.pushing:
            proposal.helps = proposal.other = 0.0
            proposal.push = rng.uniform(0.5, 1.5)
        if world.noise_spread:
            proposal.noise = math.exp(rng.normal(0.0, world.noise_spread))
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
        pushed = sum(self.proposals[number - 1].push for number in members)
        score += PUSHED * (1 - (1 - pushed / OPTIMUM) ** 2) - (EDGE_LOSS if pushed > EDGE else 0.0)
        return max(score, 0.01), luck

    def measure(self, changes: Sequence[Change], seconds: float) -> float:
        """Return the score of a run that starts at `seconds`."""
        score, luck = self.truth(changes)
        noise = math.prod(self.proposals[change.experiment - 1].noise for change in changes)
        variance = score * (1 - score) / NUM_EXAMPLES
        score += luck * math.sqrt(0.05 * variance) + self.world.drift * seconds / self.world.night_seconds
        score += self._noise.normal(0.0, self.world.seed_sd * min(max(noise, 0.4), 2.5))
        score += self._noise.normal(0.0, math.sqrt((1 - SAME_EXAMPLES - 0.05) * variance))
        return min(max(score, 0.0), 1.0)


class AboveBest:
    """Keep a candidate whose score is above the best score so far."""

    def __init__(self, score: float) -> None:
        self.kept: tuple[Change, ...] = ()
        self.stage = Stage.SEARCH  # without effect
        self._first = self._bar = score

    def gain(self, num_slots: int = 1) -> tuple[float, float]:
        """Return the bar less the baseline's score, and NaN: the rule has no interval."""
        return self._bar - self._first, math.nan

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


RuleClass = Callable[[float, RuleConstants], Posterior | AboveBest]  # from the baseline's score


def kept_set(score: float, rules: RuleConstants) -> Posterior:
    """Return the rule of the package after a baseline's score."""
    return Posterior(score, math.sqrt(score * (1 - score) / NUM_EXAMPLES), rules)


def without_rider(score: float, rules: RuleConstants) -> Posterior:
    """Return the rule without riders: a change is measured again only if it is kept."""
    rule = kept_set(score, rules)
    rule.rider = lambda new, in_flight=(): None  # type: ignore[method-assign]
    return rule


def with_bounds(keep_at: float, revert_below: float) -> RuleClass:
    """Return the rule of the package with other bounds on P(it helps)."""
    return lambda score, rules: kept_set(score, replace(rules, keep_at=keep_at, revert_below=revert_below))


REFERENCE = "kept-set"
RULES: dict[str, RuleClass] = {
    REFERENCE: kept_set,
    "no rider": without_rider,
    "best": lambda score, _: AboveBest(score),
    "bar": lambda score, _: MovingBar(score),
}


@dataclass(frozen=True)
class Conditions:
    """How a night is run. `ahead`: the next change is proposed while runs train, as it always is at several slots. By
    hand there is no rider, and there are no last runs."""

    slots: int = 1
    answer_seconds: float = 15.0
    ahead: bool = False
    by_hand: bool = False


def play(world: World, seed: tuple[int, int], conditions: Conditions, make_rule: RuleClass) -> dict[str, float]:
    """Play one night and return its figures. One proposer answers one question after the other."""
    nature = Nature(world, seed)
    rule = make_rule(nature.measure((), 0.0), world.rules)
    num_slots = conditions.slots
    is_ahead = conditions.ahead or num_slots > 1
    searches_only = conditions.by_hand or isinstance(rule, AboveBest)
    # Ends of the runs in flight; the second number makes the order of equal ends unambiguous.
    in_flight: list[tuple[float, int, float, Run, bool]] = []
    num_started = 1
    num_last = 0
    answered = world.run_seconds  # when the next proposal of a proposer that works ahead is ready
    actions: list[Action] = []

    def num_runs_left(seconds: float) -> int:
        return math.floor((world.night_seconds - seconds) / world.run_seconds) * num_slots

    def start(free: float) -> None:
        nonlocal num_started, num_last, answered
        proposed = max(free, answered) if is_ahead else free + conditions.answer_seconds
        stage = Stage.SEARCH
        if not searches_only:
            stage = next_stage(num_started, num_last, num_runs_left(proposed), num_slots)
        seconds = proposed if stage is Stage.SEARCH else free
        if num_runs_left(seconds) <= 0:
            return
        crash_seconds = None
        if stage is Stage.SEARCH:
            answered = seconds + conditions.answer_seconds
            proposal = nature.propose()
            rider = None if conditions.by_hand else rule.rider(proposal.change, [run for *_, run, _ in in_flight])
            run = Run(kept=rule.kept, rider=rider, new=proposal.change)
            crash_seconds = proposal.crash_seconds
        else:
            num_last += 1
            run = measuring_run(rule.kept, stage)
        rule.stage = run.stage
        end = seconds + (world.run_seconds if crash_seconds is None else crash_seconds)
        heapq.heappush(in_flight, (end, num_started, seconds, run, crash_seconds is not None))
        num_started += 1

    for _ in range(num_slots):
        start(world.run_seconds)
    while in_flight:
        end, _, seconds, run, is_crash = heapq.heappop(in_flight)
        if not is_crash:
            score = nature.measure(list(run.changes), seconds)
            actions += [decision.action for decision in rule.observe(run, score, seconds / 3600)]
        start(end)
    kept = rule.kept
    true_gain = nature.truth(kept)[0] - START
    reported, half = rule.gain(num_slots)
    ran = [proposal for proposal in nature.proposals if proposal.crash_seconds is None]
    helpful = {p.change.experiment for p in ran if p.helps + p.other > HELPFUL * world.scale}
    effects = [START + true_gain - nature.truth([c for c in kept if c != change])[0] for change in kept]
    return {
        "gain": true_gain,
        "told_too_high": reported - true_gain,
        "half_interval": half,
        "holds": float(abs(reported - true_gain) <= half),
        "commits_in": sum(action in (Action.KEEP, Action.ADOPT) for action in actions),
        "commits_out": actions.count(Action.REVERT),
        "changes": len(kept),
        "harmful": sum(effect < HARMFUL * world.scale for effect in effects),
        "helpful": len(helpful),
        "missed": len(helpful - {change.experiment for change in kept}),
        "runs": num_started,
    }


def summarise(nights: list[dict[str, float]], reference: list[dict[str, float]] | None) -> dict[str, Any]:
    """Return the means over nights; scores and shares in percentage points. `reference`: nights of the rule kept-set,
    whose gains are subtracted night by night. A rule without an interval has None in its place."""
    means = {figure: float(np.mean([night[figure] for night in nights])) for figure in nights[0]}
    gains = 100 * np.array([night["gain"] for night in nights])
    holds = 100 * np.array([night["holds"] for night in nights])
    has_interval = not math.isnan(means["half_interval"])
    paired = None if reference is None else gains - 100 * np.array([night["gain"] for night in reference])
    return {
        "nights": len(nights),
        "gain": float(gains.mean()),
        "stderr": standard_error(gains),
        "minus_kept_set": None if paired is None else float(paired.mean()),
        "minus_stderr": None if paired is None else standard_error(paired),
        "holds": float(holds.mean()) if has_interval else None,
        "holds_stderr": standard_error(holds) if has_interval else None,
        "told_too_high": 100 * means["told_too_high"],
        "half_interval": 100 * means["half_interval"] if has_interval else None,
        "commits_in": means["commits_in"],
        "commits_out": means["commits_out"],
        "changes": means["changes"],
        "harmful": 100 * means["harmful"] / means["changes"] if means["changes"] else None,
        "missed": 100 * means["missed"] / means["helpful"] if means["helpful"] else None,
        "runs": means["runs"],
    }


COLUMNS = {
    "world": "<20",
    "rule": "<18",
    "answer_seconds": ">15.0f",
    "nights": ">7",
    "gain": ">+8.2f",
    "stderr": ">8.2f",
    "minus_kept_set": ">16.2f",
    "minus_stderr": ">14.2f",
    "holds": ">7.1f",
    "holds_stderr": ">14.1f",
    "told_too_high": ">15.2f",
    "half_interval": ">15.1f",
    "commits_in": ">12.1f",
    "commits_out": ">13.1f",
    "changes": ">9.1f",
    "harmful": ">10.1f",
    "missed": ">9.0f",
}


def simulate(
    name: str,
    rules: Mapping[str, RuleClass],
    conditions: Conditions,
    num_nights: int,
    seed: int,
    report: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Play the nights of a world and return one row a rule. `report` gets a line about the progress."""
    nights: dict[str, list[dict[str, float]]] = {rule: [] for rule in rules}
    for number in range(num_nights):
        for rule, make_rule in rules.items():
            nights[rule].append(play(WORLDS[name], (seed, number), conditions, make_rule))
        if (number + 1) % 50 == 0:
            report(f"{name}: {number + 1} of {num_nights} nights")
    rows = []
    for rule in rules:
        reference = None if rule == REFERENCE else nights.get(REFERENCE)
        figures = summarise(nights[rule], reference)
        rows.append({"world": name, "rule": rule, "answer_seconds": conditions.answer_seconds, **figures})
    return rows


def parse_bounds(text: str) -> tuple[float, float]:
    """Return the two bounds in a text such as 0.7/0.5. BadParameter if there are not two."""
    try:
        keep_at, revert_below = map(float, text.split("/"))
    except ValueError:
        raise click.BadParameter(f"{text}: write two probabilities, such as 0.7/0.5") from None
    return keep_at, revert_below


@click.command(help=__doc__)
@click.option("--world", "worlds", type=click.Choice([*WORLDS]), multiple=True, help="Default: every world.")
@click.option("--rule", default=REFERENCE, show_default=True, type=click.Choice([*RULES, "all"]))
@click.option("--bounds", multiple=True, metavar="X/Y", help="Also in at P >= X, out at P < Y; repeatable.")
@click.option("--nights", default=60, show_default=True, type=click.IntRange(1))
@click.option("--seed", default=1, show_default=True)
@click.option("--slots", default=1, show_default=True, type=click.IntRange(1))
@click.option(
    "--answer-seconds", "answers", default=[15.0], multiple=True, type=click.FloatRange(0), help="Repeatable."
)
@click.option("--ahead", is_flag=True, help="Propose the next change while a run trains.")
@click.option("--by-hand", is_flag=True, help="No rider and no last runs.")
@click.option(
    "--output", type=click.Path(path_type=Path), default=RESULTS / "decision_rules_compared.json", show_default=True
)
def main(
    worlds: tuple[str, ...],
    rule: str,
    bounds: tuple[str, ...],
    nights: int,
    seed: int,
    slots: int,
    answers: tuple[float, ...],
    ahead: bool,
    by_hand: bool,
    output: Path,
) -> None:
    """Play the nights, print a table and write the figures."""
    kind = machine()
    compared = dict(RULES) if rule == "all" else {rule: RULES[rule]}
    for text in bounds:
        keep_at, revert_below = parse_bounds(text)
        compared[f"in {keep_at:g} out {revert_below:g}"] = with_bounds(keep_at, revert_below)
    rows = []
    for name in worlds or WORLDS:
        for answer_seconds in answers:
            conditions = Conditions(slots, answer_seconds, ahead, by_hand)
            rows += simulate(name, compared, conditions, nights, seed, lambda line: click.echo(line, err=True))
    command = shlex.join(["uv", "run", "benchmarks/decision_rules.py", *sys.argv[1:]])
    figures = {"seed": seed, "slots": slots, "ahead": ahead or slots > 1, "by_hand": by_hand}
    write_result(output, command, {**figures, "worlds": rows}, kind)
    click.echo(table(rows, COLUMNS))


if __name__ == "__main__":
    main()
