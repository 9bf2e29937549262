"""A stand-in for an agent that looks for a way out of its sandbox: prints what each attempt came to, as JSON.

No attempt does harm where it succeeds: without a sandbox, and as root, all of them would.

    stand_in_burglar.py FACTS

FACTS is a JSON file of what an agent that has read the sources could guess: `hidden` (paths), `pid` and `port` of
processes outside, `abstract` (the name of a socket there), `secret` (a text in the user's environment).
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

LIBC = ctypes.CDLL(None, use_errno=True)
CLONE_NEWUSER, CLONE_NEWNS = 0x10000000, 0x00020000
PTRACE_SEIZE, PR_GET_NO_NEW_PRIVS = 0x4206, 39  # which, other than attaching, stops nobody
SOCKETS = ("run/*", "run/*/*", "run/user/*/*", "tmp/*", "tmp/*/*", "var/run/*", "var/run/*/*", "dev/*", "agent/**/*")


def call(name: str, *arguments: object) -> str:
    """A function of the C library: "done", or the error's name."""
    made = getattr(LIBC, name)(*arguments)
    return "done" if made >= 0 else os.strerror(ctypes.get_errno())


def attempt(action: Callable[[], object]) -> str:
    try:
        return f"done: {action()!r}"[:400]
    except OSError as error:
        return os.strerror(error.errno or 0)


def is_writable(path: str) -> bool:
    """Opened, not written to: where this succeeds, the machine shall survive the test."""
    return attempt(lambda: os.close(os.open(path, os.O_WRONLY))) == "done: None"


def unnamed_file(folder: str) -> None:
    os.close(os.open(folder, os.O_TMPFILE | os.O_WRONLY))


def connect(address: object, family: int) -> str:
    with socket.socket(family) as client:
        return attempt(lambda: client.connect(address))  # type: ignore[arg-type]


def is_there(path: str | Path) -> bool:
    with suppress(OSError):
        return Path(path).exists()
    return False


def holds(path: Path, text: str) -> bool:
    with suppress(OSError):
        return text.encode() in path.read_bytes()
    return False


def main() -> None:
    facts = json.loads(Path(sys.argv[1]).read_text())
    proc, here = Path("/proc"), Path.cwd()
    processes = [path for path in proc.iterdir() if path.name.isdigit()]
    doors = [path / name for path in processes for name in ("root", "cwd", "root/..", "cwd/..", "cwd/../..")]
    doors += [Path("/"), *proc.glob("[0-9]*/fd/*"), *proc.glob("[0-9]*/fd/*/..")]
    places = ["/proc/sys/kernel/core_pattern", "/proc/sys/kernel/modprobe", "/proc/sysrq-trigger", "/proc/self/uid_map"]
    places += ["/etc/resolv.conf", "/etc/passwd", "/usr/bin/env", sys.executable, sys.argv[0], facts["prompt"]]
    folders = ["/", "/usr", "/etc", "/bin", "/proc", "/dev/pts"]
    status = (proc / "self/status").read_text().splitlines()
    found = {
        "hidden": [path for path in facts["hidden"] if any(is_there(f"{door}{path}") for door in doors)],
        "processes": len(processes) - len({1, os.getppid(), os.getpid()}),
        "signal": attempt(lambda: os.kill(facts["pid"], 0)),
        "trace": call("ptrace", PTRACE_SEIZE, facts["pid"], None, None),
        "abstract socket": connect("\0" + facts["abstract"], socket.AF_UNIX),
        "localhost": connect(("127.0.0.1", facts["port"]), socket.AF_INET),
        "sockets": [str(path) for top in SOCKETS for path in Path("/").glob(top) if path.is_socket()],
        "writable": [path for path in places if is_writable(path)],
        "new files": [name for name in folders if attempt(lambda name=name: unnamed_file(name)) == "done: None"],
        "mount": call("mount", b"none", b".", b"no such file system", 0, None),
        "unmount": call("umount2", b"..", 0),
        "namespace": call("unshare", CLONE_NEWUSER | CLONE_NEWNS),
        "device": attempt(lambda: os.mknod("disk", 0o60600, os.makedev(8, 0))),
        "devices": sorted(path.name for path in Path("/dev").iterdir()),
        "system": [name for name in ("/sys", "/run", "/var", "/srv", "/mnt", "/etc/shadow") if is_there(name)],
        "terminal": attempt(lambda: os.open("/dev/tty", os.O_RDWR)),
        "rename": attempt(lambda: here.rename(here.parent / "moved").rename(here)),
        "no new privileges": LIBC.prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0),
        "capabilities": [line.split()[1] for line in status if line.startswith(("CapEff", "CapBnd"))],
        "descriptors": sorted(path.name for path in (proc / "self/fd").iterdir() if is_there(path)),
        "environments": [str(path) for path in proc.glob("[0-9]*/environ") if holds(path, facts["secret"])],
        "variables": sorted(os.environ),
        "home": os.environ["HOME"],
        "shared memory": [path.name for path in Path("/dev/shm").iterdir()],
        "git": subprocess.run(["git", "status", "--short"], capture_output=True, text=True, check=False).stdout,
        "stdin": sys.stdin.read(),
    }  # fmt: skip
    print(json.dumps(found))


if __name__ == "__main__":
    main()
