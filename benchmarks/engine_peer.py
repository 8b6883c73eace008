"""Run one engine of `engines.py` and `updates.py` in a process of its own: a peer, or mvr_ray itself.

    python engine_peer.py FOLDER mvr_ray | qdrant | lancedb | milvus  PRECISION THREADS

The program reads FOLDER/task.json and the vectors beside it, prints that it is ready, and executes each line:

    build                     write the store, open it
    search K SHARE FIRST N    answer N questions from FIRST on, one at a time, over the passages whose field n < SHARE
                              (100: without a filter); seconds by the clock, and of all processors
    batch K FIRST N           answer them in one call
    update EVERY              replace the views of every EVERYth passage, and answer a question
    size                      bytes of the store on disk, and of this process in memory

Shapes: P passages, V views per passage, D dimension.
"""

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from machine import peak_bytes

BATCH = 1000
ALL = 100
"""The share of passages that no filter leaves out."""


class Engine(Protocol):
    """A store of passages with a field `n`, open or closed."""

    def build(self, batches: Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> None: ...

    def search(self, query_D: np.ndarray, k: int, share: int) -> list[tuple[int, float]]: ...

    def search_batch(self, queries_QD: np.ndarray, k: int) -> list[list[tuple[int, float]]]: ...

    def upsert(self, rows: np.ndarray, fields: np.ndarray, vectors_PVD: np.ndarray) -> None: ...

    def close(self) -> None: ...


class Qdrant:
    """Qdrant Edge: a multivector scored by MaxSim, without a graph; a thread per segment."""

    def __init__(self, folder: Path, task: dict[str, Any], precision: str, threads: int) -> None:
        import qdrant_edge as edge

        self.edge, self.folder, passages = edge, folder, task["passages"]
        datatype = edge.VectorStorageDatatype.Float16 if precision == "fp16" else edge.VectorStorageDatatype.Float32
        size_kb = passages * task["views"] * task["dimension"] * (2 if precision == "fp16" else 4) // 1000
        self.half, self.segments = passages // 2, threads
        self.config = edge.EdgeConfig(
            vectors=edge.EdgeVectorParams(
                size=task["dimension"],
                distance=edge.Distance.Dot,
                multivector_config=edge.MultiVectorConfig(edge.MultiVectorComparator.MaxSim),
                datatype=datatype,
            ),
            hnsw_config=edge.HnswIndexConfig(m=0, ef_construct=4, full_scan_threshold=10),
            optimizers=edge.EdgeOptimizersConfig(
                default_segment_number=threads, max_segment_size=size_kb * 2 // (threads + 1), indexing_threshold=1000
            ),
            max_search_threads=threads,
        )
        if folder.exists():
            self.shard = edge.EdgeShard.load(str(folder))

    def build(self, batches: Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> None:
        self.folder.mkdir()
        self.shard = self.edge.EdgeShard.create(str(self.folder), self.config)
        self.shard.update(self.edge.UpdateOperation.create_field_index("n", self.edge.PayloadSchemaType.Integer))
        count, halves = 0, 0
        for rows, fields, vectors_PVD in batches:
            self._put(rows, fields, vectors_PVD)
            count += len(rows)
            if self.segments == 2 and not halves and count >= self.half:
                self.shard.optimize()
                halves = 1
        self.shard.optimize()
        self.shard.flush()

    def _put(self, rows: np.ndarray, fields: np.ndarray, vectors_PVD: np.ndarray) -> None:
        points = [
            self.edge.Point(int(row), views_VD.tolist(), {"n": int(n)})
            for row, n, views_VD in zip(rows, fields, vectors_PVD)
        ]
        self.shard.update(self.edge.UpdateOperation.upsert_points(points))

    def _request(self, query_D: np.ndarray, k: int, share: int) -> Any:
        edge, condition = self.edge, None
        if share < ALL:
            condition = edge.Filter(must=[edge.FieldCondition("n", range=edge.RangeFloat(lt=share))])
        nearest = edge.Query.Nearest([query_D.tolist()])
        return edge.QueryRequest(limit=k, query=nearest, filter=condition, params=edge.SearchParams(exact=True))

    def search(self, query_D: np.ndarray, k: int, share: int) -> list[tuple[int, float]]:
        return [(point.id, point.score) for point in self.shard.query(self._request(query_D, k, share))]

    def search_batch(self, queries_QD: np.ndarray, k: int) -> list[list[tuple[int, float]]]:
        requests = [self._request(query_D, k, ALL) for query_D in queries_QD]
        answers = self.shard.query_batch(self.edge.QueryBatchRequest(requests))
        return [[(point.id, point.score) for point in answer] for answer in answers]

    def upsert(self, rows: np.ndarray, fields: np.ndarray, vectors_PVD: np.ndarray) -> None:
        for start in range(0, len(rows), BATCH):
            own = slice(start, start + BATCH)
            self._put(rows[own], fields[own], vectors_PVD[own])
        self.shard.flush()

    def close(self) -> None:
        self.shard.close()


class Lance:
    """LanceDB: a multivector column, scored by cosine, its only measure for these; views are unit vectors.
    LANCE_CPU_THREADS sets the size of its thread pool."""

    def __init__(self, folder: Path, task: dict[str, Any], precision: str, threads: int) -> None:
        import lancedb
        import pyarrow as pa

        self.pa, self.dimension = pa, task["dimension"]
        self.dtype = np.float16 if precision == "fp16" else np.float32
        self.database = lancedb.connect(str(folder))
        self.table = self.database.open_table("passages") if folder.exists() and any(folder.iterdir()) else None

    def build(self, batches: Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> None:
        first = self._rows(*next(batches))
        reader = self.pa.RecordBatchReader.from_batches(
            first.schema, (batch for table in self._tables(first, batches) for batch in table.to_batches())
        )
        self.table = self.database.create_table("passages", reader)
        self.table.create_scalar_index("n")

    def _tables(self, first: Any, batches: Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> Iterator[Any]:
        yield first
        for batch in batches:
            yield self._rows(*batch)

    def _rows(self, rows: np.ndarray, fields: np.ndarray, vectors_PVD: np.ndarray) -> Any:
        pa = self.pa
        flat = pa.array(np.ascontiguousarray(vectors_PVD, self.dtype).reshape(-1))
        offsets = pa.array(np.arange(len(rows) + 1, dtype=np.int32) * vectors_PVD.shape[1])
        vectors = pa.ListArray.from_arrays(offsets, pa.FixedSizeListArray.from_arrays(flat, self.dimension))
        return pa.table({"id": pa.array(rows), "n": pa.array(fields), "vector": vectors})

    def search(self, query_D: np.ndarray, k: int, share: int) -> list[tuple[int, float]]:
        query = self.table.search([query_D]).distance_type("cosine").limit(k).select(["id", "_distance"])
        if share < ALL:
            query = query.where(f"n < {share}", prefilter=True)
        hits = query.to_arrow()
        length = float(np.linalg.norm(query_D))
        scores = (1 - hits["_distance"].to_numpy()) * length
        return list(zip(hits["id"].to_pylist(), scores.tolist()))

    def search_batch(self, queries_QD: np.ndarray, k: int) -> list[list[tuple[int, float]]]:
        return [self.search(query_D, k, ALL) for query_D in queries_QD]

    def upsert(self, rows: np.ndarray, fields: np.ndarray, vectors_PVD: np.ndarray) -> None:
        insert = self.table.merge_insert("id").when_matched_update_all().when_not_matched_insert_all()
        insert.execute(self._rows(rows, fields, vectors_PVD))

    def close(self) -> None:
        pass


class Milvus:
    """Milvus Lite, without several vectors per row and half precision: a row per view, an index of kind FLAT.
    Its answers are the passages of the best views; it fetches enough that no passage is missing."""

    def __init__(self, folder: Path, task: dict[str, Any], precision: str, threads: int) -> None:
        from pymilvus import DataType, MilvusClient

        self.types, self.views, self.dimension, self.folder = DataType, task["views"], task["dimension"], folder
        folder.mkdir(exist_ok=True)
        self.client = MilvusClient(str(folder / "passages.db"))

    def build(self, batches: Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> None:
        schema = self.client.create_schema()
        schema.add_field("id", self.types.INT64, is_primary=True)
        schema.add_field("n", self.types.INT64)
        schema.add_field("vector", self.types.FLOAT_VECTOR, dim=self.dimension)
        index = self.client.prepare_index_params()
        index.add_index("vector", index_type="FLAT", metric_type="IP")
        self.client.create_collection("passages", schema=schema, index_params=index)
        for batch in batches:
            self.upsert(*batch)
        self.client.flush("passages")

    def search(self, query_D: np.ndarray, k: int, share: int) -> list[tuple[int, float]]:
        condition = f"n < {share}" if share < ALL else ""
        [hits] = self.client.search("passages", [query_D], filter=condition, limit=k * self.views)
        best: dict[int, float] = {}
        for hit in hits:
            best.setdefault(hit["id"] // self.views, hit["distance"])
        return list(best.items())[:k]

    def search_batch(self, queries_QD: np.ndarray, k: int) -> list[list[tuple[int, float]]]:
        return [self.search(query_D, k, ALL) for query_D in queries_QD]

    def upsert(self, rows: np.ndarray, fields: np.ndarray, vectors_PVD: np.ndarray) -> None:
        for start in range(0, len(rows), BATCH):
            own = zip(rows[start : start + BATCH].tolist(), fields[start : start + BATCH].tolist(), vectors_PVD[start:])
            points = [
                {"id": row * self.views + view, "n": n, "vector": views_VD[view]}
                for row, n, views_VD in own
                for view in range(self.views)
            ]
            self.client.upsert("passages", points)

    def close(self) -> None:
        self.client.close()


ENGINES = {"qdrant": Qdrant, "lancedb": Lance, "milvus": Milvus}


def engine_of(name: str) -> Callable[..., Engine]:
    """Return the engine's constructor; the import of mvr_ray is not measured."""
    if name == "mvr_ray":
        from engine_store import Ours

        return Ours
    return ENGINES[name]


def batches_of(folder: Path, rows: np.ndarray, file: str) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yield rows, their fields, and their views as float32, in batches."""
    fields, vectors_PVD = np.load(folder / "fields.npy"), np.load(folder / file, mmap_mode="r")
    for start in range(0, len(rows), BATCH):
        own = rows[start : start + BATCH]
        at = own if file == "vectors.npy" else np.arange(start, start + len(own))
        yield own, fields[own], np.asarray(vectors_PVD[at], np.float32)


def disk_bytes(folder: Path) -> int:
    """Return bytes on disk; a file with several names counts once."""
    stats = {(stat := path.stat()).st_ino: stat.st_blocks * 512 for path in folder.rglob("*") if path.is_file()}
    return sum(stats.values())


def written_bytes() -> int:
    """Return the bytes that this process has written to disk so far, mapped files included."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("write_bytes"))


def resident_bytes() -> dict[str, int]:
    """Return this process's private memory, and the memory mapped from files, which the system may reclaim."""
    lines = Path("/proc/self/status").read_text().splitlines()
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith("Rss")}
    return {"own": sizes["RssAnon"], "mapped": sizes["RssFile"], "peak": peak_bytes()}


class Worker:
    """Execute the lines of the protocol."""

    def __init__(self, folder: Path, name: str, precision: str, threads: int) -> None:
        self.folder, self.store = folder, folder / f"{name}-{precision}-{threads}"
        self.task = json.loads((folder / "task.json").read_text())
        self.queries_QD = np.load(folder / "queries.npy")
        engine = engine_of(name)
        self.make = lambda: engine(self.store, self.task, precision, threads)
        self.engine: Engine | None = None

    def build(self) -> dict[str, Any]:
        shutil.rmtree(self.store, ignore_errors=True)
        began = time.perf_counter()
        self.engine = self.make()
        self.engine.build(batches_of(self.folder, np.arange(self.task["passages"]), "vectors.npy"))
        return {"seconds": time.perf_counter() - began}

    def open(self) -> dict[str, Any]:
        began = time.perf_counter()
        self.engine = self.make()
        self._open.search(self.queries_QD[0], 1, ALL)
        return {"seconds": time.perf_counter() - began}

    @property
    def _open(self) -> Engine:
        assert self.engine is not None
        return self.engine

    def search(self, k: int, share: int, first: int, count: int) -> dict[str, Any]:
        seconds, cpu_s, answers = [], [], []
        for query_D in self.queries_QD[first : first + count]:
            began, cpu_start_s = time.perf_counter(), time.process_time()
            answer = self._open.search(query_D, k, share)
            seconds.append(time.perf_counter() - began)
            cpu_s.append(time.process_time() - cpu_start_s)
            answers.append(answer)
        return {"seconds": seconds, "cpu_s": cpu_s, "answers": answers}

    def batch(self, k: int, first: int, count: int) -> dict[str, Any]:
        began, cpu_start_s = time.perf_counter(), time.process_time()
        answers = self._open.search_batch(self.queries_QD[first : first + count], k)
        seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu_start_s
        return {"seconds": [seconds], "cpu_s": [cpu_s], "answers": answers}

    def update(self, every: int) -> dict[str, Any]:
        rows = np.arange(0, self.task["passages"], every)
        parts: Sequence[tuple] = list(batches_of(self.folder, rows, "changed.npy"))
        fields, vectors_PVD = (np.concatenate([part[at] for part in parts]) for at in (1, 2))
        before, writes_before = disk_bytes(self.store), written_bytes()
        began = time.perf_counter()
        self._open.upsert(rows, fields, vectors_PVD)
        upsert_end = time.perf_counter()
        self._open.search(self.queries_QD[0], 10, ALL)
        return {
            "seconds": time.perf_counter() - began,
            "upsert_s": upsert_end - began,
            "written_bytes": written_bytes() - writes_before,
            "grown_bytes": disk_bytes(self.store) - before,
        }

    def size(self) -> dict[str, Any]:
        return {"disk": disk_bytes(self.store), **resident_bytes()}

    def close(self) -> dict[str, Any]:
        self._open.close()
        self.engine = None
        return {}


def main(folder: Path, name: str, precision: str, threads: int) -> None:
    worker = Worker(folder, name, precision, threads)
    print("{}", flush=True)
    for line in sys.stdin:
        what, *numbers = line.split()
        print(json.dumps({"_": 0, **getattr(worker, what)(*map(int, numbers))}), flush=True)


if __name__ == "__main__":
    os.environ.setdefault("LANCE_CPU_THREADS", sys.argv[4])
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]))
