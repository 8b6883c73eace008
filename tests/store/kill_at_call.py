"""Kills this process at one of its calls that change the disk, and in the middle of each write."""

import builtins
import io
import os
import signal
from typing import Any

CALLS = (
    *("fsync", "fdatasync", "link", "symlink", "rename", "replace", "mkdir", "unlink", "remove", "rmdir", "utime"),
    *("truncate", "ftruncate", "write", "pwrite", "sendfile", "copy_file_range", "chmod", "fchmod"),
)


def kill_at_call(at: int) -> None:
    """SIGKILL this process before its call number `at` (from 1) of those that change the disk from now on.

    Writes each call's name to stdout, a line each. A negative number changes nothing.
    """
    if at < 0:
        return
    plain_open, say = io.open, os.write
    calls = 0

    def step(name: str) -> None:
        nonlocal calls
        calls += 1
        say(1, f"{name}\n".encode())
        if calls == at:
            os.kill(os.getpid(), signal.SIGKILL)

    def with_step(name: str) -> Any:
        real = getattr(os, name)

        def call(*args: Any, **options: Any) -> Any:
            step(name)
            return real(*args, **options)

        return call

    class Halves(io.FileIO):
        def write(self, data: Any) -> int:
            step("write")
            super().write(data[: len(data) // 2])
            step("write the rest")
            super().write(data[len(data) // 2 :])
            return len(data)

    def open_in_halves(
        file: Any, mode: str = "r", buffering: int = -1, encoding: Any = None, errors: Any = None, newline: Any = None
    ) -> Any:
        if not set(mode) & set("wxa+"):
            return plain_open(file, mode, buffering, encoding, errors, newline)
        step("create")
        raw = io.BufferedWriter(Halves(file, mode.replace("b", "").replace("t", "")))
        return raw if "b" in mode else io.TextIOWrapper(raw, encoding, errors, newline)

    for name in CALLS:
        setattr(os, name, with_step(name))
    io.open = builtins.open = open_in_halves
