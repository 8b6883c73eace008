"""Build an index version from a corpus and an encoder, and publish it.

    carry over -> find copies -> encode -> gather the originals of copies -> one build task a shard (write its changes
    beside an earlier shard, or merge carried-over embeddings and chunks; build its index and measure it, name it by
    content) -> publish

A built shard has a note in the staging folder. A shard of an earlier version with the same passages and settings is
reused, and so are the embeddings of single passages (`carry_over`); so the same command resumes after any crash and
repeats no work. The publication requires equal counts of passages read, embedded, indexed and in the manifest.

Over a refined version, `index.keep_refinement` keeps the learned views of unchanged passages; those of other passages
are dropped and counted. The operation is then `index:refined`.
"""

import dataclasses
import json
import logging
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

from mvr_ray.checksums import without_trailer
from mvr_ray.config import IndexConfig, RunConfig
from mvr_ray.core.judging.collapse import MAX_COSINE, MIN_LV
from mvr_ray.core.searching.pruning import prune_block
from mvr_ray.distributed.cluster import session
from mvr_ray.distributed.cluster.tasks import run_tasks, share
from mvr_ray.distributed.indexing import shards
from mvr_ray.distributed.indexing.carry_over import (
    carry_over,
    count_passages,
    embedded_corpora,
    find_copies,
    has_refined_views,
    lacks_views,
    passages_of,
)
from mvr_ray.distributed.indexing.lexical import LexicalTask, are_whole, build_lexical, find_base
from mvr_ray.distributed.indexing.shards import BuiltShard
from mvr_ray.distributed.indexing.staging import (
    REFINED,
    BaseShard,
    EncodeTask,
    chunks_of,
    config_digest,
    encode_task,
)
from mvr_ray.errors import UNREAD, MissingInputError, PublishConflictError, RowsLostError, StagingError, StorageError
from mvr_ray.index.base import IndexParams
from mvr_ray.index.candidates import LABELS_FILE
from mvr_ray.index.kinds import update_index
from mvr_ray.store import manifest as manifests
from mvr_ray.store import paths
from mvr_ray.store.corpus import Corpus, ids_by_shard, shard_of
from mvr_ray.store.delta import changed_blocks, views_by_id, write_changed
from mvr_ray.store.embeddings import BlockRow, EmbeddingShard, gather_rows
from mvr_ray.store.files import Store
from mvr_ray.store.local_files import link_or_copy
from mvr_ray.store.manifest import FileEntry, LexicalPart, Manifest, ShardEntry
from mvr_ray.types import EmbeddingBlock, Progress, UnreadCounts, no_progress

if TYPE_CHECKING:
    from mvr_ray.distributed.indexing.external_vectors import ExternalVectors

log = logging.getLogger(__name__)


def index(run: RunConfig, progress: Progress = no_progress, *, keep_rollback: bool = False) -> Manifest:
    """Encode the corpus, build every shard and publish the version; returns the live one if nothing would change, with
    counts of none encoded.

    Raises MissingInputError, EncoderError, ShardIndexError, ResourceError, StorageError, RowsLostError and
    PublishConflictError, with `keep_rollback` also where a roll back has replaced the last corpus. After any of them
    the live version is unchanged, and the same command resumes. Staged work that is damaged, or that a faster command
    over the same corpus removed, is made again, once.
    """
    try:
        return _index(run, progress, keep_rollback)
    except (StagingError, RowsLostError) as error:
        log.warning("staged work is made again: index=%s (%s)", run.index.name, error)
        return _index(run, progress, keep_rollback)


def _index(run: RunConfig, progress: Progress, keep_rollback: bool) -> Manifest:
    from mvr_ray.distributed.indexing.external_vectors import resolve_vectors  # with torch, which builders do not need

    store, cfg = Store(run.store.path), run.index
    live = manifests.latest_version(store, cfg.name)  # read before the corpus: a later version may have a later one
    corpus = Corpus.open(store, run.prepare.corpus)
    if keep_rollback and live and manifests.is_rolled_back(corpus, manifests.read_version(store, cfg.name, live)):
        raise PublishConflictError(
            f"index {cfg.name!r}: version {live}, a roll back, replaced corpus {corpus.name!r} of digest "
            f"{corpus.digest}, so no version of that was made; to publish it: mvr-ray index CONFIG"
        )
    encoder, external = resolve_vectors(run, corpus)
    if external:
        external.require_passages(corpus)
    before = _open_refined(store, cfg, encoder.fingerprint)
    task = encode_task(run, corpus, encoder, before, external.digest if external else "")
    manifests.require_live(store, cfg.name, live)
    with shards.renew_periodically(store, task.draft, task.key, cfg.grace_s):
        manifest = _build(run, corpus, task, before, external, progress)
    store.delete_dir(paths.staging_dir(cfg.name, task.key))
    return manifest


