"""Reads open shards again at a bounded rate, withdraws those whose bytes have changed, and reopens repaired ones.

Opening compares a shard's files, including its lexical part, with their digests and maps them; bytes overwritten later
would change answers. The scrubber reads the mapped files repeatedly, and withdraws a shard with changed bytes: the next
answers (all, or those of hybrid searches) report it as damaged. Running searches still use it.

The scrubber tries to reopen a damaged shard after a pause that doubles, so a shard repaired in place answers again.
"""

import hashlib
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager
from time import monotonic

from mvr_ray.distributed.cluster.periodic import run_every
from mvr_ray.distributed.searching.searcher import Key, ShardSearcher
from mvr_ray.store.local_files import drop_cached_sha256_of

log = logging.getLogger(__name__)

INTERVAL_S = 1.0
PIECE_BYTES = 1 << 20
FIRST_RETRY_S = 5.0
MAX_RETRY_S = 300.0


class Scrubber:
    """Verifies the open shards of one searcher. Not safe to use from several threads."""

    def __init__(self, searcher: ShardSearcher, bytes_s: int) -> None:
        """`bytes_s` is the number of bytes to read each second; 0 reads none."""
        self.searcher = searcher
        self.bytes_s = bytes_s
        self._reading = _read_all(searcher)
        self._pauses: dict[Key, tuple[float, float]] = {}

    def run_periodically(self) -> AbstractContextManager[None]:
        """Scrub every second in a background thread until the block ends."""
        return run_every(INTERVAL_S, lambda: self.scrub(monotonic()), "mvr-scrubber")

    def scrub(self, now_s: float) -> None:
        """Read one second's share of the open files, and retry the damaged shards that are due."""
        budget = int(self.bytes_s * INTERVAL_S)
        while budget > 0:
            num_bytes = next(self._reading, 0)
            if not num_bytes:  # the pass is complete; the next call begins another one
                self._reading = _read_all(self.searcher)
                break
            budget -= num_bytes
        damaged_keys = self.searcher.damaged_keys()
        pauses = {key: self._pauses.get(key, (now_s + FIRST_RETRY_S, FIRST_RETRY_S)) for key in damaged_keys}
        for key, (due_s, pause_s) in pauses.items():
            if now_s >= due_s and not self.searcher.reopen(key):
                pause_s = min(2 * pause_s, MAX_RETRY_S)
                pauses[key] = now_s + pause_s, pause_s
        self._pauses = pauses


def _read_all(searcher: ShardSearcher) -> Iterator[int]:
    """Read every file of every open shard once; yield the number of bytes of each piece."""
    for key in list(searcher.open_files()):
        yield from _read_part(searcher, key)


def _read_part(searcher: ShardSearcher, key: Key) -> Iterator[int]:
    files = searcher.open_files().get(key, ())
    for file in files:
        digest, start, problem = hashlib.sha256(), 0, ""
        try:
            while piece := file.handle.read_at(PIECE_BYTES, start):
                digest.update(piece)
                start += len(piece)
                yield len(piece)
                if searcher.open_files().get(key) is not files:
                    return  # handles of a dropped part would keep the disk space of its deleted files
        except OSError as error:
            problem = f"cannot be read ({error})"
        if not problem and digest.hexdigest() != file.entry.sha256:
            problem = "was changed while it was open"
        if problem:
            reason = f"{file.path} {problem}; repair it: mvr-ray versions CONFIG repair"
            log.error("shard withdrawn: %s", reason)
            drop_cached_sha256_of(file.path)
            searcher.withdraw(key, files, reason)
            return
