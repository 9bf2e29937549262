"""What the page draws of runs side by side."""

from datetime import UTC, datetime, timedelta

import pytest

from nightshift.campaign.records import Contention, Record, Result
from nightshift.report.timing import LANE_HEIGHT, LEFT, WIDTH, Use, nights, num_at_once, split_experiment, timeline
from tests.campaigns import a_result, judged, replace

NIGHT = datetime(2026, 11, 21, 22, tzinfo=UTC)


def run(began_seconds: float, seconds: float, place: str) -> Result:
    load = Contention(2, others_share=0.0, stolen_share=0.0)
    began = (NIGHT + timedelta(seconds=began_seconds)).isoformat()
    return replace(a_result(0.5), started=began, total_seconds=seconds, slot=place, contention=load)


@pytest.fixture
def record() -> Record:
    return judged([0.5])[0]


def records_of(record: Record, *results: Result) -> list[Record]:
    return [replace(record, number=number, result=result) for number, result in enumerate(results, 1)]


def test_a_lane_is_a_slot_and_a_bar_a_run(record: Record) -> None:
    runs = (run(0, 60, "slot 1"), run(0, 40, "slot 2"), run(60, 40, "slot 1"))
    found = timeline(records_of(record, *runs))
    assert [(lane.place, lane.y, len(lane.bars), lane.used) for lane in found.lanes] == [
        ("slot 1", 0.0, 2, 1.0),
        ("slot 2", LANE_HEIGHT, 1, 0.4),
    ]
    first, second = found.lanes[0].bars
    assert (first.x, first.width) == (LEFT, pytest.approx(0.6 * (WIDTH - LEFT)))
    assert second.x == pytest.approx(first.x + first.width)


def test_runs_that_a_campaign_began_with_took_no_time_of_it(record: Record) -> None:
    adopted = replace(
        record, result=run(-200_000, 60, "slot 1"), baseline=7, started=NIGHT.isoformat(), total_seconds=0.5
    )
    uses = split_experiment(adopted, [])
    assert uses == {Use.OTHER: 0.5}
    [night] = nights([(adopted, uses)])
    assert sum(night.seconds.values()) == night.length_seconds == 0.5
    assert num_at_once([adopted]) == 0
    found = timeline([adopted, replace(record, number=2, result=run(1, 60, "slot 1"))])
    assert [(bar.number, bar.x) for lane in found.lanes for bar in lane.bars] == [(2, LEFT)]
