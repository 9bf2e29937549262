"""Some of the rollouts that a run learnt from: of its last steps the best, the worst, and those that were cut off.

In the form of nightshift.metrics.Sample, which this process does not import.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

NUM_EACH = 7
MAX_TEXT = 4_000  # characters of a problem or completion


class Samples:
    """Call `look` with every batch."""

    def __init__(self) -> None:
        self._best, self._worst, self._cut = (deque[dict[str, Any]](maxlen=NUM_EACH) for _ in range(3))

    def look(
        self, step: int, problems: Sequence[str], texts: Sequence[str], rewards: Sequence[float], is_cut: Sequence[bool]
    ) -> None:
        """Of the batch of a step, (b,) each, keep the best rollout, the worst and one that was cut off."""
        order = sorted(range(len(rewards)), key=lambda i: rewards[i])
        whole, cut = ([i for i in order if is_cut[i] is way] for way in (False, True))
        for kept, found in ((self._best, whole[-1:]), (self._worst, whole[:1]), (self._cut, cut[:1])):
            kept.extend(
                {
                    "step": step,
                    "problem": problems[i][:MAX_TEXT],
                    "completion": texts[i][:MAX_TEXT],
                    "reward": rewards[i],
                    "truncated": is_cut[i],
                }
                for i in found
            )

    def write(self, path: Path) -> None:
        """A line each, in the order of the steps; none twice."""
        kept = sorted((*self._best, *self._worst, *self._cut), key=lambda sample: sample["step"])
        path.write_text("".join(f"{line}\n" for line in dict.fromkeys(map(json.dumps, kept))))
