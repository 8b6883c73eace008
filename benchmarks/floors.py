"""What this machine can do at most: bytes a second from memory, and floating-point operations a second.

A floor is the least time that these allow, so each is the best of several ways and of several tries. A plain sum reads
with what one core has in flight by itself; asking for memory ahead reads more, as the compiled scan does. torch's
product of float32 was seen at two fifths of what an AMD core multiplies. So both are also tried in C, where there is a
compiler.
"""

import ctypes
import operator
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, reduce
from pathlib import Path
from typing import Any

from measure import interleaved

TRIES = 7
AHEAD_BYTES = (4096, 16384, 65536)
SOURCE = Path(__file__).with_suffix(".c")
ROUNDS = 1 << 22


@cache
def _compiled() -> ctypes.CDLL | None:
    """The loops of floors.c, None where nothing compiles them."""
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "floors.so"
        command = [compiler, "-O3", "-march=native", "-shared", "-fPIC", "-o", str(made), str(SOURCE)]
        if subprocess.run(command, capture_output=True).returncode:
            return None
        loops = ctypes.CDLL(str(made))
    loops.read_all.argtypes, loops.read_all.restype = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64], ctypes.c_uint64
    for kind in ("float32", "bfloat16"):
        multiply = getattr(loops, f"multiply_{kind}")
        multiply.argtypes = [ctypes.c_float, ctypes.c_int64, ctypes.POINTER(ctypes.c_float)]
        multiply.restype = ctypes.c_int64
    return loops


def _loops() -> ctypes.CDLL:
    loops = _compiled()
    if loops is None:
        raise RuntimeError("no C compiler made the loops of floors.c; put `cc` on the PATH, or time a plain sum")
    return loops


def _threaded(threads: int, part: Callable[[int], Any]) -> list[Any]:
    """What `part` returned for each number below `threads`, one thread each."""
    found: list[Any] = [None] * threads

    def keep(number: int) -> None:
        found[number] = part(number)

    others = [threading.Thread(target=keep, args=(number,)) for number in range(1, threads)]
    [thread.start() for thread in others]
    keep(0)
    [thread.join() for thread in others]
    return found


def read_ahead(address: int, num_bytes: int, ahead: int, threads: int) -> int:
    """The exclusive or of all eight-byte words there, each thread over a stretch of its own. `num_bytes` is a multiple
    of 256 times `threads`, and `address` of 64. Raises RuntimeError where no compiler made the loop."""
    read, stretch = _loops().read_all, num_bytes // threads
    parts = _threaded(threads, lambda number: read(address + number * stretch, stretch, ahead))
    return reduce(operator.xor, parts)


def multiply(kind: str, share: float, rounds: int, threads: int) -> tuple[int, list[float]]:
    """Operations done in registers alone, 0 where the processor has none of `kind`, and each thread's total.

    A total is that of 16 sums a register, 0 at first in the first register, `share` in the next and so on, each moved
    towards 1 by `share` of what is left (float32), or given 2 `share` (bfloat16), `rounds` times. Raises RuntimeError
    where no compiler made the loop."""
    loop, totals = getattr(_loops(), f"multiply_{kind}"), [ctypes.c_float() for _ in range(threads)]
    done = _threaded(threads, lambda number: loop(share, rounds, ctypes.byref(totals[number])))
    return sum(done), [total.value for total in totals]


def read_bandwidth(threads: int, num_bytes: int = 1 << 31) -> float:
    """Bytes a second that `threads` read from memory: the best of a plain sum and of reads that ask ahead."""
    import torch

    with _on(threads):
        data = torch.ones(num_bytes // 4)
        ways: dict[str, Callable[[], Any]] = {"sum": data.sum}
        if _compiled() is not None:
            for ahead in AHEAD_BYTES:
                ways[f"{ahead} ahead"] = lambda ahead=ahead: read_ahead(data.data_ptr(), num_bytes, ahead, threads)
        return num_bytes / min(min(seconds) for seconds in interleaved(ways, rounds=TRIES).values())


def matrix_rate(threads: int, size: int = 3072, kind: str = "float32") -> float:
    """Floating-point operations a second of `kind` on `threads`: the best of a square matrix product by torch, which
    has tiles where there are any, and of products in registers, which only tiles pass."""
    import torch

    with _on(threads):
        a, b = (torch.ones(size, size, dtype=getattr(torch, kind)) for _ in range(2))
        ways: dict[str, Callable[[], Any]] = {"product": lambda: a @ b}
        operations = {"product": 2.0 * size**3}
        if _compiled() is not None:
            operations["registers"] = float(multiply(kind, 0.0, ROUNDS, threads)[0])
            ways["registers"] = lambda: multiply(kind, 0.0, ROUNDS, threads)
        found = interleaved(ways, rounds=TRIES)
        return max(operations[way] / min(seconds) for way, seconds in found.items())


def has_bfloat16() -> bool:
    """Whether this processor has products of bfloat16, in tiles (AMX) or in vectors."""
    told = Path("/proc/cpuinfo")
    return told.exists() and not {"amx_bf16", "avx512_bf16"}.isdisjoint(told.read_text().split())


@contextmanager
def _on(threads: int) -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
