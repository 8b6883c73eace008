"""Measure how old the changes are that a server does not answer from yet.

    a change      a file of `follow.source`; without one, the corpus that was prepared or updated last
    its time      when the file was changed last; when the corpus was made
    is answered   the corpus of the version that answers has dealt with the file, or is that corpus

Times are those that source and store tell, looked up in a thread of its own; ages are counted when asked for. It needs
no follower that lives: where one has died, the oldest change grows older.
"""

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

from mvr_ray.config import FollowConfig
from mvr_ray.distributed.periodic import run_periodically
from mvr_ray.errors import MvrRayError
from mvr_ray.serving.schemas import Freshness
from mvr_ray.store import paths
from mvr_ray.store.change_files import Backlog, list_change_files
from mvr_ray.store.corpus import Corpus
from mvr_ray.store.files import Store
from mvr_ray.store.manifest import Manifest

log = logging.getLogger(__name__)

LOOK_S = 5.0
"""At least so long is waited between two looks."""


class ChangeTimes(NamedTuple):
    """Unix times of changes; `unanswered` are those that no answer knows yet."""

    unanswered: list[float]
    newest_answered: float
    num_waiting: int


class FreshnessMonitor:
    """Looks at a store and at the source that is followed. `live_version` gives the version that answers."""

    def __init__(self, store: Store, cfg: FollowConfig, live_version: Callable[[], Manifest]) -> None:
        self.store = store
        self.source = None if cfg.source is None else Store(cfg.source)
        self.every_s = max(LOOK_S, cfg.poll_s)
        self.live_version = live_version
        self._times: ChangeTimes | None = None

    def running(self) -> AbstractContextManager[None]:
        """Looks at once and then every few seconds, in a thread, until the block ends."""

        def look() -> float:
            self.look()
            return self.every_s

        return run_periodically(look, 0.0, "mvr-freshness")

    def look(self) -> None:
        try:
            self._times = self._read_times(self.live_version())
        except MvrRayError as error:
            log.warning("freshness not measured: %s", error)

    def measure(self) -> Freshness | None:
        """Ages as of now; None before the first look."""
        if self._times is None:
            return None
        unanswered, newest_answered, num_waiting = self._times
        now = time.time()
        return Freshness(
            oldest_change_s=max((now - changed_s for changed_s in unanswered), default=0.0),
            newest_passage_s=max(now - newest_answered, 0.0),
            waiting_files=num_waiting,
        )

    def _read_times(self, version: Manifest) -> ChangeTimes:
        own = Corpus.open(self.store, version.corpus, version.corpus_digest).info
        last_corpus = Corpus.open(self.store, version.corpus)
        last = last_corpus.info
        done = own.change_files[-1].name if own.change_files else ""
        unanswered = {file.name: file.changed_s for file in last.change_files if file.name > done and not file.problem}
        if self.source is not None:
            left_out = {file.name for file in last.change_files if file.problem}
            waiting = Backlog.of(list_change_files(self.source), own.change_files).waiting
            unanswered |= {file.name: file.changed_s for file in waiting if file.name not in left_out}
        times = list(unanswered.values())
        if not times and last.digest != own.digest:
            times = [self._made_at(paths.corpus_publication(version.corpus, last_corpus.number))]
        applied = [file.changed_s for file in own.change_files if not file.problem]
        described = paths.corpus_version(version.corpus, version.corpus_digest)
        newest = max(applied, default=0.0) or self._made_at(described)
        return ChangeTimes(times, newest, len(unanswered))

    def _made_at(self, path: str) -> float:
        return time.time() - self.store.age_s(path)
