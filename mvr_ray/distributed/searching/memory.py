"""Checks that a version fits into memory beside the live one, from the manifest's bytes, before a file is read.

    needed on a searcher = bytes of the version's shards there that it does not hold yet

Files of a flat index are mapped, others are loaded; both are counted whole, so this is an upper bound.
"""

import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from mvr_ray.errors import InsufficientMemoryError

_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")


class MemoryUsage(NamedTuple):
    """What a searcher has: its machine, bytes free there, and the bytes of each shard that it holds, by key."""

    node: str
    free_bytes: int
    held: dict[str, int]


def require_memory(
    what: str, shards: Sequence[Mapping[str, int]], usages: Sequence[MemoryUsage], limit_bytes: int = 0
) -> int:
    """Bytes to open so that each searcher holds its `shards` (bytes by key); `usages` are the searchers', in order.

    `limit_bytes` bounds what one searcher may hold; 0: searchers of one machine share what is free there. Raises
    InsufficientMemoryError with the bytes needed and the bytes that there are.
    """
    needed: dict[str, int] = {}
    for wanted, room in zip(shards, usages, strict=True):
        added = sum(num_bytes for key, num_bytes in wanted.items() if key not in room.held)
        held = sum(room.held.values())
        if limit_bytes and held + added > limit_bytes:
            raise InsufficientMemoryError(
                f"{what} not opened: a searcher on {room.node} holds {held:,} bytes and needs {added:,} more, "
                f"{held + added:,} in all; resources.searcher_bytes allows {limit_bytes:,}. "
                f"Use more searchers, or raise it"
            )
        needed[room.node] = needed.get(room.node, 0) + added
    free = {room.node: room.free_bytes for room in usages}
    for node, num_bytes in needed.items():
        if not limit_bytes and num_bytes > free[node]:
            raise InsufficientMemoryError(
                f"{what} not opened: its new shards need {num_bytes:,} bytes on {node}, which has {free[node]:,} free. "
                f"Use more nodes, or stop the searchers first"
            )
    return sum(needed.values())


def free_bytes() -> int:
    """Memory that this process may still take: the machine's, or less where a container is held to less."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if _MEMINFO.is_file():
        lines = dict(line.split(":") for line in _MEMINFO.read_text().splitlines() if ":" in line)
        free = int(lines["MemAvailable"].split()[0]) * 1024
    limit, used = _number(_CGROUP / "memory.max"), _number(_CGROUP / "memory.current")
    return free if limit is None or used is None else min(free, max(limit - used + _cached_bytes(), 0))


def node_name() -> str:
    return platform.node() or "this machine"


def _cached_bytes() -> int:
    """File pages that the kernel gives back when memory is short."""
    path = _CGROUP / "memory.stat"
    if not path.is_file():
        return 0
    fields = dict(line.split() for line in path.read_text().splitlines())
    return int(fields.get("inactive_file", 0))


def _number(path: Path) -> int | None:
    """None where there is no such file, or no limit ("max")."""
    text = path.read_text().strip() if path.is_file() else ""
    return int(text) if text.isdigit() else None
