"""What a run trains on, of one environment or several."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from nightshift.environments import Environment, Example


def training_set(environments: Sequence[Environment], ratio: Mapping[str, float]) -> list[tuple[Environment, Example]]:
    """All examples of one environment; of several as many in all, in their ratio (1 where nothing is said), over and
    again where that is more than there are."""
    sets = {one.name: (one, one.examples("train")) for one in environments}
    shares = {name: ratio.get(name, 1.0) for name in sets}
    total = sum(len(examples) for _, examples in sets.values()) / sum(shares.values())
    return [
        (environment, example)
        for name, (environment, examples) in sets.items()
        for example in itertools.islice(itertools.cycle(examples), max(round(total * shares[name]), 1))
    ]
