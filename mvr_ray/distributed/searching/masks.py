"""Evaluates filters over the passages of open shards, and caches the masks.

A version names its corpus by digest, so the fields are those at the version's creation. Passages are matched by id,
since a version may have another number of shards than its corpus has parts. Opening a part reads it whole, to compare
its digest; after that a new filter reads only the columns that it names.

Shapes: P passages of a shard.
"""

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Collection
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
from numpy.typing import NDArray

from mvr_ray.distributed.indexing.shards import related_shards
from mvr_ray.errors import ManifestError, count_noun
from mvr_ray.store.corpus import Corpus
from mvr_ray.store.files import Store
from mvr_ray.store.filters import parse_filter
from mvr_ray.store.manifest import Manifest
from mvr_ray.types import IntArray

MASK_BYTES = 1 << 28
"""Size of a searcher's masks of all open versions, a byte a passage; the least recently used ones are evicted."""
ENTRY_BYTES = 500
"""Size of a mask without its bytes: its key and Python's objects."""
Mask = NDArray[np.bool_]
pc: Any = pyarrow.compute


class VersionMasks:
    """Caches the masks of a version's shards under filters. Safe to use from several threads."""

    def __init__(self, store: str, manifest: Manifest) -> None:
        self.num_bytes = 0
        self._store, self._manifest = store, manifest
        self._rows: dict[int, IntArray | slice] = {}
        self._masks: OrderedDict[tuple[int, bytes], Mask] = OrderedDict()
        self._lock = threading.Lock()

    @cached_property
    def _corpus(self) -> Corpus:
        return Corpus.open(Store(self._store), self._manifest.corpus, self._manifest.corpus_digest)

    def mask(self, shard: int, ids: pa.Array, filter: str) -> Mask:
        """Return whether each passage of a shard passes the filter (its JSON) [P]. `ids` are the shard's.

        Raises FilterError, and StorageError or MissingInputError if the version's corpus is damaged or missing.
        """
        key = shard, hashlib.sha256(filter.encode()).digest()
        with self._lock:
            if key in self._masks:
                self._masks.move_to_end(key)
                return self._masks[key]
        mask_P = self._evaluate(shard, ids, filter)
        with self._lock:
            self.num_bytes += _size(mask_P) * (key not in self._masks)
            self._masks[key] = mask_P
        return mask_P

    def evict(self) -> None:
        """Remove the least recently used mask."""
        with self._lock:
            if self._masks:
                self.num_bytes -= _size(self._masks.popitem(last=False)[1])

    def _evaluate(self, shard: int, ids: pa.Array, filter: str) -> Mask:
        numbers = related_shards(shard, self._corpus.num_shards, len(self._manifest.shards))
        parsed_filter = parse_filter(json.loads(filter), self._corpus.fields)
        columns = {"id", *parsed_filter.columns}
        table = pa.concat_tables([self._corpus.part(number).table(columns) for number in numbers])
        if shard not in self._rows:
            self._rows[shard] = _rows_of(ids, table.column("id"), self._manifest, shard)
        return parsed_filter.mask(table)[self._rows[shard]]


def limit_masks(caches: Collection[VersionMasks], limit_bytes: int = MASK_BYTES) -> None:
    """Remove masks, of the largest cache first, until all caches together hold no more than the limit."""
    while sum(cache.num_bytes for cache in caches) > limit_bytes:
        max(caches, key=lambda cache: cache.num_bytes).evict()


def _size(mask_P: Mask) -> int:
    return mask_P.nbytes + ENTRY_BYTES


def _rows_of(ids: pa.Array, corpus_ids: pa.ChunkedArray, manifest: Manifest, shard: int) -> IntArray | slice:
    """Return the rows of a shard's passages among those of its parts; all, if they are the same ones in the same
    order."""
    if corpus_ids.equals(pa.chunked_array([ids])):
        return slice(None)
    rows = pc.index_in(ids, value_set=corpus_ids)
    if rows.null_count:
        absent = ids.filter(pc.is_null(rows))
        raise ManifestError(
            f"shard {shard} of index {manifest.index!r} version {manifest.version} holds "
            f"{count_noun(len(absent), 'passage')} that its corpus {manifest.corpus!r} lacks, "
            f"first {absent[0].as_py()!r}; index again"
        )
    return rows.to_numpy()
