"""The index saves time and decides nothing: whatever lies there, what is believed is what the records say."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from nightshift.campaign import index as indexes
from nightshift.campaign.campaign import Campaign
from nightshift.campaign.index import INDEX_NAME, Index, fold, last_campaign, save
from nightshift.campaign.journal import sha256
from nightshift.campaign.ledger import Ledger
from nightshift.campaign.records import Evaluation, Record
from nightshift.campaign.verify import verify
from tests.campaigns import BRANCH, judged, replace, stored

STORY = [0.505, 0.54, 0.40, 0.58, 0.57, None, 0.61, 0.30, 0.60, 0.62]


@pytest.fixture
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ledger:
    """Ten experiments, with an index over the first eight."""
    monkeypatch.setattr(indexes, "_MIN_STEPS", 3)
    records = judged(STORY)
    ledger = stored(tmp_path, records[:8])
    save(ledger)
    stored(tmp_path, records[8:])
    return Ledger(tmp_path)


def believed(ledger: Ledger) -> Campaign:
    fresh = Ledger(ledger.tsv_path.parent)
    records = fresh.records()
    return fold(fresh, records, *last_campaign(records))


def plain(ledger: Ledger) -> Campaign:
    """Without any index."""
    records: list[Record] = Ledger(ledger.tsv_path.parent).records()
    return Campaign.of(records, BRANCH, records[0].rules_hash)


def is_same(one: Campaign, other: Campaign) -> bool:
    assert one.belief is not None
    assert other.belief is not None
    arrays = (
        (getattr(x.belief, name) for name in ("means", "covariance", "weights", "ideas", "sets")) for x in (one, other)
    )
    return (
        one.decided == other.decided
        and one.kept == other.kept
        and one.standings == other.standings
        and all(np.array_equal(a, b) for a, b in zip(*arrays, strict=True))
    )


def path_of(ledger: Ledger) -> Path:
    return ledger.runs_dir / INDEX_NAME


def forged(ledger: Ledger) -> bytes:
    """One that believes a hundred points more of the incumbent."""
    index = msgspec.msgpack.decode(path_of(ledger).read_bytes(), type=Index)
    return msgspec.msgpack.encode(replace(index, means=(np.frombuffer(index.means) + 1).tobytes()))


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the experiments that are folded, each time."""
    found, step = list[int](), Campaign.step

    def counting(self: Campaign, record: Record) -> Campaign:
        found.append(record.number)
        return step(self, record)

    monkeypatch.setattr(Campaign, "step", counting)
    return found


def test_what_is_not_settled_yet_and_read_again_is_folded_once(tmp_path: Path, steps: list[int]) -> None:
    ledger = stored(tmp_path, [replace(record, git_action=None) for record in judged(STORY)])
    steps.clear()
    for _ in range(2):
        fold(ledger, records := ledger.records(), *last_campaign(records))
    assert steps == list(range(1, 11))


def test_an_index_is_used_and_changes_no_bit(ledger: Ledger, steps: list[int]) -> None:
    expected = plain(ledger)
    steps.clear()
    assert is_same(believed(ledger), expected)
    assert steps == [9, 10]
    path_of(ledger).unlink()
    assert is_same(believed(ledger), expected)
    assert steps == [9, 10, *range(1, 11)]


def test_the_scores_of_what_an_index_holds_are_not_decoded(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded, really = list[Evaluation](), Evaluation.example_scores

    def counting(self: Evaluation) -> tuple[float, ...]:
        decoded.append(self)
        found: tuple[float, ...] = really.fget(self)
        return found

    monkeypatch.setattr(Evaluation, "example_scores", property(counting))
    believed(ledger)
    assert len(decoded) == 4  # of 9 and 10, and of their parents
    path_of(ledger).unlink()
    believed(ledger)
    assert len(decoded) > 4 + 10


def a_record_changed(ledger: Ledger, now: str = "[1.0,1.0", then: str = "[0.0,0.0") -> None:
    path = ledger.run_dir(4) / "record.json"
    before, text = path.stat(), path.read_text()
    assert now in text
    path.write_text(text.replace(now, then, 1))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert not is_same(plain(ledger), Campaign.of(judged(STORY), BRANCH, judged(STORY)[0].rules_hash))


CHANGES: dict[str, Callable[[Ledger], object]] = {
    "a record, its times restored": a_record_changed,
    "its settings": lambda x: a_record_changed(x, '"effective_hash":"4"', '"effective_hash":"2"'),
    "its load": lambda x: a_record_changed(x, '"contention":null', '"contention":{"num_cores":2,"others_share":0.9}'),
    "a record deleted": lambda x: x.run_dir(3).rename(x.runs_dir.parent / "gone"),
    "forged": lambda x: path_of(x).write_bytes(forged(x)),
    "torn": lambda x: os.truncate(path_of(x), 100),
    "empty": lambda x: os.truncate(path_of(x), 0),
    "huge": lambda x: os.truncate(path_of(x), 1 << 40),
    "a link": lambda x: (path_of(x).rename(x.runs_dir / "i"), path_of(x).symlink_to("i")),
    "a pipe": lambda x: (path_of(x).unlink(), os.mkfifo(path_of(x))),
    "a folder": lambda x: (path_of(x).unlink(), path_of(x).mkdir()),
    "no journal": lambda x: (path_of(x).write_bytes(forged(x)), x.journal.path.unlink()),
}


@pytest.mark.parametrize("how", CHANGES)
def test_no_change_of_index_or_record_is_believed(ledger: Ledger, how: str) -> None:
    CHANGES[how](ledger)
    assert is_same(believed(ledger), plain(ledger))
    fresh = Ledger(ledger.tsv_path.parent)
    for _ in range(2):
        save(fresh)
        assert is_same(believed(ledger), plain(ledger))


def test_an_index_that_was_forged_with_its_line_of_the_journal_is_named(ledger: Ledger) -> None:
    assert verify(ledger).problems == []
    data = forged(ledger)
    path_of(ledger).write_bytes(data)
    ledger.journal.add("cached", INDEX_NAME, sha256(data))
    assert not is_same(believed(ledger), plain(ledger))
    assert verify(Ledger(ledger.tsv_path.parent)).problems == [
        "runs/.index believes what the records do not say: delete it"
    ]


@pytest.mark.parametrize(
    "change", [{"kept": (0, 99)}, {"incumbent": 50}, {"means": b"x"}, {"covariance": b""}, {"weights": b""}]
)
def test_an_index_of_nonsense_with_its_line_of_the_journal_is_not_used(
    ledger: Ledger, change: dict[str, object]
) -> None:
    index = msgspec.msgpack.decode(path_of(ledger).read_bytes(), type=Index)
    data = msgspec.msgpack.encode(replace(index, **change))  # type: ignore[arg-type]
    path_of(ledger).write_bytes(data)
    ledger.journal.add("cached", INDEX_NAME, sha256(data))
    assert is_same(believed(ledger), plain(ledger))
