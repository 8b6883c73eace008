"""Build one shard: its index, its name by content, its measurements, and its note until the publication.

Shapes: Q queries, P passages, V views per passage, N view vectors, D dimension.
"""

import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
from pydantic import ConfigDict, ValidationError
from pydantic.dataclasses import dataclass

from mvr_ray.capacity import builder_bytes
from mvr_ray.checksums import with_trailer, without_trailer
from mvr_ray.config import IndexConfig
from mvr_ray.config.base import describe_problems
from mvr_ray.core.judging.collapse import Collapse, collapse_report
from mvr_ray.distributed.cluster.periodic import run_periodically
from mvr_ray.distributed.cluster.session import Need
from mvr_ray.errors import ConfigError, DigestError, FormatError, MissingInputError, StorageError
from mvr_ray.index.base import IndexParams, default_factory, measured_recall
from mvr_ray.index.candidates import LABELS_FILE
from mvr_ray.index.flat import shared_codes
from mvr_ray.index.kinds import build_index, open_index, searches_embeddings
from mvr_ray.store import manifest as manifests
from mvr_ray.store import paths
from mvr_ray.store.delta import open_embeddings
from mvr_ray.store.embeddings import BATCH_PASSAGES, BlockRow, EmbeddingShard, cut_block, gather_rows
from mvr_ray.store.files import Store
from mvr_ray.store.gc import GRACE_S
from mvr_ray.store.local_files import link_or_copy
from mvr_ray.store.manifest import FileEntry, Manifest, ShardEntry, ShardMeta
from mvr_ray.types import EmbeddingBlock, FloatArray

log = logging.getLogger(__name__)

Staged = TypeVar("Staged")
RECALL_DEPTH = 100
COLLAPSE_SAMPLE = 256
INDEX_BUILDERS = Need("index builders", 1, 1.0)
"""A stage with tasks for shards needs room for one of them at least (`tasks.run_tasks`)."""
RENEWALS, MIN_RENEWAL_S = 4, 1.0
"""How often the age of unfinished work is renewed within a grace time, and the least time between."""
RECALL_SLACK = 0.01
"""Promised recall is lower by this than the one measured at the build: shards and samples differ."""
STAGED = ConfigDict(extra="forbid")
"""Of what is staged as JSON: a field of a newer program may change what the others mean."""
RECALL_METRICS = ("recall", "recall_least", "shards_updated", "shards_rebuilt")


@dataclass(frozen=True, config=STAGED)
class BuiltShard:
    """A stored shard and its measurements; None where there is nothing to measure.

    `dropped` views were pruned, the worst at distance `worst` from its siblings' hull, over its norm (`pruning`).
    `is_updated`: the approximate index is an updated copy of an earlier one (True) or built from scratch (False); None
    for a reused or exact index. `least_recall` is the promise of the earlier index's version: an updated copy reaches
    it, or is rebuilt. `num_cut` and `num_unknown` of the passages that were encoded for it are not read
    whole (`UnreadCounts`).
    """

    entry: ShardEntry
    recall: float | None
    pair_cosine: float | None = None
    lv: float | None = None
    dropped: int = 0
    worst: float = 0.0
    is_updated: bool | None = None
    least_recall: float | None = None
    num_cut: int = 0
    num_unknown: int = 0


def index_params(index: IndexConfig, dimension: int, on_gpu: bool = False) -> IndexParams:
    """Index parameters of a shard from the `index` section. `on_gpu`: searchers hold it on a GPU."""
    values = {field.name: getattr(index, field.name) for field in fields(IndexParams)}
    values["factory"] = index.factory or default_factory(dimension, on_gpu)
    return IndexParams(**values)


def builder_memory(version: Manifest, vectors: Sequence[int]) -> list[int]:
    """Return the memory that building each shard of a version takes, with these numbers of vectors; that of the vectors
    in float32 for a Faiss factory that `plan` does not know."""
    params, dimension = IndexParams(**version.index_params), version.dimension
    try:
        return [builder_bytes(params, num, dimension) for num in vectors]
    except ConfigError:
        return [4 * dimension * num for num in vectors]


