"""Reuse embeddings of earlier versions, so that no passage is encoded twice by the same encoder.

A passage's embedding depends on its title, its text and the encoder. An existing version of the same encoder, in any
index of the store, has the embedding of a passage with the same content: under the same id, or under another, as of a
renamed passage. One task a shard compares its part with the parts of earlier versions, newest first, and writes a plan
to the staging folder, which a resumed command reuses.

    base            an earlier shard at the same number of shards, whose file stays; changes are written beside it
    carried over    embeddings from other shards: of other indexes, or of a version over another number of shards
    rows            rows without embeddings in any version: these are encoded
    copies          of these, passages equal to an earlier one in any shard: they get its embedding

Views as encoded come from versions built by `index`, without pruning, and from reshards and rollbacks of them without
changed views. Where refinement has changed the live version and `index.keep_refinement` is set, its own views come
first.
"""

import hashlib
import logging
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mvr_ray.checksums import add_trailer, with_trailer
from mvr_ray.distributed.encode import BaseShard, EncodePlan, EncodeTask, staged_shards
from mvr_ray.distributed.reshard import sources as shards_before
from mvr_ray.distributed.shards import BUILD_CPUS, promised_recall
from mvr_ray.distributed.tasks import run_tasks
from mvr_ray.errors import MissingInputError, StorageError
from mvr_ray.store import manifest as manifests
from mvr_ray.store import paths
from mvr_ray.store.corpus import Corpus, shard_of
from mvr_ray.store.delta import open_embeddings
from mvr_ray.store.embeddings import BATCH_PASSAGES, BlockRow, EmbeddingShard, EmbeddingWriter, gather_rows
from mvr_ray.store.files import Store
from mvr_ray.store.manifest import Manifest, ShardEntry
from mvr_ray.store.parts import difference, find_contents
from mvr_ray.types import EmbeddingBlock, IntArray, Passage, Progress, no_progress

log = logging.getLogger(__name__)
CONTENT_BYTES = 16
"""Length of a content digest."""


class EmbeddedCorpus(NamedTuple):
    """A corpus, and the shards of an index that hold its views; `is_refined` if refinement has changed some.
    `index_params` are those of the version, `least_recall` its promised recall."""

    index: str
    corpus: str
    corpus_digest: str
    shards: tuple[ShardEntry, ...]
    index_params: Mapping[str, Any]
    least_recall: float | None
    is_refined: bool


def carry_over(task: EncodeTask, corpus: Corpus, shards: Sequence[int], progress: Progress = no_progress) -> None:
    """Plan these shards: embeddings to reuse, and rows to encode. Runs in the current Ray session, if any.

    Shards with a staged chunk or plan are skipped. Raises StorageError if refined views to keep are damaged.
    """
    store = Store(task.store)
    started_shards = staged_shards(task, "chunk-", "plan-")
    sources = embedded_corpora(store, task)
    open_shards = [shard for shard in shards if shard not in started_shards] if sources else []
    calls = [(task, shard, sources) for shard in open_shards]
    results = run_tasks(carry_shard, calls, "looking for embeddings of earlier versions", cpus=BUILD_CPUS)
    for count, _ in enumerate(results, 1):
        progress("look for embeddings of earlier versions, shards", count, len(open_shards))
    counts = count_passages(task, corpus, shards)
    total = counts["encoded"] + counts["carried_over"]
    log.info("carried over: index=%s passages=%d to_encode=%d", task.index, counts["carried_over"], counts["encoded"])
    if counts["carried_over"]:
        progress("carried over from earlier versions, passages", counts["carried_over"], total)


def find_copies(task: EncodeTask, corpus: Corpus, shards: Sequence[int], progress: Progress = no_progress) -> None:
    """Plan these shards so that each content among the passages to encode is encoded once. Follows `carry_over`.

    A shard with a chunk staged before such a plan is skipped.
    """
    store, started_shards = Store(task.store), staged_shards(task, "chunk-")
    plans = {shard: task.plan(store, shard) for shard in shards}
    open_shards = [shard for shard in shards if plans[shard].copies is None and shard not in started_shards]
    if not open_shards:
        return
    digests: dict[int, bytes] = {}
    results = run_tasks(digest_contents, [(task, shard) for shard in shards], "comparing passages", cpus=BUILD_CPUS)
    for count, (shard, own) in enumerate(results, 1):
        digests[shard] = own
        progress("look for equal passages, shards", count, len(shards))
    rows_of = {shard: plans[shard].rows_to_encode(corpus.info.parts[shard].num_passages) for shard in shards}
    starts = dict(zip(shards, np.cumsum([0, *(len(rows_of[shard]) for shard in shards)]).tolist()))
    original_of = _first_equal(np.frombuffer(b"".join(digests[shard] for shard in shards), np.uint64).reshape(-1, 2))
    copies_of: dict[int, dict[int, str]] = {shard: {} for shard in open_shards}
    for place, original in original_of.items():
        (shard, row), (number, original_row) = (_row_at(rows_of, starts, own) for own in (place, original))
        if shard in copies_of:
            copies_of[shard][row] = corpus.part(number).passages(original_row, original_row + 1)[0].id
    for shard, copies in copies_of.items():
        rows = [row for row in rows_of[shard] if row not in copies] if copies else plans[shard].rows
        store.write_bytes(
            task.plan_path(shard), with_trailer(plans[shard]._replace(rows=rows, copies=copies).to_json())
        )
    log.info("equal passages: index=%s copies=%d", task.index, sum(map(len, copies_of.values())))


