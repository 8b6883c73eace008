"""Measure the limits of this machine: bytes a second from memory, and floating-point operations a second.

A floor is the least time that these allow, so each rate is the best of several methods and tries. A plain sum reads
only the cache lines that one core keeps in flight; software prefetching, as in the compiled scan, reads more. torch's
product of float32 reached two fifths of an AMD core's rate. So both are also measured in C, if there is a compiler.
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

from measure import interleave

TRIES = 7
AHEAD_BYTES = (4096, 16384, 65536)
SOURCE = Path(__file__).with_suffix(".c")
ROUNDS = 1 << 22


@cache
def _load_loops() -> ctypes.CDLL | None:
    """Load the loops of floors.c; None without a compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "floors.so"
        command = [compiler, "-O3", "-march=native", "-shared", "-fPIC", "-o", str(library), str(SOURCE)]
        if subprocess.run(command, capture_output=True).returncode:
            return None
        loops = ctypes.CDLL(str(library))
    loops.read_all.argtypes, loops.read_all.restype = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64], ctypes.c_uint64
    for kind in ("float32", "bfloat16"):
        multiply = getattr(loops, f"multiply_{kind}")
        multiply.argtypes = [ctypes.c_float, ctypes.c_int64, ctypes.POINTER(ctypes.c_float)]
        multiply.restype = ctypes.c_int64
    return loops


def _loops() -> ctypes.CDLL:
    loops = _load_loops()
    if loops is None:
        raise RuntimeError("no C compiler made the loops of floors.c; put `cc` on the PATH, or time a plain sum")
    return loops


def _run_threads(threads: int, part: Callable[[int], Any]) -> list[Any]:
    """Run `part` for each number below `threads`, one thread each, and return the results."""
    results: list[Any] = [None] * threads

    def keep(number: int) -> None:
        results[number] = part(number)

    others = [threading.Thread(target=keep, args=(number,)) for number in range(1, threads)]
    [thread.start() for thread in others]
    keep(0)
    [thread.join() for thread in others]
    return results


def read_ahead(address: int, num_bytes: int, ahead: int, threads: int) -> int:
    """Return the exclusive or of all eight-byte words at `address`, each thread over a range of its own. `num_bytes` is
    a multiple of 256 times `threads`, and `address` of 64. Raises RuntimeError if the loop is not compiled."""
    read, stretch = _loops().read_all, num_bytes // threads
    parts = _run_threads(threads, lambda number: read(address + number * stretch, stretch, ahead))
    return reduce(operator.xor, parts)


def multiply(kind: str, share: float, rounds: int, threads: int) -> tuple[int, list[float]]:
    """Count operations in registers alone, 0 if the processor has none of `kind`, and return each thread's total.

    A total is that of 16 sums a register, 0 at first in the first register, `share` in the next and so on, each moved
    towards 1 by `share` of the rest (float32), or increased by 2 `share` (bfloat16), `rounds` times. Raises
    RuntimeError if the loop is not compiled."""
    loop, totals = getattr(_loops(), f"multiply_{kind}"), [ctypes.c_float() for _ in range(threads)]
    operations = _run_threads(threads, lambda number: loop(share, rounds, ctypes.byref(totals[number])))
    return sum(operations), [total.value for total in totals]


def read_bandwidth(threads: int, num_bytes: int = 1 << 31) -> float:
    """Measure bytes a second that `threads` read from memory: the best of a plain sum and of prefetching reads."""
    import torch

    with _on(threads):
        data = torch.ones(num_bytes // 4)
        ways: dict[str, Callable[[], Any]] = {"sum": data.sum}
        if _load_loops() is not None:
            for ahead in AHEAD_BYTES:
                ways[f"{ahead} ahead"] = lambda ahead=ahead: read_ahead(data.data_ptr(), num_bytes, ahead, threads)
        return num_bytes / min(min(seconds) for seconds in interleave(ways, rounds=TRIES).values())


def matrix_rate(threads: int, size: int = 3072, kind: str = "float32") -> float:
    """Measure floating-point operations a second of `kind` on `threads`: the best of a square matrix product by torch,
    which uses tiles if there are any, and of products in registers, which only tiles exceed."""
    import torch

    with _on(threads):
        a, b = (torch.ones(size, size, dtype=getattr(torch, kind)) for _ in range(2))
        ways: dict[str, Callable[[], Any]] = {"product": lambda: a @ b}
        operations = {"product": 2.0 * size**3}
        if _load_loops() is not None:
            operations["registers"] = float(multiply(kind, 0.0, ROUNDS, threads)[0])
            ways["registers"] = lambda: multiply(kind, 0.0, ROUNDS, threads)
        samples = interleave(ways, rounds=TRIES)
        return max(operations[way] / min(seconds) for way, seconds in samples.items())


def has_bfloat16() -> bool:
    """Whether this processor has products of bfloat16, in tiles (AMX) or in vectors."""
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.exists() and not {"amx_bf16", "avx512_bf16"}.isdisjoint(cpuinfo.read_text().split())


def one_thread_rates(num_bytes: int = 1 << 30, size: int = 3072) -> dict[str, float]:
    """Measure what one thread reads and multiplies, which tells machines of one name apart: ten seconds or so."""
    rates = {"GB/s": read_bandwidth(1, num_bytes) / 1e9, "GFLOP/s in fp32": matrix_rate(1, size) / 1e9}
    if has_bfloat16():
        rates["in bfloat16"] = matrix_rate(1, size, "bfloat16") / 1e9
    return rates


@contextmanager
def _on(threads: int) -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
