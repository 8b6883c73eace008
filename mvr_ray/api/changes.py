"""Changes an index: updates its last corpus by upserts and deletions, and publishes a version of it."""

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from mvr_ray.api.run_settings import with_settings
from mvr_ray.config import RunConfig
from mvr_ray.errors import ConfigError, DataError, NoTokensError, PublishConflictError, StagingError, count_noun
from mvr_ray.store import manifest as manifests
from mvr_ray.store.change_records import ChangeRecord
from mvr_ray.store.changes import Changes
from mvr_ray.store.corpus import Corpus
from mvr_ray.store.files import Store
from mvr_ray.store.manifest import Manifest, is_rolled_back
from mvr_ray.store.update import UpdateReport, parent_corpus, update_by_records
from mvr_ray.types import Passage, Progress

if TYPE_CHECKING:
    from mvr_ray.distributed.indexing.external_vectors import ExternalVectors

T = TypeVar("T")
MAX_PUBLISH_TRIES = 20
"""Each that fails means that another process has published a change."""


def publish_changes(
    run: RunConfig,
    changes: Sequence[ChangeRecord] | Path,
    progress: Progress,
    vectors: str | None,
    *,
    has_run_file: bool,
) -> Manifest:
    """Update the corpus by records of changes, or by a file of them, and publish a version of it, with the vectors of a
    file."""
    from mvr_ray.distributed.indexing.build_index import index  # imports torch

    store = Store(run.store.path)
    live = manifests.read(store, run.index.name)
    if not has_run_file:
        _require_settings(run, store, live)
    own = {"encoder": live.encoder_fingerprint, "precision": "auto", "vectors": vectors}
    run = with_settings(run, encoder={"name": live.encoder_name}, index=own)
    external = _external_vectors(run, store, live)
    check = partial(_require_vectors, external, store, live.index) if external else None

    def change_corpus() -> tuple[Corpus, UpdateReport]:
        before = Corpus.open(store, live.corpus)
        return before, update_by_records(run.prepare, store, changes, progress, index=live.index, check=check)

    def publish() -> Manifest:
        if is_rolled_back(Corpus.open(store, live.corpus), manifests.read(store, live.index)):
            change_corpus()  # once more: the roll back replaced the change, too
        return index(run, progress, keep_rollback=True)

    try:
        before, report = _with_retries(change_corpus)
    except DataError as error:
        raise DataError(f"{error}; nothing was changed. Correct the items and call the method again") from None
    try:
        return _with_retries(publish)  # alone: what others have changed since then stays
    except NoTokensError as error:
        last = Corpus.open(store, live.corpus)
        if (report.parent, report.digest, before.number + 1) == (before.digest, last.digest, last.number):
            before.publish(after=last.number)  # every later change would fail for this text
            error.args = (f"{error}; nothing was changed",)
        raise


def _with_retries(publish: Callable[[], T]) -> T:
    for _ in range(MAX_PUBLISH_TRIES - 1):
        with suppress(PublishConflictError, StagingError):  # a faster process removes what both staged
            return publish()
    return publish()


def _external_vectors(run: RunConfig, store: Store, live: Manifest) -> "ExternalVectors | None":
    """Read the vectors that another program made; None for an index that embeds texts. Raises ConfigError for
    vectors that are not needed."""
    from mvr_ray.distributed.encoders import embeds_texts
    from mvr_ray.distributed.indexing.external_vectors import resolve_vectors

    if run.index.vectors is None and embeds_texts(store, live):
        return None
    return resolve_vectors(run, manifests.live_corpus(store, live.index))[1]


def _require_vectors(
    external: "ExternalVectors", store: Store, index: str, parent: Corpus, changes: Changes[Passage]
) -> None:
    """Raise DataError if vectors of new texts are missing, or their passages; PublishConflictError if the last
    corpus has other texts that wait for their vectors."""
    live = manifests.live_corpus(store, index)
    external.require_passages(parent, changes.upserts.keys(), changes.deletions)
    if missing := external.without_vectors(changes.upserts.values(), live, parent):
        raise DataError(f"upsert: vectors= lacks those of {', '.join(missing[:5])}, whose texts are new")
    parts = zip(parent.info.parts, live.info.parts) if parent.num_shards == live.num_shards else ()
    same_shards = {shard for shard, (own, other) in enumerate(parts) if own.digest == other.digest}
    changed_shards = {*range(parent.num_shards)} - same_shards
    texts = (passage for shard in changed_shards for passage in parent.part(shard).passages())
    others = (text for text in texts if text.id not in changes.deletions)
    others = (text for text in others if changes.upserts.get(text.id, text)[:3] == text[:3])
    if waiting := external.without_vectors(others, live):
        raise PublishConflictError(
            f"{count_noun(len(waiting), 'passage')} of an earlier change, which no version has, without vectors: "
            f"{', '.join(waiting[:5])}; nothing was changed. Call again once that change is published, or give "
            f"these vectors in upsert, too, or delete the passages"
        )


def _require_settings(run: RunConfig, store: Store, live: Manifest) -> None:
    """Raise ConfigError if an earlier program did not record a setting that a change needs."""
    corpus, problem = parent_corpus(store, live.corpus, live.index), ""
    if "pruned_views" in live.metrics and "prune_views" not in live.metrics and run.index.prune_views is None:
        problem = "lacks views by an index.prune_views"
    if "chunk_words" not in corpus.info.counts and not run.prepare.chunk_words:
        first_id = next((passage.id for passage in corpus), "")
        if re.search(r"#\d+$", first_id):
            problem = f"has chunks such as {first_id!r} by a prepare.chunk_words"
    if problem:
        raise ConfigError(
            f"index {live.index!r} {problem} that the program which made the store did not record; nothing was "
            f"changed. Open the run file instead: Index.open('CONFIG.yaml')"
        )
