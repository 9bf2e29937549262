"""A run whose machine others used: what the page and the health say of it."""

from typing import Any

import pytest

from nightshift.campaign.records import Contention, Record
from nightshift.campaign.scores import BUSY, remark
from tests.campaigns import folded, judged, replace

STORY = [0.50, 0.60, 0.40, 0.58]


def loaded(record: Record, share: float | None, **load: Any) -> Record:
    """With what others took of the cores in its run; None: the run has no load at all."""
    assert record.result is not None
    found = None if share is None else Contention(2, **{"others_share": share, **load})
    return replace(record, result=replace(record.result, contention=found))


@pytest.mark.parametrize(("share", "is_busy"), [(0.0, False), (0.249, False), (0.25, True), (0.8, True), (1.0, True)])
def test_a_run_is_busy_from_a_quarter_on(share: float, is_busy: bool) -> None:
    record = loaded(judged(STORY)[1], share)
    assert BUSY == 0.25
    assert (remark(record) is not None) == is_busy


def test_the_remark_says_what_was_taken_and_only_that() -> None:
    record = judged(STORY)[1]
    full = loaded(record, 0.42, stolen_share=0.1, gpu_shared=0.5, throttled=0.0)
    assert remark(full) == (
        "busy machine: 42% of the processors' time went to other processes, 10% of it was stolen by other virtual "
        "machines, 50% of the looks at its GPUs found somebody else there; the run counts for less"
    )
    hot = loaded(record, 0.0, throttled=0.75)
    assert remark(hot) == "busy machine: 75% of them found their clocks held down; the run counts for less"
    campaign = folded(judged(STORY)[:1])
    assert campaign.remarks(replace(full, parent=1))[0] == remark(full)
    assert campaign.remarks(record) == []
