"""Who sent a signal, and the signal mask that children inherit.

Python's signal handlers do not get the sender. `watching` blocks the stop signals in the main thread, so that a thread
receives them by sigwaitinfo, which has the sender. That thread notes the sender and passes the signal on to the main
thread, where the handler runs as always.
"""

import _thread
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from nightshift.text import clean

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_WAKE_SECONDS = 0.02  # between two tries to wake the main thread
_MAX_NAME = 64  # characters of a process's name
_origins: dict[int, str] = {}  # by signal: who sent the last one that the main thread has not handled
_is_watching = False


def origin_of(number: int) -> str:
    """Name the signal that is handled now, and its sender where that is known.

    Returns: `Ctrl-C`, `SIGTERM from process 4711 (timeout)`, or `SIGINT` where nothing is known of the sender.
    """
    return _origins.pop(number, signal.Signals(number).name)


@contextmanager
def watching(numbers: Collection[int]) -> Iterator[None]:
    """Find out who sends these signals meanwhile. Main thread only; the handlers stay as they are.

    Does nothing where another thread of this process does not block the signals: the kernel might choose that thread,
    and the main thread would not wake up.
    """
    global _is_watching
    if _is_watching or sys.platform != "linux" or not _are_blocked_elsewhere(numbers):
        yield
        return
    wake = signal.SIGRTMIN + 7  # interrupts what the main thread waits in
    main, num_woken = threading.get_ident(), 0
    _origins.clear()

    def note(number: int, frame: object) -> None:
        nonlocal num_woken
        num_woken += 1

    def receive() -> None:
        while (info := signal.sigwaitinfo({*numbers, wake})).si_signo != wake:
            before = num_woken
            _origins[info.si_signo] = _origin(info)
            _thread.interrupt_main(signal.Signals(info.si_signo))
            signal.pthread_kill(main, wake)
            while num_woken == before:  # it may have begun to wait only now
                time.sleep(_WAKE_SECONDS)
                signal.pthread_kill(main, wake)

    signal.signal(wake, note)
    thread = threading.Thread(target=receive, name="signals", daemon=True)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*numbers, wake})  # the thread inherits it
    thread.start()
    _is_watching = True
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {wake})
    try:
        yield
    finally:
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        finally:  # a handler may raise in each of these steps
            _is_watching = False
            signal.pthread_kill(thread.ident or 0, wake)
            thread.join()


@contextmanager
def unblocked() -> Iterator[None]:
    """Start a child process inside: a child inherits the signal mask, and would not receive what is blocked."""
    before = signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def blocked() -> Iterator[None]:
    """Start a thread inside: it inherits the signal mask, and receives no stop signal."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _are_blocked_elsewhere(numbers: Collection[int]) -> bool:
    """Whether all threads of this process but the main thread block these signals."""
    wanted = sum(1 << (number - 1) for number in numbers)
    for folder in Path("/proc/self/task").iterdir():
        if folder.name != str(os.getpid()):
            try:
                found = re.search(r"^SigBlk:\s*(\w+)", (folder / "status").read_text(), re.MULTILINE)
            except OSError:  # the thread has ended
                continue
            if found is None or int(found[1], 16) & wanted != wanted:
                return False
    return True


def _origin(info: signal.struct_siginfo) -> str:
    name = signal.Signals(info.si_signo).name
    if info.si_code > 0:  # the kernel itself: from a terminal's key or its end
        return "Ctrl-C" if info.si_signo == signal.SIGINT else name
    if info.si_pid == os.getpid():
        return name
    if info.si_pid == 0:  # in another PID namespace
        return f"{name} from another process"
    try:
        program = f" ({clean(psutil.Process(info.si_pid).name(), _MAX_NAME)})"
    except psutil.Error:  # it has ended
        program = ""
    return f"{name} from process {info.si_pid}{program}"
