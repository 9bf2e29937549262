"""Supervision with real processes: whatever they do, none of them is left behind.

Every process of a test carries a random signature in its command line, by which the test looks for
leftovers with psutil. Run alone: pytest tests/unit/test_supervise.py
"""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from nightshift.errors import EngineError, Interrupted
from nightshift.executors import process as processes
from nightshift.executors.process import (
    Child,
    ProcessGroup,
    engine_environment,
    interruptible,
    is_alive,
    tail,
)
from tests.waiting import HANG_SECONDS, wait_for

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="orphans are found through Linux's child subreaper")

SLEEP = "import time; time.sleep(600)"
READY = "import sys, pathlib; pathlib.Path(sys.argv[2]).touch(); "  # after it the child is as the test wants it
IGNORE_TERM = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
# A worker the marker cannot find: its environment is empty and its title another.
HIDDEN = """
def hide(signature):
    os.execve(sys.executable, ["kworker", "-S", "-c", "import time; time.sleep(600)", signature], {})
"""


def command_lines(text: str) -> dict[psutil.Process, list[str]]:
    """Living processes with the text in their command line."""
    found = {}
    for process in psutil.process_iter():
        try:
            command = process.cmdline()
        except psutil.Error:
            continue
        if text in " ".join([*command, ""]) and is_alive(process):
            found[process] = command
    return found


def with_signature(signature: str) -> list[psutil.Process]:
    return list(command_lines(signature))


def titles(signature: str) -> list[str]:
    return [command[0] for command in command_lines(signature).values()]


@pytest.fixture
def signature() -> Iterator[str]:
    text = f"signature-{uuid.uuid4().hex}"
    try:
        yield text
        assert not with_signature(text)
    finally:
        while left := with_signature(text):
            for process in left:
                process.kill()
            time.sleep(0.02)


@pytest.fixture
def make_group(signature: str) -> Iterator[Callable[..., ProcessGroup]]:
    groups = []

    def make(grace_seconds: float = HANG_SECONDS) -> ProcessGroup:
        groups.append(ProcessGroup(f"test-{uuid.uuid4().hex}", grace_seconds))
        return groups[-1]

    try:
        yield make
    finally:
        for group in groups:
            group.stop()


@pytest.fixture
def launch(tmp_path: Path, signature: str) -> Callable[..., Child]:
    """Start Python code as a child and wait until it has touched its ready file (READY)."""

    def start(group: ProcessGroup, code: str, name: str = "worker", **kwargs: object) -> Child:
        ready = tmp_path / uuid.uuid4().hex
        child = group.start(
            name,
            [sys.executable, "-S", "-c", code, signature, ready],
            log_path=tmp_path / f"{name}.log",
            env=engine_environment(os.environ, {}),
            cwd=tmp_path,
            **kwargs,
        )
        wait_for(ready.exists, f"{name}'s ready file")
        return child

    return start


# Title of each living process, the grace in seconds, how the child ends, and its code.
TREES: dict[str, tuple[list[str], float, str, str]] = {
    "deaf": ([sys.executable], 0.4, "killed by SIGKILL", IGNORE_TERM + READY + SLEEP),
    # Two forks, a session of its own, an empty environment and another title, all before the first look.
    "daemon": (["kworker"], HANG_SECONDS, "exit code 0",
        "import os, sys\n" + HIDDEN + "if os.fork(): " + READY + "os._exit(0)\n"
        "os.setsid()\nif os.fork(): os._exit(0)\nhide(sys.argv[1])"),
}  # fmt: skip


@pytest.mark.parametrize("tree", TREES)
def test_stop_ends_a_tree_and_waits_for_its_grace_at_most(make_group, launch, signature, tree):
    living, grace_seconds, cause, code = TREES[tree]
    group = make_group(grace_seconds)
    child = launch(group, code)
    wait_for(lambda: titles(signature) == living)
    assert group.stop() == []
    assert child.exit_cause() == cause
    assert not with_signature(signature)
    assert group.stop() == []


def test_child_gets_one_sigterm_and_the_time_to_clean_up(make_group, launch, tmp_path):
    group, terms = make_group(), tmp_path / "terms"
    child = launch(
        group,
        "import signal, os, time\n"
        f"signal.signal(signal.SIGTERM, lambda *_: os.write(os.open({str(terms)!r}, "
        "os.O_CREAT | os.O_APPEND | os.O_WRONLY), b'T'))\n"
        + READY
        + f"\nwhile not os.path.exists({str(terms)!r}): time.sleep(0.01)\ntime.sleep(0.6); sys.exit(5)",
    )
    assert group.stop() == []
    assert child.exit_cause() == "exit code 5"
    assert terms.read_text() == "T"


