"""`nightshift reproduce`: does the gain of somebody's bundle come again, with fresh seeds, in this clone?

Baseline and incumbent of the bundle are trained as a certificate's: a certified gain is measured on the sealed set,
which counts as a look here; one that was only believed on the selection set, on which it was found. The seeds are drawn
here, so that who made the bundle cannot have chosen them.
"""

from __future__ import annotations

import math
import secrets
import shlex
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from nightshift import sealed
from nightshift.baseline import require_packaged
from nightshift.bundle import Bundle, Claim
from nightshift.certify.certificate import Comparison, block, lines, verdict
from nightshift.certify.pairs import DEFAULT_SEEDS, MAX_SEEDS, Pairs, compare, done
from nightshift.engines.downloads import data_problem
from nightshift.errors import UsageError, listed
from nightshift.experiment import require_ready
from nightshift.files import read_file, read_json, write_json
from nightshift.guard.freeze import changed_harness_files
from nightshift.rules import RULES_NAME
from nightshift.sealed import Look, counted_looks
from nightshift.setup import Setup
from nightshift.text import clean
from nightshift.worker import KEY_BYTES

FOLDER, REPRODUCTION_NAME, _PLAN_NAME = "reproduce", "reproduction.json", "seeds.json"
FIRST_SEED_INDEX = 20_000_000  # above every transfer's
_NUM_DRAWS = 10_000_000  # blocks of seeds; the last is below 2^32
_LAST_SEED_INDEX = FIRST_SEED_INDEX + 2 * MAX_SEEDS * (_NUM_DRAWS - 1)
Answer = Literal["holds", "open", "does not hold"]
_BELIEVED = "nothing was certified: the gain of the bundle is a belief, on the set on which the incumbent was chosen"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reproduction(Comparison):
    """What `reproduction.json` says. `claimed` and its interval are the bundle's, `source` how it came by them.

    `is_inside`: the gain that was measured here lies in the claimed interval, as of five in six faithful ones with as
    many seeds: both were measured. `answer`: `holds` where the two gains differ by no more than both intervals allow,
    half-widths added in squares, as 19 in 20 do (the prediction interval of Patil, Peng and Leek, Perspectives on
    Psychological Science 11, 2016), and the interval measured here lies above 0; `open` where they do not differ by
    more, but that interval has 0 in it: whatever is claimed, so few runs cannot tell it from no gain at all.
    """

    bundle_sha256: str
    incumbent: int
    source: Literal["certified", "believed"]
    claimed: float
    claimed_interval: tuple[float, float]
    is_inside: bool
    answer: Answer


@dataclass(frozen=True, slots=True)
class Plan:
    """What is compared, and where; nothing sealed is read yet. `look`: None on the selection set."""

    bundle: Bundle
    pairs: Pairs
    look: Look | None


@dataclass(frozen=True, slots=True)
class _Begun:
    """The block of seeds that a reproduction drew, and goes on with: it counts as it stands in the chain."""

    first: Annotated[int, Meta(ge=FIRST_SEED_INDEX, le=_LAST_SEED_INDEX)]


def make_plan(bundle: Bundle, setup: Setup, num_seeds: int | None = None) -> Plan:
    """What to train. UsageError where this clone has other code, rules or data than the bundle asks for, ConfigError
    for a config that the engine refuses."""
    require_same_code(bundle, setup)
    if problem := data_problem(setup.root, setup.rules):
        raise UsageError(problem.cause, problem.fix)
    settings = {side: setup.engine.validate(config).settings for side, config in bundle.configs.items()}
    runs_dir, wanted = setup.ledger.runs_dir, num_seeds or bundle.claim.num_seeds or DEFAULT_SEEDS
    look = _look(bundle, setup, wanted) if bundle.claim.source == "certified" else None
    folder = runs_dir / FOLDER / bundle.sha256[:16] if look is None else sealed.folder(runs_dir, look)
    if look is not None and look.num_seeds != wanted and num_seeds is not None:
        cause = f"look {look.number} at the sealed set began with {look.num_seeds} seeds and is not finished"
        fix = f"Go on with --seeds {look.num_seeds}, or give it up (it stays counted): rm -r {folder}"
        raise UsageError(cause, fix)
    first, count = _first_seed(folder, setup), look.num_seeds if look else wanted
    return Plan(bundle, Pairs(folder, settings, count, first, look.number if look else None), look)


