"""Start, watch and stop the processes of a run, and leave no process behind.

Each child runs in a new session, with the group's marker in its environment and a log file. While a group is open, a
watchdog process (this module as a program) ends the children if this process dies. Orphans are identified by their
marker, or by their session if a process has no marker or its environment cannot be read.
"""

import ctypes
import hashlib
import os
import re
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import IO

import psutil

from nightshift.errors import EngineError, Interrupted
from nightshift.files import open_regular
from nightshift.startup import is_own
from nightshift.text import clean

CHECKOUT = str(Path(__file__).absolute().parents[2])
MARKER_NAME = "NIGHTSHIFT_RUN"
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
TAIL_BYTES = 64 * 1024
TAIL_LINE_LENGTH = 200
OUT_OF_MEMORY = "for lack of memory"  # part of the exit cause of a process that the kernel's OOM killer ended
WATCHDOG = ("-m", "nightshift.executors.process")
WATCH_SECONDS = 1.0  # interval at which the watchdog samples the tree
KILL_SECONDS = 10.0  # a process with a large CUDA context may need seconds to die of SIGKILL
_PAUSE_SECONDS = 0.03  # between two scans of a tree that is ending
NUM_QUIET_SWEEPS = 2  # one scan of /proc can miss a process that forks during the scan
_PIPE_BYTES = 65536
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


class Child(subprocess.Popen[bytes]):
    """A process that a group started: a Popen with a name and a log file."""

    name: str
    log_path: Path
    num_oom_kills: int  # when the process started

    def __del__(self) -> None:
        if getattr(self, "_child_created", False):  # Popen sets it once the child runs
            self.poll()  # it may have ended since the last look
        super().__del__()

    def exit_cause(self) -> str:
        """Return `exit code 1`, `killed by SIGKILL`, `killed by SIGKILL for lack of memory` or `still running`."""
        code = self.poll()
        if code is None:
            return "still running"
        if code >= 0:
            return f"exit code {code}"
        is_out_of_memory = -code == signal.SIGKILL and num_oom_kills() > self.num_oom_kills
        name = signal.Signals(-code).name if -code in [*signal.Signals] else f"signal {-code}"  # real-time signals
        return f"killed by {name}{f' {OUT_OF_MEMORY} (oom_kill)' if is_out_of_memory else ''}"


def num_oom_kills() -> int:
    """Return the number of the kernel's OOM kills on this machine; 0 if the system does not count them."""
    with suppress(OSError):
        return sum(map(int, re.findall(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(), re.MULTILINE)))
    return 0


def tail(log_path: Path, num_lines: int, line_length: int = TAIL_LINE_LENGTH, num_bytes: int = TAIL_BYTES) -> list[str]:
    """Return the last non-empty lines in the last `num_bytes` of a log, cleaned; [] if the log cannot be read."""
    try:
        with open_regular(log_path) as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - num_bytes))
            text = log.read(num_bytes).decode(errors="replace")
    except OSError:
        return []
    lines = (clean(line.rstrip("\r").rpartition("\r")[2], line_length) for line in text.split("\n"))
    return [line for line in lines if line][-num_lines:]


# The variables that an engine child may inherit from the user's shell. LD_LIBRARY_PATH is the only variable of the
# loader: many machines find libcuda.so through nothing else.
ENVIRONMENT_NAMES = """
    PATH HOME USER LOGNAME LANG LANGUAGE TZ TMPDIR TMP TEMP LD_LIBRARY_PATH
    LC_ALL LC_COLLATE LC_CTYPE LC_MESSAGES LC_MONETARY LC_NUMERIC LC_TIME XDG_CACHE_HOME XDG_CONFIG_HOME XDG_DATA_HOME
    CUDA_VISIBLE_DEVICES CUDA_DEVICE_ORDER CUDA_HOME CUDA_PATH CUDA_CACHE_PATH CUDA_CACHE_DISABLE
    NVIDIA_VISIBLE_DEVICES NVIDIA_DRIVER_CAPABILITIES
    HF_HOME HF_HUB_CACHE HUGGINGFACE_HUB_CACHE HF_DATASETS_CACHE
    HF_ASSETS_CACHE HF_HUB_OFFLINE HF_DATASETS_OFFLINE TRANSFORMERS_OFFLINE
    TORCH_HOME TORCHINDUCTOR_CACHE_DIR TRITON_CACHE_DIR VLLM_CACHE_ROOT
    OMP_NUM_THREADS MKL_NUM_THREADS OPENBLAS_NUM_THREADS
    NIGHTSHIFT_GSM8K NIGHTSHIFT_MATH NIGHTSHIFT_PRIME_RL
"""


