"""The first experiment of a campaign, which may have been made before there was a branch.

run.py on `main` measures what a branch made from that commit would measure first. If everything is the same, the branch
begins with that result: no baseline is trained twice.
"""

from datetime import datetime
from typing import Any

from msgspec.structs import replace

from nightshift.campaign.finish import close
from nightshift.campaign.git import CONFIG_NAME, Head
from nightshift.campaign.journal import record_sha256, sha256
from nightshift.campaign.ledger import EFFECTIVE_NAME, RECORD_NAME, baseline_of, differences
from nightshift.campaign.records import Proposal, Record, Request
from nightshift.config.train_toml import Config
from nightshift.experiment.integrity import require_committed
from nightshift.experiment.runs import as_json
from nightshift.experiment.setup import Setup
from nightshift.files import read_file


def fitting_baseline(setup: Setup) -> Record | None:
    """The record that measured this new campaign's baseline before its branch: the first, so that nobody picks one."""
    head, records = setup.repo.head(), setup.ledger.records()
    is_new = head.is_campaign and baseline_of(records, head) is None and not setup.experiments_in_flight()
    committed = setup.repo.config_at(head.commit) if is_new and head.commit else None
    made = next((record for record in records if committed and _is_it(record, head, committed, setup)), None)
    if made is not None and committed is not None:
        require_committed(setup.repo, head, committed, setup.rules)
    return made


def adopt_baseline(config: Config, request: Request, setup: Setup) -> Record | None:
    """Begin the campaign checked out with a result that was measured before it, if one fits; the closed record if that
    is all that running `config` asks for. UsageError as for a baseline that is run."""
    if (made := fitting_baseline(setup)) is None:
        return None
    is_more = request.again or request.baseline
    head, is_all = setup.repo.head(), config.hash == made.config_hash and not is_more
    said = f"{request.proposal.description}: " if is_all and request.proposal.description else ""
    said += f"baseline: the run of {made.number:04d}, made on {made.branch or 'a detached HEAD'}"
    cleared: dict[str, Any] = dict.fromkeys(("judgement", "decided", "git_action", "total_seconds"))
    num_decided = setup.ledger.num_decided()
    record = replace(
        made,
        branch=head.branch,
        proposal=Proposal(description=said),
        decided_before=num_decided,
        started=setup.now().isoformat(timespec="milliseconds"),
        **cleared,
        result=None,
    )
    source = setup.ledger.source(made.number)
    record = setup.ledger.reserve(record, {CONFIG_NAME: source, EFFECTIVE_NAME: as_json(record.effective)})
    seconds = max((setup.now() - datetime.fromisoformat(record.started)).total_seconds(), 0.0)
    record = replace(record, result=made.result, baseline=made.number, decided=num_decided + 1)
    record = setup.campaign(head.branch).judge(replace(record, total_seconds=seconds), config)
    record = close(record, setup.ledger, setup.repo)
    setup.reporter.note(f"experiment {record.number:04d}: {record.proposal.description}; it is not made again")
    return record if is_all else None


def _is_it(record: Record, head: Head, committed: bytes, setup: Setup) -> bool:
    """Whether a record outside of any campaign measured what this one would measure first, and is as it was written."""
    here = setup.engine.name, setup.rules_hash, setup.hardware, setup.variables
    if (
        not record.is_keep
        or record.parent is not None
        or Head(record.branch, record.commit).is_campaign
        or record.evaluation is None
        or differences(record, *here)
        or record.commit != head.commit
    ):
        return False
    # Its files are those for which their writer added a line to the journal: agents can write in runs/.
    folder = setup.ledger.run_dir(record.number)
    try:
        hashes = {CONFIG_NAME: sha256(committed), RECORD_NAME: record_sha256(read_file(folder / RECORD_NAME))}
    except (OSError, ValueError):
        return False
    lines = {name: setup.ledger.journal.last(f"{folder.name}/{name}") for name in hashes}
    return all(line and not line.recovered and line.sha256 == hashes[name] for name, line in lines.items())