def _first_seed(folder: Path, setup: Setup) -> int:
    """Of the block of seeds: the one that was begun with, else one that is drawn. UsageError for one that was changed.

    A kill between file and chain came before the first run: another block is drawn then.
    """
    path, fix = folder / _PLAN_NAME, f"Begin again: rm -r {folder}"
    begun = read_json(path, _Begun, fix)
    if begun is not None and setup.ledger.holds(path):
        return begun.first
    if any(folder.glob("*-*/")):
        raise UsageError(f"{path} is not as the chain has it: its seeds may have been chosen", fix)
    return FIRST_SEED_INDEX + 2 * MAX_SEEDS * secrets.randbelow(_NUM_DRAWS)


def require_same_code(bundle: Bundle, setup: Setup) -> None:
    """UsageError where this clone would measure something else than the bundle's campaign did; it says what to do."""
    told, commit = bundle.manifest, bundle.manifest.commit or ""
    fix = f"git fetch, then git switch --detach {commit}"
    if setup.repo.config_at(commit) is None:
        raise UsageError(f"this clone has no commit {commit[:12]}, at which the bundle's campaign began", fix)
    if changed := changed_harness_files(setup.repo, commit, setup.rules):
        raise UsageError(f"{listed(changed)} differ from commit {commit[:12]} of the bundle", fix)
    if setup.rules_hash != told.rules_hash:
        cause = f"the rules here are {setup.rules.name} {setup.rules_hash}, the bundle's {clean(told.rules_name)} "
        cause += f"{clean(told.rules_hash)}, on {clean(told.hardware)}"
        raise UsageError(cause, _rules_fix(bundle, setup))
    if told.harness_tree and (tree := setup.harness_tree) != told.harness_tree:
        cause = (
            f"files beside the tracked ones are not the bundle's ({clean(told.harness_tree[:12])}, here {tree[:12]})"
        )
        raise UsageError(cause, "Reproduce it in a fresh clone.")


def _rules_fix(bundle: Bundle, setup: Setup) -> str:
    """Where the bundle's rules.toml is to be seen; which of the two is right, the person says."""
    told, here = bundle.manifest, _bytes(setup.root / RULES_NAME)
    its = setup.repo.file_at(told.commit or "", RULES_NAME) if RULES_NAME in told.redacted else bundle.rules_toml
    if here == its:
        return "Reproduce it on a machine as it was made on."
    look = f"git show {told.commit}:{RULES_NAME}"
    if RULES_NAME not in told.redacted:
        look = f"tar xzf {shlex.quote(str(bundle.path))} -O {RULES_NAME}"
    return f"See the bundle's, then put it in place of yours, of which you keep a copy: {look}"


def _look(bundle: Bundle, setup: Setup, num_seeds: int) -> Look:
    """The one that is not finished, or the next. Its branch says that it is none of a campaign's of this clone."""
    told, counted = bundle.manifest, counted_looks(setup.ledger.runs_dir)
    assert told.baseline is not None
    assert told.incumbent is not None
    look = Look(
        number=len(counted) + 1,
        time=setup.now().isoformat(timespec="seconds"),
        branch=f"{clean(told.branch)} of bundle {bundle.sha256[:16]}",
        rules_hash=setup.rules_hash,
        baseline=told.baseline.number,
        incumbent=told.incumbent.number,
        num_seeds=num_seeds,
    )
    last = counted[-1] if counted and counted[-1].is_same(look) else None
    folder = sealed.folder(setup.ledger.runs_dir, last) if last else None
    is_begun = folder is not None and folder.is_dir() and not (folder / REPRODUCTION_NAME).exists()
    return last if last is not None and is_begun else look


def describe(plan: Plan, setup: Setup) -> list[str]:
    """The plan for people."""
    told, claim, pairs = plan.bundle.manifest, plan.bundle.claim, plan.pairs
    low, high = claim.interval
    assert told.incumbent is not None
    assert told.baseline is not None
    what = "sealed examples, which counts as a look here" if plan.look else "selection examples"
    made, least = len(done(pairs, setup)), 2 * pairs.num_seeds * setup.rules.budget_seconds / 60
    return [
        f"bundle:   {plan.bundle.sha256[:16]}, {clean(told.branch)}, {clean(told.rules_name)}",
        f"claims:   {claim.difference:+.4f} (95 % interval {low:+.4f} to {high:+.4f}), {claim.source}",
        f"compare:  experiment {told.incumbent.number:04d} (incumbent) against {told.baseline.number:04d} (baseline), "
        f"{pairs.num_seeds} new seeds each, {sum(e.num_selection for e in setup.rules.environments)} {what}",
        f"time:     at least {least:.0f} min" + (f", {made} of {2 * pairs.num_seeds} runs are done" if made else ""),
        *([] if setup.hardware == told.hardware else [f"hardware: {clean(told.hardware)}; here {setup.hardware}"]),
    ]


