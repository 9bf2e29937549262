"""`nightshift night` for another checkout, with the stand-in worker: `stand_in_night.py ROOT ORDER`.

ORDER is JSON: the fields of Order, and `pauses` in seconds, which are short unless given. With `proposer` set to
"lr" a stand-in proposes learning rates from the number of decided experiments: quicker than a real proposer. With
`real_worker` the real TRL engine trains. The agent's clock leaps an hour with each *.hangs-* in the folder `leaps`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from nightshift import setup as lab  # noqa: E402
from nightshift.engines.trl.engine import TrlEngine  # noqa: E402
from nightshift.night import begin as nightfall  # noqa: E402
from nightshift.night import loop as night  # noqa: E402
from nightshift.night.command import night as run_night  # noqa: E402
from nightshift.night.state import Order  # noqa: E402
from nightshift.proposers.proposers import Context, Proposal  # noqa: E402
from nightshift.rules import Rules  # noqa: E402
from nightshift.train_toml import config  # noqa: E402
from tests.stand_in_run import stand_in_engine  # noqa: E402

RATES = (1e-6, 3e-5, 6e-6, 2e-6, 3e-6, 1e-5, 4e-6, 8e-7, 5e-6, 2.5e-6)


class RateProposer:
    """A stand-in for TPE: the next of a fixed list of learning rates, by what the ledger has decided."""

    name = "lr"

    def propose(self, context: Context, is_stopping: Callable[[], bool]) -> Proposal:
        rate = RATES[(len(context.records) + len(context.refusals) - 1) % len(RATES)]
        source = config.set_values(
            context.source, {"trainer.optim.lr": rate * (1 + len(context.records) // len(RATES))}
        )
        return Proposal(source, f"lr {rate:g}", "better", f"lesson {len(context.records)}")


def engine(rules: Rules, root: Path, *arguments: object) -> TrlEngine:
    """The stand-in's best learning rate is 3e-6, whatever the scale of the real task."""
    return stand_in_engine(replace(rules, learning_rate_scale=200.0), root)


def main() -> None:
    asked = json.loads(sys.argv[2])
    pauses = asked.pop("pauses", [0.05, 0.05, 0.05])
    if asked.pop("proposer", None) == "lr":
        nightfall.proposer_of = lambda order, the_lab: RateProposer()
    if leaps := asked.pop("leaps", None):
        make, signs = nightfall.proposer_of, Path(leaps)
        clock = lambda: time.monotonic() + 3600 * len([*signs.glob("*.hangs-*")])  # noqa: E731
        nightfall.proposer_of = lambda order, the_lab: make(order, replace(the_lab, clock=clock))
    if not asked.pop("real_worker", False):
        lab.open_engine = engine
    night.Night = partial(night.Night, pauses=night.Pauses(tuple(pauses), tuple(pauses[:2])))
    sys.exit(run_night(Path(sys.argv[1]), Order(**asked)))


if __name__ == "__main__":
    main()
