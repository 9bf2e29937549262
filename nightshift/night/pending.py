"""The proposals of a night that are taken and not decided yet."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from nightshift.campaign.campaign import Campaign
from nightshift.campaign.ledger import Ledger
from nightshift.campaign.recombine import base_of
from nightshift.experiment import withdraw
from nightshift.night.state import NightState, decided
from nightshift.pools.survivors import survivors
from nightshift.proposers import Proposal
from nightshift.records import Record
from nightshift.request import Request
from nightshift.rules import covered_files
from nightshift.setup import Setup
from nightshift.train_toml.config import parse


@lru_cache(maxsize=512)
def _hash(source: bytes) -> str:
    """Of a train.toml that waits, and is asked for at each step of a night."""
    return parse(source).hash


def attempts(pending: Proposal, own: Sequence[Record]) -> list[Record]:
    """The closed experiments that ran a proposal; `own` are the night's."""
    if pending.source is None:
        return []
    tried, after = _hash(pending.source), -1 if pending.repeats is None else pending.repeats
    return [record for record in own if record.config_hash == tried and record.number > after]


def undecided(state: NightState, own: Sequence[Record]) -> tuple[Proposal, ...]:
    """Those that no closed experiment has decided."""
    return tuple(pending for pending in state.pending if not decided(attempts(pending, own)))


def waiting(state: NightState, in_flight: Sequence[Record]) -> list[Proposal]:
    """Those that nothing runs."""
    running = [record.config_hash for record in in_flight]
    found = []
    for pending in state.pending:
        config_hash = _hash(pending.source or b"")
        if config_hash in running:
            running.remove(config_hash)
        else:
            found.append(pending)
    return found


def withdraw_jobs(in_flight: Sequence[Record], why: str, setup: Setup) -> None:
    """Take back what waits for its turn on a cluster: it would begin when the night is over."""
    for record in in_flight:
        folders = [f for f in setup.pool.in_flight() if f.parent == setup.ledger.run_dir(record.number)]
        if not any(map(setup.pool.has_begun, folders)):
            withdraw(record.number, f"its job still waited when the night ended: {why}", setup)


def adopt(state: NightState, setup: Setup) -> set[str]:
    """Take over what an earlier head of this night left running, or finished; the workers' names."""
    alive = survivors(setup.ledger, state.first)
    adopted = {folder: was.name for folder, (was, job) in alive.items() if setup.pool.adopt(folder, was, job)}
    if adopted:
        setup.surroundings.look(covered_files(setup.root, setup.rules.frozen))
        numbers = ", ".join(sorted({f"{int(folder.parent.name):04d}" for folder in adopted}))
        setup.reporter.note(f"adopted what an earlier head of this night left running: {numbers}")
    return set(adopted.values())


def repeat_of(record: Record, campaign: Campaign, why: str, after: int, ledger: Ledger) -> Proposal:
    """An experiment's train.toml once more, with another seed; it is the first to run that `after` that one."""
    base, source = base_of(campaign, record, ledger.stored_config), ledger.source(record.number)
    return Proposal(source, f"{why}: {record.description}", record.prediction, repeats=after, base=base)


def request_of(pending: Proposal, own: Sequence[Record]) -> Request:
    """What its experiment is asked for. The first that runs a proposal has its cost: that is paid once."""
    return Request(
        pending.hypothesis,
        again=pending.repeats is not None,
        proposer=pending.proposer,
        prediction=pending.prediction,
        mechanism=pending.mechanism,
        refuted_by=pending.refuted_by,
        notes=pending.notes,
        cost=None if attempts(pending, own) else pending.cost,
        base=pending.base,
    )
