"""Started before the sandbox: `sandbox_entry.py PROGRAM ARGUMENT...` gives up what no namespace takes away, then is
PROGRAM.

The kernel keeps keys (of Kerberos, of file encryption) that a user's processes find by number: a filter refuses the
three system calls for them. Abstract sockets (X11, some D-Bus) belong to the network, which the wall shares: where
Linux has Landlock's scopes (6.12) only the agent's own can be connected to, and only its own processes be signalled.
Nothing of this is owed: where the kernel has none of it, the wall stands as it is.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys

# linux/audit.h's name of the machine, and the numbers of add_key, request_key and keyctl there.
KEY_CALLS = {"x86_64": (0xC000003E, (248, 249, 250)), "aarch64": (0xC00000B7, (217, 218, 219))}
X32_CALLS = 0x40000000  # numbers from here on are the same calls once more, on x86_64
PR_SET_SECCOMP, SECCOMP_MODE_FILTER, PR_SET_NO_NEW_PRIVS = 22, 2, 38
ALLOW, NO_SUCH_CALL = 0x7FFF0000, 0x00050000 | 38
LOAD, JUMP_IF_EQUAL, JUMP_IF_AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06  # linux/filter.h
LANDLOCK_CREATE_RULESET, LANDLOCK_RESTRICT_SELF = 444, 446
SCOPE_ABSTRACT_UNIX_SOCKET, SCOPE_SIGNAL = 1, 2


def key_filter(machine: str) -> bytes | None:
    """The filter's instructions (struct sock_filter); None for a machine whose numbers are not known."""
    if machine not in KEY_CALLS:
        return None
    audit, calls = KEY_CALLS[machine]
    left = len(calls)  # jumps over what is left of the comparisons, and ALLOW
    steps = [
        (LOAD, 0, 0, 4),
        (JUMP_IF_EQUAL, 0, left + 3, audit),
        (LOAD, 0, 0, 0),
        (JUMP_IF_AT_LEAST, left + 1, 0, X32_CALLS),
    ]
    steps += [(JUMP_IF_EQUAL, left - index, 0, call) for index, call in enumerate(calls)]
    steps += [(RETURN, 0, 0, ALLOW), (RETURN, 0, 0, NO_SUCH_CALL)]
    return b"".join(struct.pack("=HBBI", *step) for step in steps)


def leave_behind() -> None:
    """Give up the kernel's keys, and reach for other processes' abstract sockets and signals."""
    libc = ctypes.CDLL(None)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return
    # struct landlock_ruleset_attr: handled_access_fs, handled_access_net, scoped.
    asked = (ctypes.c_uint64 * 3)(0, 0, SCOPE_ABSTRACT_UNIX_SOCKET | SCOPE_SIGNAL)
    ruleset = libc.syscall(LANDLOCK_CREATE_RULESET, asked, ctypes.sizeof(asked), 0)
    if ruleset >= 0:
        libc.syscall(LANDLOCK_RESTRICT_SELF, ruleset, 0)
        os.close(ruleset)
    if steps := key_filter(os.uname().machine):
        instructions = ctypes.create_string_buffer(steps)
        program = struct.pack("@HP", len(steps) // 8, ctypes.addressof(instructions))
        libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program, 0, 0)


if __name__ == "__main__":
    leave_behind()
    os.execv(sys.argv[1], sys.argv[1:])
