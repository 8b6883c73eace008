"""Checks which of Faiss's runs exact search is compared with."""

import pytest
import search
from measure import Part

FAISS = "Faiss, 4x"


def part_of(one_thread_s: list[float], two_threads_s: list[float]) -> Part:
    part = Part("search", "Search", "queries")
    part.add({f"1 thread, batch 1, {FAISS}": one_thread_s, f"2 threads, batch 1, {FAISS}": two_threads_s}, 1)
    part.add({"2 threads, batch 1, fp32": [0.5, 1.0, 2.0]}, 1)
    return part


def test_two_threads_are_compared_with_the_faster_of_one_and_two_threads_of_faiss():
    slower = search.against_faiss(part_of([3.0, 2.0, 1.0], [4.0, 4.0, 4.0]), "", 2, 1, FAISS, 1.0, "why")
    assert slower.what == f"2 threads, batch 1: fp32 against {FAISS}, on one thread"
    assert slower.measured == pytest.approx(2) and slower.note == f"{search.NOTE_FASTER}. why"
    faster = search.against_faiss(part_of([3.0, 2.0, 1.0], [1.0, 1.5, 5.0]), "", 2, 1, FAISS, 1.0, "why")
    assert faster.what == f"2 threads, batch 1: fp32 against {FAISS}"
    assert faster.measured == pytest.approx(2) and faster.note == "why"


def test_batches_are_not_said_to_use_bfloat16_where_there_is_none():
    part = part_of([1.0] * 3, [1.0] * 3)
    for case in [f"{n}, batch {b}" for n in ("1 thread", "2 threads") for b in (1, 32, 256)]:
        kinds = (FAISS, "Faiss with BLAS, 4x", "fp32", "fp16", "int8 + re-scoring")
        part.add({f"{case}, {kind}": [1.0, 1.0, 1.0] for kind in kinds}, 1)
        part.floors[f"{case}, fp32"] = 0.5
    for rate, has_short in ((1.0, True), (search.NO_BFLOAT16, False)):
        part.facts["matrix rate of bfloat16, 1 thread(s), GFLOP/s"] = rate
        bars = search.bars(part)
        assert any("rounding rows to bfloat16" in bar.note for bar in bars) is has_short
        assert any("bfloat16 matrix rate" in bar.what for bar in bars) is has_short