def build_shard(
    store: Store,
    manifest: Manifest,
    shard: int,
    folder: Path,
    files: Mapping[str, FileEntry] | None = None,
    recall_sample: int = 0,
) -> BuiltShard:
    """Index the embeddings in `folder`, unless it holds index files, measure the recall, and move the folder to the
    name given by its content: once moved, an object store would send the files back.

    `manifest` gives the index and its parameters; it need not be published. `files` describes files that were checked
    before and are not read again.
    """
    params, embeddings = IndexParams(**manifest.index_params), folder_embeddings(folder)
    names = {file.name for file in folder.iterdir()}
    is_indexed = bool(names - {*paths.embedding_files(names), paths.PRUNED_JSON})
    if embeddings.num_passages and not searches_embeddings(params) and not is_indexed:
        build_index(params, embeddings.blocks(), folder)
    recall = folder_recall(params, folder, recall_sample, shard)
    meta = ShardMeta(shard, embeddings.num_passages, embeddings.num_vectors)
    return BuiltShard(manifests.add_shard(store, manifest.index, folder, meta, files), recall)


def keep_codes(
    params: IndexParams, base: Path, base_files: Mapping[str, FileEntry], folder: Path
) -> dict[str, FileEntry]:
    """Link the codes of the base's first file into `folder`, a shard with that file and changes; returns these files,
    none if the index has no codes, or the base has other ones."""
    if params.kind != "flat" or params.scan != "int8":
        return {}
    known_files = {}
    for name, own in shared_codes(base_files, bool(paths.changes_files(base_files))).items():
        link_or_copy(base / name, folder / own)
        known_files[own] = base_files[name]
    return known_files


def parse_staged(kind: type[Staged], data: bytes, where: str) -> Staged:
    """Parse a staged plan or note. Raises DigestError for a damaged one, FormatError for one of a newer program."""
    fields = json.loads(bytes(without_trailer(data, where)))
    try:
        return kind(**fields)
    except ValidationError as error:
        raise FormatError(f"{where} is of another program ({describe_problems(error)})") from error


def write_note(store: Store, path: str, report: BuiltShard) -> BuiltShard:
    """Write the note of a built shard, for use until its version is published; returns the shard."""
    store.write_bytes(path, with_trailer(json.dumps(asdict(report)).encode()))
    return report


def read_note(store: Store, index: str, path: str) -> BuiltShard | None:
    """Read the note of a shard that an earlier try built, and check all its files; None where it or its note is missing
    or damaged, or a newer program's: the note is removed, and the shard is built again."""
    if not store.exists(path):
        return None
    try:
        built_shard = parse_staged(BuiltShard, store.read_bytes(path), store.where(path))
        entry = built_shard.entry
        folder = paths.shard_dir(index, entry.digest)
        checks = (store.damage(f"{folder}/{name}", file.num_bytes, file.sha256) for name, file in entry.files.items())
        if reason := next(filter(None, checks), ""):
            raise DigestError(f"a file of shard {entry.shard} {reason}")
    except (DigestError, FormatError) as error:
        log.warning("shard is built again: note=%s (%s)", store.where(path), error)
        store.delete(path)
        return None
    return built_shard


def write_measurements(store: Store, draft: Manifest, report: BuiltShard) -> None:
    """Record beside a shard what later versions that reuse it need to know of it."""
    own = replace(report, is_updated=None, least_recall=None, num_cut=0, num_unknown=0)
    write_note(store, paths.shard_measurements(draft.index, report.entry.digest, draft.config_digest), own)


def read_measurements(store: Store, draft: Manifest, entry: ShardEntry) -> BuiltShard | None:
    """Read what was measured on a shard, without reading the shard. None where that is missing or damaged, a newer
    program's or of another shard."""
    path = paths.shard_measurements(draft.index, entry.digest, draft.config_digest)
    with suppress(MissingInputError, DigestError, FormatError):
        own = parse_staged(BuiltShard, store.read_bytes(path), store.where(path))
        return own if own.entry == entry else None
    return None


