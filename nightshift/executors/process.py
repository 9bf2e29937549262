"""Starts, watches and stops the processes of a run; nothing is ever left behind.

Each child gets a session of its own, the group's marker in its environment, and a log file. While a group is open, a
watchdog process (watchdog.py) ends the tree if this process dies. On macOS, which has no child subreaper, an orphan is
found by memory and marker only.
"""

import atexit
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import IO

import psutil

from nightshift.errors import EngineError, Interrupted
from nightshift.executors import leftovers
from nightshift.executors.watchdog import MARKER_NAME, ProcessTree, Watchdog, become_subreaper, marker_of, session_of
from nightshift.files import open_regular
from nightshift.signals import STOP_SIGNALS
from nightshift.startup import is_own
from nightshift.text import ANSI, clean

CHECKOUT = str(Path(__file__).absolute().parents[2])
TAIL_BYTES = 64 * 1024
TAIL_LINE_LENGTH = 200
_PIPE_BYTES = 65536


class Child(subprocess.Popen[bytes]):
    """A process that a group started: as Popen, with the name and the log that `start` gave it."""

    name: str
    log_path: Path

    def exit_cause(self) -> str:
        """How it ended: `exit code 1`, `killed by SIGKILL`, `still running`."""
        code = self.poll()
        if code is None:
            return "still running"
        if code >= 0:
            return f"exit code {code}"
        return f"killed by {signal.Signals(-code).name if -code in set(signal.Signals) else f'signal {-code}'}"

    def tail(self, num_lines: int, line_length: int = TAIL_LINE_LENGTH, num_bytes: int = TAIL_BYTES) -> list[str]:
        return tail(self.log_path, num_lines, line_length, num_bytes)


def tail(log_path: Path, num_lines: int, line_length: int = TAIL_LINE_LENGTH, num_bytes: int = TAIL_BYTES) -> list[str]:
    """The last lines with text in the last `num_bytes` of a log, cleaned; of a progress bar its last state."""
    try:
        with open_regular(log_path) as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - num_bytes))
            text = log.read(num_bytes).decode(errors="replace")
    except OSError:
        return []
    shown = (ANSI.sub("", line).rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))
    lines = (clean(line, line_length) for line in shown)
    return [line for line in lines if line][-num_lines:]


# What an engine child may inherit; a new variable of the user's shell stays out until it is named here.
# Of the loader's variables only the search path: on many machines libcuda.so is found through nothing else.
ENVIRONMENT_NAMES = """
    PATH HOME USER LOGNAME LANG LANGUAGE TZ TMPDIR TMP TEMP LD_LIBRARY_PATH
    LC_ALL LC_COLLATE LC_CTYPE LC_MESSAGES LC_MONETARY LC_NUMERIC LC_TIME XDG_CACHE_HOME XDG_CONFIG_HOME XDG_DATA_HOME
    CUDA_VISIBLE_DEVICES CUDA_DEVICE_ORDER CUDA_HOME CUDA_PATH CUDA_CACHE_PATH CUDA_CACHE_DISABLE
    NVIDIA_VISIBLE_DEVICES NVIDIA_DRIVER_CAPABILITIES
    HF_HOME HF_HUB_CACHE HF_DATASETS_CACHE HF_ASSETS_CACHE HF_HUB_OFFLINE HF_DATASETS_OFFLINE TRANSFORMERS_OFFLINE
    TORCH_HOME TORCHINDUCTOR_CACHE_DIR TRITON_CACHE_DIR VLLM_CACHE_ROOT
    OMP_NUM_THREADS MKL_NUM_THREADS OPENBLAS_NUM_THREADS
    NIGHTSHIFT_GSM8K NIGHTSHIFT_MATH NIGHTSHIFT_PRIME_RL
"""


def engine_environment(base: Mapping[str, str], extra: Mapping[str, str]) -> dict[str, str]:
    """The named variables of `base`, then `extra`.

    Keys, tokens, proxies and what injects code (PYTHONPATH, LD_PRELOAD, GIT_*) are left out.
    """
    names = frozenset(ENVIRONMENT_NAMES.split())
    return {**{name: value for name, value in base.items() if name in names}, **extra}


def python_command(*words: str) -> list[str]:
    """The command of a Python child of this checkout: `words` are `-m`, a module and its arguments, or a program."""
    return [sys.executable, "-P", *words]


def python_path() -> str:
    """PYTHONPATH of a Python child: the folders of this Python, then this checkout, whose files so hide no library."""
    return os.pathsep.join([*dict.fromkeys(filter(is_own, sys.path)), CHECKOUT])


