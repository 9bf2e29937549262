"""Drop rights that no namespace and no uid removes, then execute the program in the arguments.

Abstract sockets (X11, some D-Bus) belong to the network, which is shared. Landlock's scopes (Linux 6.12) limit the
agent to its own sockets, and its signals to its own processes. The script imports nothing from the checkout.
"""

import ctypes
import os
import sys

PR_SET_NO_NEW_PRIVS = 38
LANDLOCK_CREATE_RULESET, LANDLOCK_RESTRICT_SELF = 444, 446
SCOPE_ABSTRACT_UNIX_SOCKET, SCOPE_SIGNAL = 1, 2

if __name__ == "__main__":
    libc = ctypes.CDLL(None)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0:
        # struct landlock_ruleset_attr: handled_access_fs, handled_access_net, scoped.
        attributes = (ctypes.c_uint64 * 3)(0, 0, SCOPE_ABSTRACT_UNIX_SOCKET | SCOPE_SIGNAL)
        ruleset = libc.syscall(LANDLOCK_CREATE_RULESET, attributes, ctypes.sizeof(attributes), 0)
        if ruleset >= 0:
            libc.syscall(LANDLOCK_RESTRICT_SELF, ruleset, 0)
            os.close(ruleset)
    os.execv(sys.argv[1], sys.argv[1:])
