"""Before the first step: which night an order means, on which branch, and who proposes."""

from __future__ import annotations

import os
from pathlib import Path

from nightshift.errors import UsageError
from nightshift.git import repo as repos
from nightshift.git.repo import CAMPAIGN_PREFIX, CONFIG_NAME, Head
from nightshift.guard.clone import Workplace
from nightshift.night import state as states
from nightshift.night.state import NightState, Order
from nightshift.proposers.agent import PRESETS, AgentProposer, command_of
from nightshift.proposers.proposers import Proposer, RandomProposer, TpeProposer
from nightshift.setup import Lab
from nightshift.train_toml.text import read_source


def begin(order: Order, lab: Lab) -> NightState:
    """The state of the night that this order means: the one that was cut off, or a new one.

    A new one away from a campaign branch creates `autoresearch/<date>`. UsageError where the tree forbids it.
    """
    if (lab.root / states.STOP_NAME).exists():
        raise UsageError(f"the file {states.STOP_NAME} is still in the checkout", "Delete it, then start the night.")
    old, now, head = states.load(lab.ledger), lab.now(), lab.repo.head()
    if old is not None and old.cause is None:
        is_same = (old.order, old.branch, old.rules_hash) == (order, head.branch, lab.rules_hash)
        if is_same and (old.deadline is None or now < old.deadline):
            lab.reporter.note(f"going on with the night of {old.started}")
            return old
        cause = "its hours passed while it was cut off" if is_same else "another night was started"
        states.save(lab.ledger, states.ended(old, cause, now))
        lab.reporter.note(f"the night of {old.started} was cut off and is over: {cause}")
    if not head.is_campaign:
        tag = now.astimezone().strftime("%Y-%m-%d")
        wanted = Head(CAMPAIGN_PREFIX + tag, head.commit)
        repos.require_clean_start(lab.repo, wanted, read_source(lab.root / CONFIG_NAME), None)
        where = f"branch {head.branch}" if head.branch else "a detached HEAD"
        head = lab.repo.start_campaign(tag)
        lab.reporter.note(f"{where} is no campaign: created {head.branch} and switched to it; no file was changed")
    # What an agent thought of is not thrown away with its night.
    kin = (order.agent, head.branch, lab.rules_hash)
    is_kin = old is not None and (old.order.agent, old.branch, old.rules_hash) == kin
    return NightState(
        order=order,
        branch=head.branch,
        rules_hash=lab.rules_hash,
        started=now.isoformat(timespec="seconds"),
        first=max(lab.ledger.numbers(), default=0) + 1,
        pending=old.pending if old is not None and is_kin else None,
    )


def proposer_of(order: Order, lab: Lab) -> Proposer:
    """What --agent names. UsageError for a program that is not there."""
    if order.agent == "tpe":
        return TpeProposer(order.seed)
    if order.agent == "random":
        return RandomProposer(order.seed)
    command = command_of(order.agent)
    name = order.agent if order.agent in PRESETS else Path(command[0]).name
    return AgentProposer(
        name,
        command,
        lab,
        dict(os.environ),
        order.agent_timeout_seconds,
        Workplace(lab.repo),
    )
