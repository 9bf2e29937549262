"""A run on a busy machine: believed less by a stated rule, said, and named once for a repetition."""

from typing import Any

import pytest

from nightshift.campaign.campaign import Campaign
from nightshift.campaign.records import Contention, Failure, Record
from nightshift.campaign.scores import BUSY, extra_variance, remark, taken, to_repeat
from tests.campaigns import a_record, folded, judged, replace

PRIOR_SD = a_record().decision_rules.prior_sd
STORY = [0.50, 0.60, 0.40, 0.58]


def loaded(record: Record, share: float | None, **load: Any) -> Record:
    """With what others took of the cores in its run; None: the run has no load at all."""
    assert record.result is not None
    found = None if share is None else Contention(2, **{"others_share": share, **load})
    return replace(record, result=replace(record.result, contention=found))


def busy(*shares: float) -> list[Record]:
    """The experiments of the story with what others took in each."""
    return [loaded(record, share) for record, share in zip(judged(STORY[: len(shares)]), shares, strict=True)]


@pytest.mark.parametrize(("share", "is_busy"), [(0.0, False), (0.249, False), (0.25, True), (0.8, True), (1.0, True)])
def test_from_a_quarter_on_the_noise_grows_by_the_share_on_the_scale_of_ideas(share: float, is_busy: bool) -> None:
    record = loaded(judged(STORY)[1], share)
    assert BUSY == 0.25
    assert extra_variance(record) == pytest.approx((share * PRIOR_SD) ** 2 if is_busy else 0.0)
    assert (remark(record) is not None) == is_busy


def test_a_run_without_a_load_is_calm() -> None:
    (first,) = judged(STORY[:1])
    assert taken(first) == taken(loaded(first, None)) == 0.0


def test_a_busy_run_moves_the_belief_less() -> None:
    first, calm = judged([0.50, 0.40])
    before = Campaign().step(first)
    moved = []
    for share in (0.0, 0.2, 0.3, 0.9):
        tested = before.test(loaded(calm, share))
        moved.append((float(tested.delta), float(tested.delta_stderr)))
    assert moved[0] == moved[1], "below the bound nothing is different"
    assert moved[0][0] < moved[2][0] < moved[3][0] < 0
    assert moved[0][1] < moved[3][1]
    busy = Campaign().step(loaded(first, 0.9)).standing
    assert busy.incumbent_sd > 1.5 * before.standing.incumbent_sd, "of a baseline too"


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


def test_the_last_busy_experiment_is_named_until_it_was_run_again() -> None:
    records = busy(0.0, 0.5, 0.6, 0.0)
    assert to_repeat(judged(STORY), 2) is None
    assert to_repeat(records, 2) == records[2]
    again = replace(records[2], number=5, decided=5)
    assert to_repeat([*records, again], 2) == records[1], "the one before it is next, and a repetition is not repeated"
    assert to_repeat([*records, again, replace(records[1], number=6, decided=6)], 2) is None


def test_a_repetition_that_met_a_busy_machine_again_is_enough() -> None:
    records = busy(0.0, 0.5)
    again = loaded(replace(records[1], number=3, decided=3, parent=2, status="discard"), 0.9)
    assert to_repeat([*records, again], 2) is None


def test_a_baseline_is_run_again_only_while_all_stands_on_it() -> None:
    records = busy(0.5, 0.0)
    assert to_repeat(records[:1], 1) == records[0]
    assert to_repeat(records, 2) is None
    assert to_repeat(records, 1) == records[0], "the keep was taken back"


def test_what_is_slow_by_itself_is_no_busy_machine() -> None:
    """Steps of a quarter of an hour and fifty processes that wait: all its own."""
    records = judged(STORY)
    slow = {"load_average": 50.0, "step_seconds": 900.0, "stolen_share": 0.0}
    records[3] = loaded(records[3], 0.05, **slow)
    assert to_repeat(records, 2) is None
    assert extra_variance(records[3]) == 0.0
    assert remark(records[3]) is None
    unknown = replace(records[3], result=replace(records[3].result, contention=Contention(2, 50.0, 900.0)))
    assert to_repeat([*records[:3], unknown], 2) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"decided": None, "failure": Failure.INTERRUPTED, "status": "crash"},
        {"decided": None, "failure": Failure.MACHINERY, "status": "crash"},
        {"status": "started", "decided": None},
    ],
)
def test_what_was_not_decided_is_nothing_to_repeat(changes: dict[str, Any]) -> None:
    records = judged(STORY)
    records[3] = replace(loaded(records[3], 0.9), **changes)
    assert to_repeat(records, 2) is None


def test_a_crash_without_an_evaluation_is_nothing_to_repeat() -> None:
    records = judged([*STORY, None])
    run = replace(records[1].result, evaluation=None, contention=Contention(2, others_share=0.9))
    assert to_repeat([*records[:4], replace(records[4], result=run)], 2) is None
