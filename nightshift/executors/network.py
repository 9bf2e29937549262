"""A network namespace for one run: a private loopback that no outside process can reach, and no other network.

The namespace protects ports and abstract sockets. It does not protect sockets that are files, and processes of the same
user or of root may enter the namespace.

As a script, this file enters a namespace and connects to itself there, to test whether that works on this machine.
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

is_own = False  # whether this process has entered a new namespace


def problem() -> str:
    """Try `enter` in a child process. Return why it fails on this machine, "" if it works."""
    child = subprocess.run([sys.executable, "-I", __file__], capture_output=True, text=True, check=False)
    return (child.stderr.splitlines() or [f"exit code {child.returncode}"])[-1] if child.returncode else ""


def enter() -> None:
    """Move this process, which must have only one thread, and its later children into a new network namespace.

    Without root's rights, also enter a user namespace with the same user and group ids, so that access to files,
    devices and signals does not change. OSError if the kernel refuses.
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
