"""Read open shards again at a bounded rate, withdraw those whose bytes have changed, and open repaired ones again.

A shard's files, its words' among them, are compared with their digests when they are opened, and mapped after that:
what overwrites them later changes answers. The scrubber reads the very files that are mapped, over and over; a shard
whose file has other bytes is damaged from then on, so the next answers are without it, and say so: all answers, or
those by words. Searches that are under way end with it.

A damaged shard is tried again after a pause that doubles: one that was repaired in its place answers again.
"""

import hashlib
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager
from time import monotonic

from mvr_ray.distributed.periodic import run_periodically
from mvr_ray.distributed.searching.searcher import Key, ShardSearcher
from mvr_ray.store.files import forget_sha256_of

log = logging.getLogger(__name__)

LOOK_S = 1.0
PIECE_BYTES = 1 << 20
FIRST_RETRY_S = 5.0
LONGEST_RETRY_S = 300.0


class Scrubber:
    """Looks after the shards of one searcher. Not safe to use from several threads."""

    def __init__(self, searcher: ShardSearcher, bytes_s: int) -> None:
        """`bytes_s`: how much is read each second; 0: nothing."""
        self.searcher = searcher
        self.bytes_s = bytes_s
        self._reading = self._read_all()
        self._pauses: dict[Key, tuple[float, float]] = {}

    def running(self) -> AbstractContextManager[None]:
        """Looks every second, in a thread, until the block ends."""

        def look() -> float:
            self.look(monotonic())
            return LOOK_S

        return run_periodically(look, LOOK_S, "mvr-scrubber")

    def look(self, now_s: float) -> None:
        """Read a second's worth of what is open, and try what is damaged and due."""
        budget = int(self.bytes_s * LOOK_S)
        while budget > 0:
            num_bytes = next(self._reading, 0)
            if not num_bytes:  # all was read; the next look begins anew
                self._reading = self._read_all()
                break
            budget -= num_bytes
        self._retry(now_s)

    def _read_all(self) -> Iterator[int]:
        """Read every file of every open shard once; yields the bytes of each piece."""
        for key, files in self.searcher.open_files():
            for file in files:
                digest, start, problem = hashlib.sha256(), 0, ""
                try:
                    while piece := file.handle.read_at(PIECE_BYTES, start):
                        digest.update(piece)
                        start += len(piece)
                        yield len(piece)
                except OSError as error:
                    problem = f"cannot be read ({error})"
                if not problem and digest.hexdigest() != file.entry.sha256:
                    problem = "was changed while it was open"
                if problem:
                    reason = f"{file.path} {problem}; repair it: mvr-ray versions CONFIG repair"
                    log.error("shard withdrawn: %s", reason)
                    forget_sha256_of(file.path)
                    self.searcher.withdraw(key, files, reason)
                    break

    def _retry(self, now_s: float) -> None:
        damaged = self.searcher.damaged_keys()
        pauses = {key: self._pauses.get(key, (now_s + FIRST_RETRY_S, FIRST_RETRY_S)) for key in damaged}
        for key, (due_s, pause_s) in pauses.items():
            if now_s >= due_s and not self.searcher.reopen(key):
                pause_s = min(2 * pause_s, LONGEST_RETRY_S)
                pauses[key] = now_s + pause_s, pause_s
        self._pauses = pauses
