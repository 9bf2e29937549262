"""What several runs side by side gain: simulated nights of one joint campaign, with the shipped rule.

    uv run benchmarks/parallel_nights.py                    hours of one core; goes on where it stopped

Runs end one by one and are decided in that order, each against the parent that it was made from, which may be the
incumbent no longer. One proposer serves all slots and is one idea ahead. Beside it N separate nights, of which the one
that believes most of its incumbent is taken. Worlds and clock: simulated_nights.py..
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
from decision_rules import RULES, WORLDS
from machine import RESULTS, machine, table, write_result
from simulated_nights import START, Bools, Floats, Ints, Player, Seed, ShippedRule, World, _Nights, simulate

from nightshift.campaign.recombine import DRAWN_UNTIL
from nightshift.campaign.standing import Z95
from nightshift.campaign.worlds import UNUSED

NUM_NIGHTS = {1: 1000, 2: 500, 4: 300, 8: 120, 16: 40}  # campaigns of so many slots
PLAYED = ("default", "hard", "decay")


class SideBySide(ShippedRule):
    """The shipped rule when the next idea begins before the last one is decided."""

    def choose(self, used: Floats, num_ideas: int) -> tuple[Floats, Ints]:
        """As a night does it: (the set of `num_ideas` that the next one joins, the parent that it is compared with)."""
        belief, self.num_ideas = self.belief, num_ideas
        effects = np.where((used < DRAWN_UNTIL)[:, None], belief.draw(self.rng), belief.effects)
        slots = (effects > 0).astype(float)
        slots[:, 0] = 1.0
        return self._ideas(slots), np.broadcast_to(belief.incumbent, (len(slots),)).copy()

    def decide(self, active: Bools, score: Floats, e2: Floats, base: Floats, parent: Ints, number: Ints) -> None:
        """One run of idea `number`, from 1, tried on the set `base`, (campaigns, ideas), where `active`."""
        belief = self.belief
        places = np.clip(belief.ideas - 1, 0, base.shape[1] - 1)
        made_from = np.take_along_axis(base, places, axis=1) * (belief.ideas > 0)
        made_from[:, 0] = 1.0
        self.observed(active, score, e2, parent, made_from, np.where(active, number, UNUSED))

    def set_of(self, parent: Ints) -> Floats:
        """The ideas of a kept config."""
        return self._ideas(self.belief.set_of(parent))


class _Slots(_Nights):
    """Many campaigns in step, each with several slots: in a step, in each of them, the run that ends first is decided
    and its slot begins another."""

    rule: SideBySide

    def __init__(self, num_slots: int, world: World, size: int, seed: Seed) -> None:
        self.rule = SideBySide(RULES, seed=seed[0])
        super().__init__(Player(self.rule), world, size, seed)
        self.num_slots = num_slots

    def play_all(self) -> tuple[Floats, Floats, Floats, float]:
        """(true gain, reported gain, its standard deviation, ideas a campaign)."""
        size, rows = self.size, np.arange(self.size)
        self.rule.begin(self.run(np.full(size, START), np.zeros(size)), self.player.num_examples)
        ends = np.full((size, self.num_slots), self.run_seconds)  # of what runs in each slot
        parent = np.zeros((size, self.num_slots), int)
        number, crashed = np.zeros((size, self.num_slots), int), np.zeros((size, self.num_slots), bool)
        sets = np.zeros((size, self.num_slots, 0))
        ready, open_, index = np.full(size, self.run_seconds), np.zeros((size, self.num_slots), bool), 0
        while True:
            slot = np.where(open_ | (number == 0), ends, np.inf).argmin(axis=1)
            now = ends[rows, slot]
            self._decide(
                open_[rows, slot] & ~crashed[rows, slot], sets[rows, slot], parent[rows, slot], number[rows, slot]
            )
            open_[rows, slot] = False
            begins = np.maximum(now, ready + self.world.agent_seconds)
            alive = (begins + self.run_seconds <= self.end) & (now < np.inf)
            if not alive.any() and not open_.any():
                break
            crash, crash_seconds = self.meet(index)
            chosen, parents = self.rule.choose(begins / self.end, index)
            sets = np.concatenate([sets, np.zeros((size, self.num_slots, 1))], axis=2)
            sets[rows[alive], slot[alive], : chosen.shape[1]] = chosen[alive]
            sets[rows[alive], slot[alive], chosen.shape[1] :] = 0.0
            parent[rows[alive], slot[alive]] = parents[alive]
            number[rows[alive], slot[alive]] = index + 1
            crashed[rows[alive], slot[alive]] = crash[alive]
            ends[rows, slot] = np.where(alive, begins + np.where(crash, crash_seconds, self.run_seconds), np.inf)
            open_[rows[alive], slot[alive]] = True
            number[rows[~alive], slot[~alive]] = -1
            ready = np.where(alive, begins, ready)
            self.ideas += int(alive.sum())
            index = self.rule.num_ideas = index + 1
        true = self.truth(self.rule.incumbent)[0] - START
        return true, *self.rule.gain, self.ideas / size

    def _decide(self, active: Bools, base: Floats, parent: Ints, number: Ints) -> None:
        """The run of one slot of each campaign where `active`."""
        if not active.any():
            return
        tried = base.copy()
        tried[np.flatnonzero(active), number[active] - 1] = 1.0
        q, own = self.truth(tried)
        before = self.rule.set_of(parent)
        width = max(before.shape[1], tried.shape[1] - 1)
        before = np.pad(before, ((0, 0), (0, width - before.shape[1])))
        wide = np.pad(tried, ((0, 0), (0, width + 1 - tried.shape[1])))
        e2 = self.e2(self.truth(before)[0], before, wide)
        self.rule.decide(active, self.run(q, own), e2, base, parent, number)


def joint(num_slots: int, world: World, num_nights: int, seed: int) -> dict[str, float]:
    """One campaign on all slots."""
    sizes = [min(40, num_nights - start) for start in range(0, num_nights, 40)]
    played = [_Slots(num_slots, world, size, (seed, batch)).play_all() for batch, size in enumerate(sizes)]
    gain, believed, sd = (np.concatenate([night[column] for night in played]) for column in range(3))
    over = believed - gain
    return {
        "gain": 100 * float(gain.mean()),
        "stderr": 100 * float(gain.std(ddof=1)) / len(gain) ** 0.5,
        "reported_too_high": 100 * float(over.mean()),
        "coverage": float((np.abs(over) < Z95 * sd)[sd > 0].mean()),
        "ideas": float(np.average([night[3] for night in played], weights=sizes)),
    }


def apart(num_slots: int, world: World, num_nights: int, seed: int) -> float:
    """N nights that know nothing of each other: true gain of the one whose reported gain is largest, pp."""
    night = simulate(Player(ShippedRule(RULES)), world, num_slots * num_nights, seed)
    said, gain = (values.reshape(num_nights, num_slots) for values in (night.believed, night.gain))
    return 100 * float(np.take_along_axis(gain, said.argmax(axis=1)[:, None], axis=1).mean())


@click.command(help=__doc__)
@click.option("--seed", default=404, show_default=True)
@click.option("--share", default=1.0, show_default=True, help="Of the nights: fewer for a first look.")
@click.option("--output", type=click.Path(path_type=Path), default=RESULTS / "parallel_nights.json")
def main(seed: int, share: float, output: Path) -> None:
    """Simulate what is missing, print, write."""
    kind, command = machine(), f"uv run benchmarks/parallel_nights.py --seed {seed} --share {share:g}"
    old = json.loads(output.read_text()) if output.exists() else {}
    rows: list[dict[str, Any]] = old.get("rows", []) if old.get("command") == command else []
    for name in PLAYED:
        for num_slots, most in NUM_NIGHTS.items():
            if any((row["world"], row["slots"]) == (name, num_slots) for row in rows):
                continue
            began, num_nights = time.process_time(), max(int(share * most), 2)
            row = {"world": name, "slots": num_slots, "nights": num_nights}
            row |= joint(num_slots, WORLDS[name], num_nights, seed)
            row["apart"] = apart(num_slots, WORLDS[name], num_nights, seed)
            row["cpu_seconds"] = round(time.process_time() - began, 1)
            click.echo(row, err=True)
            rows.append(row)
            write_result(output, command, {"rows": rows}, kind)
    columns = {"world": "<10", "slots": ">6", "nights": ">7", "gain": ">8.2f", "stderr": ">8.2f", "apart": ">8.2f"}
    click.echo(table(rows, columns | {"reported_too_high": ">+18.2f", "coverage": ">9.3f", "ideas": ">7.0f"}))


if __name__ == "__main__":
    main()