def renew_periodically(store: Store, draft: Manifest, key: str, grace_s: float) -> AbstractContextManager[None]:
    """Renew, while the block runs, the age of unfinished work, of what it claims and the shards that its notes name,
    and of the corpus of its version, so that no collection with this grace time, or that of corpora, removes them."""
    interval_s = max(min(grace_s, GRACE_S) / RENEWALS, MIN_RENEWAL_S)

    def renew() -> float:
        store.touch(paths.corpus_version(draft.corpus, draft.corpus_digest))
        store.write_bytes(paths.staged_marker(draft.index, key), b"")
        folder = paths.staging_dir(draft.index, key)
        for name in store.list(folder):
            path = paths.claimed_path(draft.index, name)
            if name.startswith("built-"):
                with suppress(MissingInputError, DigestError, FormatError):  # the command itself deals with such a note
                    data, where = store.read_bytes(f"{folder}/{name}"), store.where(f"{folder}/{name}")
                    path = paths.shard_dir(draft.index, parse_staged(BuiltShard, data, where).entry.digest)
            if path and store.age_s(path) >= interval_s:  # an object store copies a file to renew it
                store.touch(path)
        return interval_s

    return run_periodically(renew, 0.0, "mvr-renew", join_s=None)


@contextmanager
def shard_folder(store: Store) -> Iterator[Path]:
    """Create an empty temporary folder for a new shard."""
    with store.scratch() as scratch:
        folder = scratch / "shard"
        folder.mkdir()
        yield folder


def folder_embeddings(folder: Path) -> EmbeddingShard:
    """Open the embeddings of a shard that consists of the files in a folder."""
    return open_embeddings(folder, [file.name for file in folder.iterdir()])


def shard_embeddings(store: Store, index: str, entry: ShardEntry) -> EmbeddingShard:
    """Open the embeddings of a stored shard. Raises as `manifest.open_shard`."""
    return open_embeddings(manifests.open_shard(store, index, entry), entry.files)


def embeddings_alone(entry: ShardEntry) -> ShardEntry:
    """Return a shard with the files that hold its views, and no others."""
    return replace(entry, files={name: entry.files[name] for name in paths.embedding_files(entry.files)})


def version_blocks(store: Store, version: Manifest) -> Iterator[EmbeddingBlock]:
    """Yield the stored views of all passages of a version, shard by shard, in blocks of up to 4,096 passages that
    cannot be written to; one shard is open at a time. Raises as `shard_embeddings`, and StorageError if the version has
    been deleted."""
    for entry in version.shards:
        try:
            shard = shard_embeddings(store, version.index, entry)
        except DigestError:
            if store.exists(paths.manifest(version.index, version.version)):
                raise
            what = f"index {version.index!r} version {version.version} was collected, and its files with it"
            raise StorageError(f"{what}; open the index again") from None
        for block in shard.iter_blocks():  # with passages between those of the first file, or copied around changes
            block.vectors_ND.flags.writeable = False
            for start in range(0, len(block.ids), BATCH_PASSAGES):
                yield cut_block(block, start, min(start + BATCH_PASSAGES, len(block.ids)))


def gather_batches(blocks: Sequence[EmbeddingBlock], rows: Sequence[BlockRow]) -> Iterator[EmbeddingBlock]:
    """Gather rows, as `gather_rows` does, in batches of passages."""
    for start in range(0, len(rows), BATCH_PASSAGES):
        yield gather_rows(blocks, rows[start : start + BATCH_PASSAGES])


def related_shards(shard: int, num_before: int, num_after: int) -> list[int]:
    """Return the old shards, or parts of a corpus, that can hold a passage of a new shard: those with the same
    residue."""
    step = math.gcd(num_before, num_after)
    return list(range(shard % step, num_before, step))


def mean_over_passages(shards: Sequence[BuiltShard], name: str) -> float | None:
    """Return the mean of a measurement of shards weighted by passages; None where nothing was measured."""
    pairs = [(getattr(shard, name), shard.entry.num_passages) for shard in shards]
    weighted_values = [(value, weight) for value, weight in pairs if value is not None]
    total = sum(weight for _, weight in weighted_values)
    return sum(value * weight for value, weight in weighted_values) / total if total else None


