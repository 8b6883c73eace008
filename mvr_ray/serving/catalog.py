"""Lists, publishes and rolls back the versions of one index.

Reads manifests. Rolling back publishes, and so does an offer, when its files are whole; of two who publish on the same
version one wins and the other is told.
"""

import dataclasses
from typing import Any

from mvr_ray.serving.manifest_payload import PublishRequest, manifest_from_payload
from mvr_ray.serving.publish_jobs import PublishJobs
from mvr_ray.serving.schemas import RequestError, ShardContent, VersionDetail, VersionInfo
from mvr_ray.store import manifest
from mvr_ray.store.files import Store
from mvr_ray.versions import version_line


class VersionCatalog:
    """The versions of `index` in a store."""

    def __init__(self, store: Store, index: str) -> None:
        self.store = store
        self.index = index
        self._publish_jobs = PublishJobs(store, index)

    def all(self) -> list[VersionInfo]:
        """Every version, ascending; the last is live."""
        numbers = manifest.list_versions(self.store, self.index)
        lines = [version_line(manifest.read(self.store, self.index, n), n == numbers[-1]) for n in numbers]
        return [VersionInfo(**line._asdict()) for line in lines]

    def one(self, version: int) -> VersionDetail:
        """Raises RequestError (404) for a version that is not there."""
        live = self._known(version)
        described = manifest.read(self.store, self.index, version)
        told: dict[str, Any] = version_line(described, version == live)._asdict()
        shards = [
            ShardContent(
                shard=entry.shard,
                digest=entry.digest,
                passages=entry.num_passages,
                vectors=entry.num_vectors,
                bytes=entry.num_bytes,
            )
            for entry in described.shards
        ]
        return VersionDetail(
            **told,
            similarity=described.similarity,
            num_views=described.num_views,
            dimension=described.dimension,
            dtype=described.dtype,
            corpus=described.corpus,
            index_params=described.index_params,
            recall=described.recall,
            metrics=described.metrics,
            dirty_share=described.dirty_share,
            shard_list=shards,
        )

    def publish(self, request: PublishRequest, timeout_s: float) -> VersionInfo:
        """Publish a manifest whose files are in the store, or give the version that it is already.

        Raises RequestError (422 where something is not what it says, 503 while files are read still),
        PublishConflictError where its parent is not the newest version.
        """
        described = manifest_from_payload(request, self.index)
        if request.parent is not None:
            described = dataclasses.replace(described, parent=request.parent)
        published = self._publish_jobs.publish(described, timeout_s)
        live = published.version == manifest.latest_version(self.store, self.index)
        return VersionInfo(**version_line(published, live)._asdict())

    def rollback(self, version: int) -> VersionInfo:
        """Publish that version's content as a new version, which is then live.

        Raises RequestError (404) for a version that is not there, PublishConflictError if another was first.
        """
        self._known(version)
        published = manifest.rollback(self.store, self.index, version)
        return VersionInfo(**version_line(published, live=True)._asdict())

    def _known(self, version: int) -> int:
        """The live version's number, where `version` is there."""
        numbers = manifest.list_versions(self.store, self.index)
        if version not in numbers:
            shown = f"{version}" if abs(version) < 10**12 else "of that number"
            have = f"there are {', '.join(map(str, numbers[-20:]))}" if numbers else "there is none yet"
            message = f"index {self.index!r} has no version {shown}"
            raise RequestError(404, "unknown_version", "n", message, f"{have}; see GET /v1/versions")
        return numbers[-1]
