"""Asks the proposer of a night for the next train.toml."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from nightshift.campaign.campaign import Campaign
from nightshift.campaign.recombine import next_base
from nightshift.experiment import admit
from nightshift.night.pending import context_of
from nightshift.night.state import NightState, used
from nightshift.proposers import Proposal, Proposer
from nightshift.records import Record
from nightshift.request import Request
from nightshift.setup import Setup
from nightshift.waiting import waiting as wait_for


def ask(
    proposer: Proposer,
    state: NightState,
    setup: Setup,
    campaign: Campaign,
    incumbent: Record,
    waiting: Sequence[Proposal],
) -> Proposal:
    """One proposal, with the base that it was made from and who made it. `waiting`: those that nothing runs yet."""
    over, in_flight = used(state, state.own(setup.ledger.records()), setup.now()), setup.in_flight
    num_open = len(in_flight) + len(waiting)
    base, config = next_base(campaign, over, setup.ledger.stored_config, setup.engine.validate, num_open)
    admit(config, Request(again=True, base=base), setup)  # no proposal is to blame for the set-up
    context = context_of(state, setup, campaign, incumbent, config.source, base, in_flight, waiting)
    setup.reporter.note(what := f"{proposer.name} proposes experiment {context.number:04d}")
    with wait_for(what):
        proposal = proposer.propose(context, setup.is_stopping)
    return replace(proposal, base=base, proposer=proposer.name)


def learn(proposal: Proposal, last: Record, setup: Setup) -> None:
    """Write down what a proposer says that the `last` experiment taught, unless that is known."""
    if proposal.lesson and last.lesson is None:
        with setup.ledger.lock():
            setup.ledger.write(replace(last, told_outcome=proposal.told_outcome, lesson=proposal.lesson))


def unpriced(proposer: Proposer, proposal: Proposal, max_cost: float | None) -> str | None:
    """What to tell a person who gave `max_cost` dollars, where it is not known what this proposal cost."""
    cost = proposal.cost
    if max_cost is None or (cost is not None and cost.tells("dollars")):
        return None
    told = f"{proposer.name} told {'no' if cost is None or cost.dollars is None else 'not all'} dollars"
    return f"--max-cost {max_cost:g}: {told}, so this rule cannot hold; others stop it"
