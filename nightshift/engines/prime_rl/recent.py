"""`score_last` of the rules: the weights of the last published steps, and their mean as the final weights of a run.
And of a game a few steps spread over the training, for a curve.

prime-rl's trainer deletes all but its last two steps, so each is kept by hard links as soon as it is seen whole, in a
folder beside theirs. The mean is computed by a child (averager.py): this process never loads torch.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from nightshift.engines.prime_rl.launch import Launch
from nightshift.engines.prime_rl.proof import ask_child
from nightshift.engines.prime_rl.weights import link_weights, stable_steps, whole_files
from nightshift.entry import isolated
from nightshift.environments import CURVE_STEPS
from nightshift.rules import Rules

RECENT_DIR = "recent"  # in prime-rl's folder; remains.py removes it
AVERAGER = Path(__file__).with_name("averager.py")
# Estimated: 20 steps of 1.3 GB from a disk that reads 150 MB/s, in place of the page cache.
AVERAGE_SECONDS = 180.0


def num_kept(rules: Rules) -> int:
    """Of how many steps a run may hold the weights beside the trainer's own two, the mean counted in."""
    return max(0, rules.score_last - 1) + CURVE_STEPS * any(environment.is_game for environment in rules.environments)


class Recent:
    """The last steps of one run. `averaged`: those that `final` took the mean of. `earlier`: of a game folders by step,
    the last that was seen when each fifth of the training but the first began."""

    def __init__(self, launch: Launch, environ: Mapping[str, str]) -> None:
        self._launch, self._environ = launch, environ
        self._folder = launch.prime_dir / RECENT_DIR
        self._kept: list[int] = []  # in order
        self._fifth = 0
        self.averaged: tuple[int, ...] = ()
        self.earlier: dict[int, Path] = {}

    def look(self, share: float = 0.0) -> None:
        """Keep what was published since the last look, and let go of what is older than the last `score_last`.
        `share` of the training is over."""
        broadcasts, count = self._launch.broadcasts_dir, self._launch.score_last
        is_next = self._launch.is_game and self._fifth < int(5 * share) < 5
        for step in sorted(stable_steps(broadcasts)) if count or is_next else ():
            if step <= max([*self._kept, *self.earlier], default=0):  # 0: the base model, which no update made
                continue
            try:
                link_weights(broadcasts / f"step_{step}", self._folder / f"step_{step}")
                whole_files(self._folder / f"step_{step}")
                self._kept.append(step)
            except (OSError, ValueError):  # the trainer was deleting it
                shutil.rmtree(self._folder / f"step_{step}", ignore_errors=True)
        if is_next and self._kept:
            self._fifth, self.earlier[self._kept[-1]] = int(5 * share), self._folder / f"step_{self._kept[-1]}"
        while len(self._kept) > count:
            if (step := self._kept.pop(0)) not in self.earlier:
                shutil.rmtree(self._folder / f"step_{step}", ignore_errors=True)

    def final(self, step: int) -> Path:
        """The folder of the weights to score after `step`, when the trainer has ended: of fewer steps than `score_last`
        that step's own. EngineError where the mean cannot be computed.
        """
        self.look()
        if not self._launch.score_last or len(self._kept) < self._launch.score_last or self._kept[-1] != step:
            return self._launch.broadcasts_dir / f"step_{step}"
        mean = self._folder / "mean"
        shutil.rmtree(mean, ignore_errors=True)
        mean.mkdir()
        sources = [self._folder / f"step_{each}" for each in self._kept]
        command = isolated(*map(str, (AVERAGER, mean, *sources)))
        ask_child("averager", command, b"", self._launch.run_dir, self._environ, AVERAGE_SECONDS)
        self.averaged = tuple(self._kept)
        return mean
