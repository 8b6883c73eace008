"""From a corpus and an encoder to a published index version.

    encode -> one build task a shard (concatenate its chunks, build its index, name it by content) -> measure -> publish

A shard that is built is noted in the staging folder, and one that an earlier version has from the same settings is
taken from there, so the same command continues after any crash and does nothing twice. Passages read, embedded, indexed
and in the manifest are counted against each other before anything is published.
"""

import dataclasses
import hashlib
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import ray

from mvr_ray.config import IndexConfig, RunConfig
from mvr_ray.core.collapse import MAX_COSINE, MIN_LV
from mvr_ray.core.pruning import prune_block
from mvr_ray.distributed import session
from mvr_ray.distributed.encode import EncodeTask, chunks_of, encode_corpus, encode_task, resolve_encoder
from mvr_ray.distributed.encoders import LocalEncoder
from mvr_ray.distributed.failures import own_errors
from mvr_ray.distributed.shards import (
    BUILD_CPUS,
    BuiltShard,
    build_shard,
    index_params,
    mean_over_passages,
    read_note,
    shard_collapse,
    shard_folder,
    shard_recall,
    write_note,
)
from mvr_ray.errors import RowsLostError
from mvr_ray.index.base import IndexParams
from mvr_ray.index.kinds import check_params
from mvr_ray.store import layout, manifest
from mvr_ray.store.corpus import Corpus
from mvr_ray.store.embeddings import EmbeddingShard, EmbeddingWriter
from mvr_ray.store.files import Store
from mvr_ray.store.manifest import Manifest, ShardEntry
from mvr_ray.types import Progress, no_progress

__all__ = ["BuiltShard", "build_shard", "index", "require_all_rows", "shard_recall"]

log = logging.getLogger(__name__)


def index(run: RunConfig, progress: Progress = no_progress) -> Manifest:
    """Encode the corpus, build every shard and publish the version; the live one where nothing would change.

    Raises MissingInputError, EncoderError, ShardIndexError, ResourceError, StorageError, RowsLostError and
    PublishConflictError. After any of them the live version is as it was, and the same command continues.
    """
    store = Store(run.store.path)
    corpus = Corpus.open(store, run.prepare.corpus)
    encoder = resolve_encoder(run, corpus)
    params = index_params(run.index, encoder.dimension, run.resources.gpus_per_searcher > 0)
    check_params(params, encoder.dimension)
    task = encode_task(run, corpus, encoder)
    draft = _draft(store, run, corpus, encoder, params, task)
    kept = _kept_shards(store, draft)
    wanted = [shard for shard in range(corpus.num_shards) if shard not in kept]
    if not wanted and (live := _unchanged(store, draft, kept)):
        log.info("index unchanged: index=%s version=%d", live.index, live.version)
        progress(f"nothing changed, version {live.version} stays live; passages", live.num_passages, live.num_passages)
        return live
    with session.connect(run.resources) as info:
        session.require(info, [session.Need("index builders", 1, BUILD_CPUS)])
        todo = [shard for shard in wanted if _noted(store, draft, task.key, shard) is None]
        encode_corpus(task, corpus, todo, run.resources, progress)
        with own_errors("building the index"):
            shards = _build(task, draft, corpus, kept, run.index, progress)
    finished = _described(draft, shards)
    require_all_rows(corpus, finished)
    repaired = _unchanged(store, draft, {entry.shard: entry for entry in finished.shards})
    published = repaired or manifest.publish(store, finished)
    store.delete_dir(layout.staging_dir(draft.index, task.key))
    progress("passages read = embedded = indexed = in the manifest", published.num_passages, corpus.num_passages)
    return published


def require_all_rows(corpus: Corpus, described: Manifest) -> None:
    """RowsLostError unless every shard holds exactly as many passages as its part of the corpus."""
    for entry in described.shards:
        expected = corpus.info.parts[entry.shard].num_passages
        if entry.num_passages != expected:
            folder = manifest.open_shard(corpus.store, described.index, entry)
            _require_ids(corpus.part(entry.shard).ids(), EmbeddingShard.open(folder / layout.EMBEDDINGS).ids(), entry)
    if described.num_passages != corpus.num_passages:
        raise RowsLostError(
            f"corpus {corpus.name!r} has {corpus.num_passages} passages, the shards hold {described.num_passages}; "
            f"nothing was published"
        )


