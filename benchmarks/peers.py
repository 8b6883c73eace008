"""Create environments of peers, and run a peer in a process that works on request.

An environment is made once under a folder that git ignores. A peer's script reads a task, prints `ready`, then executes
each input line, and answers each with a line of JSON.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

from machine import ROOT

PEERS = ROOT / ".peers"
SENTENCE_TRANSFORMERS = (
    "torch==2.13.0",
    "transformers==5.23.0",
    "sentence-transformers[train]==6.2.0",
    "numpy==2.4.6",
)


def environment(peers: Path, name: str, pins: tuple[str, ...], without: tuple[str, ...] = ()) -> Path:
    """Return the Python of the environment `name`; create it if it is missing or holds other versions.

    `without`: unneeded dependencies of a pin, such as a package built for another torch.
    """
    folder = peers / name
    python, marker = folder / "bin" / "python", folder / "installed.txt"
    if not marker.is_file() or marker.read_text() != "\n".join(pins):
        print(f"making {folder}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *pins], check=True)
        if without:
            subprocess.run([str(python), "-m", "pip", "uninstall", "--quiet", "--yes", *without], check=True)
        marker.write_text("\n".join(pins))
    return python


class Peer:
    """A running script of a peer. Leaving the `with` ends it."""

    def __init__(
        self, python: Path, script: str, *words: str, threads: int, modules: Path | None = None, **variables: str
    ) -> None:
        defaults = {"PYTHONPATH": str(modules or ""), "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "true"}
        environ = {**os.environ, **defaults, **variables}
        path = Path(__file__).with_name(script)
        self.name = " ".join(words)
        self.process = subprocess.Popen(
            [str(python), str(path), *words],
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._answer()  # it is ready

    def ask(self, what: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        """Return the next answer; skip other output of the peer."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(('{"', "{}")):
                return json.loads(line)
        sys.exit(f"the peer's process {self.name!r} ended ({self.process.wait()}); run its script by hand to see why")

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()

    def __enter__(self) -> "Peer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