def python_environment(base: Mapping[str, str], extra: Mapping[str, str]) -> dict[str, str]:
    """`engine_environment` for a Python child: PYTHONPATH holds no foreign folder."""
    return engine_environment(base, {"PYTHONPATH": python_path(), **extra})


@contextmanager
def handling(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Let `handler` take the stop signals in the block. A signal that is ignored (nohup) stays ignored."""
    handled = [number for number in STOP_SIGNALS if signal.getsignal(number) not in (signal.SIG_IGN, None)]
    previous = {number: signal.signal(number, handler) for number in handled}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)


@contextmanager
def interruptible(
    told: str = "",
    is_noted: Callable[[int], bool] = lambda number: False,
) -> Iterator[None]:
    """Raise Interrupted in the main thread on the first SIGINT, SIGTERM or SIGHUP; ignore the next ones.

    `told`: a sentence that the error ends with. `is_noted`: gets a signal's number; True if the caller has handled that
    signal.
    """
    caught: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        if not caught and not is_noted(number):
            caught.append(number)
            raise Interrupted(f"stopped by {signal.Signals(number).name}", told)

    with handling(interrupt):
        yield


@contextmanager
def _signals_deferred() -> Iterator[None]:
    """Let no signal handler raise inside; deliver the first signal afterwards."""
    caught: list[int] = []

    def defer(number: int, frame: FrameType | None) -> None:
        caught.append(number)

    try:
        with handling(defer):
            yield
    finally:
        if caught:
            signal.raise_signal(caught[0])


class ProcessGroup:
    """The processes of one part of a run that are stopped together. Main thread only.

    A child in another session than this process's belongs to a run: start nothing else with `start_new_session`.
    """

    def __init__(
        self,
        marker: str,
        grace_seconds: float,
        orphan_grace_seconds: float | None = None,
        *,
        is_subreaper: bool = False,
    ) -> None:
        """`marker`: a unique word without spaces, which stands in the children's environment as NIGHTSHIFT_RUN.
        `orphan_grace_seconds`: the grace that the watchdog gives when the harness is dead; None: the same.
        `is_subreaper`: the child takes the orphans below it, so that none of them comes to the harness."""
        self.marker = marker
        self.grace_seconds = grace_seconds
        self.orphan_grace_seconds = grace_seconds if orphan_grace_seconds is None else orphan_grace_seconds
        self.is_subreaper = is_subreaper
        self.children: list[Child] = []
        become_subreaper()
        harness = psutil.Process()
        self._tree = ProcessTree(harness, lambda process: _owner(process) is self, self._reap)
        self._tree.markers.add(marker)
        self._foreign = frozenset(harness.children())

    def start(
        self,
        name: str,
        argv: Sequence[str | Path],
        *,
        log_path: Path,
        env: Mapping[str, str],
        cwd: Path,
        stdin: int | IO[bytes] | None = None,
        stdout: int | IO[bytes] | None = None,
    ) -> Child:
        """Start a child in its own session; stderr, and stdout unless given, go to `log_path`. Raises EngineError."""
        with _signals_deferred():
            _open_groups.add(self)
            try:
                _keep_watchdog()
                with open_regular(log_path, "ab") as log:
                    child = Child(
                        [os.fspath(word) for word in argv],
                        stdin=subprocess.DEVNULL if stdin is None else stdin,
                        stdout=log if stdout is None else stdout,
                        stderr=log,
                        env={**env, MARKER_NAME: self.marker, **leftovers.mark()},
                        cwd=cwd,
                        start_new_session=True,
                    )
            except OSError as error:
                cause = f"{name} cannot be started: {error.strerror}: {error.filename!r}"
                raise EngineError(cause, "Run prepare.py, which names what is missing.") from error
            child.name, child.log_path = name, log_path
            self.children.append(child)
            return child

    def check(self) -> list[Child]:
        """The children that have ended by themselves. Call about once a second: it also remembers processes."""
        self._tree.sample()
        return [child for child in self.children if child.poll() is not None]

    def kill_below(self, child: Child) -> None:
        """SIGKILL to all that a child has started, so that it has nobody to wait for when it is asked to end."""
        with suppress(psutil.NoSuchProcess):
            for process in psutil.Process(child.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    process.kill()

    def stop(self) -> list[str]:
        """End every process of the group (see ProcessTree.end); returns what could not be killed, normally nothing.

        Safe to call twice. A signal that arrives meanwhile is delivered afterwards.
        """
        with _signals_deferred():
            _open_groups.add(self)  # if it has started nothing: what began meanwhile is its own all the same
            left = self._tree.end(self.grace_seconds)
            for child in self.children:
                child.poll()
                for pipe in filter(None, (child.stdin, child.stdout)):
                    with suppress(BrokenPipeError):  # unsent input to a process that is dead by intent
                        pipe.close()
            _open_groups.discard(self)
            _reap_orphans()
            if not _open_groups:
                _dismiss_watchdog()
            return left

    def _reap(self, process: psutil.Process) -> None:
        """Collect a zombie: a child's exit code belongs to its Popen, an orphan's to nobody else."""
        for child in self.children:
            if child.pid == process.pid and child.returncode is None:
                child.poll()
                return
        if process.is_running():  # a zombie still; its pid is not somebody else's by now
            with suppress(ChildProcessError):  # another process's child: that one reaps it
                os.waitpid(process.pid, os.WNOHANG)


_open_groups: set[ProcessGroup] = set()  # those that have started something and are not stopped
_watchdog: Watchdog | None = None


class Pipes:
    """Lines to the stdin of a child and from its stdout, each with a deadline on the clock of time.monotonic.

    TimeoutError after the deadline. BrokenPipeError once the child has closed a pipe.
    """

    def __init__(self, group: ProcessGroup, child: Child) -> None:
        assert child.stdin is not None
        assert child.stdout is not None
        self._group, self._stdin, self._stdout = group, child.stdin.fileno(), child.stdout.fileno()
        os.set_blocking(self._stdin, False)
        self._buffer = b""

    def send(self, line: bytes, deadline: float) -> None:
        """Write a line of any length. What the child writes meanwhile is read: neither waits for the other."""
        unsent = memoryview(line + b"\n")
        while unsent:
            if self._wait(deadline, [self._stdin]):
                unsent = unsent[os.write(self._stdin, unsent[:_PIPE_BYTES]) :]

    def receive(self, deadline: float) -> bytes:
        """Return the next line, without its end."""
        while b"\n" not in self._buffer:
            self._wait(deadline, [])
        line, self._buffer = self._buffer.split(b"\n", 1)
        return line

    def _wait(self, deadline: float, to_write: list[int]) -> bool:
        """Wait up to a second, and read what there is. Return whether the child can be written to."""
        seconds = deadline - time.monotonic()
        if seconds <= 0:
            raise TimeoutError
        readable, writable, _ = select.select([self._stdout], to_write, [], min(seconds, 1.0))
        if readable:
            data = os.read(self._stdout, _PIPE_BYTES)
            if not data:
                raise BrokenPipeError
            self._buffer += data
        elif not writable:
            self._group.check()
        return bool(writable)


def _owner(process: psutil.Process) -> ProcessGroup | None:
    """The open group to which a direct child of the harness belongs: started by it, or its orphan."""
    session = session_of(process)
    if session in (None, os.getsid(0)) or (_watchdog is not None and process.pid == _watchdog.pid):
        return None
    for group in _open_groups:
        if process in group._tree.seen or any(session == child.pid for child in group.children):
            return group
    marker = marker_of(process)
    for group in _open_groups:
        if marker == group.marker:
            return group
    groups = [group for group in _open_groups if not group.is_subreaper]
    if len(groups) == 1 and process not in groups[0]._foreign:
        return groups[0]  # an orphan that was never seen before, cleared its environment and made its own session
    return None


def _reap_orphans() -> None:
    """Collect what came to this process as its orphan and has ended, such as the watchdogs of its workers."""
    own = {child.pid for group in _open_groups for child in group.children} | {_watchdog.pid if _watchdog else 0}
    for process in psutil.Process().children():
        with suppress(psutil.NoSuchProcess, ChildProcessError):
            is_orphan = process.pid not in own and session_of(process) != os.getsid(0)
            if is_orphan and process.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(process.pid, os.WNOHANG)


def _keep_watchdog() -> None:
    """See to it that a living watchdog knows the markers of all open groups."""
    global _watchdog
    if _watchdog is None or not _watchdog.is_alive():  # the first, or somebody killed it
        _dismiss_watchdog()
        atexit.unregister(_stop_open_groups)
        atexit.register(_stop_open_groups, os.getpid())
        _watchdog = Watchdog(engine_environment(os.environ, {}))
    for group in _open_groups:
        _watchdog.watch(group.marker, group.orphan_grace_seconds)


def _dismiss_watchdog() -> None:
    global _watchdog
    if _watchdog is not None:
        _watchdog.dismiss()
        _watchdog = None


def _stop_open_groups(harness_pid: int) -> None:
    """The last resort when an exception got past the caller's own stop()."""
    if os.getpid() == harness_pid:  # not in a forked copy of the harness
        for group in [*_open_groups]:
            group.stop()
