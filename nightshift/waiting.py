"""What this process waits for, said by the code that waits; cli/progress.py shows it while it lasts.

A process does one thing at a time, so there is one list of what it waits for, the innermost last, and nobody has to
hand a terminal down to a lock, a download or an agent. Where nothing shows it, as in a worker, saying it costs nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import SimpleQueue

from nightshift.text import clean

_now: list[Wait] = []
# Lines that cannot be printed where they are said: in a signal handler, which may have cut into a print. To put into
# this queue is safe there (its `put` is reentrant). None wakes the reader.
news: SimpleQueue[str | None] = SimpleQueue()


@dataclass(frozen=True, slots=True, eq=False)
class Wait:
    """One thing that is waited for: `what` says it, and how far it is. `at_most` seconds; None: nothing ends it."""

    what: Callable[[], str]
    at_most: float | None = None
    began: float = field(default_factory=time.monotonic)

    def __str__(self) -> str:
        most = "" if self.at_most is None else f" of at most {lasted(self.at_most)}"
        return f"{clean(self.what())}, {lasted(time.monotonic() - self.began)}{most}"


@contextmanager
def waiting(what: str | Callable[[], str], at_most: float | None = None) -> Iterator[None]:
    """Say what is waited for inside: in words, or by what has them anew each time."""
    wait = Wait(what if callable(what) else lambda: what, at_most)
    _now.append(wait)
    try:
        yield
    finally:
        _now.remove(wait)


def innermost() -> Wait | None:
    return next(iter(_now[-1:]), None)


def lasted(seconds: float) -> str:
    """`34 s`, `12 min 5 s`, `1 h 3 min`."""
    minutes, rest = divmod(max(int(seconds), 0), 60)
    if minutes < 20:
        return f"{60 * minutes + rest} s"
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
