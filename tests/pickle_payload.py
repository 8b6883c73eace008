"""Leaves a trace where a file of ours is unpickled."""

import os
from collections.abc import Callable
from pathlib import Path


class Payload:
    """Unpickled, it makes a folder."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.trace),)