class _Plan(NamedTuple):
    """What a version takes from earlier ones, and the shards to build.

    `draft` has the words of a version over the same corpus, if any; `words_base` is the version whose words a changed
    corpus updates.
    """

    draft: Manifest
    reusable: dict[int, ShardEntry]
    others: list[int]
    words_base: Manifest | None


def _build(
    run: RunConfig,
    corpus: Corpus,
    task: EncodeTask,
    before: Manifest | None,
    external: "ExternalVectors | None",
    progress: Progress,
) -> Manifest:
    """Make and publish the version of a task; with `before`, from that version's refined views; of `external` vectors,
    if any."""
    versions = manifests.read_all(corpus.store, task.draft.index)
    plan = _plan_shards(run.index, corpus, task, before, external, versions)
    is_ready = not plan.others and (not run.index.lexical or plan.draft.lexical is not None)
    if is_ready and (live := _same_live_version(corpus.store, plan.draft, plan.reusable)):
        return _keep_live(live, progress)
    _warn_of_pruned_views(run.index, corpus.store, task, plan, versions)
    if not session.needs_ray(run.resources, 1):  # a small update of a large corpus needs no cluster
        with session.staying_local():
            carry_over(task, corpus, _not_built(corpus.store, task, plan.others), versions, progress)
    with session.connect(run.resources, _num_passages(task, corpus, plan.others), [shards.INDEX_BUILDERS]):
        _embed(run, corpus, task, external, plan.others, versions, progress)
        built_shards = _build_shards(run.index, corpus, task, plan, progress)
        lexical = _build_words(run.index, corpus, task, plan, progress)
    counts = count_passages(task, corpus, plan.others)
    counts["carried_over"] += sum(entry.num_passages for entry in plan.reusable.values())
    version = _complete_draft(plan.draft, built_shards, counts, run.index.prune_views)
    return _publish(corpus, dataclasses.replace(version, lexical=lexical), progress)


def _plan_shards(
    cfg: IndexConfig,
    corpus: Corpus,
    task: EncodeTask,
    before: Manifest | None,
    external: "ExternalVectors | None",
    versions: Mapping[int, Manifest],
) -> _Plan:
    """Find what earlier versions have of the task's; of `external` vectors, shards of the live one that hold the same:
    an earlier one may have others of the same texts."""
    store, draft = corpus.store, task.draft
    reused_versions = {number: one for number, one in versions.items() if not external or number == draft.parent}
    reusable = _reusable_shards(store, draft, corpus, before, reused_versions, cfg)
    if external:
        for shard, ids in ids_by_shard(external.rows, corpus.num_shards).items():
            entry = reusable.get(shard)
            if entry and external.differing(ids, shards.shard_embeddings(store, draft.index, entry)):
                del reusable[shard]
    base = find_base(store, cfg.name, corpus, cfg.language) if cfg.lexical else None
    if base and base.corpus_digest == corpus.digest:
        draft = dataclasses.replace(draft, lexical=base.lexical)
    others = [shard for shard in range(corpus.num_shards) if shard not in reusable]
    return _Plan(draft, reusable, others, base)


def _keep_live(live: Manifest, progress: Progress) -> Manifest:
    """Return the live version with counts of none encoded."""
    log.info("index unchanged: index=%s version=%d", live.index, live.version)
    progress(f"nothing changed, version {live.version} stays live; passages", live.num_passages, live.num_passages)
    counts = {"encoded": 0, "encoded_cut": 0, "encoded_unknown": 0, "carried_over": live.num_passages, "deleted": 0}
    return dataclasses.replace(live, metrics=live.metrics | counts)


