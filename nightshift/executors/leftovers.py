"""Processes that an earlier controller of this checkout left running, because its watchdog was killed with it.

What a controller starts has a digest of the checkout's path in its environment, and so has what that starts. A process
that cleared its environment is not found.
"""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import psutil

from nightshift.executors.watchdog import MARKER_NAME, ProcessTree, describe, environment_of
from nightshift.waiting import waiting

CHECKOUT_NAME = "NIGHTSHIFT_CHECKOUT"
GRACE_SECONDS = 5.0

_checkout = ""  # the digest of the checkout whose controller this process is


def mark() -> dict[str, str]:
    """The variable that a child gets; a worker passes on what its controller gave it."""
    checkout = _checkout or os.environ.get(CHECKOUT_NAME)
    return {CHECKOUT_NAME: checkout} if checkout else {}


def digest_of(root: Path) -> str:
    """What stands for a checkout where agents can read it: its path is none of their business."""
    return hashlib.sha256(os.fsencode(root.resolve())).hexdigest()[:16]


def end_leftovers(root: Path, note: Callable[[str], None]) -> None:
    """End what earlier controllers of the checkout at `root` left running, and say so. Call as the controller."""
    global _checkout
    _checkout = digest_of(root)
    marked = {p for p in psutil.process_iter() if environment_of(p).get(CHECKOUT_NAME) == _checkout}
    found = marked - {psutil.Process(), *psutil.Process().parents()}
    if not found:
        return
    tree = ProcessTree(None, lambda process: False)
    tree.seen |= found
    tree.markers |= {environment_of(process).get(MARKER_NAME, _checkout) for process in found}
    names = ", ".join(sorted(map(describe, found)))
    with waiting(f"ending what an earlier start left running: {names}", GRACE_SECONDS):
        left = tree.end(GRACE_SECONDS)
    ended = f"processes of an earlier start in this checkout still ran and were ended: {names}"
    note(f"{ended}; not to be ended: {', '.join(left)}" if left else ended)