def digest_contents(task: EncodeTask, shard: int) -> tuple[int, bytes]:
    """Return the shard, and the concatenated content digests of its passages to encode."""
    store = Store(task.store)
    part = Corpus.open(store, task.corpus, task.corpus_digest).part(shard)
    rows, table = task.plan(store, shard).rows_to_encode(len(part)), part.table(("title", "text"))
    digests: list[bytes] = []
    for start in range(0, len(rows), BATCH_PASSAGES):
        batch = table.take(list(rows[start : start + BATCH_PASSAGES]))
        for title, text in zip(*(column.to_pylist() for column in batch.columns)):
            content = f"{len(title)} {title}{text}".encode()
            digests.append(hashlib.blake2b(content, digest_size=CONTENT_BYTES).digest())
    return shard, b"".join(digests)


def _first_equal(digests_N2: IntArray) -> dict[int, int]:
    """Map each repeated row to the first row with an equal digest."""
    order_N = np.lexsort(digests_N2.T)  # stable
    is_later_N = np.zeros(len(order_N), bool)
    is_later_N[1:] = (digests_N2[order_N[1:]] == digests_N2[order_N[:-1]]).all(1)
    first_N = np.maximum.accumulate(np.where(is_later_N, 0, np.arange(len(order_N))))
    return dict(zip(order_N[is_later_N].tolist(), order_N[first_N[is_later_N]].tolist()))


def _row_at(rows_of: Mapping[int, Sequence[int]], starts: Mapping[int, int], place: int) -> tuple[int, int]:
    """The shard and the row of a position in the concatenated rows of all shards."""
    shards = list(starts)
    shard = shards[bisect_right(list(starts.values()), place) - 1]
    return shard, rows_of[shard][place - starts[shard]]


def count_passages(task: EncodeTask, corpus: Corpus, shards: Iterable[int]) -> dict[str, int]:
    """Count the passages of planned shards by action; `encoded` and `carried_over` add up to all of them."""
    counts = {"encoded": 0, "carried_over": 0, "deleted": 0, "unlearned": 0}
    for shard in shards:
        plan, total = task.plan(corpus.store, shard), corpus.info.parts[shard].num_passages
        num_encoded = len(plan.rows_to_encode(total))
        counts["encoded"] += num_encoded
        counts["carried_over"] += total - num_encoded
        counts["deleted"] += plan.num_deleted
        counts["unlearned"] += plan.num_unlearned
    return counts


def embedded_corpora(store: Store, task: EncodeTask) -> list[EmbeddedCorpus]:
    """Corpora that versions of the store embedded with the task's encoder: first the version with refined views to
    keep, then those of the task's own index, newest first, then others."""
    indexes = sorted(store.list(paths.indexes_dir()), key=lambda name: name != task.index)
    corpora: dict[tuple[str, tuple[str, ...]], EmbeddedCorpus] = {}
    for index in indexes:
        versions = {number: manifests.read(store, index, number) for number in manifests.list_versions(store, index)}
        for version in reversed(versions.values()):
            same = (version.encoder_fingerprint, version.dtype) == (task.fingerprint, task.dtype)
            is_refined = index == task.index and version.version == task.refined_version
            if same and (is_refined or is_as_encoded(version, versions)):
                key = version.corpus_digest, tuple(entry.digest for entry in version.shards)
                corpora.setdefault(
                    key,
                    EmbeddedCorpus(
                        index=index,
                        corpus=version.corpus,
                        corpus_digest=version.corpus_digest,
                        shards=tuple(version.shards),
                        index_params=version.index_params,
                        least_recall=promised_recall(version),
                        is_refined=is_refined,
                    ),
                )
    return sorted(corpora.values(), key=lambda source: not source.is_refined)


