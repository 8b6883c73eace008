"""Measure the age of the changes that the answers of a server do not include yet.

    a change      a file of `follow.source`; without one, the corpus that was prepared or updated last
    its time      when the file was changed last; when the corpus was published
    is answered   the corpus of the version that answers has processed the file, or is that corpus

A thread reads the times from source and store; ages are computed on request. No follower needs to run: if it has died,
the age of the oldest change grows.
"""

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import NamedTuple

from mvr_ray.config import FollowConfig
from mvr_ray.distributed.cluster.periodic import run_periodically
from mvr_ray.errors import MissingInputError, MvrRayError, StorageError
from mvr_ray.serving.schemas import Freshness
from mvr_ray.store import paths
from mvr_ray.store.change_files import Backlog, list_change_files
from mvr_ray.store.corpus import Corpus, publications
from mvr_ray.store.files import Store
from mvr_ray.store.manifest import Manifest

log = logging.getLogger(__name__)

MIN_PERIOD_S = 5.0
"""Minimum time between two updates."""


class ChangeTimes(NamedTuple):
    """Unix times of changes; `unanswered_times` are those that answers do not include yet."""

    unanswered_times: list[float]
    newest_answered: float
    num_waiting: int


class FreshnessMonitor:
    """Reads a store and the followed source. `live_version` returns the version that answers."""

    def __init__(self, store: Store, cfg: FollowConfig, live_version: Callable[[], Manifest]) -> None:
        self.store = store
        self.source = None if cfg.source is None else Store(cfg.source)
        self.every_s = max(MIN_PERIOD_S, cfg.poll_s)
        self.live_version = live_version
        self._times: ChangeTimes | None = None
        self._key: tuple[str, str, int] | None = None
        self._own: Corpus
        self._last: Corpus
        self._is_of_files = True

    def running(self) -> AbstractContextManager[None]:
        """Update at once and then every few seconds, in a thread, until the block ends."""
        return run_periodically(self.update, 0.0, "mvr-freshness")

    def update(self) -> float:
        """Read the times of changes; returns the seconds until the next update."""
        try:
            self._times = self._read_times(self.live_version())
        except MvrRayError as error:
            log.warning("freshness not measured: %s", error)
        return self.every_s

    def measure(self) -> Freshness | None:
        """Return the current ages; None before the first update."""
        if self._times is None:
            return None
        unanswered_times, newest_answered, num_waiting = self._times
        now = time.time()
        return Freshness(
            oldest_change_s=max(now - min(unanswered_times, default=now), 0.0),
            newest_passage_s=max(now - newest_answered, 0.0),
            waiting_files=num_waiting,
        )

    def _read_times(self, version: Manifest) -> ChangeTimes:
        name, digest = version.corpus, version.corpus_digest
        key = name, digest, max(publications(self.store, name), default=0)
        if key != self._key or not key[2]:  # a publication may describe the corpus of a digest anew
            self._own, self._last = Corpus.open(self.store, name, digest), Corpus.open(self.store, name)
            self._key = key
            self._is_of_files = _is_of_files(self._own)
        own, last = self._own.info, self._last.info
        last_name = own.change_files[-1].name if own.change_files else ""
        unanswered_files = {
            file.name: file.changed_s for file in last.change_files if file.name > last_name and not file.problem
        }
        if self.source is not None:
            left_out = {file.name for file in last.change_files if file.problem}
            waiting = Backlog.of(list_change_files(self.source), own.change_files).waiting
            unanswered_files |= {file.name: file.changed_s for file in waiting if file.name not in left_out}
        times = list(unanswered_files.values())
        if not times and last.digest != own.digest:
            times = [self._creation_time(paths.corpus_publication(name, self._last.number))]
        applied_times = [file.changed_s for file in own.change_files if not file.problem]
        if self._is_of_files and applied_times:
            return ChangeTimes(times, max(applied_times), len(unanswered_files))
        path = paths.corpus_version(name, digest)  # whose age every version over this corpus renews
        if last.digest == own.digest and self._last.number:
            path = paths.corpus_publication(name, self._last.number)
        return ChangeTimes(times, self._creation_time(path), len(unanswered_files))

    def _creation_time(self, path: str) -> float:
        return time.time() - self.store.age_s(path)


def _is_of_files(corpus: Corpus) -> bool:
    """Return whether change files made a corpus of the one before; True where that cannot be told, as where it was
    collected."""
    info = corpus.info
    if info.parent in ("", info.digest):
        return True
    with suppress(MissingInputError, StorageError):
        return Corpus.open(corpus.store, corpus.name, info.parent).info.change_files != info.change_files
    return True
