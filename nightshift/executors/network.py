"""A network namespace for one run: a loopback of its own, which no process outside can reach, and no other network.

Covered: the ports of the run's processes, on 127.0.0.1 and on all addresses, and abstract sockets. Not covered: sockets
that are files, and a process of the same user or of root, which may enter the namespace.

As a script this file enters a namespace and talks to itself there, to find out whether that works on this machine.
"""

import ctypes
import fcntl
import os
import socket
import struct
import subprocess
import sys
from pathlib import Path

_NEWUSER, _NEWNET = 0x10000000, 0x40000000  # linux/sched.h
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1  # linux/sockios.h, linux/if.h
_TRY_SECONDS = 20.0

is_own = False  # whether this process is in a namespace that it made


def problem() -> str:
    """Return why `enter` fails on this machine, from a child that tries it; "" if it works."""
    devices = Path("/dev/nvidiactl"), Path("/dev/nvidia-uvm")
    if os.geteuid() and [path.exists() for path in devices] == [True, False]:  # setuid has no effect in a namespace
        return f"{devices[1]} does not exist before the first CUDA program of this machine: run nvidia-smi and one"
    try:
        command = [sys.executable, "-I", __file__]
        child = subprocess.run(command, capture_output=True, text=True, timeout=_TRY_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"a new network namespace did not work within {_TRY_SECONDS:g} s"
    return (child.stderr.splitlines() or [f"exit code {child.returncode}"])[-1] if child.returncode else ""


def enter() -> None:
    """Move this process, which must have one thread, and its later children into a new network namespace.

    Without root's rights the namespace needs a user namespace, in which the user and the group keep their numbers: the
    rights to files, devices and signals stay as they are.

    Raises:
        OSError: the kernel or its settings refuse it.
    """
    global is_own
    user, group = os.geteuid(), os.getegid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEWNET | (_NEWUSER if user else 0)):
        number = ctypes.get_errno()
        raise OSError(number, f"unshare: {os.strerror(number)}")
    maps = {"setgroups": "deny", "uid_map": f"{user} {user} 1", "gid_map": f"{group} {group} 1"}
    for name, text in maps.items() if user else ():
        Path(f"/proc/self/{name}").write_text(text)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))
    is_own = True


if __name__ == "__main__":
    enter()
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname(), timeout=5.0).close()
