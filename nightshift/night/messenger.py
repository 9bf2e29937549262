"""One notice: runs the person's command with the message on its stdin, and sees to it that it ends.

    python -I nightshift/entry.py nightshift/night/messenger.py     what it does comes on stdin (Errand)

A process of its own, so that the night need not look after it: an agent thinks for minutes, and a night may be killed.
The command has a session, a limit of time, and a pipe for all that it prints, which is read slowly and not kept. When
it is over, however, nothing of it is left. Exit code 0 if the command's was; else 1, and one line on stderr.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from nightshift.errors import NightshiftError
from nightshift.processes.supervise import ProcessGroup, limit_life
from nightshift.text import clean

GRACE_SECONDS = 2.0  # from SIGTERM to SIGKILL
LATE_SECONDS = 20.0  # more than the command's time and the grace, and it hangs itself
_POLL_SECONDS = 0.05
_PART_BYTES = 64 * 1024  # read at a time: a flood costs its writer time, and nobody else's
_KEPT_BYTES = 2_000
_JOINED = ("/bin/sh", "-c", 'exec "$@" 2>&1', "sh")


@dataclass(frozen=True, slots=True)
class Errand:
    """What it does: the `words` of the command, the `message` for its stdin, at most some kilobytes, which a pipe holds
    whoever reads it; the `log` that errors are written to, the caller's; seconds that it may take. Words and paths are
    bytes, of which not all are text."""

    words: tuple[bytes, ...]
    message: bytes
    log: bytes
    limit_seconds: float


def run(errand: Errand) -> str | None:
    """Run the command to its end; what went wrong, if anything, in one line."""
    group, said, cause = ProcessGroup(f"notice-{uuid.uuid4().hex}", GRACE_SECONDS), b"", None
    try:
        child = group.start(
            "notice",
            [*_JOINED, *map(os.fsdecode, errand.words)],
            log_path=Path(os.fsdecode(errand.log)),
            env=os.environ,
            cwd=Path.cwd(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert child.stdin is not None
        assert child.stdout is not None
        with suppress(BrokenPipeError):  # it does not want to know
            child.stdin.write(errand.message)
            child.stdin.close()
        os.set_blocking(child.stdout.fileno(), False)
        deadline = time.monotonic() + errand.limit_seconds
        while child.poll() is None and cause is None:
            group.check()
            if time.monotonic() >= deadline:
                cause = f"no end after {errand.limit_seconds:g} s: ended"
            said = (said + _read(child.stdout.fileno()))[-_KEPT_BYTES:]
        said = (said + _read(child.stdout.fileno()))[-_KEPT_BYTES:]
        cause = cause or (child.exit_cause() if child.returncode != 0 else None)
    except NightshiftError as error:
        cause = error.cause
    finally:
        left = group.stop()
    if left:
        cause = f"could not be ended: {', '.join(left)}"
    last = next(filter(None, (clean(line, 200) for line in reversed(said.decode(errors="replace").split("\n")))), "")
    return cause and cause + (f"; its last words: {last}" if last else "")


def _read(descriptor: int) -> bytes:
    """What there is, a part of it; waits a little either way."""
    ready, _, _ = select.select([descriptor], [], [], _POLL_SECONDS)
    data = b""
    with suppress(BlockingIOError):
        data = os.read(descriptor, _PART_BYTES) if ready else b""
    if ready:  # a flood, or the end of a pipe that something else closed: no reason to hurry
        time.sleep(_POLL_SECONDS)
    return data


def main() -> int:
    """The exit code."""
    errand = msgspec.json.decode(sys.stdin.buffer.read(), type=Errand)
    limit_life(errand.limit_seconds + GRACE_SECONDS + LATE_SECONDS)
    if (cause := run(errand)) is not None:
        sys.stderr.write(f"{cause}\n")
    return 1 if cause else 0


if __name__ == "__main__":
    sys.exit(main())
