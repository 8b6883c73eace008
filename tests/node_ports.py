"""Finds ports for a Ray node of a test's own, and holds one for a server."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

WORKER_PORTS = range(10002, 20000)


def free_ports(count: int) -> list[int]:
    """Ports on which no process listens now, outside those that Ray gives to its workers."""
    ports: list[int] = []
    with ExitStack() as stack:
        while len(ports) < count:
            probe = stack.enter_context(socket.socket())
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
            if port not in WORKER_PORTS:
                ports.append(port)
    return ports


@contextmanager
def held_port() -> Iterator[int]:
    """A port that no other process is given meanwhile, and that a server which sets SO_REUSEADDR can listen at."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]
