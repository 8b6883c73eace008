"""A real HTTP server on the loopback, in a thread of this process."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI


@contextmanager
def listening(app: FastAPI) -> Iterator[str]:
    """The address of a uvicorn server over the app."""
    server = uvicorn.Server(uvicorn.Config(app, "127.0.0.1", 0, log_level="error", ws="none"))
    has_begun = threading.Event()
    startup = server.startup

    async def start_and_tell(sockets=None) -> None:
        await startup(sockets)
        has_begun.set()

    server.startup = start_and_tell
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    assert has_begun.wait(20)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)
