"""Before the first step: which night a request means, on which branch, and who proposes."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from nightshift.errors import UsageError
from nightshift.git.repo import CAMPAIGN_PREFIX, CONFIG_NAME, Head
from nightshift.guard.clone import Clone
from nightshift.guard.freeze import require_clean_start
from nightshift.guard.seal import Checkout
from nightshift.night.state import STOP_NAME, NightRequest, NightState, ended, load, save
from nightshift.proposers import Proposer
from nightshift.proposers.agent import PRESETS, AgentProposer, command_of
from nightshift.setup import Setup
from nightshift.train_toml.text import read_source


def begin(request: NightRequest, setup: Setup) -> NightState:
    """The state of the night that is asked for: the one that was cut off, or a new one.

    A new one away from a campaign branch creates `autoresearch/<date>`. UsageError where the tree forbids it.
    """
    if (setup.root / STOP_NAME).exists():
        raise UsageError(f"the file {STOP_NAME} is still in the checkout", "Delete it, then start the night.")
    old, now, head = load(setup.ledger), setup.now(), setup.repo.head()
    if old is not None and old.cause is None:
        is_same = (old.request, old.branch, old.rules_hash) == (request, head.branch, setup.rules_hash)
        if is_same and (old.deadline is None or now < old.deadline):
            setup.reporter.note(f"going on with the night of {old.started}")
            return replace(old, pid=os.getpid())
        cause = "its hours passed while it was cut off" if is_same else "another night was started"
        save(setup.ledger, ended(old, cause, now))
        setup.reporter.note(f"the night of {old.started} was cut off and is over: {cause}")
    if not head.is_campaign:
        tag = now.astimezone().strftime("%Y-%m-%d")
        wanted = Head(CAMPAIGN_PREFIX + tag, head.commit)
        require_clean_start(setup.repo, wanted, read_source(setup.root / CONFIG_NAME), None, setup.rules)
        where = f"branch {head.branch}" if head.branch else "a detached HEAD"
        head = setup.repo.start_campaign(tag)
        setup.reporter.note(f"{where} is no campaign: created {head.branch} and switched to it; no file was changed")
    # What an agent thought of is not thrown away with its night.
    agent = (request.agent, head.branch, setup.rules_hash)
    is_its = old is not None and (old.request.agent, old.branch, old.rules_hash) == agent
    return NightState(
        request=request,
        branch=head.branch,
        rules_hash=setup.rules_hash,
        started=now.isoformat(timespec="seconds"),
        first=setup.ledger.next_number(),
        pending=old.pending if old is not None and is_its else None,
    )


def proposer_of(request: NightRequest, setup: Setup) -> Proposer:
    """What --agent names. UsageError for a program that is not there."""
    if request.agent in ("tpe", "random"):
        from nightshift.proposers.search import SearchProposer  # Optuna takes half a second to load

        return SearchProposer(request.agent, request.seed)
    command = command_of(request.agent)
    name = request.agent if request.agent in PRESETS else Path(command[0]).name
    return AgentProposer(
        name,
        command,
        Checkout(setup.root, setup.rules, setup.ledger, setup.repo),
        dict(os.environ),
        request.agent_timeout_seconds,
        Clone(setup.repo),
        setup.clock,
    )
