"""Ends a process tree, also when the controller or worker that started it (the harness) was killed.

As a script (`python -I watchdog.py HARNESS_PID`) this file is the watchdog, in a session of its own. The harness holds
the pipe to its stdin, and writes `MARKER GRACE_SECONDS` for each group that it opens. When the pipe closes, the
watchdog ends what is left. It imports only psutil and little of the standard library, so that it starts quickly.
"""

import os
import select
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress

import psutil

MARKER_NAME = "NIGHTSHIFT_RUN"
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # that stop a command
WATCH_SECONDS = 1.0  # how often the watchdog looks at the tree
KILL_SECONDS = 10.0  # a process that holds a large CUDA context may need seconds to die of SIGKILL
FIRST_PAUSE_SECONDS = 0.01  # between two looks at a tree that is ending; doubles up to:
LAST_PAUSE_SECONDS = 0.2
NUM_QUIET_SWEEPS = 2  # one look at /proc can miss a process that forks while it is read


def is_alive(process: psutil.Process) -> bool:
    """True if this very process (pid and create time) still runs. A zombie does not, unless other threads run on."""
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and (process.status() != psutil.STATUS_ZOMBIE or process.num_threads() > 1)
    return False


class ProcessTree:
    """The processes below one harness, found by descent, by memory and by marker; by the sessions of the harness's
    children in place of the marker where the system shows no environment (macOS shows few).

    Each alone loses some: descent loses orphans, memory what was never seen, the marker programs that clear their
    environment, a session what makes its own (torchrun and verifiers do). psutil compares the create time before each
    signal, so a recycled pid is never touched.
    """

    def __init__(
        self,
        harness: psutil.Process | None,
        claims: Callable[[psutil.Process], bool],
        reap: Callable[[psutil.Process], None] = lambda process: None,
    ) -> None:
        """`claims` tells which direct children of the harness, None if that is dead already, belong here; their
        descendants do with them. `reap` is called for each process of the tree that has ended."""
        self.harness, self.claims, self.reap = harness, claims, reap
        self.markers: set[str] = set()  # also of processes whose marker begins with one of these
        self.sessions: set[int | None] = set()
        self._shows_markers = bool(environment_of(psutil.Process()))
        self.seen: set[psutil.Process] = set()

    def sample(self) -> None:
        """Remember the living processes of the tree, each one until it is gone; reap those that have ended."""
        for process in self._look()[1]:
            self.reap(process)

    def end(self, grace_seconds: float) -> list[str]:
        """SIGTERM to the whole tree, SIGKILL to what is left after `grace_seconds`, until nothing is found twice.

        Returns a description of each process that outlived KILL_SECONDS of SIGKILL, normally none.
        """
        spared = {psutil.Process(), *psutil.Process().parents()}
        asked: set[psutil.Process] = set()
        found: set[psutil.Process] = set()
        kill_at = time.monotonic() + grace_seconds
        pause, num_quiet = FIRST_PAUSE_SECONDS, 0
        while True:
            self.seen |= {process for process in psutil.process_iter() if self._is_marked(process)}
            found |= self.seen
            alive, ended = self._look()
            left = alive - spared
            # A chain that forks faster than /proc can be read shows only by the zombies it leaves.
            num_quiet = 0 if left or ended - found else num_quiet + 1
            found |= ended
            if time.monotonic() >= kill_at:
                for process in left | ended:
                    _kill(process)
            else:
                for process in left - asked:  # once: a second SIGTERM makes many programs drop their clean-up
                    _terminate(process)
                asked |= left
            for process in ended:
                self.reap(process)
            if num_quiet == NUM_QUIET_SWEEPS or time.monotonic() > kill_at + KILL_SECONDS:
                return sorted(describe(process) for process in left)
            time.sleep(pause)
            pause = min(2 * pause, LAST_PAUSE_SECONDS)

    def _is_marked(self, process: psutil.Process) -> bool:
        if not self._shows_markers:
            return session_of(process) in self.sessions
        return environment_of(process).get(MARKER_NAME, "").startswith((*self.markers,))

    def _look(self) -> tuple[set[psutil.Process], set[psutil.Process]]:
        """The living processes of the tree, and those that have ended since the last look (zombies, or gone)."""
        known = self.seen | self._descendants()
        self.seen = {process for process in known if is_alive(process)}
        return self.seen, known - self.seen

    def _descendants(self) -> set[psutil.Process]:
        if self.harness is None or not is_alive(self.harness):
            # Its orphans have gone to init: only what is remembered leads on.
            return {child for process in self.seen for child in children_of(process)}
        below: dict[int, psutil.Process] = {}
        for process in children_of(self.harness):  # in one look at /proc; parents come before their children
            with suppress(psutil.NoSuchProcess):
                parent = process.ppid()
                if parent == self.harness.pid and self.claims(process):
                    below[process.pid] = process
                    self.sessions.add(session_of(process))
                elif parent in below:
                    below[process.pid] = process
        return {*below.values()}


