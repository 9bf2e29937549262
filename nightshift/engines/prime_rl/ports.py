"""The loopback ports of one prime-rl run."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack
from dataclasses import dataclass

from nightshift.errors import EngineError

# Below the ephemeral ports of Linux (32768-60999): no outgoing connection can take one in the meantime.
_PORT_RANGE = range(20_000, 32_000)
_PORT_TRIES = 200


@dataclass(frozen=True, slots=True)
class Ports:
    """Loopback ports of one run."""

    inference: int
    rollouts: int  # and the next one: P/transports/rollouts/zmq.py:29
    env_server: int
    rendezvous: int  # of torchrun


def free_ports() -> Ports:
    """Ports that nobody uses now, all different.

    They are held while the others are chosen. A race is left: between this call and the moment, up to
    half a minute later, at which a process binds its port, another program could bind the same one out of
    12,000; that process then ends with "address already in use".
    """
    rng = random.SystemRandom()
    with ExitStack() as held:
        inference, rollouts, env_server, rendezvous = (_hold(rng, held, count) for count in (1, 2, 1, 1))
    return Ports(inference, rollouts, env_server, rendezvous)


def _hold(rng: random.Random, held: ExitStack, count: int) -> int:
    """The first of `count` free ports in a row, bound until `held` is closed."""
    for _ in range(_PORT_TRIES):
        first = rng.choice(_PORT_RANGE)
        with ExitStack() as opened:
            try:
                for port in range(first, first + count):
                    # All addresses: torchrun's store listens on every one. No SO_REUSEADDR: it would let two share.
                    opened.enter_context(socket.socket()).bind(("", port))
            except OSError:
                continue
            held.push(opened.pop_all())
            return first
    raise EngineError(f"no free port among {_PORT_RANGE.start}-{_PORT_RANGE.stop}", "See what listens: ss -ltn")