def _warn_of_pruned_views(
    cfg: IndexConfig, store: Store, task: EncodeTask, plan: _Plan, versions: Mapping[int, Manifest]
) -> None:
    """Log a warning if unchanged passages are encoded again because every version with this encoder lacks views."""
    draft = plan.draft
    embedders = {(one.encoder_fingerprint, one.dtype) for one in versions.values() if lacks_views(one)}
    are_pruned = bool(plan.others) and (draft.encoder_fingerprint, draft.dtype) in embedders
    if are_pruned and not embedded_corpora(store, task, versions):
        log.warning(
            "index %r: passages that did not change are encoded again, as all versions lack views "
            "(index.prune_views); to encode changes alone, index all views under another name before: mvr-ray index "
            "CONFIG index.name=%s-all-views index.prune_views=null",
            *(cfg.name, cfg.name),
        )


def _num_passages(task: EncodeTask, corpus: Corpus, others: Sequence[int]) -> int:
    """Count the passages to work on, by which a stage starts Ray or not. An approximate index is built of all passages
    of a changed shard."""
    if task.draft.index_params["kind"] != "flat":
        return sum(corpus.info.parts[shard].num_passages for shard in others)
    return count_passages(task, corpus, others)["encoded"]


def _embed(
    run: RunConfig,
    corpus: Corpus,
    task: EncodeTask,
    external: "ExternalVectors | None",
    others: Sequence[int],
    versions: Mapping[int, Manifest],
    progress: Progress,
) -> None:
    """Stage the embeddings of the shards that no earlier try built: carried over, copied, and encoded or external."""
    from mvr_ray.distributed.indexing.encode import encode_corpus  # with torch, too

    missing = _not_built(corpus.store, task, others)
    carry_over(task, corpus, missing, versions, progress)
    if external:
        external.stage(task, corpus, missing, progress)
    else:
        find_copies(task, corpus, missing, progress)
        encode_corpus(task, corpus, missing, run.resources, progress)


def _build_shards(
    cfg: IndexConfig, corpus: Corpus, task: EncodeTask, plan: _Plan, progress: Progress
) -> list[BuiltShard]:
    """Build the shards, or measure those that are reused, a task each."""
    originals = share(stage_originals(task, corpus, plan.others, progress))
    calls = [(task, shard, plan.reusable.get(shard), cfg, originals) for shard in range(corpus.num_shards)]
    vectors = [part.num_passages * plan.draft.num_views for part in corpus.info.parts]
    memory = shards.builder_memory(
        plan.draft, [0 if shard in plan.reusable else num for shard, num in enumerate(vectors)]
    )
    return run_tasks(build_one, calls, "building the index", "build shards", progress, memory=memory)


def _build_words(
    cfg: IndexConfig, corpus: Corpus, task: EncodeTask, plan: _Plan, progress: Progress
) -> LexicalPart | None:
    """Build the words of the corpus with `index.lexical`, from those of the plan's base."""
    if not cfg.lexical:
        return None
    base = plan.words_base
    words = LexicalTask(corpus, cfg.name, corpus.num_shards, cfg.language, base, cfg.compact_share, task.key)
    return build_lexical(words, progress)


def _publish(corpus: Corpus, version: Manifest, progress: Progress) -> Manifest:
    """Publish a version that holds every passage of the corpus; returns the live one if that is the same."""
    _require_all_rows(corpus, version)
    live = _same_live_version(corpus.store, version, {entry.shard: entry for entry in version.shards})
    is_same = live is not None and live.recall == version.recall  # not where index.recall_sample changed
    manifest = live if live and is_same else manifests.publish(corpus.store, version)
    progress("passages read = embedded = indexed = in the manifest", manifest.num_passages, corpus.num_passages)
    return manifest


