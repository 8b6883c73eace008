"""Checks the loops that measure the floors of the machine, and the fitted line that shows growth."""

import floors
import numpy as np
import pytest
from measure import line


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_reading_ahead_reads_every_byte(threads):
    words = np.random.default_rng(0).integers(0, 2**63, 32 * 3 * 40, dtype=np.uint64)
    room = np.zeros(len(words) + 8, np.uint64)
    at = -room.ctypes.data % 64 // 8
    there = room[at : at + len(words)]
    there[:] = words
    for ahead in floors.AHEAD_BYTES:
        checksum = floors.read_ahead(there.ctypes.data, there.nbytes, ahead, threads)
        assert checksum == int(np.bitwise_xor.reduce(words))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("rounds", [1, 3, 1000])
def test_products_in_registers_are_done_as_often_as_is_counted(threads, rounds):
    share = 0.25
    remainder = {"float32": (1 - share) ** rounds, "bfloat16": 1.0}
    gain = {"float32": 1 - remainder["float32"], "bfloat16": 2 * share * rounds}
    for kind, of_one in (("float32", 2), ("bfloat16", 4)):
        operations, totals = floors.multiply(kind, share, rounds, threads)
        if kind == "bfloat16" and operations == 0:
            assert not floors.has_bfloat16()
            continue
        sums = operations / (threads * rounds * 16 * of_one)
        assert sums >= 5 and sums == int(sums)
        expected = sum(16 * (gain[kind] + remainder[kind] * share * number) for number in range(int(sums)))
        assert totals == pytest.approx([expected] * threads, rel=1e-4)


def test_the_line_parts_what_always_passes_from_what_each_passage_takes():
    sizes = np.array([10_000, 30_000, 100_000])
    assert line(sizes, 9.5 + 2e-5 * sizes) == pytest.approx((9.5, 2e-5))
    assert line(sizes, 2e-5 * sizes - 0.05) == pytest.approx((0, 1.94e-5), rel=0.02)
    assert line(sizes, [3.0, 2.0, 1.0]) == pytest.approx((2, 0))
