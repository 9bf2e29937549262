"""Starts, watches and stops the processes of a run; nothing is ever left behind.

Each child gets a session of its own, the group's marker in its environment, and a log file. While a group is open, a
watchdog, which is this module as a program, ends them if this process dies. Orphans are found by marker, and by session
where a process has no marker or environments cannot be read.
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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import IO

import psutil

from nightshift.errors import EngineError, Interrupted
from nightshift.files import open_regular
from nightshift.startup import is_own
from nightshift.text import ANSI, clean
from nightshift.waiting import waiting

CHECKOUT = str(Path(__file__).absolute().parents[2])
MARKER_NAME = "NIGHTSHIFT_RUN"
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # that stop a command
TAIL_BYTES = 64 * 1024
TAIL_LINE_LENGTH = 200
OUT_OF_MEMORY = "for lack of memory"  # in the cause of a process that the kernel killed for it
SYS = Path("/sys")  # where the kernel shows processors and control groups
WATCHDOG = ("-m", "nightshift.executors.process")
WATCH_SECONDS = 1.0  # how often the watchdog looks at the tree
KILL_SECONDS = 10.0  # a process that holds a large CUDA context may need seconds to die of SIGKILL
FIRST_PAUSE_SECONDS = 0.01  # between two looks at a tree that is ending; doubles up to:
LAST_PAUSE_SECONDS = 0.2
NUM_QUIET_SWEEPS = 2  # one look at /proc can miss a process that forks while it is read
_PIPE_BYTES = 65536
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


class Child(subprocess.Popen[bytes]):
    """A process that a group started: as Popen, with the name and the log that `start` gave it."""

    name: str
    log_path: Path
    num_oom_kills: int  # in this control group when the process started

    def exit_cause(self) -> str:
        """How it ended: `exit code 1`, `killed by SIGKILL`, `killed by SIGKILL for lack of memory`, `still running`."""
        code = self.poll()
        if code is None:
            return "still running"
        if code >= 0:
            return f"exit code {code}"
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        is_out_of_memory = -code == signal.SIGKILL and num_oom_kills() > self.num_oom_kills
        return f"killed by {name}{f' {OUT_OF_MEMORY} (oom_kill)' if is_out_of_memory else ''}"


def control_groups(proc: Path = Path("/proc"), sys: Path = SYS) -> list[Path]:
    """Return the folders of this process's control group (v2) and of those around it, the innermost first."""
    folder = sys / "fs/cgroup"
    with suppress(OSError):
        paths = (proc / "self/cgroup").read_text().splitlines()
        folder = folder.joinpath(*(path.removeprefix("0::/") for path in paths if path.startswith("0::/")))
    return [folder, *folder.parents]  # a container may see a path of its host: then only the top has the files


def num_oom_kills(proc: Path = Path("/proc"), sys: Path = SYS) -> int:
    """Return how many processes the kernel has killed for lack of memory, in this control group if it counts them."""
    for path in (*(group / "memory.events" for group in control_groups(proc, sys)), proc / "vmstat"):
        with suppress(OSError):
            return sum(map(int, re.findall(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE)))
    return 0


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
    HF_HOME HF_HUB_CACHE HUGGINGFACE_HUB_CACHE HF_DATASETS_CACHE
    HF_ASSETS_CACHE HF_HUB_OFFLINE HF_DATASETS_OFFLINE TRANSFORMERS_OFFLINE
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


_deferred: list[Interrupted] | None = None  # what signals would have raised in a block of `_signals_deferred`


@contextmanager
def interruptible(told: str = "", is_noted: Callable[[int], bool] = lambda number: False) -> Iterator[None]:
    """Raise Interrupted in the main thread on the first SIGINT, SIGTERM or SIGHUP; ignore the next ones.

    `told`: a sentence that the error ends with. `is_noted`: gets a signal's number; True if the caller has handled that
    signal. A signal that is ignored (nohup) stays ignored.
    """
    caught: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        if caught or is_noted(number):
            return
        caught.append(number)
        error = Interrupted(f"stopped by {signal.Signals(number).name}", told)
        if _deferred is None:
            raise error
        _deferred.append(error)

    handled = [number for number in STOP_SIGNALS if signal.getsignal(number) not in (signal.SIG_IGN, None)]
    previous = {number: signal.signal(number, interrupt) for number in handled}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)


