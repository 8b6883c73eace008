"""Checks from a manifest, before a file is read, that a version fits into memory beside the live one.

    needed on a searcher = bytes of the version's shards there that it does not hold yet

Files of a flat index are mapped, others are loaded; both count in full, so this is an upper bound.
"""

import os
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from mvr_ray.core.container import cgroup_text, memory_limit
from mvr_ray.errors import InsufficientMemoryError

_MEMINFO = Path("/proc/meminfo")


class MemoryUsage(NamedTuple):
    """A searcher's machine, the bytes free there, and the bytes of each shard that the searcher holds, by key."""

    node: str
    free_bytes: int
    held_bytes: dict[str, int]


def require_memory(
    what: str, shards: Sequence[Mapping[str, int]], usages: Sequence[MemoryUsage], limit_bytes: int = 0
) -> None:
    """Raise InsufficientMemoryError, with the bytes needed and available, unless each searcher can hold its `shards`
    (bytes by key); `usages` are in the same order.

    `limit_bytes` bounds the bytes of one searcher; 0: the searchers of one machine share its free memory.
    """
    bytes_by_node: Counter[str] = Counter()
    for own, usage in zip(shards, usages, strict=True):
        new_bytes = sum(num_bytes for key, num_bytes in own.items() if key not in usage.held_bytes)
        held_bytes = sum(usage.held_bytes.values())
        if limit_bytes and held_bytes + new_bytes > limit_bytes:
            raise InsufficientMemoryError(
                f"{what} not opened: a searcher on {usage.node} holds {held_bytes:,} bytes and needs {new_bytes:,} "
                f"more, {held_bytes + new_bytes:,} in all; resources.searcher_bytes allows {limit_bytes:,}. "
                f"Use more searchers, or raise it"
            )
        bytes_by_node[usage.node] += new_bytes
    for node, free, _ in usages:
        if not limit_bytes and (num_bytes := bytes_by_node[node]) > free:
            raise InsufficientMemoryError(
                f"{what} not opened: its new shards need {num_bytes:,} bytes on {node}, which has {free:,} free. "
                f"Use more nodes, or stop the searchers first"
            )


def free_bytes() -> int:
    """Return the memory available to this process: the machine's, or less under the limit of a container."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if _MEMINFO.is_file():
        lines = dict(line.split(":") for line in _MEMINFO.read_text().splitlines() if ":" in line)
        free = int(lines["MemAvailable"].split()[0]) * 1024
    limit, usage = memory_limit(), cgroup_text("memory.current")
    return free if limit is None or not usage else min(free, max(limit - int(usage) + _cached_bytes(), 0))


def node_name() -> str:
    return platform.node() or "this machine"


def _cached_bytes() -> int:
    """Return the bytes of file pages that the kernel can reclaim."""
    fields = dict(line.split() for line in cgroup_text("memory.stat").splitlines())
    return int(fields.get("inactive_file", 0))
