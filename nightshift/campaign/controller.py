"""The lock of the one process that works in a checkout: run.py, a night, certify.

The lock is held on the folder runs/ itself, so deleting a file lets no second controller in. `runs/.controller` names
the process that holds the lock. That file is locked as well: NFS and Lustre lock a folder for one host only, a file for
all hosts. The kernel drops both locks when the process dies, however it dies.
"""

import errno
import fcntl
import os
import shlex
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import psutil

from nightshift.errors import UsageError
from nightshift.files import as_json, disk_error, read_file
from nightshift.text import clean, local

HOLDER_NAME = ".controller"
_PATIENCE_SECONDS = 1.0  # `is_held` takes the lock for an instant, for example in `nightshift status`
_POLL_SECONDS = 0.01
_MAX_COMMAND = 200  # characters that are shown
# Some file systems lock no folders. An emulation of flock by locks on byte ranges refuses a descriptor that was opened
# for reading (EBADF).
_NO_LOCK = (errno.EBADF, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that holds the lock. `since` is ISO 8601, UTC: when the process started."""

    pid: int
    command: str
    since: str
    host: str

    def __str__(self) -> str:
        since = local(datetime.fromisoformat(self.since))
        where = "" if self.host == socket.gethostname() else f" on {clean(self.host)}"
        return f"process {self.pid}{where} ({clean(self.command, _MAX_COMMAND)}), since {since}"


_held: dict[Path, int] = {}  # descriptors of the folders whose lock this process holds


class ControllerLock:
    """The lock of one folder runs/, held by this process or looked at from outside."""

    def __init__(self, runs_dir: Path) -> None:
        self.runs_dir = runs_dir.absolute()
        self._path = runs_dir / HOLDER_NAME

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock. UsageError, which names the holder, while another process holds it."""
        try:
            self.runs_dir.mkdir(exist_ok=True)
            folder = os.open(self.runs_dir, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise disk_error(error, self._path) from None
        file = None
        try:
            file = self._acquire(folder)
            _held[self.runs_dir] = folder
            yield
        finally:
            if _held.pop(self.runs_dir, None) == folder and _is_at(folder, self.runs_dir):
                self._path.unlink(missing_ok=True)
            for descriptor in (file, folder):
                if descriptor is not None:
                    os.close(descriptor)

    def is_held(self) -> bool:
        """Whether a process holds the lock. Writes nothing, so a checkout without write permission is enough."""
        for path, flags in ((self.runs_dir, os.O_DIRECTORY), (self._path, os.O_NOFOLLOW | os.O_NONBLOCK)):
            try:
                descriptor = os.open(path, os.O_RDONLY | flags)
            except OSError:
                return False
            try:
                if not _flock(descriptor, fcntl.LOCK_SH, is_required=False):
                    return True
            finally:
                os.close(descriptor)
        return False

    def require_in_place(self) -> None:
        """Raise UsageError if this process holds the lock and somebody moved runs/ away."""
        folder = _held.get(self.runs_dir)
        if folder is not None and not _is_at(folder, self.runs_dir):
            cause = f"{self.runs_dir} was moved away or replaced while this process worked in it"
            raise UsageError(cause, "Put the folder back, then repeat the command.")

    def _acquire(self, folder: int) -> int:
        """Lock the folder and `.controller`, which then names this process. Returns: the file's descriptor."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while True:
            try:
                file = self._lock_file() if _flock(folder, fcntl.LOCK_EX, is_required=False) else None
            except OSError as error:
                raise disk_error(error, self._path) from None
            if file is not None:
                return file
            if time.monotonic() >= deadline:
                holder = ""  # the file may not tell
                with suppress(OSError, ValueError, OverflowError, RecursionError):
                    holder = f": {msgspec.json.decode(read_file(self._path, 64 * 1024), type=Holder)}"
                cause = f"another controller works in this checkout{holder}"
                raise UsageError(cause, "Wait for it (uv run nightshift wait), or use one clone each.")
            time.sleep(_POLL_SECONDS)

    def _lock_file(self) -> int | None:
        """Lock `.controller`, and write into it. None while another process holds the lock."""
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        is_ours = False
        try:
            # Somebody may have removed or replaced the file before this process locked it.
            if _flock(file, fcntl.LOCK_EX) and _is_at(file, self._path):
                os.ftruncate(file, 0)
                os.pwrite(file, _this_process(), 0)
                is_ours = True
        finally:
            if not is_ours:
                os.close(file)
        return file if is_ours else None


def _flock(descriptor: int, kind: int, *, is_required: bool = True) -> bool:
    """Try to lock; False if another process holds the lock. A file system without such locks is an OSError, unless the
    lock is not required."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if is_required or error.errno not in _NO_LOCK:
            raise
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False


def _this_process() -> bytes:
    program, *arguments = sys.argv or [""]
    since = datetime.fromtimestamp(psutil.Process().create_time(), UTC).isoformat(timespec="seconds")
    command = shlex.join(["uv", "run", Path(program).name, *arguments])
    return as_json(Holder(os.getpid(), command, since, socket.gethostname())) + b"\n"
