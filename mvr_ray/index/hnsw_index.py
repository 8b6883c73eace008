"""Search an hnswlib graph over the views of a shard by inner product; a label is a vector's number in block order.

Built by one thread from a fixed seed, so the same vectors give the same file. (hnswlib's own multi-vector space gives
wrong answers for inner products; `candidates` groups vectors into passages instead.)

Shapes: Q queries, N vectors, F fetched, D dimension.
"""

import shutil
import threading
from collections.abc import Sequence
from pathlib import Path

import hnswlib  # pyrefly: ignore[missing-import]
import numpy as np

from mvr_ray.errors import ShardIndexError, StorageError
from mvr_ray.index.base import IndexParams, count_vectors
from mvr_ray.index.candidates import (
    DELETED,
    REBUILD,
    ApproximateIndex,
    LabelUpdate,
    float32_vectors,
    read_labels,
    translate_library_errors,
)
from mvr_ray.types import EmbeddingBlock, FloatArray, IntArray

hnswlib.Index(space="ip", dim=1).get_items([])  # loads numpy for hnswlib: two threads at once would deadlock
HNSW_FILE = "index.hnsw"
LEVEL_SEED = 100


class HnswIndex(ApproximateIndex):
    """An hnswlib index file, loaded into memory."""

    def __init__(
        self,
        params: IndexParams,
        blocks: Sequence[EmbeddingBlock],
        folder: Path,
        rows: Sequence[IntArray] | None = None,
        *,
        device: str = "cpu",
        threads: int | None = None,
    ) -> None:
        """The graph is searched on the CPU, whatever the device."""
        super().__init__(blocks, folder, rows, threads=threads)
        self.breadth = params.hnsw_ef_search
        self.lock = threading.Lock()  # the graph stores the beam width of a search
        if not self.num_vectors:
            return
        path = folder / HNSW_FILE
        if not path.is_file():
            raise ShardIndexError(f"no hnswlib index at {path}; build the index again")
        self.graph = hnswlib.Index(space="ip", dim=self.dimension)
        with translate_library_errors(f"hnswlib cannot read {path}", REBUILD):
            self.graph.load_index(str(path))
        if self.graph.get_current_count() != self.num_labels:
            raise ShardIndexError(
                f"{path} holds {self.graph.get_current_count()} vectors, the embeddings are {self.num_labels}; "
                f"build the index again"
            )
        if threads is not None:
            self.graph.set_num_threads(threads)

    @classmethod
    def check(cls, params: IndexParams, dimension: int) -> None:
        """Raise ShardIndexError if no graph can be built with these parameters."""
        if params.hnsw_m < 2:
            raise ShardIndexError(f"hnsw_m is {params.hnsw_m}; a node needs at least 2 links")
        if min(params.hnsw_ef_construction, params.hnsw_ef_search) < 1:
            raise ShardIndexError(
                f"hnsw_ef_construction is {params.hnsw_ef_construction} and hnsw_ef_search {params.hnsw_ef_search}; "
                f"both must be at least 1"
            )

    @classmethod
    def build(cls, params: IndexParams, blocks: Sequence[EmbeddingBlock], folder: Path) -> list[str]:
        """Add every vector in order, write one file."""
        graph = hnswlib.Index(space="ip", dim=int(blocks[0].vectors_ND.shape[1]))
        graph.init_index(
            max_elements=count_vectors(blocks),
            M=params.hnsw_m,
            ef_construction=params.hnsw_ef_construction,
            random_seed=LEVEL_SEED,
        )
        first = 0
        for vectors_ND in float32_vectors(blocks):
            graph.add_items(vectors_ND, np.arange(first, first + len(vectors_ND)), num_threads=1)
            first += len(vectors_ND)
        _save(graph, folder / HNSW_FILE)
        return [HNSW_FILE]

    @classmethod
    def update(
        cls, params: IndexParams, update: LabelUpdate, new_ND: FloatArray, source: Path, folder: Path
    ) -> list[str]:
        """Write a copy of the graph of `source` with new vectors, and with deleted ones marked.

        hnswlib ends the process where it adds a vector among marked ones alone, so none is marked meanwhile; recall is
        the same.
        """
        graph = hnswlib.Index(space="ip", dim=int(new_ND.shape[1]))
        old_labels = read_labels(source)
        with translate_library_errors(f"hnswlib cannot add {len(new_ND)} vectors to {source / HNSW_FILE}"):
            graph.load_index(str(source / HNSW_FILE), max_elements=len(update.number_L))
            for label in [] if old_labels is None else np.flatnonzero(old_labels == DELETED).tolist():
                graph.unmark_deleted(label)
            if len(new_ND):
                graph.add_items(new_ND, np.arange(update.first_new, len(update.number_L)), num_threads=1)
            for label in np.flatnonzero(update.number_L[: update.first_new] == DELETED).tolist():
                graph.mark_deleted(label)
        _save(graph, folder / HNSW_FILE)
        return [HNSW_FILE, *update.write(folder)]

    def nearest_labels(self, queries_QD: FloatArray, fetch: int) -> IntArray:
        with self.lock:
            self.graph.set_ef(max(self.breadth, fetch))
            try:
                return self.graph.knn_query(queries_QD, k=fetch)[0].astype(np.int64)
            except RuntimeError:  # a query reached fewer vectors than `fetch`; hnswlib does not name it
                return np.stack([self._nearest_to_one(query_D, fetch) for query_D in queries_QD])

    def _nearest_to_one(self, query_D: FloatArray, fetch: int) -> IntArray:
        try:
            return self.graph.knn_query(query_D, k=fetch)[0][0].astype(np.int64)
        except RuntimeError:
            return np.full(fetch, -1, np.int64)


def _save(graph: hnswlib.Index, path: Path) -> None:
    """Write a graph. Raises StorageError for a full disk, which hnswlib does not notice."""
    graph.save_index(str(path))
    expected, num_bytes = graph.index_file_size(), path.stat().st_size if path.exists() else 0
    if num_bytes != expected:
        raise StorageError(
            f"cannot write {path}: {num_bytes} of {expected} bytes were written ({shutil.disk_usage(path.parent).free} "
            f"bytes free); free space and run the same command again"
        )