def reproduce(plan: Plan, setup: Setup) -> Reproduction:
    """Make the runs and compare; goes on where an interrupted one stopped. Call as the head. Raises as `certify`."""
    ledger, folder = setup.ledger, plan.pairs.folder
    for line in describe(plan, setup):
        setup.reporter.note(line)
    setup.engine.prepare_at_start(setup.reporter.note)
    require_ready(setup)
    require_packaged(setup)
    if plan.look is not None:
        setup.pool.look_key = secrets.token_bytes(KEY_BYTES)
        with ledger.lock():
            sealed.count(ledger.runs_dir, plan.look, setup.pool.look_key)
            ledger.enter(ledger.runs_dir / sealed.LOOKS_NAME)
    folder.mkdir(parents=True, exist_ok=True)
    with ledger.lock():
        write_json(folder / _PLAN_NAME, _Begun(plan.pairs.first))
        ledger.enter(folder / _PLAN_NAME)
    found = compare(plan.pairs, setup)
    if plan.look is not None and (again := sum(look.is_same(plan.look) for look in counted_looks(ledger.runs_dir)) - 1):
        again_note = f"this bundle was looked at {again} time{'s' if again > 1 else ''} before: one answer of several"
        found = replace(found, notes=(*found.notes, again_note))
    result = judged(found, plan.bundle, "" if setup.hardware == plan.bundle.manifest.hardware else setup.hardware)
    with ledger.lock():
        write_json(folder / REPRODUCTION_NAME, result)
        ledger.enter(folder / REPRODUCTION_NAME)
    return result


def judged(found: Comparison, bundle: Bundle, other_hardware: str = "") -> Reproduction:
    """What was measured here beside what the bundle claims. `other_hardware`: this, where it is not the bundle's."""
    told, claim = bundle.manifest, bundle.claim
    low, high = claim.interval
    notes = [*found.notes, *([_BELIEVED] if claim.source == "believed" else [])]
    notes += [f"made on {clean(told.hardware)}, reproduced on {other_hardware}"] if other_hardware else []
    assert told.incumbent is not None
    measured = {field.name: getattr(found, field.name) for field in fields(Comparison)}
    return Reproduction(
        **measured | {"branch": clean(told.branch), "notes": tuple(notes)},
        bundle_sha256=bundle.sha256,
        incumbent=told.incumbent.number,
        source=claim.source,
        claimed=claim.difference,
        claimed_interval=claim.interval,
        is_inside=low <= found.difference <= high,
        answer=_answer(found, claim),
    )


def _answer(found: Comparison, claim: Claim) -> Answer:
    """See `Reproduction`. What is measured to be a loss is no gain that holds, however wide the claim."""
    (low, high), (own_low, own_high) = claim.interval, found.interval
    is_apart = abs(found.difference - claim.difference) > math.hypot(high - low, own_high - own_low) / 2
    if is_apart or own_high < 0:
        return "does not hold"
    return "holds" if own_low > 0 else "open"


def summary(found: Reproduction) -> str:
    """The block that `nightshift reproduce` prints."""
    low, high = found.claimed_interval
    inside = f"the gain measured here lies {'in' if found.is_inside else 'outside'} the {found.source} interval"
    told = {
        "holds": "it differs by no more than both intervals allow, and is above 0",
        "open": "it differs by no more than both intervals allow, and may be none at all. More --seeds tell",
        "does not hold": "it is a loss" if found.interval[1] < 0 else "it differs by more than both intervals allow",
    }
    extra = [
        ("claimed", f"{found.claimed:+.6f}"),
        ("claimed_interval", f"{low:+.6f} {high:+.6f} ({found.source})"),
        ("answer", f"{found.answer}: {inside}; {told[found.answer]}"),
        *(("note", note) for note in found.notes),
    ]
    return block([*lines(found, verdict(found)), *extra])


def _bytes(path: Path) -> bytes | None:
    try:
        return read_file(path)
    except OSError:
        return None
