"""What the floors are measured with, and the line that growth is told by."""

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
        found = floors.read_ahead(there.ctypes.data, there.nbytes, ahead, threads)
        assert found == int(np.bitwise_xor.reduce(words))


def test_the_line_parts_what_always_passes_from_what_each_passage_takes():
    sizes = np.array([10_000, 30_000, 100_000])
    assert line(sizes, 9.5 + 2e-5 * sizes) == pytest.approx((9.5, 2e-5))
    assert line(sizes, 2e-5 * sizes - 0.05) == pytest.approx((0, 1.94e-5), rel=0.02)
    assert line(sizes, [3.0, 2.0, 1.0]) == pytest.approx((2, 0))
