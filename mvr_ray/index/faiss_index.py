"""Search the views of a shard by an index of any Faiss factory string, by inner product.

Built by one thread from a fixed seed, so the same vectors give the same file. Opened mapped and read-only: pages load
when a search reads them, and processes share them; only codes that Faiss keeps in blocks for its fast scan (`fs`) are
read into memory. (Faiss aborts the process on additions to a mapped index, so this module never adds to one.)

Shapes: Q queries, N vectors, F fetched, D dimension.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import faiss
import numpy as np

from mvr_ray.errors import ShardIndexError
from mvr_ray.index.base import IndexParams, count_vectors, num_trained_on
from mvr_ray.index.candidates import (
    REBUILD,
    ApproximateIndex,
    LabelUpdate,
    float32_vectors,
    take_vectors,
    translate_library_errors,
)
from mvr_ray.types import EmbeddingBlock, FloatArray, IntArray

FAISS_FILE = "index.faiss"
TRAIN_SEED = 20220527
MAX_GPU_FETCH = 2048


class FaissIndex(ApproximateIndex):
    """A Faiss index file, mapped, or copied to a GPU."""

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
        super().__init__(blocks, folder, rows, threads=threads)
        self.threads = threads
        self.on_gpu = device != "cpu"
        self.index = self._open(folder / FAISS_FILE, params) if self.num_vectors else None
        if self.index is not None and self.on_gpu:
            self.index = _to_gpu(self.index, device, params.factory)

    @classmethod
    def check(cls, params: IndexParams, dimension: int) -> None:
        """Raise ShardIndexError if Faiss cannot build an index with these parameters."""
        if params.nprobe < 1:
            raise ShardIndexError(f"nprobe is {params.nprobe}; at least one list must be probed")
        _make(params.factory, dimension)

    @classmethod
    def build(cls, params: IndexParams, blocks: Sequence[EmbeddingBlock], folder: Path) -> list[str]:
        """Train on a seeded sample, add every vector in order, write one file."""
        num_vectors = count_vectors(blocks)
        index = _make(params.factory, int(blocks[0].vectors_ND.shape[1]))
        _set_construction(index, params)
        searchable = _searchable(index)
        num_lists = searchable.nlist if isinstance(searchable, faiss.IndexIVF) else 0
        failure = f"Faiss cannot build {params.factory!r} over {num_vectors} vectors in {folder}"
        advice = "; use a smaller factory, fewer shards, or index.kind=flat"
        with _threads(1), translate_library_errors(failure, advice):
            if not index.is_trained:
                index.train(_sample(blocks, num_vectors, num_trained_on(num_vectors, num_lists)))
            for vectors_ND in float32_vectors(blocks):
                index.add(vectors_ND)
        _write(index, folder / FAISS_FILE)
        return [FAISS_FILE]

    @classmethod
    def update(
        cls, params: IndexParams, update: LabelUpdate, new_ND: FloatArray, source: Path, folder: Path
    ) -> list[str]:
        """Write a copy of the index file of `source` with new vectors; deleted vectors stay in it, with labels of
        DELETED. Lists, codes and transforms are those of the first build. Nothing for a graph that takes no more."""
        with (
            _threads(1),
            translate_library_errors(f"Faiss cannot add {len(new_ND)} vectors to {source / FAISS_FILE}"),
        ):
            index = faiss.read_index(str(source / FAISS_FILE))
            _set_construction(index, params)
            if len(new_ND):
                if isinstance(_searchable(index), faiss.IndexNSG):
                    return []
                index.add(new_ND)
        _write(index, folder / FAISS_FILE)
        return [FAISS_FILE, *update.write(folder)]

    def _open(self, path: Path, params: IndexParams) -> faiss.Index:
        if not path.is_file():
            raise ShardIndexError(f"no Faiss index at {path}; build the index again")
        with translate_library_errors(f"Faiss cannot read {path}", REBUILD):
            index = faiss.read_index(str(path), 0 if self.on_gpu else faiss.IO_FLAG_MMAP_IFC)
        if (index.d, index.ntotal) != (self.dimension, self.num_labels):
            raise ShardIndexError(
                f"{path} holds {index.ntotal} vectors of dimension {index.d}, the embeddings are {self.num_labels} of "
                f"{self.dimension}; build the index again"
            )
        searchable = _searchable(index)
        if isinstance(searchable, faiss.IndexIVF):
            searchable.nprobe = min(params.nprobe, searchable.nlist)
        if isinstance(searchable, faiss.IndexHNSW):
            searchable.hnsw.efSearch = self.breadth = params.hnsw_ef_search
        return index

    def max_fetch(self) -> int:
        return min(MAX_GPU_FETCH, self.num_labels) if self.on_gpu else self.num_labels

    def nearest_labels(self, queries_QD: FloatArray, fetch: int) -> IntArray:
        assert self.index is not None, "a shard without vectors has no nearest ones"
        with nullcontext() if self.threads is None else _threads(self.threads):
            return self.index.search(queries_QD, fetch)[1]


def _make(factory: str, dimension: int) -> faiss.Index:
    failure = f"Faiss factory string {factory!r} does not work for inner products of dimension {dimension}"
    with translate_library_errors(failure):
        index = faiss.index_factory(dimension, factory, faiss.METRIC_INNER_PRODUCT)
    if isinstance(index, faiss.IndexIDMap):
        raise ShardIndexError(
            f"Faiss factory string {factory!r} renames vectors; leave IDMap out, rows are numbered here"
        )
    return index


def _write(index: faiss.Index, path: Path) -> None:
    """Write an index by a file of Python, as Faiss does not notice that a full disk lacks the end of its own."""
    with path.open("wb") as file:
        writer = faiss.PyCallbackIOWriter(file.write)  # pyrefly: ignore[missing-attribute]
        faiss.write_index(index, writer)


def _searchable(index: faiss.Index) -> faiss.Index:
    """Return the index inside transforms and refinements."""
    while True:
        if isinstance(index, faiss.IndexPreTransform):
            index = faiss.downcast_index(index.index)
        elif isinstance(index, faiss.IndexRefine):
            index = faiss.downcast_index(index.base_index)
        else:
            return index


def _set_construction(index: faiss.Index, params: IndexParams) -> None:
    """Set how vectors are added, and leave out what no search here uses."""
    searchable = _searchable(index)
    if isinstance(searchable, (faiss.IndexPQ, faiss.IndexIVFPQ)):  # an order for Hamming distances: 3 s for each 256
        searchable.do_polysemous_training = False  # pyrefly: ignore[missing-attribute]
    if isinstance(searchable, faiss.IndexHNSW):
        searchable.hnsw.efConstruction = params.hnsw_ef_construction


def _sample(blocks: Sequence[EmbeddingBlock], num_vectors: int, num: int) -> FloatArray:
    """Sample `num` of the vectors, deterministically, in order."""
    numbers = np.sort(np.random.default_rng(TRAIN_SEED).choice(num_vectors, num, replace=False))
    return take_vectors(blocks, numbers)


def _to_gpu(index: faiss.Index, device: str, factory: str) -> faiss.Index:
    if not hasattr(faiss, "StandardGpuResources") or not faiss.get_num_gpus():
        raise ShardIndexError(
            f"cannot search Faiss on {device!r}: this Faiss sees no GPU; install mvr-ray[gpu] or use 'cpu'"
        )
    number = int(device.partition(":")[2] or 0)
    with translate_library_errors(f"Faiss cannot put {factory!r} on {device!r}", "; use 'cpu'"):
        return faiss.index_cpu_to_gpu(faiss.StandardGpuResources(), number, index)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Set the number of OpenMP's threads for work that this thread begins in the block, and restore it afterwards:
    OpenMP keeps a number for each thread. It takes a microsecond."""
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(count)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)