# In the session of the child that started it, or in one of its own.
@pytest.mark.parametrize("session", ["", "os.setsid()\n"])
def test_orphan_without_marker_is_stopped_with_its_own_group(make_group, launch, signature, session):
    """Nobody has seen the orphan before; another group is open with an orphan of its own, and not asked."""
    orphan = "if os.fork(): os._exit(0)\n{}hide(sys.argv[1] + {!r})"
    other, group = make_group(), make_group()
    launch(other, f"import os, sys\n{HIDDEN}if os.fork():\n    {READY}{SLEEP}\n" + orphan.format("", "-other"), "other")
    launch(group, f"import os, sys\n{HIDDEN}if os.fork():\n    {READY}os._exit(0)\n" + orphan.format(session, "-ours"))
    wait_for(lambda: sorted(titles(signature)) == sorted([sys.executable, "kworker", "kworker"]))
    assert group.stop() == []
    assert sorted(titles(signature)) == sorted([sys.executable, "kworker"])
    assert not with_signature(f"{signature}-ours")
    assert other.stop() == []


def test_processes_of_others_survive(make_group, launch, signature):
    """One that looks the same, and one with a session of its own that is older than the group."""
    command = [sys.executable, "-S", "-c", SLEEP, signature + "-foreign", "ready"]
    older = subprocess.Popen(command, start_new_session=True)
    group = make_group()
    launch(group, READY + SLEEP)
    alike = subprocess.Popen(command)
    try:
        group.check()
        assert group.stop() == []
        assert older.poll() is None
        assert alike.poll() is None
    finally:
        for process in (older, alike):
            process.kill()
            process.wait()


def test_signal_during_a_stop_is_delivered_after_it(make_group, launch, signature, monkeypatch):
    def sleep(seconds: float) -> None:
        while numbers:
            signal.raise_signal(numbers.pop())
        really_sleep(seconds)

    numbers, really_sleep = [signal.SIGINT], time.sleep
    group = make_group(0.1)
    launch(group, IGNORE_TERM + READY + SLEEP)
    monkeypatch.setattr(time, "sleep", sleep)
    with pytest.raises(Interrupted, match=r"^stopped by SIGINT$"), interruptible():
        group.stop()
    assert not with_signature(signature)


def test_program_that_cannot_be_started_is_an_engine_error(make_group, tmp_path):
    group = make_group()
    with pytest.raises(
        EngineError, match=r"^server cannot be started: No such file.*'/no/vllm'\. Run: uv run prepare\.py"
    ):
        group.start("server", ["/no/vllm"], log_path=tmp_path / "log", env={}, cwd=tmp_path)
    assert group.stop() == []
    assert not with_signature(f"nightshift.executors.process {os.getpid()} ")  # its watchdog


def test_tail_is_the_end_of_the_log_as_plain_short_text(tmp_path):
    log = (
        b"\x1b[31mred\x1b[0m \x1b[1;38;5;9mbold\x1b[m\n\x1b]0;title\x07kept\n\n   \n"
        b" 10%|#   |\r 50%|##  |\r100%|####|\r\n\xff\xfe broken \xc3\n"
    )
    with Child(["true"]) as child:
        child.log_path = tmp_path / "child.log"
    child.log_path.write_bytes(log + b"x" * 1000 + b"\nend without newline")
    assert tail(child.log_path, 9) == [
        *("red bold", "kept", "100%|####|", "\ufffd\ufffd broken \ufffd", "x" * 197 + "...", "end without newline")
    ]
    child.log_path.unlink()
    assert tail(child.log_path, 2) == []


SECRETS = """
    OPENAI_API_KEY ANTHROPIC_API_KEY HF_TOKEN HUGGING_FACE_HUB_TOKEN WANDB_API_KEY AWS_SECRET_ACCESS_KEY LC_TOKEN
    XDG_PASSWORD PYTHONPATH PYTHONSTARTUP PYTHONHOME LD_PRELOAD LD_AUDIT GIT_DIR GIT_SSH_COMMAND BASH_ENV HTTPS_PROXY
    SSH_AUTH_SOCK NIGHTSHIFT_RUN LC_PLAN LC_ALL_KEYS lc_all XDG_RUNTIME_DIR XDG_SESSION_ID
"""


