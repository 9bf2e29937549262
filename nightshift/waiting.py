"""What this process is waiting for. The code that waits reports it here, and cli/progress.py shows it."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from nightshift.text import clean

waits: list[Callable[[], str]] = []  # descriptions with progress, the innermost wait last
watchers: list[Callable[[], None]] = []  # called by `look`
markers: list[Callable[[str, str, bool], None]] = []  # called by `mark`


@contextmanager
def waiting(what: str | Callable[[], str], at_most: float | None = None) -> Iterator[None]:
    """Report a wait inside the context: a text, or a function of the current text. `at_most`: limit in seconds."""
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
    """Update the shown progress. Long waits call this now and then."""
    for watcher in watchers:
        watcher()


def mark(row: str, figure: str = "", is_shown: bool = True) -> None:
    """Report that a row of proof.json starts, or with a `figure` that it is done. `is_shown`: the figure proves it."""
    for marker in markers:
        marker(row, figure, is_shown)


def lasted(seconds: float) -> str:
    """Return `34 s`, `12 min 5 s` or `1 h 3 min`."""
    minutes, rest = divmod(max(int(seconds), 0), 60)
    if minutes < 20:
        return f"{60 * minutes + rest} s"
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
