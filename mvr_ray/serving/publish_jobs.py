"""Publishes a manifest after reading every file that it names and comparing each with its digest.

    offer  ->  nothing wrong with its files?  ->  its parent is the newest version?  ->  published, whole and live

Reading an index takes longer than a request may. So it goes on when the request's time is over, and the same request
sent again waits for it, or gets what came of it: an offer that is published already is answered by its version, and
never published twice.
"""

import dataclasses
import logging
import threading
import time
from concurrent.futures import Future, wait

from mvr_ray.errors import MissingInputError, PublishConflictError, StorageError
from mvr_ray.serving.schemas import RequestError
from mvr_ray.store import manifest, paths
from mvr_ray.store.corpus import Corpus
from mvr_ray.store.delta import open_embeddings
from mvr_ray.store.files import Store
from mvr_ray.store.manifest import Manifest, ShardEntry

log = logging.getLogger(__name__)

ASK_AGAIN_S = 2
REMEMBERED_S = 60.0
"""What came of an offer is kept so long for the one who asks again; later it is read anew."""


class _Job:
    """One offer, and what comes of it."""

    def __init__(self, described: Manifest) -> None:
        self.described = described
        self.key = (described.content_digest(), described.parent)
        self.done: Future[Manifest] = Future()
        self.ended_s = 0.0
        self.shards = 0
        """Shards that were found whole so far."""

    def is_over(self) -> bool:
        return self.done.done() and time.monotonic() - self.ended_s > REMEMBERED_S


class PublishJobs:
    """Publishes to one index of a store, one offer at a time. Safe to use from several threads."""

    def __init__(self, store: Store, index: str) -> None:
        self.store = store
        self.index = index
        self._lock = threading.Lock()
        self._job: _Job | None = None

    def publish(self, described: Manifest, timeout_s: float) -> Manifest:
        """Make what is described the version after its parent, or give the version that it is already.

        Raises RequestError: 422 where a file, the corpus or the encoder is not what it says, 503 while files are read
        still. PublishConflictError where its parent is not the newest version.
        """
        if found := self._published(described):
            return found
        self._require_parent(described)
        job = self._begun(described)
        wait([job.done], timeout=max(timeout_s, 0.0))
        if not job.done.done():
            told = f"{job.shards} of {len(described.shards)} shards were found whole so far"
            raise _busy(f"the files of this version are being read; {told}", "send the same request again")
        with self._lock:
            if self._job is job:  # whoever sends it a third time wants it read again
                self._job = None
        return job.done.result()

    def _begun(self, described: Manifest) -> _Job:
        job = _Job(described)
        with self._lock:
            if self._job is not None and not self._job.is_over():
                if self._job.key == job.key:
                    return self._job
                if not self._job.done.done():
                    raise _busy("another version is being published here", "ask again when it is done")
            self._job = job
            threading.Thread(target=self._work, args=(job,), name="mvr-publish", daemon=True).start()
            return job

    def _work(self, job: _Job) -> None:
        try:
            published = self._checked_and_published(job)
        except BaseException as error:  # noqa: BLE001 - it is raised where the job is waited for
            job.ended_s = time.monotonic()
            job.done.set_exception(error)
        else:
            job.ended_s = time.monotonic()
            job.done.set_result(published)

    def _checked_and_published(self, job: _Job) -> Manifest:
        described = job.described
        for number, entry in enumerate(described.shards):
            self._check_shard(described, entry, f"manifest.shards.{number}")
            job.shards += 1
        for problem in manifest.verify(self.store, dataclasses.replace(described, shards=())).problems:
            raise not_whole("manifest.refined_queries", f"{problem.path} {problem.reason}")
        self._check_sources(described)
        try:
            published = manifest.publish(self.store, described)
        except PublishConflictError:
            if found := self._published(described):
                return found
            raise
        log.info("published by request: index=%s version=%d", self.index, published.version)
        return published

    def _check_shard(self, described: Manifest, entry: ShardEntry, field: str) -> None:
        folder = paths.shard_dir(self.index, entry.digest)
        if not self.store.exists(folder):
            raise not_whole(field, f"{folder} is missing")
        self.store.touch(folder)  # or a collection that runs meanwhile would take it for forgotten
        alone = dataclasses.replace(described, shards=(entry,), refined_queries={})
        for problem in manifest.verify(self.store, alone).problems:
            raise not_whole(field, f"{problem.path} {problem.reason}")
        try:
            held = open_embeddings(self.store.local_path(folder), entry.files)
        except StorageError as error:
            raise not_whole(field, str(error)) from None
        found = (held.dimension, held.num_passages, held.num_vectors)
        told = (described.dimension, entry.num_passages, entry.num_vectors)
        if found != told:
            says = "dimension {}, {} passages and {} views"
            raise not_whole(field, f"its embeddings have {says.format(*found)}, not {says.format(*told)}")

    def _check_sources(self, described: Manifest) -> None:
        """Texts are embedded with the version's encoder, and shown from its corpus: both must be in this store."""
        name, fingerprint = described.encoder_name, described.encoder_fingerprint
        if not self.store.exists(f"{paths.encoder_dir(name, fingerprint)}/{paths.ENCODER_JSON}"):
            message = f"encoder {name}/{fingerprint} is not in the store"
            raise RequestError(422, "no_encoder", "manifest.encoder_fingerprint", message, "copy its folder there, too")
        try:
            held = Corpus.open(self.store, described.corpus).digest
        except (MissingInputError, StorageError) as error:
            raise RequestError(422, "no_corpus", "manifest.corpus", str(error), "copy its folder there, too") from None
        if held != described.corpus_digest:
            message = f"corpus {described.corpus!r} of the store has digest {held}, not {described.corpus_digest}"
            raise RequestError(422, "no_corpus", "manifest.corpus_digest", message, "copy the right one there")

    def _published(self, described: Manifest) -> Manifest | None:
        """The version after the parent, where that is what is described: nobody heard that it was published."""
        number = described.parent + 1
        if number not in manifest.list_versions(self.store, self.index):
            return None
        after = manifest.read(self.store, self.index, number)
        return after if after.content_digest() == described.content_digest() else None

    def _require_parent(self, described: Manifest) -> None:
        live = manifest.latest_version(self.store, self.index)
        if live != described.parent:
            raise PublishConflictError(
                f"index {self.index!r} version {described.parent + 1} not published: version {live} is live, not "
                f"{described.parent}; look at it, then send the request with parent {live} if it shall follow that one"
            )


def not_whole(field: str, message: str) -> RequestError:
    hint = "copy the shard's folder into the store again, then send the same request"
    return RequestError(422, "not_whole", field, message, hint)


def _busy(message: str, hint: str) -> RequestError:
    return RequestError(503, "publishing", "", message, hint, {"retry-after": str(ASK_AGAIN_S)})