def _open_refined(store: Store, cfg: IndexConfig, fingerprint: str) -> Manifest | None:
    """Return the live version, if it has refined views of the same encoder to keep, else None, with a warning for those
    of another encoder, and of a version that lacks views by `index.prune_views`: which ones is not recorded.
    """
    if not cfg.keep_refinement or not manifests.latest_version(store, cfg.name):
        return None
    version = manifests.read(store, cfg.name)
    is_copy = version.operation in manifests.COPIES
    originals = manifests.read_all(store, cfg.name) if is_copy else {}
    if not has_refined_views(version, originals):
        return None
    if lacks_views(version):
        log.warning(
            f"index: what refinement changed in version {version.version} of index {cfg.name!r} is not kept: views of "
            f"it were left out by index.prune_views; refine again: mvr-ray refine CONFIG"
        )
        return None
    if (version.encoder_fingerprint, version.dtype) != (fingerprint, cfg.dtype):
        log.warning(
            f"index: what refinement changed in version {version.version} of index {cfg.name!r} is not kept: its "
            f"views are of encoder {version.encoder_name}/{version.encoder_fingerprint} in {version.dtype}, the new "
            f"ones of {fingerprint} in {cfg.dtype}; refine again: mvr-ray refine CONFIG"
        )
        return None
    return version


def _not_built(store: Store, task: EncodeTask, shards: Sequence[int]) -> list[int]:
    """Return the shards that no earlier try of this command built."""
    names = {*store.list(paths.staging_dir(task.draft.index, task.key))}
    return [shard for shard in shards if _note_path(task, shard).rpartition("/")[2] not in names]


def _note_path(task: EncodeTask, shard: int) -> str:
    return paths.staged_shard(task.draft.index, task.key, task.draft.config_digest, shard)


def _require_all_rows(corpus: Corpus, manifest: Manifest) -> None:
    """Raise RowsLostError unless every shard holds exactly as many passages as its part of the corpus."""
    for entry in manifest.shards:
        if entry.num_passages != corpus.info.parts[entry.shard].num_passages:
            embeddings = shards.shard_embeddings(corpus.store, manifest.index, entry)
            _require_ids(corpus.part(entry.shard).ids(), embeddings.ids(), str(entry))
    if manifest.num_passages != corpus.num_passages:
        raise RowsLostError(
            f"corpus {corpus.name!r} has {corpus.num_passages} passages, the shards hold {manifest.num_passages}; "
            f"nothing was published"
        )


def _require_ids(expected: Sequence[str], actual: Sequence[str], where: str) -> None:
    missing = sorted(set(expected) - set(actual))
    if missing or len(expected) != len(actual):
        names = ", ".join(missing[:5]) or f"none, but {len(actual) - len(expected)} too many"
        raise RowsLostError(
            f"{where}: {len(expected)} passages read, {len(actual)} embedded; {len(missing)} missing ({names}); "
            f"nothing was published"
        )


def _reusable_shards(
    store: Store,
    draft: Manifest,
    corpus: Corpus,
    before: Manifest | None,
    versions: Mapping[int, Manifest],
    cfg: IndexConfig,
) -> dict[int, ShardEntry]:
    """Find undamaged shards of earlier `versions` with the same encoder, settings and passages, newest version first;
    with `before`, only of that version, to keep its learned views. Settings of a search, such as `index.nprobe`, may be
    others. A shard is compared in one version of those that share it; its bytes are read only if that version is over
    the same corpus, or a shard is to be measured: an update reads no shard that it does not change, and the same
    command again repairs what is damaged."""
    reusable: dict[int, ShardEntry] = {}
    num_passages = {shard: part.num_passages for shard, part in enumerate(corpus.info.parts)}
    compared_digests: set[str] = set()
    for earlier in [before] if before else versions.values():
        params = IndexParams(**earlier.index_params)
        has_same_files = params.of_files() == IndexParams(**draft.index_params).of_files()
        same = has_same_files and earlier.config_digest == config_digest(cfg, draft.encoder_fingerprint, params)
        if not same or (not before and has_refined_views(earlier, versions)):
            continue
        entries = [
            entry
            for entry in earlier.shards
            if entry.shard not in reusable
            and entry.digest not in compared_digests
            and entry.num_passages == num_passages.get(entry.shard)
        ]
        compared_digests.update(entry.digest for entry in entries)
        same_parts = _same_parts(store, earlier, corpus) if entries else ()
        own = tuple(entry for entry in entries if entry.shard in same_parts)
        partial_manifest = dataclasses.replace(earlier, shards=own, refined_queries={}, lexical=None)
        are_measured = all(store.for_each(lambda entry: shards.read_measurements(store, draft, entry), own))
        sizes_only = are_measured and earlier.corpus_digest != corpus.digest
        report = manifests.verify(store, partial_manifest, sizes_only=sizes_only)
        damaged_shards = {problem.shard for problem in report.problems}
        if damaged_shards:
            log.warning(
                "index repairs shards: index=%s version=%d shards=%s", draft.index, earlier.version, damaged_shards
            )
        reusable |= {entry.shard: entry for entry in own if entry.shard not in damaged_shards}
    return reusable


