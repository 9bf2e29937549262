"""What this process waits for, said by the code that waits; cli/progress.py shows it.

A process does one thing at a time, so nobody has to hand a terminal down to a lock, a download or an agent. Where
nothing shows it, as in a worker, saying it costs nothing.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from nightshift.text import clean

waits: list[Callable[[], str]] = []  # what is waited for and how far it is, the innermost last
watchers: list[Callable[[], None]] = []  # called by `look`
markers: list[Callable[[str, str, bool], None]] = []  # called by `mark`


@contextmanager
def waiting(what: str | Callable[[], str], at_most: float | None = None) -> Iterator[None]:
    """Say what is waited for inside: in words, or by what has them anew each time. `at_most`: seconds, if any."""
    began, most = time.monotonic(), "" if at_most is None else f" of at most {lasted(at_most)}"

    def describe() -> str:
        return f"{clean(what() if callable(what) else what)}, {lasted(time.monotonic() - began)}{most}"

    waits.append(describe)
    try:
        look()
        yield
    finally:
        waits.remove(describe)


def look() -> None:
    """Show again how far it is. Call it now and then where a wait is long."""
    for watcher in watchers:
        watcher()


def mark(row: str, figure: str = "", is_shown: bool = True) -> None:
    """Say that a row of proof.json begins (experiment/prove.py), or with a figure that it ends. `is_shown`: whether the
    figure shows what the row is about."""
    for marker in markers:
        marker(row, figure, is_shown)


def lasted(seconds: float) -> str:
    """`34 s`, `12 min 5 s`, `1 h 3 min`."""
    minutes, rest = divmod(max(int(seconds), 0), 60)
    if minutes < 20:
        return f"{60 * minutes + rest} s"
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
