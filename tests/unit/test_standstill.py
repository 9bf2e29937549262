"""A run that stands still, by the CPU time of its processes and by NVML: the clock and NVML are stand-ins."""

import os

import pytest

from nightshift.engines.standstill import Standstill
from nightshift.errors import EngineError, Failure
from tests.stand_in_nvml import Card, StandInNvml
from tests.waiting import Clock


def looks(watch: Standstill, clock: Clock, num: int, step: float = 5.0, progress: int = 0) -> str:
    note = ""
    for _ in range(num):
        clock.now += step
        note = watch.look(progress)
    return note


def test_a_run_that_does_nothing_is_shown_and_then_ended(clock: Clock) -> None:
    watch = Standstill(list, (0,), StandInNvml([Card(busy=0)]), 120.0, clock)
    looks(watch, clock, 1, progress=1)
    assert looks(watch, clock, 1, progress=1) == ""
    assert looks(watch, clock, 1, progress=1) == "standing still for 10 s"
    assert looks(watch, clock, 20, progress=1) == "standing still for 110 s"
    words = "the run stood still: no step, no CPU time and no GPU time for 120 s"
    with pytest.raises(EngineError, match=words) as error:
        looks(watch, clock, 2, progress=1)
    assert error.value.failure is Failure.INFRASTRUCTURE


@pytest.mark.parametrize("busy", [1, None])
def test_a_card_that_works_or_cannot_be_read_is_no_standstill(clock: Clock, busy: int | None) -> None:
    assert looks(Standstill(list, (0, 0), StandInNvml([Card(busy=busy)]), 120.0, clock), clock, 100) == ""


def test_a_step_begins_the_count_again_and_a_pause_of_this_process_does_not_count(clock: Clock) -> None:
    watch = Standstill(list, (), None, 120.0, clock)
    for progress in range(5):
        looks(watch, clock, 20, progress=progress)
    assert looks(watch, clock, 1, step=100_000.0, progress=4) == "standing still for 100 s"


def test_one_process_that_computes_is_enough(clock: Clock) -> None:
    watch = Standstill(lambda: [os.getpid()], (), None, 0.5, clock)
    for _ in range(5):
        before = os.times().user
        while os.times().user - before < 0.05:  # a tenth of the limit
            pass
        looks(watch, clock, 1, step=1.0)
