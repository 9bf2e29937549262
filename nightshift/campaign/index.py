"""`runs/.index`: what a campaign was folded into, so that a start folds what came since and not thousands of records.

Never needed: without it everything is folded anew. Used only where its bytes are those that the journal holds,
and what is folded of each record (number, status, parent, ideas, constants, settings, load, scores) hashes to what was
folded then.
`nightshift verify` folds everything anew and compares.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from functools import reduce

import msgspec
import numpy as np

from nightshift.campaign.campaign import Campaign, Idea, ordered
from nightshift.campaign.journal import sha256
from nightshift.campaign.ledger import Ledger
from nightshift.campaign.records import Record
from nightshift.campaign.standing import Expected, Standing
from nightshift.campaign.worlds import Posterior
from nightshift.errors import UsageError
from nightshift.files import read_file, write_atomically

INDEX_NAME = ".index"
_MIN_STEPS = 50  # so many are folded in less time than an index takes to be read
_MIN_NEW = 3  # and so many than it takes to be written


@dataclass(frozen=True, slots=True)
class Index:
    """A belief, arrays as bytes of float64. `kept`: places among the `num_decided` records that hash to `digest`."""

    branch: str
    rules_hash: str
    num_decided: int
    digest: str
    kept: tuple[int, ...]
    means: bytes
    covariance: bytes
    weights: bytes
    ideas: tuple[int, ...]
    sets: bytes
    known: dict[int, Idea]
    incumbent: int
    pairing_variance: float
    standings: tuple[Standing | None, ...]
    last_expected: dict[int, Expected]


def fold(ledger: Ledger, records: Sequence[Record], branch: str, rules_hash: str) -> Campaign:
    """As `Campaign.of`, from where this process or an earlier head has folded to. UsageError as that says."""
    ours = ordered(records, branch, rules_hash)
    known = ledger.folded.get((branch, rules_hash), Campaign())
    if any(a is not b and a != b for a, b in zip(known.decided, ours, strict=False)) or len(known.decided) > len(ours):
        known = Campaign()
    if len(ours) - len(known.decided) > _MIN_STEPS:
        index = _read(ledger)
        known = (index and (index.branch, index.rules_hash) == (branch, rules_hash) and _restored(index, ours)) or known
    campaign = reduce(Campaign.step, ours[len(known.decided) :], known)
    ledger.folded[branch, rules_hash] = campaign
    return campaign


def fold_sound(
    ledger: Ledger, records: Sequence[Record], branch: str, rules_hash: str
) -> tuple[Campaign, dict[int, str]]:
    """As `fold` for who only looks: without the experiments that fit nothing, and why not, by their numbers."""
    campaign, unfit = Campaign(), dict[int, str]()
    try:
        return fold(ledger, records, branch, rules_hash), unfit
    except UsageError:
        for record in ordered(records, branch, rules_hash):
            try:
                campaign = campaign.step(record)
            except UsageError as error:
                unfit[record.number] = error.cause
        return campaign, unfit


def last_campaign(records: Sequence[Record]) -> tuple[str, str]:
    """Branch and rules hash of the last experiment that came to a verdict; of no campaign where none did."""
    return next(((r.branch, r.rules_hash) for r in reversed(records) if r.judgement is not None), ("", ""))


def save(ledger: Ledger) -> None:
    """Write the index, if folding without it would take long. Call with the lock held. EngineError of the disk."""
    whose = last_campaign(records := ledger.records())
    try:
        campaign = fold(ledger, records, *whose)
    except UsageError:  # who needs the belief will hear of it
        return
    belief, decided, old = campaign.belief, campaign.decided, _read(ledger)
    num_known = old.num_decided if old and (old.branch, old.rules_hash) == whose else 0
    if belief is None or num_known <= len(decided) < num_known + (_MIN_NEW if num_known else _MIN_STEPS):
        return
    places = {record.number: place for place, record in enumerate(decided)}
    index = Index(
        *whose,
        len(decided),
        _digest(decided),
        tuple(places[record.number] for record in campaign.kept),
        belief.means.tobytes(),
        belief.covariance.tobytes(),
        belief.weights.tobytes(),
        tuple(map(int, belief.ideas)),
        belief.sets.tobytes(),
        dict(campaign.ideas),
        int(belief.incumbent),
        float(belief.pairing_variance),
        campaign.standings,
        dict(campaign.last_expected),
    )
    data, path = msgspec.msgpack.encode(index), ledger.runs_dir / INDEX_NAME
    if ledger.journal.add("cached", INDEX_NAME, sha256(data)):
        with suppress(OSError):  # it costs the next start some time, and no more
            write_atomically(path, data, sync=False)


def contradictions(ledger: Ledger, records: Sequence[Record]) -> list[str]:
    """What an index that would be used believes, and its records do not say."""
    index = _read(ledger)
    ours = ordered(records, index.branch, index.rules_hash) if index else []
    restored = _restored(index, ours)
    try:
        if restored is None or _same(restored, reduce(Campaign.step, restored.decided, Campaign())):
            return []
    except UsageError as error:
        return [error.cause]
    return [f"runs/{INDEX_NAME} believes what the records do not say: delete it"]


def _same(one: Campaign, other: Campaign) -> bool:
    if one.belief is None or other.belief is None or (one.kept, one.ideas) != (other.kept, other.ideas):
        return False
    if one.last_expected.keys() != other.last_expected.keys():
        return False
    for number, known in one.last_expected.items():
        if not np.allclose(astuple(known), astuple(other.last_expected[number]), atol=1e-9):
            return False
    pairs = zip(astuple(one.belief), astuple(other.belief), strict=True)
    return all(np.shape(a) == np.shape(b) and np.allclose(a, b, atol=1e-9) for a, b in pairs)


def _read(ledger: Ledger) -> Index | None:
    try:
        data = read_file(ledger.runs_dir / INDEX_NAME)
        line = ledger.journal.last(INDEX_NAME)
        is_ours = line is not None and line.sha256 == sha256(data)
        return msgspec.msgpack.decode(data, type=Index) if is_ours else None
    except (OSError, ValueError, RecursionError):
        return None


def _restored(index: Index | None, ours: Sequence[Record]) -> Campaign | None:
    """The campaign of an index over the first of these records; None if it is not of them."""
    if index is None or index.num_decided > len(ours):
        return None
    decided, size = tuple(ours[: index.num_decided]), len(index.ideas)
    if index.digest != _digest(decided):
        return None
    try:
        kept = tuple(decided[place] for place in index.kept)
        weights = np.frombuffer(index.weights)
        means = np.frombuffer(index.means).reshape(len(weights), size)
        covariance = np.frombuffer(index.covariance).reshape(len(weights), size, size)
        rest = index.incumbent, np.float64(index.pairing_variance)
        sets = np.frombuffer(index.sets).reshape(len(kept), size)
        belief = Posterior(means, covariance, weights, np.array(index.ideas), sets, *rest)
        if list(index.known) != [*index.ideas[1:]]:
            return None
        known = index.known, index.standings, index.last_expected
        return Campaign(decided, kept, belief, kept[index.incumbent], *known)
    except (ValueError, IndexError):
        return None


def _digest(decided: Sequence[Record]) -> str:
    """Of all that `Campaign.step` looks at."""
    folded = [
        (
            r.number,
            r.status,
            r.parent,
            r.decision_rules,
            r.effective_hash,
            r.proposal.base,
            r.diff,
            r.result and r.result.contention,
        )
        for r in decided
    ]
    scores = [(bytes(e.scores), e.parts) if (e := r.evaluation) else None for r in decided]
    return sha256(msgspec.msgpack.encode((folded, scores)))