def engine_environment(base: Mapping[str, str], extra: Mapping[str, str]) -> dict[str, str]:
    """Return the allowed variables of `base`, overridden by `extra`: no keys, tokens, proxies, and no variable that
    injects code (PYTHONPATH, LD_PRELOAD, GIT_*)."""
    names = ENVIRONMENT_NAMES.split()
    return {**{name: value for name, value in base.items() if name in names}, **extra}


def python_command(*words: str) -> list[str]:
    """Return the command of a Python child: `words` are `-m`, a module and its arguments, or a program."""
    return [sys.executable, "-P", *words]


def python_path() -> str:
    """Return PYTHONPATH for a Python child: the folders of this Python, then the checkout, so that no file of the
    checkout hides a library."""
    return os.pathsep.join([*dict.fromkeys(filter(is_own, sys.path)), CHECKOUT])


def python_environment(base: Mapping[str, str], extra: Mapping[str, str]) -> dict[str, str]:
    """Return `engine_environment` with the PYTHONPATH of a Python child."""
    return engine_environment(base, {"PYTHONPATH": python_path(), **extra})


_deferred: list[Interrupted] | None = None  # the errors of signals that arrive inside `_signals_deferred`


@contextmanager
def interruptible(advice: str = "", is_noted: Callable[[int], bool] = lambda number: False) -> Iterator[None]:
    """Raise Interrupted in the main thread on the first SIGINT, SIGTERM or SIGHUP; ignore later signals. A signal that
    is ignored already (nohup) stays ignored.

    `advice`: the last sentence of the error. `is_noted`: called with the signal's number; returns True if the caller
    has handled the signal.
    """
    caught: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        if caught or is_noted(number):
            return
        caught.append(number)
        error = Interrupted(f"stopped by {signal.Signals(number).name}", advice)
        if _deferred is None:
            raise error
        _deferred.append(error)

    previous = {
        number: signal.signal(number, interrupt)
        for number in STOP_SIGNALS
        if signal.getsignal(number) not in (signal.SIG_IGN, None)
    }
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)


@contextmanager
def _signals_deferred() -> Iterator[None]:
    """Postpone the error of an `interruptible` signal to the end of the block. Blocks cannot be nested."""
    global _deferred
    errors = _deferred = []
    try:
        yield
    finally:
        _deferred = None
        if errors:
            raise errors[0]


def is_alive(process: psutil.Process) -> bool:
    """Return whether this process (pid and create time) runs and is no zombie."""
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