def _same_parts(store: Store, earlier: Manifest, corpus: Corpus) -> set[int]:
    """Return the parts of the corpus that equal the sources of an earlier version's shards."""
    if len(earlier.shards) != corpus.num_shards:
        return set()
    if earlier.corpus_digest == corpus.digest:
        return set(range(corpus.num_shards))
    try:
        before = Corpus.open(store, earlier.corpus, earlier.corpus_digest).info.parts
    except (MissingInputError, StorageError):
        return set()
    now = corpus.info.parts
    return {shard for shard in range(len(now)) if len(now) == len(before) and now[shard].digest == before[shard].digest}


def _same_live_version(store: Store, draft: Manifest, reusable: dict[int, ShardEntry]) -> Manifest | None:
    """Return the live version, if it has the same shards and settings, else None."""
    if not draft.parent:
        return None
    live = manifests.read(store, draft.index)
    same = live.shards == tuple(reusable[shard] for shard in sorted(reusable))
    same = same and (live.lexical is None or are_whole(store, draft.index, live.lexical.files))
    alike = ("encoder_name", "encoder_fingerprint", "corpus", "corpus_digest", "index_params", "num_views", "dtype")
    alike = (*alike, "refined_queries", "lexical")
    return live if same and all(getattr(live, name) == getattr(draft, name) for name in alike) else None


def build_one(
    task: EncodeTask, shard: int, reusable: ShardEntry | None, cfg: IndexConfig, originals: Mapping[int, str]
) -> BuiltShard:
    """Build one shard from its staged work, or reuse the given or noted one, which is measured unless it was before.
    `originals` are the files of `stage_originals`."""
    store, draft, note = Store(task.store), task.draft, _note_path(task, shard)
    earlier = (
        shards.read_measurements(store, draft, reusable) if reusable else shards.read_note(store, draft.index, note)
    )
    if earlier:
        return earlier
    if reusable:
        recall = shards.shard_recall(store, draft, reusable, cfg.recall_sample)
        folder = store.local_path(paths.shard_dir(draft.index, reusable.digest))
        built_shard = BuiltShard(reusable, recall, **_measure_views(folder))
        shards.write_measurements(store, draft, built_shard)
        return built_shard
    params, is_updated, least_recall = IndexParams(**draft.index_params), None, None
    unread_counts: list[UnreadCounts] = []
    with shards.shard_folder(store) as folder:
        try:
            known_files = _write_embeddings(store, task, shard, folder, cfg, originals, unread_counts)
        except RowsLostError as error:  # as where a faster command over the same corpus removes a plan
            raise task.discard(store, shard, error) from error
        if params.kind != "flat" and not known_files.keys() - {*paths.embedding_files(known_files)}:
            is_updated = (folder / LABELS_FILE).exists()
        measured_views = _measure_views(folder)
        built_shard = shards.build_shard(store, draft, shard, folder, known_files, cfg.recall_sample)
    if LABELS_FILE in built_shard.entry.files and (base := task.plan(store, shard).base):
        least_recall = base.promise(draft)
    built_shard = dataclasses.replace(
        built_shard,
        **measured_views,
        is_updated=is_updated,
        least_recall=least_recall,
        num_cut=sum(own.num_cut for own in unread_counts),
        num_unknown=sum(own.num_unknown for own in unread_counts),
    )
    shards.write_measurements(store, draft, built_shard)
    return shards.write_note(store, note, built_shard)


def _measure_views(folder: Path) -> dict[str, Any]:
    """Return the measurements on the views of a shard in a folder, by their names in `BuiltShard`."""
    views = shards.shard_collapse(EmbeddingShard.open(folder / paths.EMBEDDINGS))
    file = folder / paths.PRUNED_JSON
    pruning = json.loads(file.read_text()) if file.exists() else {}
    return {"pair_cosine": views.mean_pair_cosine, "lv": views.lv, **pruning}


