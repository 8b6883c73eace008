"""Finds ports for a Ray node of a test's own."""

import socket
from contextlib import ExitStack

WORKER_PORTS = range(10002, 20000)


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now, outside those that Ray gives to its workers."""
    ports: list[int] = []
    with ExitStack() as stack:
        while len(ports) < count:
            probe = stack.enter_context(socket.socket())
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
            if port not in WORKER_PORTS:
                ports.append(port)
    return ports
