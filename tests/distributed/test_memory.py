"""Tests of the memory check for a version beside the live one."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mvr_ray.distributed.searching.memory import MemoryUsage, free_bytes, require_memory
from mvr_ray.errors import ResourceError

SIZES = {"a": 100, "b": 70, "c": 30, "d": 1}
SHARDS = st.sets(st.sampled_from(sorted(SIZES))).map(lambda names: {name: SIZES[name] for name in sorted(names)})
SEARCHER = st.tuples(st.sampled_from(["left", "right"]), SHARDS, SHARDS)


@given(st.lists(SEARCHER, min_size=1, max_size=5), st.integers(0, 400), st.integers(0, 400))
def test_searchers_of_one_machine_share_what_is_free_there(searchers, left_bytes, right_bytes):
    free = {"left": left_bytes, "right": right_bytes}
    usages = [MemoryUsage(node, free[node], open_shards) for node, open_shards, _ in searchers]
    added_bytes = dict.fromkeys(free, 0)
    for node, open_shards, own in searchers:
        added_bytes[node] += sum(SIZES[name] for name in own.keys() - open_shards.keys())
    short = [node for node in free if added_bytes[node] > free[node]]
    if short:
        numbers = "|".join(
            f"need {added_bytes[node]:,} bytes on {node}, which has {free[node]:,} free" for node in short
        )
        with pytest.raises(ResourceError, match=rf"^it not opened: its new shards ({numbers})\. "):
            require_memory("it", [own for *_, own in searchers], usages)
    else:
        assert require_memory("it", [own for *_, own in searchers], usages) == sum(added_bytes.values())


@given(SHARDS, SHARDS, st.integers(1, 400))
def test_a_searcher_holds_no_more_than_its_limit(present_files, own, limit):
    both = sum({**present_files, **own}.values())
    if both > limit:
        with pytest.raises(ResourceError, match=rf"{both:,} in all; resources.searcher_bytes allows {limit:,}"):
            require_memory("it", [own], [MemoryUsage("here", 0, present_files)], limit)
    else:
        require_memory("it", [own], [MemoryUsage("here", 0, present_files)], limit)


def test_free_memory_is_some_of_the_machines():
    assert 0 < free_bytes() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