class ProcessTree:
    """The processes below one harness process, None if the harness is dead.

    Members are the descendants of the harness, the processes seen earlier, and the processes with a marker: orphans are
    no descendants, and some programs clear their environment. psutil never sends a signal to a recycled pid.
    """

    harness: psutil.Process | None = None

    def __init__(self, *markers: str) -> None:
        """`markers`: prefixes of the markers of its processes."""
        self.markers, self.seen, self.children = {*markers}, set[psutil.Process](), list[Child]()

    def claims(self, process: psutil.Process) -> bool:
        """Return whether a direct child of the harness, with all its descendants, belongs to this tree: every child in
        another session."""
        return session_of(process) not in (None, os.getsid(0), self.harness and session_of(self.harness))

    def sample(self) -> None:
        """Update `seen` to the living processes of the tree, and reap the zombies of orphans."""
        self._reap(self._scan())

    def _scan(self) -> set[psutil.Process]:
        """Update `seen`. Return the processes of the tree that have ended since the last scan."""
        known = self.seen | self._descendants()
        self.seen = {process for process in known if is_alive(process)}
        return known - self.seen

    def _descendants(self) -> set[psutil.Process]:
        if self.harness is None or not is_alive(self.harness):
            # The orphans of the harness are children of init now, so only remembered processes lead to others.
            return {child for process in self.seen for child in _children_of(process)}
        below = dict[int, psutil.Process]()
        for process in _children_of(self.harness):  # parents come before their children
            with suppress(psutil.NoSuchProcess):
                parent = process.ppid()
                if parent in below or (parent == self.harness.pid and self.claims(process)):
                    below[process.pid] = process
        return {*below.values()}

    def _reap(self, ended: set[psutil.Process]) -> None:
        pids = {child.pid for child in self.children}  # Popen reaps those
        for process in ended:
            if process.is_running() and process.pid not in pids:
                with suppress(ChildProcessError):  # the child of another process
                    os.waitpid(process.pid, os.WNOHANG)

    def end(self, grace_seconds: float) -> list[str]:
        """Send SIGTERM to the whole tree and SIGKILL after `grace_seconds`, until two scans find no process. Return the
        processes that survived KILL_SECONDS of SIGKILL, normally none."""
        spared = {psutil.Process(), *psutil.Process().parents()}
        terminated, known = set[psutil.Process](), set[psutil.Process]()
        kill_at, num_quiet = time.monotonic() + grace_seconds, 0
        while True:
            prefixes = (*self.markers,)
            self.seen |= {process for process in psutil.process_iter() if marker_of(process).startswith(prefixes)}
            known |= self.seen
            ended = self._scan()
            left = self.seen - spared
            # Of a chain that forks faster than /proc can be read, only the zombies are visible.
            num_quiet = 0 if left or ended - known else num_quiet + 1
            known |= ended
            is_late = time.monotonic() >= kill_at
            for process in left | ended if is_late else left - terminated:  # many programs clean up on one SIGTERM only
                with suppress(psutil.Error):  # gone, or no permission: then the process is left and reported
                    _kill(process) if is_late else process.terminate()
            terminated |= left
            self._reap(ended)
            if num_quiet == NUM_QUIET_SWEEPS:
                return []
            if time.monotonic() > kill_at + KILL_SECONDS:
                return sorted(map(describe, left)) or ["a process that forks faster than it can be killed"]
            time.sleep(_PAUSE_SECONDS)


def marker_of(process: psutil.Process) -> str:
    """Return the marker with which a process was started; "" if it has none, has ended or belongs to another user."""
    with suppress(psutil.Error):
        return process.environ().get(MARKER_NAME, "")
    return ""


def session_of(process: psutil.Process) -> int | None:
    """Return the session id of a process, None if the process is gone."""
    with suppress(ProcessLookupError):
        return os.getsid(process.pid)
    return None


def _children_of(process: psutil.Process) -> list[psutil.Process]:
    """Return all descendants of a process; [] if the process is gone."""
    with suppress(psutil.NoSuchProcess):
        return process.children(recursive=True)
    return []


def _kill(process: psutil.Process) -> None:
    """Send SIGKILL to the process group of a process or zombie, because a program can fork faster than /proc is
    scanned, and to the process."""
    with suppress(ProcessLookupError, PermissionError):
        group = os.getpgid(process.pid)
        if process.is_running() and group != os.getpgrp():
            os.killpg(group, signal.SIGKILL)
    process.kill()


def describe(process: psutil.Process) -> str:
    try:
        return f"pid {process.pid} {process.name()!r} ({process.status()})"
    except psutil.Error:
        return f"pid {process.pid}"