def _write_embeddings(
    store: Store,
    task: EncodeTask,
    shard: int,
    folder: Path,
    cfg: IndexConfig,
    originals: Mapping[int, str],
    unread_counts: list[UnreadCounts],
) -> dict[str, FileEntry]:
    """Write one shard's embeddings: its changes beside an earlier shard's file, or all of it.

    Passage ids are checked against the corpus. Returns files with known digests, and adds the counts of each chunk's
    passages that the encoder does not read whole to `unread_counts`. With `index.prune_views`, redundant views are
    dropped, and a file records the result. The approximate index of an earlier shard with the same parameters is copied
    and updated, unless its recall would be below the earlier version's promise.
    """
    corpus, plan = task.open_corpus(), task.plan(store, shard)
    new_blocks, known_files = _embedded_blocks(store, task, corpus, shard, originals, unread_counts), {}
    if plan.base is None:
        _write_blocks(task, new_blocks, folder, cfg.prune_views)
        return known_files
    base_files, params = plan.base.entry.files, IndexParams(**task.draft.index_params)
    same_params = IndexParams(**(plan.base.index_params or {})).of_files() == params.of_files()
    try:
        base = shards.shard_embeddings(store, plan.base.index, plan.base.entry)
    except (MissingInputError, StorageError) as error:
        raise task.discard(store, shard, error) from error
    upserts = views_by_id(new_blocks)
    if cfg.prune_views is not None:
        _write_blocks(task, changed_blocks(base.blocks(), upserts, plan.deleted_ids), folder, cfg.prune_views)
    elif not upserts and not plan.deleted_ids:
        names = base_files if same_params else paths.embedding_files(base_files)
        known_files = {name: base_files[name] for name in names if name != paths.PRUNED_JSON}
        for name in known_files:
            link_or_copy(base.path.with_name(name), folder / name)
    elif shared_names := write_changed(base, folder, upserts, plan.deleted_ids, cfg.compact_share):
        known_files = {name: base_files[name] for name in shared_names}
        if same_params:
            known_files |= shards.keep_codes(params, base.path.parent, base_files, folder)
        if same_params and params.kind != "flat":
            _update_index(plan.base, task.draft, base, folder, upserts, cfg)
    _require_ids(corpus.part(shard).ids(), shards.folder_embeddings(folder).ids(), f"shard {shard}")
    return known_files


def _update_index(
    base: BaseShard,
    draft: Manifest,
    embeddings: EmbeddingShard,
    folder: Path,
    changed_ids: Collection[str],
    cfg: IndexConfig,
) -> None:
    """Write the updated approximate index of a base with these embeddings to `folder`, which holds the changed ones;
    none if it needs a rebuild: too many vectors are deleted, or its recall is below the promise."""
    params, blocks = IndexParams(**draft.index_params), shards.folder_embeddings(folder).blocks()
    source, promise = embeddings.path.parent, base.promise(draft)
    files = update_index(params, embeddings.blocks(), blocks, changed_ids, source, folder, cfg.compact_share)
    if files and promise is not None and cfg.recall_sample:
        recall = shards.folder_recall(params, folder, cfg.recall_sample, base.entry.shard)
        if recall is not None and recall < promise:
            log.info("index is rebuilt: shard=%d recall=%.4f promised=%.4f", base.entry.shard, recall, promise)
            for name in files:
                (folder / name).unlink()


def _write_blocks(task: EncodeTask, blocks: Iterable[EmbeddingBlock], folder: Path, max_distance: float | None) -> None:
    num_dropped, worst = 0, 0.0
    with task.embedding_writer(folder / paths.EMBEDDINGS) as writer:
        for block in blocks:
            if max_distance is not None:
                block, own_dropped, own_worst = prune_block(block, max_distance)
                num_dropped, worst = num_dropped + own_dropped, max(worst, own_worst)
            writer.write(block)
    if max_distance is not None:
        (folder / paths.PRUNED_JSON).write_text(json.dumps({"dropped": num_dropped, "worst": worst}) + "\n")