def is_as_encoded(version: Manifest, versions: Mapping[int, Manifest]) -> bool:
    """Whether a version holds all views as encoded. `versions` are the existing ones of the index."""
    if "pruned_views" in version.metrics:
        return False
    if version.operation in ("reshard", "compact"):
        return version.parent in versions and is_as_encoded(versions[version.parent], versions)
    if version.operation == "rollback":
        earlier = (one for one in versions.values() if one.version < version.version and one.shards == version.shards)
        return any(is_as_encoded(one, versions) for one in earlier)
    return version.operation == "index"


def carry_shard(task: EncodeTask, shard: int, sources: Sequence[EmbeddedCorpus]) -> None:
    """Stage embeddings of one shard's passages from other shards, then the plan."""
    store = Store(task.store)
    corpus = Corpus.open(store, task.corpus, task.corpus_digest)
    part = corpus.part(shard)
    plan = _plan_over_base(store, corpus, shard, sources) or EncodePlan()
    passages = part.passages() if plan.rows is None else part.take(plan.rows)
    remaining = {passage.id: passage for passage in passages}
    blocks: list[EmbeddingBlock] = []
    places: list[BlockRow] = []
    for source in sources:
        if not remaining:
            break
        for block in _blocks_of_unchanged(store, source, dict(remaining)):
            for row, passage_id in enumerate(block.ids):
                if remaining.pop(passage_id, None) is not None:
                    places.append(BlockRow(passage_id, len(blocks), row))
            blocks.append(block)
        if source.is_refined and plan.base is None:
            deleted_ids, replaced_ids = _deleted_or_replaced(store, source, corpus, shard, remaining)
            num_unlearned = _num_unlearned(store, source, sources, [*deleted_ids, *replaced_ids])
            plan = plan._replace(num_deleted=len(deleted_ids), num_unlearned=num_unlearned)
    files_without: set[str] = set()
    for source in sources:
        if remaining and not source.is_refined:
            for own in _places_of_same_content(store, source, remaining, files_without):
                places += [BlockRow(passage_id, len(blocks), row) for passage_id, row in own.rows]
                blocks.append(own.block)
                for passage_id, _ in own.rows:
                    del remaining[passage_id]
    places.sort()
    if places:
        with store.scratch() as folder:
            file = folder / "carried.arrow"
            with EmbeddingWriter(file, task.dimension, task.num_views, task.dtype) as writer:
                for start in range(0, len(places), BATCH_PASSAGES):
                    writer.write(gather_rows(blocks, places[start : start + BATCH_PASSAGES]))
            add_trailer(file)
            store.put_file(file, task.carried_path(shard))
        rows = [row for row, name in enumerate(part.ids()) if name in remaining]
        plan = plan._replace(rows=rows, is_carried=True)
    store.write_bytes(task.plan_path(shard), with_trailer(plan.to_json()))


def _plan_over_base(store: Store, corpus: Corpus, shard: int, sources: Sequence[EmbeddedCorpus]) -> EncodePlan | None:
    """Plan over the first source with the same number of shards, encoding all changed passages; None without one."""
    for source in sources:
        if len(source.shards) != corpus.num_shards:
            if source.is_refined:
                return None
            continue
        try:
            before = Corpus.open(store, source.corpus, source.corpus_digest)
            _open(store, source, shard)
            same = before.info.parts[shard].digest == corpus.info.parts[shard].digest
            changed_rows, deleted_ids = ([], []) if same else difference(before.part(shard), corpus.part(shard))
        except (MissingInputError, StorageError) as error:
            _skip_source(source, error)
            continue
        replaced_ids = [passage.id for passage in corpus.part(shard).take(changed_rows)]
        num_unlearned = 0
        if source.is_refined:
            num_unlearned = _num_unlearned(store, source, sources, [*replaced_ids, *deleted_ids])
        own = BaseShard(source.index, source.shards[shard], source.index_params, source.least_recall)
        return EncodePlan(changed_rows, own, deleted_ids, len(deleted_ids), num_unlearned)
    return None


def _deleted_or_replaced(
    store: Store, source: EmbeddedCorpus, corpus: Corpus, shard: int, remaining: Collection[str]
) -> tuple[list[str], list[str]]:
    """Passages of a source over another number of shards that hash to this shard, but are deleted from it, or have new
    content: those still in `remaining` after reuse."""
    ids = set(corpus.part(shard).ids())
    source_ids = [
        name
        for number in shards_before(shard, len(source.shards), corpus.num_shards)
        for name in _open(store, source, number).ids()
        if shard_of(name, corpus.num_shards) == shard
    ]
    return [name for name in source_ids if name not in ids], [name for name in source_ids if name in remaining]