class ProcessGroup(ProcessTree):
    """The processes of one part of a run that are stopped together. Use it in the main thread only, and start nothing
    else with `start_new_session`: every child in another session belongs to a run."""

    def __init__(self, name: str, grace_seconds: float) -> None:
        """`name`: a word without spaces, which becomes part of the marker."""
        self.marker, self.grace_seconds = new_marker(name), grace_seconds
        super().__init__(self.marker)
        if prctl := getattr(ctypes.CDLL(None), "prctl", None):  # on Linux: adopt orphans as children
            prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self.harness = psutil.Process()
        self._foreign = frozenset(self.harness.children())

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
        """Start a child in a new session, with stderr, and stdout unless given, in `log_path`. Raises EngineError."""
        with _signals_deferred():
            _open_groups.add(self)
            try:
                _keep_watchdog()
                num_kills = num_oom_kills()
                with open_regular(log_path, "ab") as log:
                    child = Child(
                        [os.fspath(word) for word in argv],
                        stdin=stdin or subprocess.DEVNULL,
                        stdout=stdout or log,
                        stderr=log,
                        env={**env, MARKER_NAME: self.marker},
                        cwd=cwd,
                        start_new_session=True,
                    )
            except OSError as error:
                cause = f"{name} cannot be started: {error.strerror}: {error.filename!r}"
                raise EngineError(cause, "Run: uv run prepare.py.") from error
            child.name, child.log_path, child.num_oom_kills = name, log_path, num_kills
            self.children.append(child)
            return child

    def check(self) -> list[Child]:
        """Return the children that have ended. Call it about once a second: it also samples the tree."""
        self.sample()
        return [child for child in self.children if child.poll() is not None]

    def kill_below(self, child: Child) -> None:
        """Kill all descendants of a child, so that the child does not wait for them when it ends."""
        with suppress(psutil.NoSuchProcess):
            for process in _children_of(psutil.Process(child.pid)):
                process.kill()

    def stop(self) -> list[str]:
        """End every process of the group and return the survivors. A signal that arrives meanwhile is delivered
        afterwards. You may call it twice."""
        with _signals_deferred():
            left = self.end(self.grace_seconds)
            for child in self.children:
                with suppress(subprocess.TimeoutExpired):  # a zombie can be reaped once its last thread has ended
                    child.wait(0 if left else KILL_SECONDS)
                for pipe in filter(None, (child.stdin, child.stdout)):
                    with suppress(BrokenPipeError):  # unsent input of a child that has just been killed
                        pipe.close()
            _open_groups.discard(self)
            if not _open_groups:
                _dismiss_watchdog()
            return left

    def claims(self, process: psutil.Process) -> bool:
        """Return whether a direct child of this process has the group's marker. A child without a marker is an orphan
        that cleared its environment; it belongs to the group unless another group started its session."""
        if marker := marker_of(process):
            return marker.startswith(self.marker)
        others = [child.pid for group in _open_groups - {self} for child in group.children]
        is_spared = session_of(process) in (_watchdog and _watchdog.pid, *others) or process in self._foreign
        return super().claims(process) and not is_spared


_open_groups: set[ProcessGroup] = set()  # with a started child, and not stopped
_watchdog: subprocess.Popen[bytes] | None = None


class Pipes:
    """Lines to the stdin of a child and from its stdout. TimeoutError after a deadline on the clock of time.monotonic,
    BrokenPipeError once the child has closed a pipe."""

    def __init__(self, group: ProcessGroup, child: Child) -> None:
        assert child.stdin is not None
        assert child.stdout is not None
        self._group, self._stdin, self._stdout = group, child.stdin.fileno(), child.stdout.fileno()
        os.set_blocking(self._stdin, False)
        self._buffer = b""

    def send(self, line: bytes, deadline: float) -> None:
        """Write a line, and read what the child writes meanwhile, so that neither side blocks the other."""
        unsent = memoryview(line + b"\n")
        while unsent:
            if self._wait(deadline, [self._stdin]):
                unsent = unsent[os.write(self._stdin, unsent) :]

    def receive(self, deadline: float) -> bytes:
        """Return the next line, without its end."""
        while b"\n" not in self._buffer:
            self._wait(deadline, [])
        line, self._buffer = self._buffer.split(b"\n", 1)
        return line

    def _wait(self, deadline: float, to_write: list[int]) -> bool:
        """Wait up to a second and read the available output. Return whether the child accepts input."""
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


