"""Kills this process at one of its calls that change the disk, and in the middle of each write."""

import builtins
import gc
import io
import os
import signal
import threading
import traceback
from collections.abc import Callable
from typing import Any

import sweep

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
    lock = threading.Lock()  # a thread that renews ages has calls, too

    def step(name: str) -> None:
        nonlocal calls
        with lock:
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
        buffer_class = io.BufferedRandom if "+" in mode else io.BufferedWriter
        raw = buffer_class(Halves(file, mode.replace("b", "").replace("t", "")))
        return raw if "b" in mode else io.TextIOWrapper(raw, encoding, errors, newline)

    for name in CALLS:
        setattr(os, name, with_step(name))
    io.open = builtins.open = open_in_halves


NEVER = 1 << 30
"""Number of no call."""


def run_and_kill(work: Callable[[], object], at: int) -> list[str]:
    """Do some work in a fork of this process that kills itself at call number `at`, if there are so many; the names of
    its calls until then. The work may use no threads that this process has."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        code = 1
        gc.freeze()  # to free one of Ray's references here would write into this process's connections
        try:
            os.dup2(writer, 1)
            kill_at_call(at)
            work()
            code = 0
        finally:  # whatever was raised: the fork never returns into the test
            if code:
                traceback.print_exc()
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader) as names:
        calls = names.read().split("\n")[:-1]
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    is_killed = len(calls) == at
    assert code == (-signal.SIGKILL if is_killed else 0), f"the work ended with {code} after {len(calls)} calls"
    return calls


def kill_points(calls: list[str]) -> list[int]:
    """Numbers of the calls at which a sweep kills, given those of the work that nothing disturbs: each name once."""
    return sweep.take(range(1, len(calls) + 1), lambda at: calls[at - 1])
