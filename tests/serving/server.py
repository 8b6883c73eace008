"""Real HTTP servers on the loopback: uvicorn in a thread of this process, and `mvr-ray serve` as a process."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn
import yaml
from fastapi import FastAPI
from waiting import lines_of

from mvr_ray.config import RunConfig

COMMAND = """
import sys
from mvr_ray.cli import main
main(sys.argv[1:])
"""
ADMIN = "admin-" + "a" * 20


@contextmanager
def listening(app: FastAPI) -> Iterator[str]:
    """The address of a uvicorn server over the app."""
    server = uvicorn.Server(uvicorn.Config(app, "127.0.0.1", 0, log_level="error", ws="none"))
    has_begun = threading.Event()
    startup = server.startup

    async def start_and_signal(sockets=None) -> None:
        await startup(sockets)
        has_begun.set()

    server.startup = start_and_signal
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    assert has_begun.wait(120)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)


@contextmanager
def command(
    run: RunConfig, folder: Path, *, private: bool = False
) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """`mvr-ray serve` over a run, in the session's cluster or a private one, which answers, and the lines that it has
    written. A private one and the command are a process group of their own.

    What fails in the block fails the test, and does not leave it waiting for the server.
    """
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(run.model_dump(mode="json")))
    environment = os.environ | {"MVR_RAY_ADMIN_TOKEN": ADMIN}
    if private:
        environment = {name: value for name, value in environment.items() if not name.startswith("RAY_A")}
    else:
        import ray

        environment["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
    arguments = [sys.executable, "-c", COMMAND, "serve", str(file)]
    options: dict[str, Any] = {"stderr": subprocess.PIPE, "text": True, "start_new_session": private}
    with subprocess.Popen(arguments, env=environment, **options) as server:
        try:
            lines: list[str] = []
            for line in lines_of(server, server.stderr):
                lines.append(line)
                if line.startswith("serving on"):
                    break
            yield server, lines
        except BaseException:
            server.kill()
            raise