def _embedded_blocks(
    store: Store,
    task: EncodeTask,
    corpus: Corpus,
    shard: int,
    originals: Mapping[int, str],
    unread_counts: list[UnreadCounts],
) -> Iterator[EmbeddingBlock]:
    """Yield a shard's encoded, carried-over and copied embeddings, in order of id; one chunk at a time is in memory."""
    plan, chunks = task.plan(store, shard), _encoded_chunks(store, task, corpus, shard, unread_counts)
    if not plan.is_carried and not plan.copies:
        yield from chunks
        return
    others = _open_staged(store, task, shard, task.carried_path(shard)).blocks() if plan.is_carried else []
    others += _copied_blocks(store, task, corpus, shard, originals)
    ids = corpus.part(shard).ids()
    encoded_ids = {ids[row] for row in plan.rows_to_encode(len(ids))}  # given vectors replace those carried over
    places = (BlockRow(name, at, row) for at, block in enumerate(others) for row, name in enumerate(block.ids))
    rows = sorted(place for place in places if place.passage_id not in encoded_ids)
    if plan.base is None:  # the ids of a chunk are compared with it
        _require_ids(ids, [*encoded_ids, *(at.passage_id for at in rows)], f"shard {shard}")
    start = 0
    for block in chunks:
        stop = bisect_left(rows, block.ids[-1], key=lambda at: at.passage_id)
        own = (BlockRow(name, len(others), row) for row, name in enumerate(block.ids))
        yield from shards.gather_batches([*others, block], sorted([*rows[start:stop], *own]))
        start = stop
    yield from shards.gather_batches(others, rows[start:])


def _copied_blocks(
    store: Store, task: EncodeTask, corpus: Corpus, shard: int, originals: Mapping[int, str]
) -> Iterator[EmbeddingBlock]:
    """Copy embeddings of equal passages from the staged originals."""
    own_ids, copies = corpus.part(shard).ids(), task.plan(store, shard).copies or {}
    copies_of: dict[int, dict[str, list[str]]] = {}
    for row, original in copies.items():
        ids_of = copies_of.setdefault(shard_of(original, corpus.num_shards), {})
        ids_of.setdefault(original, []).append(own_ids[row])
    for number, copy_ids in sorted(copies_of.items()):
        path, num_found = originals.get(number), 0
        for block in _open_staged(store, task, number, path).blocks() if path else ():
            pairs = [(row, copy_ids[name]) for row, name in enumerate(block.ids) if name in copy_ids]
            num_found += len(pairs)
            if pairs:
                yield gather_rows([block], [BlockRow(copy, 0, row) for row, names in pairs for copy in names])
        if num_found < len(copy_ids):
            if path:
                store.delete(path)
            raise task.discard(store, shard, StagingError("the original of a copied passage is no longer encoded"))


def stage_originals(task: EncodeTask, corpus: Corpus, shards: Sequence[int], progress: Progress) -> dict[int, str]:
    """Write the encoded passages that those of these shards equal to one file for each shard that holds some, so that
    each of its chunks is read once for all copies. Returns the files by number of the shard."""
    store = corpus.store
    copied_ids = {name for plan in task.plans(store, shards) for name in (plan.copies or {}).values()}
    ids_of = {number: sorted(ids) for number, ids in ids_by_shard(copied_ids, corpus.num_shards).items()}
    files = {number: task.originals_path(number, ids) for number, ids in ids_of.items()}
    names = {*store.list(paths.staging_dir(task.draft.index, task.key))} if files else ()
    missing = [number for number, path in files.items() if path.rpartition("/")[2] not in names]
    calls, what = [(task, number, ids_of[number]) for number in missing], "gather embeddings of equal passages, shards"
    run_tasks(write_originals, calls, "gathering embeddings of equal passages", what, progress)
    return files


