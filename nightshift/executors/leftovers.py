"""Processes that an earlier controller of this checkout left running, because its watchdog was killed with it.

They carry a digest of the checkout's path in their environment. Those below an agent, which may clear their
environment, stand in a file with the time of their start.

The file lies where agents can write. So a process is spared if it began at another time, is another user's, sits at a
terminal, works for another checkout, or is this process or an ancestor of it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import psutil

from nightshift.errors import NightshiftError, UsageError
from nightshift.executors.watchdog import MARKER_NAME, ProcessTree, describe, environment_of, is_alive
from nightshift.files import read_json, write_json
from nightshift.waiting import waiting

CHECKOUT_NAME = "NIGHTSHIFT_CHECKOUT"
SEEN_NAME = "runs/agent/processes.json"
GRACE_SECONDS = 5.0
SAME_SECONDS = 2.0  # the clock on the wall, by which psutil tells when a process began, is set now and then
_MAX_BYTES = 100_000  # of that file: thousands of processes, each of which takes time to look at
_Rows = list[tuple[int, float]]  # process id, and when it began, as psutil tells

_checkout = ""  # a digest of its path, of the head, which sets both
_seen_path: Path | None = None
_rows: _Rows = []  # what stands there


def mark() -> dict[str, str]:
    """The variable that a child gets; a worker passes on what its controller gave it."""
    checkout = _checkout or os.environ.get(CHECKOUT_NAME)
    return {CHECKOUT_NAME: checkout} if checkout else {}


def digest_of(root: Path) -> str:
    """What stands for a checkout where agents can read it: its path is none of their business."""
    return hashlib.sha256(os.fsencode(root.resolve())).hexdigest()[:16]


def remember(processes: Iterable[psutil.Process]) -> None:
    """Note what lives below the head now, for the head after it. Does nothing in other processes."""
    global _rows
    rows = []
    for process in processes if _seen_path else ():
        with suppress(psutil.Error):  # gone meanwhile
            rows.append((process.pid, process.create_time()))
    if _seen_path is None or sorted(rows) == sorted(_rows):
        return
    with suppress(OSError, NightshiftError):  # a full disk, or what somebody put in its place: the marks are left
        _seen_path.parent.mkdir(exist_ok=True)
        write_json(_seen_path, rows)
        _rows = rows


def end_leftovers(root: Path, note: Callable[[str], None]) -> None:
    """End what earlier controllers of the checkout at `root` left running, and say so. Call as the controller."""
    global _checkout, _seen_path
    _checkout, _seen_path = digest_of(root), root / SEEN_NAME
    marked = {p for p in psutil.process_iter() if environment_of(p).get(CHECKOUT_NAME) == _checkout}
    found = (marked | _noted(_seen_path)) - {psutil.Process(), *psutil.Process().parents()}
    if not found:
        return
    tree = ProcessTree(None, lambda process: False)
    tree.seen |= found
    tree.markers |= {environment_of(process).get(MARKER_NAME, _checkout) for process in marked & found}
    names = ", ".join(sorted(map(describe, found)))
    with waiting(f"ending what an earlier start left running: {names}", GRACE_SECONDS):
        left = tree.end(GRACE_SECONDS)
    ended = f"processes of an earlier start in this checkout still ran and were ended: {names}"
    note(f"{ended}; not to be ended: {', '.join(left)}" if left else ended)


def _noted(path: Path) -> set[psutil.Process]:
    processes, rows = set[psutil.Process](), _Rows()
    with suppress(UsageError):
        rows = read_json(path, _Rows, "", _MAX_BYTES) or rows
    for pid, began in rows:
        with suppress(psutil.Error, OverflowError, ValueError):
            process = psutil.Process(pid)
            is_same = is_alive(process) and abs(process.create_time() - began) < SAME_SECONDS
            is_own = process.uids().real == os.getuid() and process.terminal() is None
            if is_same and is_own and environment_of(process).get(CHECKOUT_NAME, _checkout) == _checkout:
                processes.add(process)
    return processes
