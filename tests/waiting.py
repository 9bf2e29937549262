"""Nothing here depends on how busy the machine is: waiting for an event, and measuring work in CPU time."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

HANG_SECONDS = 60.0  # what has not come by then never comes; a limit, not a duration that a test is about
POLL_SECONDS = 0.02


def wait_for(condition: Callable[[], T], what: str = "what the test waits for") -> T:
    """Poll until the condition is true and return its value; AssertionError if it hangs.

    The limit counts looks, not seconds: none passes while this process itself is stopped or starved.
    """
    for _ in range(round(HANG_SECONDS / POLL_SECONDS)):
        if value := condition():
            return value
        time.sleep(POLL_SECONDS)
    raise AssertionError(f"{what} did not come within {HANG_SECONDS:g} s")


class Clock:
    """A stand-in for the monotonic clock: stands still until a test moves it, or moves by `step` at every look."""

    now, step = 0.0, 0.0

    def __call__(self) -> float:
        self.now += self.step
        return self.now


def assert_linear(work: Callable[[int], object], size: int, min_tries: int = 3) -> None:
    """Four times the size may cost up to eight times the CPU time: linear costs four times, quadratic sixteen.

    CPU time of this process, the least of several tries: others on the machine disturb both sizes and no try for good.
    """
    least = {size: float("inf"), 4 * size: float("inf")}
    for num_tries in range(1, 11):
        for each in least:
            began = time.process_time()
            work(each)
            least[each] = min(least[each], time.process_time() - began)
        if num_tries >= min_tries and least[4 * size] < 8 * least[size]:
            return
    raise AssertionError(f"{least[size]:.4f} s of CPU time for {size}, {least[4 * size]:.4f} s for four times as much")
