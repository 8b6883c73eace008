"""Holds versions of an index on one searcher in this process, without Ray; defines the protocol of all holders."""

from typing import Protocol

from mvr_ray.distributed.searching.memory import require_memory
from mvr_ray.distributed.searching.searcher import (
    ExactFleet,
    Fleet,
    LocalFleet,
    SearcherTask,
    ShardSearcher,
    assignment_bytes,
)
from mvr_ray.store.manifest import Manifest
from mvr_ray.types import FleetCounts


class Searchers(Protocol):
    """Holders of versions of one index."""

    def fleet(self, manifest: Manifest) -> ExactFleet:
        """The fleet of a version; a search opens the shards that are not open."""
        ...

    def load(self, manifest: Manifest) -> Fleet:
        """Open all shards of a version, probe them, and return its fleet.

        Raises ResourceError for too little memory or a dead searcher, StorageError for a damaged file; then nothing of
        the version stays open.
        """
        ...

    def drop(self, version: int) -> None: ...

    def counts(self) -> FleetCounts: ...

    def stop(self) -> None: ...


class LocalSearchers:
    """Holds versions of an index on one searcher in this process."""

    def __init__(self, task: SearcherTask, limit_bytes: int = 0) -> None:
        self.task = task
        self.limit_bytes = limit_bytes
        self.searcher = ShardSearcher(task)

    def fleet(self, manifest: Manifest) -> LocalFleet:
        shards = tuple(entry.shard for entry in manifest.shards)
        return LocalFleet(self.task._replace(manifest=manifest, shards=shards), self.searcher)

    def load(self, manifest: Manifest) -> LocalFleet:
        fleet = self.fleet(manifest)
        needs = assignment_bytes(manifest, fleet.task.shards)
        require_memory(version_name(manifest), [needs], [self.searcher.memory()], self.limit_bytes)
        try:
            fleet.ready()
            self.searcher.probe(manifest.version)
        except BaseException:  # nothing stays open, after Ctrl-C either
            self.drop(manifest.version)
            raise
        return fleet

    def drop(self, version: int) -> None:
        self.searcher.drop(version)

    def counts(self) -> FleetCounts:
        return FleetCounts()

    def stop(self) -> None:
        pass


def version_name(manifest: Manifest) -> str:
    return f"index {manifest.index!r} version {manifest.version}"