def _require_ids(expected: Sequence[str], found: Sequence[str], where: Any) -> None:
    lost = sorted(set(expected) - set(found))
    if lost or len(expected) != len(found):
        named = ", ".join(lost[:5]) or f"none, but {len(found) - len(expected)} too many"
        raise RowsLostError(
            f"{where}: {len(expected)} passages read, {len(found)} embedded; {len(lost)} missing ({named}); nothing "
            f"was published. Run the same command again"
        )


def _draft(
    store: Store, run: RunConfig, corpus: Corpus, encoder: LocalEncoder, params: IndexParams, task: EncodeTask
) -> Manifest:
    """The manifest to be, without shards; `config_digest` covers everything that decides their bytes."""
    decides = [task.key, dataclasses.asdict(params), run.index.recall_sample, run.index.prune_views]
    return Manifest(
        index=run.index.name,
        operation="index",
        encoder_name=encoder.name,
        encoder_fingerprint=encoder.fingerprint,
        similarity=encoder.similarity,
        num_views=encoder.num_views,
        dimension=encoder.dimension,
        dtype=run.index.dtype,
        corpus=corpus.name,
        corpus_digest=corpus.digest,
        index_params=dataclasses.asdict(params),
        shards=(),
        parent=manifest.latest_version(store, run.index.name),
        config_digest=hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:16],
    )


def _kept_shards(store: Store, draft: Manifest) -> dict[int, ShardEntry]:
    """Shards that an earlier version built from the same corpus, encoder and settings, as far as they are whole."""
    for version in reversed(manifest.list_versions(store, draft.index)):
        earlier = manifest.read(store, draft.index, version)
        if earlier.operation == "index" and earlier.config_digest == draft.config_digest:
            damaged = {problem.shard for problem in manifest.verify(store, earlier).problems}
            if damaged:
                log.warning("index repairs shards: index=%s version=%d shards=%s", draft.index, version, damaged)
            return {entry.shard: entry for entry in earlier.shards if entry.shard not in damaged}
    return {}


def _unchanged(store: Store, draft: Manifest, kept: dict[int, ShardEntry]) -> Manifest | None:
    """The live version, where publishing these shards would say again what it says."""
    if not draft.parent:
        return None
    live = manifest.read(store, draft.index)
    same = live.shards == tuple(kept[shard] for shard in sorted(kept)) and not live.refined_queries
    alike = ("encoder_name", "encoder_fingerprint", "corpus", "corpus_digest", "index_params", "num_views", "dtype")
    return live if same and all(getattr(live, name) == getattr(draft, name) for name in alike) else None


def _note(draft: Manifest, key: str, shard: int) -> str:
    return layout.staged_shard(draft.index, key, draft.config_digest, shard)


def _build(
    task: EncodeTask,
    draft: Manifest,
    corpus: Corpus,
    kept: dict[int, ShardEntry],
    cfg: IndexConfig,
    progress: Progress,
) -> list[BuiltShard]:
    """All shards, built now or before, in order; a task each, as many at a time as the cluster has CPUs for."""
    remote: Any = ray.remote(build_one).options(num_cpus=BUILD_CPUS)
    shards = range(corpus.num_shards)
    waiting = [
        remote.remote(task, draft, shard, kept.get(shard), cfg.recall_sample, cfg.prune_views) for shard in shards
    ]
    built: list[BuiltShard] = []
    while waiting:
        ready, waiting = ray.wait(waiting, num_returns=1)
        built += ray.get(ready)
        progress("build shards", len(built), corpus.num_shards)
    return sorted(built, key=lambda shard: shard.entry.shard)