def _keep_watchdog() -> None:
    """Start a watchdog unless one runs, and send it the markers of all open groups. Raises OSError."""
    global _watchdog
    if _watchdog is None or _watchdog.poll() is not None:
        _dismiss_watchdog()
        _watchdog = subprocess.Popen(
            python_command(*WATCHDOG, str(os.getpid())),
            stdin=subprocess.PIPE,  # not inheritable: only this process has the write end
            # Not the output of this process: `run.py | tee log` must end when run.py ends.
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=python_environment(os.environ, {}),
            cwd="/",
            start_new_session=True,
            bufsize=0,
        )
    assert _watchdog.stdin is not None
    for group in _open_groups:
        with suppress(BrokenPipeError):  # the watchdog was killed: the next start of a child starts another
            _watchdog.stdin.write(f"{group.marker} {group.grace_seconds}\n".encode())


def _dismiss_watchdog() -> None:
    global _watchdog
    if _watchdog is not None:
        _watchdog.kill()
        _watchdog.communicate()  # reaps the watchdog and closes the pipe
        _watchdog = None


# -- processes of an earlier controller that was killed together with its watchdog ------------------------
# A process that cleared its environment is not found.

LEFTOVERS_GRACE_SECONDS = 5.0

_checkout = ""  # if this process is a controller, the digest of its checkout


def new_marker(name: str) -> str:
    """Return a new marker for a child: this process's own marker, the digest of the checkout, a name and an id."""
    return "/".join(filter(None, (os.environ.get(MARKER_NAME), _checkout, f"{name}-{uuid.uuid4().hex}")))


def digest_of(root: Path) -> str:
    """Return an id of a checkout that does not reveal its path to agents."""
    return hashlib.sha256(os.fsencode(root.resolve())).hexdigest()[:16]


def end_leftovers(root: Path, note: Callable[[str], None]) -> None:
    """End and note the processes that earlier controllers of the checkout left running. Call as the controller."""
    global _checkout
    _checkout, tree = digest_of(root), ProcessTree()
    for process in {*psutil.process_iter()} - {psutil.Process(), *psutil.Process().parents()}:
        if _checkout in (marker := marker_of(process)).split("/"):
            tree.seen.add(process)
            tree.markers.add(marker)
    if not tree.seen:
        return
    names = ", ".join(sorted(map(describe, tree.seen)))
    left = tree.end(LEFTOVERS_GRACE_SECONDS)
    survivors = f"; could not end: {', '.join(left)}" if left else ""
    note(f"ended processes that an earlier start in this checkout left running: {names}{survivors}")


# -- the watchdog ------------------------------------------------------------------------------------------


def watch(harness_pid: int) -> None:
    """Run as the watchdog of the parent process, which writes `MARKER GRACE_SECONDS` to stdin for each group. End the
    parent's tree when this pipe closes."""
    for number in STOP_SIGNALS:  # a signal that stops the harness may reach the watchdog, too
        signal.signal(number, signal.SIG_IGN)
    tree, grace_seconds, pipe = ProcessTree(), 0.0, os.fdopen(0, "rb", 0)
    parent = psutil.Process().parent()
    tree.harness = parent if parent is not None and parent.pid == harness_pid else None
    while True:
        if select.select([pipe], [], [], WATCH_SECONDS)[0]:
            if not (line := pipe.readline()):
                break
            marker, grace = line.decode().split()
            tree.markers.add(marker)
            grace_seconds = max(grace_seconds, float(grace))
        elif os.getppid() != harness_pid:  # the harness is dead, although a forked copy keeps the pipe open
            break
        tree.sample()
    tree.end(grace_seconds)


if __name__ == "__main__":
    watch(int(sys.argv[1]))
