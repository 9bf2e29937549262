"""What an agent may see of this machine behind the wall, and what is covered there.

A place is a path inside with bubblewrap's option for it, less the path: {Path("/usr"): ("--ro-bind", "/usr")}. Links
are made again as they are, and the files that they lead to are bound: so a program finds itself where it is installed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from nightshift.errors import UsageError

Places = dict[Path, tuple[str, ...]]

_SYSTEM = ("/usr", "/nix/store", "/gnu/store", "/home/linuxbrew/.linuxbrew")
# What programs need to load, to find a host and to trust it; of /etc nothing else, which may hold secrets.
_ETC = """
    ld.so.cache ld.so.conf ld.so.conf.d alternatives crypto-policies localtime services protocols
    resolv.conf hosts host.conf nsswitch.conf gai.conf ssl/certs ssl/cert.pem ssl/openssl.cnf
    pki/tls/certs pki/tls/cert.pem pki/tls/openssl.cnf pki/ca-trust/extracted ca-certificates/extracted
"""
_MAX_HEAD = 256  # bytes of a script in which its interpreter stands


def system_places() -> Places:
    """Programs, libraries, name resolution and certificates of this machine, to read."""
    places: Places = {Path(name): ("--ro-bind", name) for name in _SYSTEM if Path(name).is_dir()}
    for path in Path("/").iterdir():
        if path.name in ("bin", "sbin") or path.name.startswith("lib"):
            places[path] = (
                ("--symlink", os.fspath(path.readlink())) if path.is_symlink() else ("--ro-bind", os.fspath(path))
            )
    for path in (Path("/etc", name) for name in _ETC.split()):
        if path.exists():  # /etc/resolv.conf is often a link into /run: its file, and nothing else of it
            places[path] = ("--ro-bind", os.fspath(path.resolve()))
    return places


def program_places(words: Sequence[str], search: str, places: Places, hidden: Sequence[Path]) -> Places:
    """`places`, with the program that `words` begin with, its interpreter and package, and the files that they name.

    `search`: the person's PATH. UsageError if one of them is hidden.
    """
    found, program = dict(places), shutil.which(words[0], path=search)
    waiting = [Path(program)] if program and Path(program).is_absolute() else []  # any other lies in the clone
    seen = set[Path]()
    while waiting:
        steps = _steps(waiting.pop())
        for folder in [folder for step in steps for folder in _package(step)]:
            # Not the checkout's .venv; nor a HOME in which somebody made an environment.
            if not _is_below(folder, hidden) and folder / ".cache" not in hidden:
                found |= {} if is_shown(folder, found, hidden) else {folder: ("--ro-bind", os.fspath(folder))}
        found |= expose(steps, found, hidden)
        waiting += _interpreter(steps[-1], search) if steps[-1] not in seen else []
        seen.add(steps[-1])
    for word in words[1:]:
        if _is_file(word):
            found |= expose(_steps(Path(word)), found, hidden)
    return found


def file_places(files: Iterable[str], places: Places, hidden: Sequence[Path]) -> Places:
    """`places`, with these files, as far as they are there and not hidden."""
    found = dict(places)
    for name in files:
        if _is_file(name) and not _is_below(Path(name).resolve(), hidden):
            found |= expose(_steps(Path(name)), found, hidden)
    return found


def expose(steps: Sequence[Path], places: Places, hidden: Sequence[Path]) -> Places:
    """The links that lead to a file, and the file. UsageError if it is hidden."""
    *links, real = steps
    if _is_below(real, hidden):
        raise UsageError(
            f"the agent's {real} lies where no agent may look", "Install it in a folder of its own; or --sandbox none."
        )
    found: Places = {link: ("--symlink", os.fspath(link.readlink())) for link in links}
    found[real] = ("--ro-bind", os.fspath(real))
    return {path: option for path, option in found.items() if path not in places and not is_shown(path, places, hidden)}


def cover(places: Places, hidden: Sequence[Path]) -> Places:
    """`places`, with an empty folder over all that is hidden and would be seen in one of them."""
    shown = [(place, option[1]) for place, option in places.items() if option[0] == "--ro-bind"]
    return places | {
        place / path.relative_to(source): ("--tmpfs",)
        for place, source in shown
        for path in hidden
        if path.is_relative_to(source) and os.access(path, os.F_OK) and path.is_dir()
    }


def _is_file(name: str) -> bool:
    return Path(name).is_absolute() and Path(name).is_file()


def _is_below(path: Path, folders: Sequence[Path]) -> bool:
    return any(path.is_relative_to(folder) for folder in folders)


def is_shown(path: Path, places: Places, hidden: Sequence[Path] = ()) -> bool:
    """True if it lies in a folder that is shown already, and is not covered there."""
    folders = [place for place, option in places.items() if option[0] == "--ro-bind" and path.is_relative_to(place)]
    return bool(folders) and not _is_below(path, [place for place in hidden if _is_below(place, folders)])


def _steps(path: Path) -> list[Path]:
    """All links on the way to a file, each without links before it, and the file that it is at last."""
    links, real, parts = list[Path](), Path("/"), [*path.parts[1:]]
    while parts:
        step = Path(os.path.normpath(real / parts.pop(0)))
        if step.is_symlink():
            links.append(step)
            parts = [*step.readlink().parts, *parts]
        else:
            real = step
    return [*links, real]


def _package(path: Path) -> list[Path]:
    """The folders that a program does not run without."""
    parts, top = path.parts, path.parent.parent
    if "node_modules" in parts:
        return [Path(*parts[: parts.index("node_modules") + 1])]
    if (top / "pyvenv.cfg").is_file() or (top / "conda-meta").is_dir():
        return [top]
    if parts[1] == "opt" and len(parts) > 3:
        return [Path(*parts[:3])]
    return [*top.glob("lib/python3*"), *top.glob("lib/libpython*")] if path.name.startswith("python") else []


def _interpreter(program: Path, search: str) -> list[Path]:
    """What the first line of a script names; nothing for another program."""
    words = list[str]()
    with suppress(OSError), program.open("rb") as file:
        mark, _, line = file.read(_MAX_HEAD).partition(b"\n")[0].partition(b"#!")
        words = [] if mark else os.fsdecode(line).split()
    if words and Path(words[0]).name == "env":
        named = next((word for word in words[1:] if not word.startswith("-") and "=" not in word), "")
        words = [found] if (found := shutil.which(named, path=search)) else []
    return [Path(words[0])] if words and _is_file(words[0]) else []