def build_one(
    task: EncodeTask, draft: Manifest, shard: int, kept: ShardEntry | None, sample: int, bound: float | None = None
) -> BuiltShard:
    """One shard from its staged chunks, or as it is kept or noted already; measured either way."""
    store = Store(task.store)
    if kept is None and (noted := _noted(store, draft, task.key, shard)):
        return noted
    entry = kept
    if entry is None:
        with shard_folder(store) as folder:
            _concatenate(store, task, shard, folder, bound)
            entry = build_shard(store, draft, shard, folder)
    recall = shard_recall(store, draft, entry, sample)
    folder = store.local_path(layout.shard_dir(draft.index, entry.digest))
    views = shard_collapse(EmbeddingShard.open(folder / layout.EMBEDDINGS))
    pruned = json.loads((folder / layout.PRUNED_JSON).read_text()) if layout.PRUNED_JSON in entry.files else {}
    built = BuiltShard(entry, recall, views.mean_pair_cosine, views.lv, **pruned)
    if kept is None:
        write_note(store, _note(draft, task.key, shard), built)
    return built


def _noted(store: Store, draft: Manifest, key: str, shard: int) -> BuiltShard | None:
    return read_note(store, draft.index, _note(draft, key, shard))


def _concatenate(store: Store, task: EncodeTask, shard: int, folder: Path, bound: float | None) -> None:
    """Write one shard's embeddings from its chunks, each checked against the ids that the corpus has there.

    With a bound, views that their siblings can stand in for are left out, and a file says what that came to.
    """
    dropped, worst = 0, 0.0
    corpus = Corpus.open(store, task.corpus)
    part = corpus.part(shard)
    ids = part.ids()
    with EmbeddingWriter(folder / layout.EMBEDDINGS, task.dimension, task.num_views, task.dtype) as writer:
        for chunk in chunks_of(task, corpus, shard):
            staged = _staged(store, task.staged(chunk))
            _require_ids(ids[chunk.start : chunk.stop], staged.ids(), f"shard {shard} from row {chunk.start}")
            for block in staged.blocks():
                if bound is not None:
                    block, own_dropped, own_worst = prune_block(block, bound)
                    dropped, worst = dropped + own_dropped, max(worst, own_worst)
                writer.write(block)
    if bound is not None:
        (folder / layout.PRUNED_JSON).write_text(json.dumps({"dropped": dropped, "worst": worst}) + "\n")


def _staged(store: Store, path: str) -> EmbeddingShard:
    """A staged chunk; from an object store it is read into memory, for a cached copy would never be used again."""
    if store.is_local:
        return EmbeddingShard.open(store.local_path(path))
    return EmbeddingShard(Path(path), pa.ipc.open_file(pa.BufferReader(store.read_bytes(path))))


def _described(draft: Manifest, shards: Sequence[BuiltShard]) -> Manifest:
    """The draft with its shards and what was measured on them, averaged over passages."""
    measured = {
        "recall": mean_over_passages([(shard.recall, shard.entry.num_passages) for shard in shards]),
        "view_pair_cosine": mean_over_passages([(shard.pair_cosine, shard.entry.num_passages) for shard in shards]),
        "lv": mean_over_passages([(shard.lv, shard.entry.num_passages) for shard in shards]),
    }
    metrics = {name: value for name, value in measured.items() if value is not None}
    if any(layout.PRUNED_JSON in shard.entry.files for shard in shards):
        metrics |= {"pruned_views": float(sum(shard.dropped for shard in shards))}
        metrics |= {"pruned_bound": max(shard.worst for shard in shards)}
    cosine, lv = measured["view_pair_cosine"], measured["lv"]
    if cosine is not None and lv is not None:
        metrics["collapsed"] = float(cosine > MAX_COSINE or lv < MIN_LV)
        told = log.warning if metrics["collapsed"] else log.info
        told(
            "views %s: index=%s view_pair_cosine=%.4f lv=%.4f",
            "collapsed into one vector" if metrics["collapsed"] else "differ",
            draft.index,
            cosine,
            lv,
        )
    entries = tuple(shard.entry for shard in shards)
    return dataclasses.replace(draft, shards=entries, recall=measured["recall"], metrics=metrics)