def promised_recall(manifest: Manifest) -> float | None:
    """Return the minimum recall for an updated index of a shard of the version; None where nothing was measured."""
    if manifest.recall is None:
        return None
    return float(manifest.metrics.get("recall_least", manifest.recall - RECALL_SLACK))


def recall_metrics(shards: Sequence[BuiltShard]) -> dict[str, int | float]:
    """Return the manifest metrics of the shards' approximate indexes: the measured recall, the minimum for each updated
    index, and the numbers of updated and rebuilt ones."""
    metrics: dict[str, int | float] = {}
    recall = mean_over_passages(shards, "recall")
    if recall is not None:
        approximate = (shard for shard in shards if LABELS_FILE in shard.entry.files)
        floors = [one.recall if one.least_recall is None else one.least_recall for one in approximate]
        least = min((one for one in floors if one is not None), default=recall - RECALL_SLACK)
        metrics |= {"recall": recall, "recall_least": least}
    if any(shard.is_updated is not None for shard in shards):
        metrics |= {"shards_updated": sum(shard.is_updated is True for shard in shards)}
        metrics |= {"shards_rebuilt": sum(shard.is_updated is False for shard in shards)}
    return metrics


def shard_recall(store: Store, manifest: Manifest, entry: ShardEntry, sample: int) -> float | None:
    """Measure the recall of a shard's index against exact search; None for an exact index.

    The queries are `sample` of the shard's own views, drawn by its number.
    """
    params = IndexParams(**manifest.index_params)
    if params.kind == "flat" or not sample or not entry.num_passages:
        return None
    folder = manifests.open_shard(store, manifest.index, entry)
    return folder_recall(params, folder, sample, entry.shard)


def folder_recall(params: IndexParams, folder: Path, sample: int, seed: int) -> float | None:
    """Measure as `shard_recall` does the recall of the index of the shard, of number `seed`, in a folder."""
    embeddings = folder_embeddings(folder)
    if params.kind == "flat" or not sample or not embeddings.num_passages:
        return None
    blocks = embeddings.blocks()
    queries_QD = sample_views(blocks, sample, seed)
    exact = open_index(IndexParams(kind="flat"), blocks, folder, threads=1)
    return measured_recall(open_index(params, blocks, folder, threads=1), exact, queries_QD, RECALL_DEPTH)


def sample_views(blocks: Sequence[EmbeddingBlock], num: int, seed: int) -> FloatArray:
    """Sample `num` views of a shard (all, if it has fewer) by `seed`, as float32."""
    ends = np.cumsum([len(block.vectors_ND) for block in blocks])
    rows_Q = np.sort(np.random.default_rng(seed).permutation(int(ends[-1]))[:num])
    at_Q = np.searchsorted(ends, rows_Q, side="right")
    views = [blocks[at].vectors_ND[row - (ends[at - 1] if at else 0)] for at, row in zip(at_Q, rows_Q)]
    return np.stack(views).astype(np.float32)


def shard_collapse(shard: EmbeddingShard) -> Collapse:
    """Check the encoded views of the shard's first passages for collapse, without feedback views."""
    if not shard.num_passages:
        return Collapse(None, None, False, "the shard is empty")
    block = shard.blocks()[0]
    num = min(COLLAPSE_SAMPLE, len(block.ids))
    stop = int(block.row_ptr[num])
    views_PVD = np.zeros((num, shard.num_views, shard.dimension), np.float32)
    mask_PV = np.zeros(views_PVD.shape[:2], bool)
    rows_N = np.repeat(np.arange(num), np.diff(block.row_ptr[: num + 1]))
    own_N = block.view_numbers_N[:stop] < shard.num_views
    places = rows_N[own_N], block.view_numbers_N[:stop][own_N]
    views_PVD[places] = block.vectors_ND[:stop][own_N]
    mask_PV[places] = True
    return collapse_report(views_PVD, mask_PV)