@contextmanager
def _signals_deferred() -> Iterator[None]:
    """Let no signal of `interruptible` raise inside; raise afterwards. Blocks are not nested."""
    global _deferred
    errors = _deferred = []
    try:
        yield
    finally:
        _deferred = None
        if errors:
            raise errors[0]


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

    harness: psutil.Process | None = None  # None: it is dead

    def __init__(self, *markers: str) -> None:
        """`markers`: of its processes, each perhaps only the beginning."""
        self.markers, self.sessions, self.seen = {*markers}, set[int | None](), set[psutil.Process]()
        here = psutil.Process()  # whose own environment a change of its title may have overwritten
        self._shows_markers = any(map(environment_of, (here, *here.parents())))

    def claims(self, process: psutil.Process) -> bool:
        """Return whether a direct child of the harness belongs here: its descendants do with it."""
        return False

    def reap(self, ended: Collection[psutil.Process]) -> None:
        """Act on processes of the tree that have ended."""

    def sample(self) -> None:
        """Remember the living processes of the tree, each one until it is gone."""
        self.reap(self._look()[1])

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
                    with suppress(psutil.Error):  # gone, or not ours to signal: then it is left, and reported
                        process.terminate()
                        process.resume()  # of one that was stopped the signal waits
                asked |= left
            self.reap(ended)
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
            return {child for process in self.seen for child in _children_of(process)}
        below = dict[int, psutil.Process]()
        for process in _children_of(self.harness):  # in one look at /proc; parents come before their children
            with suppress(psutil.NoSuchProcess):
                parent = process.ppid()
                is_claimed = parent == self.harness.pid and self.claims(process)
                if is_claimed:
                    self.sessions.add(session_of(process))
                if is_claimed or parent in below:
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


def _children_of(process: psutil.Process) -> list[psutil.Process]:
    """All that descend from it; none if it is gone."""
    with suppress(psutil.NoSuchProcess):
        return process.children(recursive=True)
    return []


def _kill(process: psutil.Process) -> None:
    """SIGKILL, to its whole process group first: only that stops a program which forks faster than we look. Also to a
    zombie: until it is reaped, its pid and its group are nobody else's."""
    with suppress(psutil.Error, ProcessLookupError, PermissionError):
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
    """The processes of one part of a run that are stopped together. Main thread only.

    A child in another session than this process's belongs to a run: start nothing else with `start_new_session`.
    """

    def __init__(self, name: str, grace_seconds: float) -> None:
        """`name`: a word without spaces, of the marker."""
        self.marker, self.grace_seconds = new_marker(name), grace_seconds
        super().__init__(self.marker)
        self.children: list[Child] = []
        if prctl := getattr(ctypes.CDLL(None), "prctl", None):  # on Linux: orphans become children of this process
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
        """Start a child in its own session; stderr, and stdout unless given, go to `log_path`. Raises EngineError."""
        with _signals_deferred():
            _open_groups.add(self)
            try:
                _keep_watchdog()
                num_kills = num_oom_kills()
                with open_regular(log_path, "ab") as log:
                    child = Child(
                        [os.fspath(word) for word in argv],
                        stdin=subprocess.DEVNULL if stdin is None else stdin,
                        stdout=log if stdout is None else stdout,
                        stderr=log,
                        env={**env, MARKER_NAME: self.marker},
                        cwd=cwd,
                        start_new_session=True,
                    )
            except OSError as error:
                cause = f"{name} cannot be started: {error.strerror}: {error.filename!r}"
                raise EngineError(cause, "Run prepare.py, which names what is missing.") from error
            child.name, child.log_path, child.num_oom_kills = name, log_path, num_kills
            self.children.append(child)
            return child

    def check(self) -> list[Child]:
        """The children that have ended by themselves. Call about once a second: it also remembers processes."""
        self.sample()
        return [child for child in self.children if child.poll() is not None]

    def kill_below(self, child: Child) -> None:
        """SIGKILL to all that a child has started, so that it has nobody to wait for when it is asked to end."""
        with suppress(psutil.NoSuchProcess):
            for process in _children_of(psutil.Process(child.pid)):
                process.kill()

    def stop(self) -> list[str]:
        """End every process of the group (see `end`); returns what could not be killed, normally nothing.

        Safe to call twice. A signal that arrives meanwhile is delivered afterwards.
        """
        with _signals_deferred():
            _open_groups.add(self)  # if it has started nothing: what began meanwhile is its own all the same
            left = self.end(self.grace_seconds)
            for child in self.children:
                child.poll()
                for pipe in filter(None, (child.stdin, child.stdout)):
                    with suppress(BrokenPipeError):  # unsent input to a process that is dead by intent
                        pipe.close()
            _open_groups.discard(self)
            if not _open_groups:
                _dismiss_watchdog()
            return left

    def claims(self, process: psutil.Process) -> bool:
        """True for a direct child of this process with the group's marker. One without a marker, an orphan that cleared
        its environment, belongs to any group unless another one started its session."""
        session, marker = session_of(process), environment_of(process).get(MARKER_NAME)
        is_watchdog = _watchdog is not None and process.pid == _watchdog.pid
        if session in (None, os.getsid(0)) or is_watchdog or process in self._foreign:
            return False
        if marker is not None:
            return marker.startswith(self.marker)
        return session not in {child.pid for group in _open_groups - {self} for child in group.children}

    def reap(self, ended: Collection[psutil.Process]) -> None:
        """Collect the zombies of orphans: a program may leave thousands. A child's exit code belongs to its Popen."""
        for process in ended:
            if process.is_running() and process.pid not in {child.pid for child in self.children}:
                with suppress(ChildProcessError):  # another process's child: that one reaps it
                    os.waitpid(process.pid, os.WNOHANG)


