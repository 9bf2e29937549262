"""What a request runs, and whether it may run: checked before anything is recorded."""

import hashlib
import json
import platform
from collections.abc import Sequence
from importlib import metadata

from msgspec.structs import replace

from nightshift.campaign.campaign import Campaign
from nightshift.campaign.commits import change_keys
from nightshift.campaign.ledger import STARTED, baseline_of, require_same_setup
from nightshift.campaign.next_run import already_tried
from nightshift.campaign.records import Record, Request, Run
from nightshift.config.allowlist import shorten
from nightshift.config.train_toml import Config, diff
from nightshift.errors import EngineError, UsageError
from nightshift.executors.slots import Slot
from nightshift.experiment.integrity import require_unchanged
from nightshift.experiment.setup import Setup

_LONGEST = 200  # characters of a list in a refusal, which is one line


def require_ready(setup: Setup, slots: Sequence[Slot] | None = None) -> None:
    """Raise EngineError with the first problem of these slots; None: of the slot of the next run."""
    for slot in setup.executor.free_slots[:1] if slots is None else slots:
        if problems := setup.engine_of.get(slot.gpus, setup.engine).check():
            more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
            raise EngineError(problems[0] + more)


def warnings(setup: Setup) -> list[str]:
    """Return what may make a run fail in the slots of this machine, each a line with its fix."""
    engines = [setup.engine_of.get(slot.gpus, setup.engine) for slot in setup.executor.free_slots]
    return [*dict.fromkeys(str(check.problem) for engine in engines for check in engine.warnings())]


def admit(candidate: Config, request: Request, campaign: Campaign, setup: Setup) -> Record:
    """Return the record of an experiment to come, with number 0. UsageError or IntegrityError if it may not run."""
    head, records = setup.repo.head(), setup.ledger.records()
    first = baseline_of(records, head.branch)
    hardware, variables = setup.hardware(first), setup.variables
    if first:
        require_unchanged(setup.repo, setup.rules, first.rules_hash, first.commit, setup.rules_hash)
        require_same_setup(first, setup.engine.name, setup.rules_hash, hardware, variables)
    validated = setup.engine.validate(candidate)
    settings = json.dumps(validated.settings, sort_keys=True, indent=1, allow_nan=False)
    effective_hash = hashlib.sha256(settings.encode()).hexdigest()[:12]
    if campaign.baseline is None or request.baseline:
        run, before = Run(), candidate
    elif request.run is not None:
        run, before = request.run, campaign.compose(replace(request.run, new=None).changes)
    else:
        before = campaign.compose(campaign.incumbent)
        keys = change_keys(before, candidate)
        new = campaign.known(keys) if keys else None
        run = Run(kept=campaign.incumbent, new=new)
        if request.again and new is not None and (new.experiment or new.commit):  # the same changes, none of them new
            run, before = Run(kept=run.changes), candidate
    changes = tuple(change.line for change in diff(before, candidate))
    is_repeat = request.again or request.baseline or (request.run is not None and request.run.new is None)
    if not is_repeat and campaign.baseline is not None:
        if tried := already_tried(campaign.decided, run, candidate.hash):
            effect = tried.decision and tried.decision.estimate
            outcome = tried.status + (f", effect {effect}" if effect else "")
            cause = f"this config was already tried in experiment {tried.number:04d} ({outcome})"
            raise UsageError(cause, "Change train.toml, or repeat it with a new seed: --again.")
        for other in setup.in_flight:
            is_same = run.new and other.run.new and other.run.new.keys == run.new.keys
            if is_same or other.config_hash == candidate.hash:
                raise UsageError(f"this config is in flight as experiment {other.number:04d}", "Change train.toml.")
        if changes and setup.engine.validate(before).settings == validated.settings:
            text = shorten("; ".join(changes), _LONGEST)
            cause = f"the only changes are to keys that this engine does not use: {text}"
            raise UsageError(cause, "Change a key that it uses, or run it all the same: --again.")
    name = "baseline" if run.is_baseline else "incumbent" if run.changes == campaign.kept else ""
    name = f"{name} again".lstrip() if campaign.baseline else "baseline"
    description = request.proposal.description or "; ".join(changes) or name
    return Record(
        number=0,
        status=STARTED,
        branch=head.branch,
        commit=head.commit,
        started=setup.now().isoformat(timespec="milliseconds"),
        parent=campaign.parent.number if campaign.parent else None,
        decided_before=setup.ledger.num_decided(),
        user_decisions=campaign.user_decisions,
        proposal=replace(request.proposal, description=description),
        run=run,
        diff=changes,
        scaled=validated.scaled,
        unused_keys=validated.unused,
        config_hash=candidate.hash,
        effective_hash=effective_hash,
        effective=dict(validated.settings),
        rules_name=setup.rules.name,
        rules_hash=setup.rules_hash,
        decision_rules=setup.rules.decision,
        budget_seconds=setup.rules.budget_seconds,
        engine=setup.engine.name,
        versions={"python": platform.python_version(), "nightshift": metadata.version("nightshift")} | variables,
        hardware=hardware,
        num_starts=1 + sum((r.branch, r.effective_hash) == (head.branch, effective_hash) for r in records),
    )
