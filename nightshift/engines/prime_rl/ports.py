"""The loopback ports of one prime-rl run."""

from __future__ import annotations

import random
import socket
from dataclasses import dataclass

from nightshift.errors import EngineError

# The first of a run's. Below the ephemeral ports of Linux (32768-60999): no outgoing connection can take one.
_PORT_RANGE = range(20_000, 32_000)
_PORT_TRIES = 200


@dataclass(frozen=True, slots=True)
class Ports:
    """Loopback ports of one run."""

    inference: int
    rollouts: int  # and the next one: P/transports/rollouts/zmq.py:29
    env_server: int  # and the next ones, where there are several environments
    rendezvous: int  # of torchrun


def free_ports(num_environments: int = 1) -> Ports:
    """Ports that nobody uses now: five in a row, and one for every environment after the first.

    A race is left: between this call and the moment, up to half a minute later, at which a process binds its port,
    another program could bind the same one out of 12,000; that process then ends with "address already in use", and
    PrimeRlEngine.open tries others.
    """
    for _ in range(_PORT_TRIES):
        first = random.SystemRandom().choice(_PORT_RANGE)
        try:
            for port in range(first, first + 4 + num_environments):
                with socket.socket() as opened:
                    # All addresses: torchrun's store listens on every one. No SO_REUSEADDR: it would let two share.
                    opened.bind(("", port))
        except OSError:
            continue
        return Ports(inference=first, rollouts=first + 1, env_server=first + 3, rendezvous=first + 3 + num_environments)
    raise EngineError(f"no free port among {_PORT_RANGE.start}-{_PORT_RANGE.stop}", "See what listens: ss -ltn")
