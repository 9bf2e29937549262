"""The proposals of a night that are taken and not decided yet, and the runs of them that outlived their head."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from nightshift.campaign.chain import sha256
from nightshift.campaign.ledger import STARTED, Ledger
from nightshift.files import read_file
from nightshift.night.state import NightState, decided
from nightshift.pools import SUBMITTED_NAME, Submitted
from nightshift.proposers import Proposal
from nightshift.records import Record
from nightshift.rules import covered_files
from nightshift.setup import Setup
from nightshift.train_toml.config import parse


def attempts(pending: Proposal, own: Sequence[Record]) -> list[Record]:
    """The closed experiments that ran a proposal; `own` are the night's."""
    if pending.source is None:
        return []
    tried, after = parse(pending.source).hash, -1 if pending.repeats is None else pending.repeats
    return [record for record in own if record.config_hash == tried and record.number > after]


def undecided(state: NightState, own: Sequence[Record]) -> tuple[Proposal, ...]:
    """Those that no closed experiment has decided."""
    return tuple(pending for pending in state.pending if not decided(attempts(pending, own)))


def waiting(state: NightState, in_flight: Sequence[Record]) -> list[Proposal]:
    """Those that nothing runs."""
    running = [record.config_hash for record in in_flight]
    found = []
    for pending in state.pending:
        config_hash = parse(pending.source or b"").hash
        if config_hash in running:
            running.remove(config_hash)
        else:
            found.append(pending)
    return found


def survivors(ledger: Ledger, first: int) -> dict[Path, Submitted]:
    """By folder, the runs of the experiments from `first` on that were submitted and not collected, as the chain has
    them: whoever wrote another name or key there gets nothing adopted."""
    found = {}
    for record in ledger.records():
        if record.status != STARTED or record.number < first or record.version == 1:
            continue
        for folder in sorted(ledger.run_dir(record.number).glob("run-*")):
            path = folder / SUBMITTED_NAME
            if not path.is_file() or int(folder.name.removeprefix("run-")) <= len(record.runs):
                continue
            data = read_file(path)
            if ledger.chain.holds(path.relative_to(ledger.runs_dir).as_posix(), sha256(data)):
                found[folder] = msgspec.json.decode(data, type=Submitted)
    return found


def adopt(state: NightState, setup: Setup) -> None:
    """Take over what an earlier head of this night left running, or finished."""
    folders = [folder for folder in survivors(setup.ledger, state.first) if setup.pool.adopt(folder)]
    if folders:
        setup.surroundings.look(covered_files(setup.root, setup.rules.frozen))
        names = ", ".join(sorted({f"{int(folder.parent.name):04d}" for folder in folders}))
        setup.reporter.note(f"adopted what an earlier head of this night left running: {names}")