def environment_of(process: psutil.Process) -> dict[str, str]:
    """What a process was started with; empty if it does not tell, and for root's and others' unless this is root."""
    with suppress(psutil.Error):  # it ended meanwhile, or may not be read
        return process.environ() if os.getuid() in (0, process.uids().real) else {}
    return {}


def session_of(process: psutil.Process) -> int | None:
    """The session id of a process, None if it is gone."""
    with suppress(ProcessLookupError):
        return os.getsid(process.pid)
    return None


def children_of(process: psutil.Process) -> list[psutil.Process]:
    """All that descend from it; none if it is gone."""
    with suppress(psutil.NoSuchProcess):
        return process.children(recursive=True)
    return []


def _terminate(process: psutil.Process) -> None:
    with suppress(psutil.Error):  # gone meanwhile; what may not be signalled is still there at the end, and reported
        process.terminate()
        if process.status() == psutil.STATUS_STOPPED:  # the signal waits until it runs again
            process.resume()


def _kill(process: psutil.Process) -> None:
    """SIGKILL, to its whole process group first: only that stops a program which forks faster than we look. Also to a
    zombie: until it is reaped, its pid and its group are nobody else's."""
    with suppress(psutil.Error, ProcessLookupError, PermissionError):  # as in _terminate
        group = os.getpgid(process.pid)
        if process.is_running() and group != os.getpgrp():
            os.killpg(group, signal.SIGKILL)
        process.kill()


def describe(process: psutil.Process) -> str:
    try:
        return f"pid {process.pid} {process.name()!r} ({process.status()})"
    except psutil.Error:
        return f"pid {process.pid}"


def _watch(harness_pid: int) -> None:
    parent = psutil.Process().parent()
    harness = parent if parent is not None and parent.pid == harness_pid else None  # it is dead already
    sessions_spared = {None, os.getsid(0), session_of(harness) if harness else None}
    grace_seconds, received = 0.0, b""
    tree = ProcessTree(harness, lambda child: session_of(child) not in sessions_spared)
    while True:
        if select.select([0], [], [], WATCH_SECONDS)[0]:
            data = os.read(0, 65536)
            if not data:
                break
            *lines, received = (received + data).split(b"\n")
            for line in lines:
                marker, grace = line.decode().split(" ")
                tree.markers.add(marker)
                grace_seconds = max(grace_seconds, float(grace))
        elif os.getppid() != harness_pid:  # dead, although a forked copy of it still holds the pipe open
            break
        tree.sample()
    tree.end(grace_seconds)


def main() -> None:
    """Run as the watchdog of the process whose pid is the first argument."""
    for number in STOP_SIGNALS:  # who stops the harness must not take its watchdog away: it ends with the harness
        signal.signal(number, signal.SIG_IGN)
    _watch(int(sys.argv[1]))


if __name__ == "__main__":
    main()
