"""`nightshift night` for another checkout, with the stand-in trainer: `stand_in_night.py ROOT REQUEST`.

REQUEST is JSON: the fields of NightRequest, and `waits`: seconds from one try in vain to the next, 0.05 unless given.
With `proposer` a stand-in proposes learning rates by the number of decided experiments. The agent's clock leaps an hour
with each *.hangs-* in the folder `leaps`. `slots`: so many, however few cores there are. `notify`: as the flag.
`page`: true where the test reads the page.
With --detach after REQUEST it starts a night as that flag does.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from nightshift.startup import begin  # noqa: E402

begin()

from nightshift.agents.base import Answer, Context  # noqa: E402
from nightshift.campaign.ledger import Ledger  # noqa: E402
from nightshift.campaign.records import Proposal  # noqa: E402
from nightshift.cli import output  # noqa: E402
from nightshift.cli.progress import TerminalReporter  # noqa: E402
from nightshift.cli.run import start_detached  # noqa: E402
from nightshift.cli.shell import exit_code_of  # noqa: E402
from nightshift.cli.status import is_under_way  # noqa: E402
from nightshift.config.train_toml import set_values  # noqa: E402
from nightshift.executors.local import own_cores  # noqa: E402
from nightshift.experiment import experiment  # noqa: E402
from nightshift.night import start, state  # noqa: E402
from nightshift.night.state import NightRequest  # noqa: E402
from tests.stand_in_proposer import StandInProposer  # noqa: E402
from tests.stand_ins import install, save_time  # noqa: E402

RATES = (1e-6, 3e-5, 6e-6, 2e-6, 3e-6, 1e-5, 4e-6, 8e-7, 5e-6, 2.5e-6)


class RateProposer(StandInProposer):
    """A stand-in for TPE: the next of a fixed list of learning rates, by what the ledger has decided."""

    name = "lr"

    def answer(self, context: Context) -> Answer:
        num_decided, last = len(context.campaign.decided), context.campaign.decided[-1].number
        rate = RATES[(num_decided + len(context.refusals) - 1) % len(RATES)]
        source = set_values(context.source, {"trainer.optim.lr": rate * (1 + num_decided // len(RATES))})
        proposal = Proposal(description=f"lr {rate:g}", prediction="better")
        return Answer(source, proposal, lessons={last: {"lesson": f"lesson {last}"}})


class LaterSearch(StandInProposer):
    """A search that loads Optuna, which takes half a second, when it is first asked."""

    def __init__(self, name: str, request: NightRequest, search_of=start.search_of) -> None:
        self.name, self.request, self.search_of = name, request, search_of

    def answer(self, context: Context) -> Answer:
        return self.search_of(self.name, self.request).answer(context)


def main() -> None:
    asked = json.loads(sys.argv[2])
    notify = asked.pop("notify", None)
    if asked.pop("proposer", None):
        start.proposer_of = lambda request, of: RateProposer()
    if num_slots := asked.pop("slots", None):
        asked["pairs"] = num_slots
        experiment.own_cores = lambda: [own_cores()[i % len(own_cores())] for i in range(num_slots)]
    if leaps := asked.pop("leaps", None):
        make, signs = start.proposer_of, Path(leaps)
        clock = lambda: time.monotonic() + 3600 * len([*signs.glob("*.hangs-*")])  # noqa: E731
        start.proposer_of = lambda request, of: make(request, replace(of, clock=clock))
    state.FIRST_SECONDS = state.MAX_SECONDS = asked.pop("waits", 0.05)
    start.search_of = LaterSearch
    install("night")
    save_time(with_page=asked.pop("page", False))
    if "--detach" in sys.argv:  # as cli/main.py does it
        ledger = Ledger(Path(sys.argv[1]))
        with closing(TerminalReporter()) as reporter:
            create = partial(start.create_branch, Path(sys.argv[1]), NightRequest(**asked), reporter, None)
            if code := exit_code_of(create):
                sys.exit(code)
        sys.exit(start_detached(ledger, partial(is_under_way, ledger, time.time()), "nightshift wait --night"))

    def night() -> int:
        with closing(TerminalReporter()) as reporter:
            return start.night(Path(sys.argv[1]), NightRequest(**asked), reporter, output.print_text, notify)

    sys.exit(exit_code_of(night))


if __name__ == "__main__":
    main()
