"""Tests of the memory check for a version beside the live one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mvr_ray.core import container
from mvr_ray.core.searching.native import num_cores
from mvr_ray.distributed.cluster.session import doctor
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
        require_memory("it", [own for *_, own in searchers], usages)


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


def test_a_container_has_no_more_than_its_limits(tmp_path, monkeypatch):
    monkeypatch.setattr(container, "CGROUP", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64))
    for files, cores, is_enough in (
        ({}, 64, True),
        ({"cpu.max": "max 100000", "memory.max": "max", "memory.current": "5"}, 64, True),
        ({"cpu.max": "250000 100000", "memory.max": f"{2 << 30}"}, 3, False),
        ({"cpu.max": "50000 100000", "memory.stat": "anon 1\ninactive_file 3"}, 1, False),
    ):
        for name, text in files.items():
            (tmp_path / name).write_text(f"{text}\n")
        checks = {check.name: check for check in doctor()}
        assert num_cores() == cores and checks["processors"].detail.startswith(f"{cores} cores; ")
        assert checks["memory"].ok == is_enough
    assert 0 < free_bytes() <= (2 << 30) - 5 + 3


MANY_SHARDS = """
import resource, sys
from pathlib import Path
import built_index
from mvr_ray.distributed.searching.searcher import LocalSearchers, SearcherTask
from mvr_ray.errors import ResourceError

root, soft = Path(sys.argv[1]), int(sys.argv[2])
hard = int(sys.argv[3]) if len(sys.argv) > 3 else resource.getrlimit(resource.RLIMIT_NOFILE)[1]
built_index.SHARDS = 40
version = built_index.build(root)
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
searchers = LocalSearchers(SearcherTask(str(root), version))
try:
    searchers.ready(version)
    print(len(searchers.searcher.health()), "shards are open")
except ResourceError as error:
    print(error)
"""


@pytest.fixture
def open_many_shards(tmp_path: Path):
    """Opens 40 shards in a process whose limit of open files is low; returns what it prints."""

    def run(*limits: int) -> str:
        folders = [str(path) for path in sys.path if path]
        tests = Path(__file__).parents[1]
        path = os.pathsep.join([str(tests), str(tests / "serving"), *folders])
        words = [sys.executable, "-c", MANY_SHARDS, str(tmp_path), *map(str, limits)]
        process = subprocess.run(
            words, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False
        )
        return process.stdout.strip() or process.stderr

    return run


def test_an_index_of_more_shards_than_the_soft_limit_has_files_is_opened(open_many_shards):
    assert open_many_shards(40) == "40 shards are open"


@pytest.mark.parametrize("limit", [40, 41, 42])
def test_too_many_open_files_are_refused_with_their_number_and_the_cure(open_many_shards, limit):
    message = open_many_shards(limit, limit)
    assert message.startswith("shard ") and message.endswith(
        f" of index 'library' version 1 not opened: too many open files, of which this process may have {limit}; raise "
        f"the limit (ulimit -n), use more searchers, or make fewer shards (mvr-ray reshard CONFIG shards=N)"
    )