def _num_unlearned(store: Store, source: EmbeddedCorpus, sources: Sequence[EmbeddedCorpus], ids: Iterable[str]) -> int:
    """Count passages with moved or added views in a refined source, as far as a source over the same number of shards
    has them as encoded."""
    as_encoded = next((one for one in sources if len(one.shards) == len(source.shards) and not one.is_refined), None)
    by_shard: dict[int, list[str]] = {}
    for name in ids:
        by_shard.setdefault(shard_of(name, len(source.shards)), []).append(name)
    num_unlearned = 0
    for shard, own in by_shard.items():
        embeddings = _open(store, source, shard)
        try:
            encoded_views = _open(store, as_encoded, shard).find(own) if as_encoded else {}
        except (MissingInputError, StorageError):
            encoded_views = {}
        for name, views in embeddings.find(own).items():
            is_added = bool((views.view_numbers_N >= embeddings.num_views).any())
            is_moved = name in encoded_views and views.vectors_ND.tobytes() != encoded_views[name].vectors_ND.tobytes()
            num_unlearned += is_added or is_moved
    return num_unlearned


def _open(store: Store, source: EmbeddedCorpus, shard: int) -> EmbeddingShard:
    entry = source.shards[shard]
    return open_embeddings(manifests.open_shard(store, source.index, entry), entry.files)


def _skip_source(source: EmbeddedCorpus, error: Exception) -> None:
    """Skip a missing or damaged source, so that its passages are encoded; raise if refined views would be lost."""
    if source.is_refined:
        raise StorageError(
            f"what refinement changed in index {source.index!r} cannot be kept: {error}; repair it first (mvr-ray "
            f"versions CONFIG repair), roll back, or index without it (index.keep_refinement=false)"
        ) from error
    log.warning("embeddings are not carried over: index=%s (%s)", source.index, error)


def _content(passage: Passage) -> Passage:
    """The part of a passage that determines its embedding."""
    return passage._replace(fields=())


def _blocks_of_unchanged(
    store: Store, source: EmbeddedCorpus, passages: dict[str, Passage]
) -> Iterator[EmbeddingBlock]:
    """Yield blocks of those of `passages` whose content in the source is unchanged."""
    try:
        before = Corpus.open(store, source.corpus, source.corpus_digest)
        unchanged_ids = {
            name for name, passage in before.get(passages).items() if _content(passage) == _content(passages[name])
        }
    except (MissingInputError, StorageError) as error:
        _skip_source(source, error)
        return
    yield from _blocks_with(store, source, unchanged_ids)


def _blocks_with(store: Store, source: EmbeddedCorpus, passage_ids: Iterable[str]) -> Iterator[EmbeddingBlock]:
    """Yield blocks of these passages of a source, as far as its shards are undamaged."""
    by_shard: dict[int, set[str]] = {}
    for passage_id in passage_ids:
        by_shard.setdefault(shard_of(passage_id, len(source.shards)), set()).add(passage_id)
    for number, ids in sorted(by_shard.items()):
        try:
            embeddings = _open(store, source, number)
        except (MissingInputError, StorageError) as error:
            _skip_source(source, error)
            continue
        for block in embeddings.blocks():
            rows = [BlockRow(passage_id, 0, row) for row, passage_id in enumerate(block.ids) if passage_id in ids]
            if rows:
                yield gather_rows([block], rows)


class SameContent(NamedTuple):
    """A block, and passages of other ids with equal content: (their id, row of the block)."""

    block: EmbeddingBlock
    rows: list[tuple[str, int]]


def _places_of_same_content(
    store: Store, source: EmbeddedCorpus, passages: Mapping[str, Passage], files_without: set[str]
) -> Iterator[SameContent]:
    """Yield passages of a source that have the content of some of `passages`, whatever their ids.

    `files_without` are files of corpus parts known to have none of these contents; this source's are added.
    """
    ids_of: dict[tuple[str, str], list[str]] = {}
    for passage in passages.values():
        ids_of.setdefault((passage.title, passage.text), []).append(passage.id)
    ids_by_name: dict[str, list[str]] = {}
    try:
        before = Corpus.open(store, source.corpus, source.corpus_digest)
        for number, info in enumerate(before.info.parts):
            if not files_without.issuperset(file.file for file in info.files):
                names = find_contents(before.part(number), ids_of, files_without)
                ids_by_name |= {name: ids_of.pop(content) for content, name in names.items()}
    except (MissingInputError, StorageError) as error:
        _skip_source(source, error)
    for block in _blocks_with(store, source, ids_by_name):
        yield SameContent(block, [(own, row) for row, name in enumerate(block.ids) for own in ids_by_name[name]])
