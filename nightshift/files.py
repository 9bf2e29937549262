"""Write files atomically, even if the writer is killed, and read files that may have been replaced by anything."""

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

MAX_BYTES = 64 * 1024 * 1024  # limit of a file that is read whole: a sparse file may have a terabyte
VERSION: Literal[4] = 4  # of every Document
_NAME = re.compile(r"\.(.+?)\.(\d{1,9})\.[0-9a-f]{16}\.tmp")
_NESTED = "it is nested too deeply"
T = TypeVar("T")


class Document(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """A JSON object for other programs: a record.json, or the output of a command with --json.

    `version` changes if a field is removed or changes its meaning. Scores are fractions; null means "not measured".
    """

    version: Literal[4] = VERSION


def cache_dir(environ: Mapping[str, str]) -> Path:
    """Return Nightshift's folder in the user's cache."""
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nightshift"


def temporary_beside(path: Path) -> Path:
    """Return a new path in the same folder for a temporary file, as `sweep_folder` expects it."""
    return path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(8)}.tmp")


def write_atomically(path: Path, data: bytes, *, sync: bool = True, mode: int = 0o666) -> None:
    """Replace the content of `path`: write a new temporary file, fsync, rename, fsync the folder. Without `sync`, a
    loss of power (not a kill) may restore the previous content."""
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
    """Return a dataclass, mapping or list as JSON on one line."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:  # a file name that is not UTF-8 has surrogates, which become question marks
        plain = json.dumps(msgspec.to_builtins(value, enc_hook=msgspec.json.decode), ensure_ascii=False)
        return plain.encode(errors="replace")


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON, atomically. EngineError if the disk refuses."""
    try:
        write_atomically(path, as_json(value) + b"\n")
    except OSError as error:
        raise disk_error(error, path) from None


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes `target` at the end. UsageError: `target` exists and is not an empty
    folder. EngineError: an OSError inside the context."""
    target = target.absolute()  # `.` has no name
    if target.is_symlink() or (target.exists() and not (target.is_dir() and not any(target.iterdir()))):
        raise UsageError(f"{target} exists and is not an empty folder", "Name a new folder: --output DIR.")
    partial = target.with_name(f".{target.name}.tmp")
    try:
        remove_tree(partial)  # of a killed process
        partial.mkdir(parents=True)
        yield partial
        partial.rename(target)  # replaces an empty folder
    except OSError as error:
        raise disk_error(error, target) from None
    finally:
        remove_tree(partial)


def disk_error(error: OSError, path: Path) -> EngineError:
    """Return the error for a write that the disk refused."""
    return EngineError(f"cannot write {path}: {error.strerror or error}", "Free disk space or fix its permissions.")


def open_regular(path: Path | str, mode: str = "rb") -> BinaryIO:
    """Open a regular file for reading, or with "ab" for appending, without following a link or waiting for a pipe.
    OSError: ELOOP for a link, EINVAL for other kinds of files."""
    return cast(BinaryIO, open(path, mode, opener=_open))


def _open(name: Path | str, flags: int) -> int:
    try:
        descriptor = os.open(name, flags | os.O_NONBLOCK | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:  # the kernel's text is "Too many levels of symbolic links"
            raise OSError(errno.ELOOP, "it is a symbolic link", os.fspath(name)) from None
        raise
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "it is not a regular file", os.fspath(name))


def read_file(path: Path | str, max_bytes: int = MAX_BYTES) -> bytes:
    """Return the bytes of a regular file. OSError as in `open_regular`, and EFBIG for more than `max_bytes`."""
    with open_regular(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > max_bytes:
            raise OSError(errno.EFBIG, f"it has {size:,} bytes", os.fspath(path))
        return file.read(size)


@contextmanager
def nesting_limit() -> Iterator[None]:
    """Raise ValueError if JSON or TOML is nested too deeply for Python's stack."""
    try:
        yield
    except RecursionError:
        raise ValueError(_NESTED) from None


def parse_json(data: bytes | str, kind: type[T]) -> T:
    """Return the value of a JSON text as `kind`. ValueError if the text is not valid."""
    try:  # a context manager is slower than parsing a short line
        return msgspec.json.decode(data, type=kind)
    except RecursionError:
        raise ValueError(_NESTED) from None


def parse_toml(data: bytes) -> dict[str, Any]:
    """Return the tables of a TOML text. ValueError if the text is not TOML."""
    with nesting_limit():
        return tomllib.loads(data.decode())


def read_json(path: Path | str, kind: type[T], fix: str) -> T | None:
    """Return the value of a JSON file as `kind`; None if there is no file. UsageError with `fix` for a damaged file."""
    try:
        return parse_json(read_file(path), kind)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"{path} is damaged: {reason}", fix) from None


def read_rows(path: Path, kind: type[T], places: Iterable[int] | None = None) -> list[T]:
    """Return the lines of a JSON lines file as `kind`, only those at `places` if given. Invalid lines and a missing
    file are ignored, because a writer may be killed at any byte."""
    rows = list[T]()
    with suppress(OSError):
        lines = read_file(path).split(b"\n")
        for line in lines if places is None else [lines[place] for place in places if place < len(lines)]:
            with suppress(ValueError):
                rows.append(parse_json(line, kind))
    return rows


def apply_umask(folder: Path) -> None:
    """Give the files of a folder the mode that the umask allows, because safetensors writes files with mode 0600."""
    for path in folder.iterdir():
        path.chmod(folder.stat().st_mode & 0o666)


def sync_folder(folder: Path) -> None:
    """Sync a folder, so that renames in it survive a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sweep_folder(folder: Path, names: tuple[str, ...] | None = None, *, is_only_mine: bool = False) -> None:
    """Delete the temporary files of killed writers in a folder, by default all of them, or those of `names`.
    `is_only_mine`: also those of running processes. A worker without a controller is about to exit."""
    for path in folder.glob(".*.tmp"):
        match = _NAME.fullmatch(path.name)
        is_ours = match and not path.is_dir() and (names is None or match[1] in names)
        if match and is_ours and (is_only_mine or not psutil.pid_exists(int(match[2]))):
            path.unlink(missing_ok=True)


def remove_tree(path: Path) -> None:
    """Remove a file or a tree of any depth (shutil.rmtree is recursive), as far as possible."""
    if os.path.lexists(path):
        subprocess.run(["rm", "-rf", "--", path], capture_output=True, check=False)


def free_disk_gb(path: Path) -> float:
    """Return the free space, in units of 1e9 bytes, of the file system of `path`, which need not exist."""
    existing = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
    return shutil.disk_usage(existing).free / 1e9
