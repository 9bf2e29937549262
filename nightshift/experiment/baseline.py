"""A baseline that was measured before its campaign had a branch.

`run.py` on main measures what a branch made from that commit would measure first. If everything is the same, the branch
begins with that result, and no baseline is trained twice.
"""

from datetime import datetime
from typing import Any

from msgspec.structs import replace

from nightshift.campaign.finish import close
from nightshift.campaign.git import CONFIG_NAME, Head
from nightshift.campaign.journal import record_sha256, sha256
from nightshift.campaign.ledger import EFFECTIVE_NAME, RECORD_NAME
from nightshift.campaign.records import Proposal, Record, Request
from nightshift.campaign.same_setup import baseline_of, differences
from nightshift.config.train_toml import Config
from nightshift.experiment.integrity import require_committed
from nightshift.experiment.runs import as_json
from nightshift.experiment.setup import Setup
from nightshift.files import read_file


def fitting_baseline(setup: Setup) -> Record | None:
    """Return the first record that measured this new campaign's baseline before its branch; None without one.

    It is the first one, so that nobody picks the best of several.
    """
    head, records = setup.repo.head(), setup.ledger.records()
    if not head.is_campaign or not head.commit or baseline_of(records, head) or setup.experiments_in_flight():
        return None
    committed = setup.repo.config_at(head.commit)
    if committed is None:
        return None
    for record in records:
        if _fits(record, head, committed, setup):
            require_committed(setup.repo, head, committed, setup.rules)
            return record
    return None


def adopt_baseline(config: Config, request: Request, setup: Setup) -> Record | None:
    """Begin the campaign checked out with a result that was measured before it, if one fits.

    Returns: the closed record if running `config` asks for no more than this; else None.
    """
    earlier = fitting_baseline(setup)
    if earlier is None:
        return None
    is_all = config.hash == earlier.config_hash and not (request.again or request.baseline)
    description = f"baseline: the run of {earlier.number:04d}, made on {earlier.branch or 'a detached HEAD'}"
    if is_all and request.proposal.description:
        description = f"{request.proposal.description}: {description}"
    cleared: dict[str, Any] = dict.fromkeys(("result", "judgement", "decided", "git_action", "total_seconds"))
    num_decided = setup.ledger.num_decided()
    record = replace(
        earlier,
        branch=setup.repo.head().branch,
        proposal=Proposal(description=description),
        decided_before=num_decided,
        started=setup.now().isoformat(timespec="milliseconds"),
        **cleared,
    )
    source = setup.ledger.source(earlier.number)
    record = setup.ledger.reserve(record, {CONFIG_NAME: source, EFFECTIVE_NAME: as_json(record.effective)})
    seconds = max((setup.now() - datetime.fromisoformat(record.started)).total_seconds(), 0.0)
    record = replace(
        record, result=earlier.result, baseline=earlier.number, decided=num_decided + 1, total_seconds=seconds
    )
    record = close(setup.campaign(record.branch).judge(record, config), setup.ledger, setup.repo)
    setup.reporter.note(f"experiment {record.number:04d}: {record.proposal.description}; it is not made again")
    return record if is_all else None


def _fits(record: Record, head: Head, committed: bytes, setup: Setup) -> bool:
    """Return whether a record from outside any campaign measured what this campaign would measure first."""
    here = setup.engine.name, setup.rules_hash, setup.hardware, setup.variables
    is_campaign = Head(record.branch, record.commit).is_campaign
    if not record.is_keep or record.parent is not None or is_campaign or record.evaluation is None:
        return False
    if differences(record, *here) or record.commit != head.commit:
        return False
    # Agents can write in runs/: the files must be those of the journal.
    folder = setup.ledger.run_dir(record.number)
    try:
        hashes = {CONFIG_NAME: sha256(committed), RECORD_NAME: record_sha256(read_file(folder / RECORD_NAME))}
    except (OSError, ValueError):
        return False
    lines = {name: setup.ledger.journal.last(f"{folder.name}/{name}") for name in hashes}
    return all(line and not line.recovered and line.sha256 == hashes[name] for name, line in lines.items())