def write_originals(task: EncodeTask, shard: int, ids: Sequence[str]) -> None:
    """Write the embeddings of these passages of a shard, as far as it has them encoded, from its chunks."""
    store, corpus = Store(task.store), task.open_corpus()
    part = corpus.part(shard)
    rows = task.plan(store, shard).rows_to_encode(len(part))
    places = sorted(bisect_left(rows, part.row(name)) for name in ids)
    blocks = (
        block
        for chunk in chunks_of(task, corpus, shard)
        if bisect_left(places, chunk.start) < bisect_left(places, chunk.stop)
        for block in _open_staged(store, task, shard, task.chunk_path(chunk)).blocks()
    )
    task.write_staged(store, task.originals_path(shard, ids), passages_of(blocks, {*ids}))


def _encoded_chunks(
    store: Store, task: EncodeTask, corpus: Corpus, shard: int, unread_counts: list[UnreadCounts]
) -> Iterator[EmbeddingBlock]:
    ids = corpus.part(shard).ids()
    ids = [ids[row] for row in task.plan(store, shard).rows_to_encode(len(ids))]
    for chunk in chunks_of(task, corpus, shard):
        embeddings = _open_staged(store, task, shard, task.chunk_path(chunk))
        _require_ids(ids[chunk.start : chunk.stop], embeddings.ids(), f"shard {shard} from row {chunk.start}")
        unread_counts.append(embeddings.unread_counts)
        yield from embeddings.blocks()


def _open_staged(store: Store, task: EncodeTask, shard: int, path: str) -> EmbeddingShard:
    """Open staged embeddings of a shard and check their digest. An object store's chunk is read into memory, since a
    cached copy would not be used again; what is carried over is as large as a shard, and mapped.

    Raises StagingError where they are missing or damaged, after removing them; for carried-over embeddings, with the
    plan.
    """
    try:
        if store.is_local or path == task.carried_path(shard):
            with pa.memory_map(str(store.local_path(path))) as file:
                data = file.read_buffer()
        else:
            data = pa.py_buffer(store.read_bytes(path))
        content = data.slice(0, len(without_trailer(data, store.where(path))))
        return EmbeddingShard(Path(path), pa.ipc.open_file(pa.BufferReader(content)))
    except (OSError, pa.ArrowException) as error:
        if path == task.carried_path(shard):
            raise task.discard(store, shard, error) from error
        store.delete(path)
        raise StagingError(f"a staged file is removed ({error}); run the same command again, it makes it") from error


def _complete_draft(
    draft: Manifest, built_shards: Sequence[BuiltShard], counts: Mapping[str, int], prune_views: float | None
) -> Manifest:
    """Complete the draft with its shards, the counts of encoded and reused passages, and the measurements on shards,
    averaged over passages."""
    cosine, lv = shards.mean_over_passages(built_shards, "pair_cosine"), shards.mean_over_passages(built_shards, "lv")
    means = {"view_pair_cosine": cosine, "lv": lv}
    metrics: dict[str, int | float] = {name: value for name, value in means.items() if value is not None}
    metrics |= {name: counts[name] for name in ("encoded", "carried_over", "deleted")}
    metrics["encoded_cut"] = sum(shard.num_cut for shard in built_shards)
    metrics["encoded_unknown"] = sum(shard.num_unknown for shard in built_shards)
    for name, problem in UNREAD.items():
        if metrics[name]:
            log.warning("encoded passages: index=%s passages=%d: %s", draft.index, metrics[name], problem)
    metrics |= shards.recall_metrics(built_shards) | {"refined": float(draft.operation == REFINED)}
    if draft.operation == REFINED:
        metrics["unlearned"] = counts["unlearned"]
    if any(paths.PRUNED_JSON in shard.entry.files for shard in built_shards):
        metrics["pruned_views"] = float(sum(shard.dropped for shard in built_shards))
        metrics["pruned_bound"] = max(shard.worst for shard in built_shards)
    if prune_views is not None:
        metrics["prune_views"] = prune_views
    if cosine is not None and lv is not None:
        metrics["collapsed"] = float(cosine > MAX_COSINE or lv < MIN_LV)
        level, what = logging.INFO, "differ"
        if metrics["collapsed"]:
            level, what = logging.WARNING, "collapsed into one vector"
        log.log(level, "views %s: index=%s view_pair_cosine=%.4f lv=%.4f", what, draft.index, cosine, lv)
    entries = tuple(shard.entry for shard in built_shards)
    return dataclasses.replace(draft, shards=entries, recall=metrics.get("recall"), metrics=metrics)
