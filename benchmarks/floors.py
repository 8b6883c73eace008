"""What this machine can do at most: bytes a second from memory, and floating-point operations a second.

A floor is the least time that these allow, so each is the best of several ways and of several tries. A plain sum reads
with what one core has in flight by itself; asking for memory ahead reads more, as the compiled scan does, so reading is
also tried with that, in C, where there is a compiler.
"""

import ctypes
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from measure import interleaved

TRIES = 7
AHEAD_BYTES = (4096, 16384, 65536)
READ_C = """
#include <stdint.h>
typedef uint64_t lanes __attribute__((vector_size(64)));
uint64_t read_all(const char *from, int64_t bytes, int64_t ahead) {
    lanes sum[4] = {0};
    for (int64_t at = 0; at + 256 <= bytes; at += 256) {
        const lanes *here = (const lanes *)(from + at);
        for (int part = 0; part < 4; part++) {
            __builtin_prefetch(from + at + ahead + 64 * part, 0, 2);
            sum[part] ^= here[part];
        }
    }
    lanes all = sum[0] ^ sum[1] ^ sum[2] ^ sum[3];
    uint64_t one = 0;
    for (int part = 0; part < 8; part++) one ^= all[part];
    return one;
}
"""


@cache
def _read_all() -> Any:
    """`read_all(address, bytes, ahead)`, None where nothing compiles it."""
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        source, made = Path(folder) / "read.c", Path(folder) / "read.so"
        source.write_text(READ_C)
        command = [compiler, "-O3", "-march=native", "-shared", "-fPIC", "-o", str(made), str(source)]
        if subprocess.run(command, capture_output=True).returncode:
            return None
        read = ctypes.CDLL(str(made)).read_all
    read.argtypes, read.restype = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64], ctypes.c_uint64
    return read


def read_ahead(address: int, num_bytes: int, ahead: int, threads: int) -> int:
    """The exclusive or of all eight-byte words there, each thread over a stretch of its own. `num_bytes` is a multiple
    of 256 times `threads`, and `address` of 64. Raises RuntimeError where no compiler made the loop."""
    read, stretch = _read_all(), num_bytes // threads
    if read is None:
        raise RuntimeError("no C compiler made the reading loop; put `cc` on the PATH, or time a plain sum")
    found = [0] * threads

    def part(number: int) -> None:
        found[number] = read(address + number * stretch, stretch, ahead)

    others = [threading.Thread(target=part, args=(number,)) for number in range(1, threads)]
    [thread.start() for thread in others]
    part(0)
    [thread.join() for thread in others]
    whole = 0
    for one in found:
        whole ^= one
    return whole


def read_bandwidth(threads: int, num_bytes: int = 1 << 31) -> float:
    """Bytes a second that `threads` read from memory: the best of a plain sum and of reads that ask ahead."""
    import torch

    with _on(threads):
        data = torch.ones(num_bytes // 4)
        ways: dict[str, Callable[[], Any]] = {"sum": data.sum}
        if _read_all() is not None:
            for ahead in AHEAD_BYTES:
                ways[f"{ahead} ahead"] = lambda ahead=ahead: read_ahead(data.data_ptr(), num_bytes, ahead, threads)
        return num_bytes / min(min(seconds) for seconds in interleaved(ways, rounds=TRIES).values())


def matrix_rate(threads: int, size: int = 3072, kind: str = "float32") -> float:
    """Floating-point operations a second of a square matrix product of `kind` on `threads`: the best of its tries."""
    import torch

    with _on(threads):
        a, b = (torch.ones(size, size, dtype=getattr(torch, kind)) for _ in range(2))
        return 2.0 * size**3 / min(interleaved({"product": lambda: a @ b}, rounds=TRIES)["product"])


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
