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
from collections.abc import Callable
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
"""Size of a searcher's cache of masks, a byte a passage; the least recently used ones are evicted."""
ENTRY_BYTES = 500
"""Size of a mask without its bytes: its key and Python's objects."""
Mask = NDArray[np.bool_]
pc: Any = pyarrow.compute


class MaskCache:
    """Caches the masks of shards under filters, by version. Safe to use from several threads.

    A version is its number and its token, since a deleted version's number may be used again. A search may end after
    its version was dropped: only what is of a version that `is_open` is stored.
    """

    def __init__(
        self, store: str, limit_bytes: int = MASK_BYTES, is_open: Callable[[Manifest], bool] = lambda manifest: True
    ) -> None:
        self.store = store
        self.limit_bytes = limit_bytes
        self.num_bytes = 0
        self._is_open = is_open
        self._corpora: dict[tuple[int, str], Corpus] = {}
        self._rows: dict[tuple[int, str, int], IntArray | slice] = {}
        self._masks: OrderedDict[tuple[int, str, int, bytes], Mask] = OrderedDict()
        self._lock = threading.Lock()

    def mask(self, manifest: Manifest, shard: int, ids: pa.Array, filter: str) -> Mask:
        """For each passage of a shard, whether it passes the filter (its JSON) [P]. `ids` are the shard's.

        Raises FilterError, and StorageError or MissingInputError if the version's corpus is damaged or missing.
        """
        key = manifest.version, manifest.token, shard, hashlib.sha256(filter.encode()).digest()
        with self._lock:
            if key in self._masks:
                self._masks.move_to_end(key)
                return self._masks[key]
        mask_P = self._evaluate(manifest, shard, ids, filter)
        with self._lock:
            if not self._is_open(manifest):
                return mask_P
            self.num_bytes += _size(mask_P) * (key not in self._masks)
            self._masks[key] = mask_P
            while self.num_bytes > self.limit_bytes and len(self._masks) > 1:
                self.num_bytes -= _size(self._masks.popitem(last=False)[1])
        return mask_P

    def drop(self, version: int) -> None:
        """Remove the masks of a version that is not open any more."""
        with self._lock:
            self._corpora = {key: corpus for key, corpus in self._corpora.items() if key[0] != version}
            self._rows = {key: rows for key, rows in self._rows.items() if key[0] != version}
            for key in [key for key in self._masks if key[0] == version]:
                self.num_bytes -= _size(self._masks.pop(key))

    def _evaluate(self, manifest: Manifest, shard: int, ids: pa.Array, filter: str) -> Mask:
        key = manifest.version, manifest.token
        corpus = self._corpora.get(key)
        if corpus is None:
            corpus = Corpus.open(Store(self.store), manifest.corpus, manifest.corpus_digest)
            with self._lock:
                if self._is_open(manifest):
                    corpus = self._corpora.setdefault(key, corpus)
        parts = [corpus.part(number) for number in related_shards(shard, corpus.num_shards, len(manifest.shards))]
        parsed_filter = parse_filter(json.loads(filter), corpus.fields)
        table = pa.concat_tables([part.table({"id", *parsed_filter.columns}) for part in parts])
        rows = self._rows.get((*key, shard))
        if rows is None:
            rows = _rows_of(ids, table.column("id"), manifest, shard)
            with self._lock:
                if self._is_open(manifest):
                    self._rows[*key, shard] = rows
        return parsed_filter.mask(table)[rows]


def _size(mask_P: Mask) -> int:
    return mask_P.nbytes + ENTRY_BYTES


def _rows_of(ids: pa.Array, corpus_ids: pa.ChunkedArray, manifest: Manifest, shard: int) -> IntArray | slice:
    """The rows of a shard's passages among those of its parts; all, if they are the same ones in the same order."""
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