_open_groups: set[ProcessGroup] = set()  # those that have started something and are not stopped
_watchdog: subprocess.Popen[bytes] | None = None


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


def _keep_watchdog() -> None:
    """See to it that a living watchdog knows the markers of all open groups. Raises OSError."""
    global _watchdog
    if _watchdog is None or _watchdog.poll() is not None:  # the first, or somebody killed it
        _dismiss_watchdog()
        _watchdog = subprocess.Popen(
            python_command(*WATCHDOG, str(os.getpid())),
            stdin=subprocess.PIPE,  # not inheritable: this process alone holds the write end
            # Not this process's own: `run.py | tee log` must end when run.py does.
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=python_environment(os.environ, {}),
            cwd="/",
            start_new_session=True,
            bufsize=0,
        )
    assert _watchdog.stdin is not None
    for group in _open_groups:
        with suppress(BrokenPipeError):  # killed: the next start of a child brings a new one
            _watchdog.stdin.write(f"{group.marker} {group.grace_seconds}\n".encode())


def _dismiss_watchdog() -> None:
    global _watchdog
    if _watchdog is not None:
        _watchdog.kill()
        _watchdog.communicate()  # reaps it and closes the pipe
        _watchdog = None


# -- what an earlier controller left, because its watchdog was killed with it -----------------------------
# A process that cleared its environment is not found.

LEFTOVERS_GRACE_SECONDS = 5.0

_checkout = ""  # the digest of the checkout whose controller this process is


def new_marker(name: str) -> str:
    """Return a marker for what this process starts: behind the marker of this process itself, and the digest of the
    checkout whose controller this process is."""
    return "/".join(filter(None, (os.environ.get(MARKER_NAME), _checkout, f"{name}-{uuid.uuid4().hex}")))


def digest_of(root: Path) -> str:
    """What stands for a checkout where agents can read it: its path is none of their business."""
    return hashlib.sha256(os.fsencode(root.resolve())).hexdigest()[:16]


def end_leftovers(root: Path, note: Callable[[str], None]) -> None:
    """End what earlier controllers of the checkout at `root` left running, and say so. Call as the controller."""
    global _checkout
    _checkout, tree = digest_of(root), ProcessTree()
    for process in {*psutil.process_iter()} - {psutil.Process(), *psutil.Process().parents()}:
        marker = environment_of(process).get(MARKER_NAME, "")
        if _checkout in marker.split("/"):
            tree.seen.add(process)
            tree.markers.add(marker)
    if not tree.seen:
        return
    names = ", ".join(sorted(map(describe, tree.seen)))
    with waiting(f"ending what an earlier start left running: {names}", LEFTOVERS_GRACE_SECONDS):
        left = tree.end(LEFTOVERS_GRACE_SECONDS)
    ended = f"processes of an earlier start in this checkout still ran and were ended: {names}"
    note(f"{ended}; not to be ended: {', '.join(left)}" if left else ended)


# -- the watchdog ------------------------------------------------------------------------------------------


class _Watched(ProcessTree):
    """The tree of a harness that may die, or is dead already."""

    def __init__(self, harness_pid: int) -> None:
        super().__init__()
        parent = psutil.Process().parent()
        self.harness = parent if parent is not None and parent.pid == harness_pid else None
        self._sessions_spared = {None, os.getsid(0), session_of(self.harness) if self.harness else None}

    def claims(self, process: psutil.Process) -> bool:
        return session_of(process) not in self._sessions_spared


def watch(harness_pid: int) -> None:
    """Run as the watchdog of this parent, which holds the pipe to stdin and writes `MARKER GRACE_SECONDS` for each
    group that it opens. When the pipe closes, end what is left."""
    for number in STOP_SIGNALS:  # who stops the harness must not take its watchdog away: it ends with the harness
        signal.signal(number, signal.SIG_IGN)
    tree, grace_seconds, received = _Watched(harness_pid), 0.0, b""
    while True:
        if select.select([0], [], [], WATCH_SECONDS)[0]:
            data = os.read(0, _PIPE_BYTES)
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


if __name__ == "__main__":
    watch(int(sys.argv[1]))