def test_child_sees_neither_secrets_nor_what_injects_code_and_inherits_no_open_files(make_group, tmp_path, monkeypatch):
    """In particular not the pipe to the watchdog, which would keep it from noticing the harness's death."""

    def output_of(*command: str) -> list[str]:
        environment = engine_environment(secrets | passed, {"HF_HUB_OFFLINE": "1"})
        child = group.start("said", command, log_path=tmp_path / command[0], env=environment, cwd=tmp_path)
        child.wait(HANG_SECONDS)
        return child.log_path.read_text().splitlines()

    monkeypatch.setattr(processes, "_checkout", "")  # another test of this process may have been a controller
    secrets, group = dict.fromkeys(SECRETS.split(), "leaked"), make_group()
    passed = {"PATH": os.environ["PATH"], "HOME": "/home/x", "LC_ALL": "C.UTF-8", "CUDA_VISIBLE_DEVICES": "2"}
    wanted = passed | {"HF_HUB_OFFLINE": "1", "NIGHTSHIFT_RUN": group.marker}
    assert dict(line.split("=", 1) for line in output_of("env")) == wanted
    assert output_of("ls", "/proc/self/fd") == ["0", "1", "2", "3"]  # 3 is ls's own, on the folder


@pytest.mark.parametrize("number", processes.STOP_SIGNALS)
def test_the_first_signal_interrupts_and_later_ones_are_ignored(number: signal.Signals) -> None:
    def twice() -> None:
        try:
            signal.raise_signal(number)
        finally:
            signal.raise_signal(signal.SIGTERM)

    before = signal.getsignal(number)
    with pytest.raises(Interrupted, match=rf"^stopped by {number.name}$"), interruptible():
        twice()
    assert signal.getsignal(number) == before


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interruptible():
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


HARNESS = """
import fcntl, os, sys, termios, time
from pathlib import Path
from nightshift.executors import process
group = process.ProcessGroup("harness-" + sys.argv[1], 0.5)
for code in sys.argv[2:]:
    group.start("worker", [sys.executable, "-S", "-c", code, sys.argv[1], "child"], cwd=Path.cwd(),
                log_path=Path("worker.log"), env=process.engine_environment(os.environ, {}))
sys.stdin.readline()
for _ in range(2):
    process._keep_watchdog()
    while any(fcntl.ioctl(process._watchdog.stdin, termios.FIONREAD, bytes(4))): time.sleep(0.01)
Path("looked").touch()
time.sleep(600)
"""


def watchdogs_of(harness_pid: int) -> list[psutil.Process]:
    """Its watchdogs, normally one; waits for nothing: one that has just begun is known by its name when it has time."""
    return with_signature(f"nightshift.executors.process {harness_pid} ")


def test_sigkill_of_the_harness_ends_the_tree_and_the_watchdog(tmp_path, signature):
    """A stubborn child, and a hidden daemon that the watchdog can know only from having looked."""
    hide = "import os, sys, time\n" + HIDDEN + "\nif os.fork(): os._exit(0)\nos.setsid()\nhide(sys.argv[1])"
    command = [sys.executable, "-c", HARNESS, signature, IGNORE_TERM + SLEEP, hide]
    process = subprocess.Popen(command, cwd=tmp_path, stdin=subprocess.PIPE, bufsize=0)
    try:
        wait_for(lambda: "kworker" in titles(signature))
        [watchdog] = wait_for(lambda: watchdogs_of(process.pid))
        process.stdin.write(b"look\n")
        wait_for((tmp_path / "looked").exists)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            watchdog.send_signal(number)
        watchdog.suspend()  # until the daemon hangs below the harness no more
        process.kill()
        process.wait()
        watchdog.resume()
        wait_for(lambda: not with_signature(signature))
        wait_for(lambda: not is_alive(watchdog))
    finally:
        process.kill()
        process.wait()
        process.stdin.close()


def test_watchdog_is_up_while_a_group_is_open_and_comes_back_with_the_next_start(make_group, launch):
    first, second = make_group(), make_group()
    for group in (first, second, second):
        launch(group, READY + SLEEP)
        [watchdog] = wait_for(lambda: watchdogs_of(os.getpid()))
        assert "NIGHTSHIFT_RUN" not in watchdog.environ()
        assert os.getsid(watchdog.pid) == watchdog.pid
        if group is first:
            watchdog.kill()
            wait_for(lambda: not watchdogs_of(os.getpid()))
    assert first.stop() == []
    assert is_alive(watchdog)
    assert second.stop() == []
    assert not watchdogs_of(os.getpid())
