"""Asks the proposer of a night for the next train.toml."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from nightshift.campaign.campaign import Campaign
from nightshift.campaign.recombine import next_base
from nightshift.engines import used_keys
from nightshift.experiment import admit
from nightshift.night.state import NightState, num_since_keep, used
from nightshift.proposers import Context, Proposal, Proposer
from nightshift.records import Record
from nightshift.report.slices import shown_examples
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
    own, now, in_flight = state.own(setup.ledger.records()), setup.now(), setup.in_flight
    num_open = len(in_flight) + len(waiting)
    base, config = next_base(
        campaign, used(state, own, now), setup.ledger.stored_config, setup.engine.validate, num_open
    )
    admit(config, Request(again=True, base=base), setup)  # no proposal is to blame for the set-up
    plateau, last = state.request.plateau, campaign.decided[-1]
    parent = next((kept for kept in campaign.kept if kept.number == last.parent), None)
    flips = shown_examples(last.environments, setup.root).flips(last, parent) if parent else ()
    context = Context(
        number=setup.ledger.next_number(),
        incumbent=incumbent,
        source=config.source,
        base=base,
        campaign=campaign,
        rules=setup.rules,
        ledger=setup.ledger,
        used_keys=used_keys(setup.engine, config),
        refusals=state.refusals,
        in_flight=in_flight,
        waiting=tuple(waiting),
        flips=tuple(f"{each.name}: {each.fixed} fixed, {each.broken} broken of {each.num_examples}" for each in flips),
        new_direction=plateau is not None and num_since_keep(own) >= plateau,
        seconds_left=None if state.deadline is None else max((state.deadline - now).total_seconds(), 1.0),
    )
    setup.reporter.note(what := f"{proposer.name} proposes experiment {context.number:04d}")
    with wait_for(what):
        proposal = proposer.propose(context, setup.is_stopping)
    if proposal.cause is None and proposal.source in [other.source for other in waiting]:
        proposal = replace(proposal, cause="this config waits for its turn already. Change train.toml.")
    return replace(proposal, base=base, proposer=proposer.name)


def learn(proposal: Proposal, last: Record, setup: Setup) -> None:
    """Write down what a proposer says that the `last` experiment taught, unless that is known."""
    if proposal.lesson and last.lesson is None:
        with setup.ledger.lock():
            setup.ledger.write(replace(last, told_outcome=proposal.told_outcome, lesson=proposal.lesson))


def unpriced(proposer: Proposer, proposal: Proposal, max_cost: float | None) -> str | None:
    """What to tell a person who gave `max_cost` dollars, where it is not known what this proposal cost."""
    cost = proposal.cost
    if max_cost is None or (cost is not None and cost.is_whole("dollars")):
        return None
    told = f"{proposer.name} told {'no' if cost is None or cost.dollars is None else 'not all'} dollars"
    return f"--max-cost {max_cost:g}: {told}, so this rule cannot hold; others stop it"
