"""Files that are replaced whole or not at all, whatever kills their writer; and files that are read though anybody
may have put anything in their place."""

import errno
import json
import os
import re
import secrets
import shutil
import stat
import subprocess
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeVar, cast

import msgspec
import psutil

from nightshift.errors import EngineError, UsageError

MAX_BYTES = 64 * 1024 * 1024  # of a file that is read whole: a sparse file of a terabyte costs its writer nothing
VERSION: Literal[4] = 4  # of each Document
_NAME = re.compile(r"\.(.+?)\.(\d{1,9})\.[0-9a-f]{16}\.tmp")
_NESTED = "it is nested too deeply"
T = TypeVar("T")


class Document(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """A JSON object that other programs read: a record.json, or what a command prints with --json.

    `kind` is the tag of the class. `version` rises when a name goes or changes its meaning; names may be added. Scores
    and differences of scores are fractions, seconds are wall-clock time, and null is "not measured".
    """

    version: Literal[4] = VERSION


def cache_dir(environ: Mapping[str, str]) -> Path:
    """Return Nightshift's folder in the user's cache."""
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nightshift"


def temporary_beside(path: Path) -> Path:
    """A new name beside `path` for a file that is renamed to `path` once it is whole; `sweep_folder` knows the name."""
    return path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(8)}.tmp")


def write_atomically(path: Path, data: bytes, *, sync: bool = True, mode: int = 0o666) -> None:
    """Replace `path` by `data`: temporary file beside it, fsync, rename, fsync of the folder.

    Nobody can guess its name, and nothing is opened that lies there already. Without `sync` a loss of power may
    bring back what was there before; a kill does not.
    """
    temporary = temporary_beside(path)
    try:
        with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(data)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
        if sync:
            sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def as_json(value: Any) -> bytes:
    """A dataclass, mapping or list as JSON, on one line.

    A lone surrogate, which stands for a byte of a file name or argument that is no UTF-8, becomes a question mark.
    """
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        plain = json.dumps(msgspec.to_builtins(value, enc_hook=msgspec.json.decode), ensure_ascii=False)
        return plain.encode(errors="replace")


def write_json(path: Path, value: Any) -> None:
    """A value `as_json` in a file, whole or not at all. EngineError when the disk refuses."""
    try:
        write_atomically(path, as_json(value) + b"\n")
    except OSError as error:
        raise disk_error(error, path) from None


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """A folder to write into, which becomes `target` when all went well, and is gone where not, or with the next try.

    UsageError where something lies there already but an empty folder. EngineError when the disk refuses: who reads
    other files meanwhile says himself what those refuse.
    """
    target = target.absolute()  # `.` has no name
    if target.is_symlink() or (target.exists() and not (target.is_dir() and not any(target.iterdir()))):
        raise UsageError(f"{target} holds something already", "Name a new folder: --output DIR.")
    partial = target.with_name(f".{target.name}.tmp")
    try:
        remove_tree(partial)  # left by a kill
        partial.mkdir(parents=True)
        yield partial
        partial.rename(target)  # takes the place of an empty one
    except OSError as error:
        raise disk_error(error, target) from None
    finally:
        remove_tree(partial)


def disk_error(error: OSError, path: Path) -> EngineError:
    """One line for what the disk refused."""
    return EngineError(f"cannot write {path}: {error.strerror or error}", "Free disk space or fix its permissions.")


def open_regular(path: Path | str, mode: str = "rb") -> BinaryIO:
    """A regular file, opened for reading or with "ab" to be added to. Never follows a link, never waits for a pipe.

    Raises OSError: FileNotFoundError or NotADirectoryError where there is nothing, ELOOP for a link, EINVAL for what
    is no regular file.
    """
    return cast(BinaryIO, open(path, mode, opener=_open))


def _open(name: Path | str, flags: int) -> int:
    try:
        descriptor = os.open(name, flags | os.O_NONBLOCK | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:  # the kernel's words for it are "Too many levels of symbolic links"
            raise OSError(errno.ELOOP, "it is a symbolic link", os.fspath(name)) from None
        raise
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "it is no regular file", os.fspath(name))


def read_file(path: Path | str, max_bytes: int = MAX_BYTES) -> bytes:
    """The bytes of a regular file. Raises OSError as `open_regular`, and EFBIG for more than `max_bytes`."""
    with open_regular(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > max_bytes:
            raise OSError(errno.EFBIG, f"it has {size:,} bytes", os.fspath(path))
        return file.read(size)


@contextmanager
def nesting_limit() -> Iterator[None]:
    """Raise ValueError where JSON or TOML that is parsed or written is nested too deeply for Python's stack."""
    try:
        yield
    except RecursionError:
        raise ValueError(_NESTED) from None


def parse_json(data: bytes | str, kind: type[T]) -> T:
    """Return the value of a JSON text, checked against `kind`. ValueError if the text is no such JSON."""
    try:  # a context manager takes longer than the parsing of a short line
        return msgspec.json.decode(data, type=kind)
    except RecursionError:
        raise ValueError(_NESTED) from None


def parse_toml(data: bytes) -> dict[str, Any]:
    """Return the tables of a TOML text. ValueError if the text is no TOML."""
    with nesting_limit():
        return tomllib.loads(data.decode())


def read_json(path: Path | str, kind: type[T], fix: str, max_bytes: int = MAX_BYTES) -> T | None:
    """What a JSON file holds, checked against `kind`; None where there is none. UsageError, with `fix`, if damaged."""
    try:
        return parse_json(read_file(path, max_bytes), kind)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"{path} is damaged: {reason}", fix) from None


def read_rows(path: Path, kind: type[T], places: Iterable[int] | None = None) -> list[T]:
    """The lines of a JSON lines file that are a `kind`, only those at `places` if given. Others are left out, and so is
    a file that cannot be read: who writes it may be killed at any byte."""
    rows = list[T]()
    with suppress(OSError):
        lines = read_file(path).split(b"\n")
        for line in lines if places is None else [lines[place] for place in places if place < len(lines)]:
            with suppress(ValueError):
                rows.append(parse_json(line, kind))
    return rows


def apply_umask(folder: Path) -> None:
    """Give the files of a folder that this process made the mode that the umask allows: safetensors writes 0600."""
    for path in folder.iterdir():
        path.chmod(folder.stat().st_mode & 0o666)


def sync_folder(folder: Path) -> None:
    """Make what was renamed in `folder` survive a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sweep_folder(folder: Path, names: tuple[str, ...] | None = None, *, is_only_mine: bool = False) -> None:
    """Delete the temporary files that killed writers left in `folder`; of these `names` only, if given.

    Where the folder `is_only_mine`, those of the living too: a worker whose controller is dead is about to die,
    and the dead have a process id until their parent takes note.
    """
    for path in folder.glob(".*.tmp"):
        match = _NAME.fullmatch(path.name)
        is_ours = match and not path.is_dir() and (names is None or match[1] in names)
        if match and is_ours and (is_only_mine or not psutil.pid_exists(int(match[2]))):
            path.unlink(missing_ok=True)


def remove_tree(path: Path, timeout_seconds: float | None = None) -> None:
    """Remove what stands at `path`, of any depth: shutil.rmtree recurses. What refuses to go is left.

    Raises subprocess.TimeoutExpired.
    """
    if os.path.lexists(path):
        subprocess.run(["rm", "-rf", "--", path], capture_output=True, check=False, timeout=timeout_seconds)


def free_disk_gb(path: Path) -> float:
    """Free space, in 1e9 bytes, of the file system where `path` is or would be created."""
    existing = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
    return shutil.disk_usage(existing).free / 1e9
