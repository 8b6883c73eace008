"""Build and open the three kinds of index.

    flat    exact and certified; scans the vectors, or with `scan: int8` codes of a quarter of float32's size, and
            scores with the vectors what the codes cannot exclude
    faiss   any Faiss factory string; approximate
    hnsw    hnswlib graph; approximate

An approximate index finds candidates; each is then scored exactly with all its views, so returned scores are exact.
Only passages may be missing.
"""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mvr_ray.errors import ShardIndexError
from mvr_ray.index.base import IndexParams, ShardIndex, count_vectors
from mvr_ray.index.candidates import DELETED, take_vectors, update_labels
from mvr_ray.index.flat import FlatIndex, build_codes, open_codes
from mvr_ray.types import EmbeddingBlock, IntArray

if TYPE_CHECKING:
    from mvr_ray.index.faiss_index import FaissIndex
    from mvr_ray.index.hnsw_index import HnswIndex

KINDS = ("flat", "faiss", "hnsw")
SCANS = ("vectors", "int8")


def check_params(params: IndexParams, dimension: int) -> None:
    """Raise ShardIndexError if no index can be built with these parameters, before any work is done."""
    if params.kind not in KINDS:
        raise ShardIndexError(f"index kind {params.kind!r} is unknown; it is one of {', '.join(KINDS)}")
    if params.scan not in SCANS:
        raise ShardIndexError(f"index scan {params.scan!r} is unknown; it is one of {', '.join(SCANS)}")
    if dimension < 1:
        raise ShardIndexError(f"embeddings have dimension {dimension}; at least 1 is needed")
    if params.kind != "flat":
        _approximate(params.kind).check(params, dimension)


def build_index(params: IndexParams, blocks: Sequence[EmbeddingBlock], folder: Path) -> list[str]:
    """Build the index files in `folder` and return their names, none for plain flat. Same blocks, same bytes."""
    check_params(params, _dimension(blocks))
    if params.kind == "flat":
        return build_codes(blocks, folder) if params.scan == "int8" else []
    return _approximate(params.kind).build(params, blocks, folder) if count_vectors(blocks) else []


def update_index(
    params: IndexParams,
    old_blocks: Sequence[EmbeddingBlock],
    blocks: Sequence[EmbeddingBlock],
    changed_ids: Collection[str],
    source: Path,
    folder: Path,
    most_share: float,
) -> list[str]:
    """Write to `folder` the index of `blocks` as a copy of the approximate index of `old_blocks` in `source`: with new
    vectors added, and deleted ones excluded from every search. Return the names of its files.

    Passages of `changed_ids` may have new vectors; all others that both have are the same. The bytes depend only on
    these arguments, so on the history of the index. Empty where there is nothing to copy, where more than `most_share`
    of the labels would be deleted, or where the index takes no further vectors.
    """
    if params.kind == "flat" or not count_vectors(old_blocks) or not count_vectors(blocks):
        return []
    update = update_labels(old_blocks, blocks, changed_ids, source)
    if (update.number_L == DELETED).mean() > most_share:
        return []
    new_ND = take_vectors(blocks, update.number_L[update.first_new :])
    return _approximate(params.kind).update(params, update, new_ND, source, folder)


def searches_embeddings(params: IndexParams) -> bool:
    """Return whether a search reads only the embeddings, without an index file."""
    return params.kind == "flat" and params.scan == "vectors"


def open_index(
    params: IndexParams,
    blocks: Sequence[EmbeddingBlock],
    folder: Path,
    rows: Sequence[IntArray] | None = None,
    *,
    device: str = "cpu",
    threads: int | None = None,
) -> ShardIndex:
    """Open the index that `build_index` wrote to `folder`, over the same blocks, which must stay mapped.

    Blocks of a shard with changes come with their `rows` (`StoredBlocks`).
    """
    check_params(params, _dimension(blocks))
    if params.kind != "flat":
        return _approximate(params.kind)(params, blocks, folder, rows, device=device, threads=threads)
    has_codes = params.scan == "int8" and any(len(block.ids) for block in blocks)
    codes = open_codes(folder, blocks, is_changed=rows is not None) if has_codes else None
    return FlatIndex(blocks, rows, codes=codes, device=device, threads=threads)


def _approximate(kind: str) -> "type[FaissIndex] | type[HnswIndex]":
    """Import the class of an approximate kind, and with it its library."""
    if kind == "faiss":
        try:
            from mvr_ray.index.faiss_index import FaissIndex
        except ImportError as error:
            raise ShardIndexError(
                f"index.kind is faiss, which cannot be imported ({error}); pip install 'mvr-ray[cpu]' or "
                f"'mvr-ray[gpu]', or set index.kind=hnsw"
            ) from error
        return FaissIndex
    from mvr_ray.index.hnsw_index import HnswIndex

    return HnswIndex


def _dimension(blocks: Sequence[EmbeddingBlock]) -> int:
    if not blocks:
        raise ShardIndexError("a shard without blocks cannot be indexed: its dimension is unknown")
    return int(blocks[0].vectors_ND.shape[1])
