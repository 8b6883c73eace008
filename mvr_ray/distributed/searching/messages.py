"""Encodes the messages between routers and searchers as Arrow record batches, one each way.

    scan     a row for each query [D]; settings            ->  a row for each shard and query: its best K, its frontier
    views    settings name the passages                    ->  a row for each stored view

Settings and failures of shards are JSON in the schema's metadata. Decoding creates arrays, strings and numbers, and
runs no code.

Shapes: Q queries, K hits, D dimension, R distinct rows among the hits.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from mvr_ray.store.embeddings import Views
from mvr_ray.types import FloatArray, HybridQueries, IntArray, ShardHits

_SETTINGS = b"mvr_ray"


class ScanRequest(NamedTuple):
    """A request for each query's best `k` passages of each of these shards of one version that pass a filter (its JSON;
    empty: none)."""

    queries_QD: FloatArray
    k: int
    shards: tuple[int, ...]
    version: int
    filter: str = ""
    hybrid: HybridQueries | None = None


class ViewsRequest(NamedTuple):
    """A request for the stored views of these passages, by the shard that holds them."""

    ids: Mapping[int, Sequence[str]]
    version: int


class ShardFailure(NamedTuple):
    """Shards without an answer, and the reason: `died`, `late`, `hung` or `damaged`; `detail` may say more."""

    shards: tuple[int, ...]
    reason: str
    detail: str = ""


class ShardResult(NamedTuple):
    """The best rows of one shard. `ids_R` are the passages of `rows_R`; `rescored_Q` as in `types.CountedHits`."""

    shard: int
    hits: ShardHits
    rescored_Q: IntArray
    rows_R: IntArray
    ids_R: pa.Array


class ShardResults(NamedTuple):
    results: list[ShardResult]
    failures: list[ShardFailure]


class ViewResults(NamedTuple):
    """Views by passage id, of the passages that the answering shards hold."""

    views: dict[str, Views]
    failures: list[ShardFailure]


def encode_scan(request: ScanRequest) -> pa.Buffer:
    """The request as one message."""
    settings = {name: getattr(request, name) for name in ("k", "shards", "version", "filter", "hybrid")}
    return _encode({"query": _lists(np.asarray(request.queries_QD, np.float32))}, settings)


def decode_scan(message: pa.Buffer) -> ScanRequest:
    """The request in a message."""
    batch, settings = _decode(message)
    queries_QD = _matrix(batch.column("query"))
    hybrid = HybridQueries(tuple(settings["hybrid"][0]), settings["hybrid"][1]) if settings["hybrid"] else None
    shards = tuple(settings["shards"])
    return ScanRequest(queries_QD, settings["k"], shards, settings["version"], settings["filter"], hybrid)


def encode_results(answer: ShardResults, num_queries: int) -> pa.Buffer:
    """Results as one message; lists of several lengths are padded to the longest."""
    results, failures = answer
    width = max([1, *(one.hits.rows_QK.shape[1] for one in results)])
    hits = [one.hits for one in results]
    empty = np.empty(0, np.int64)
    offsets = np.cumsum([0, *(len(one.rows_R) for one in results)])
    columns = {
        "row": _lists(_stack([one.rows_QK for one in hits], width, -1, np.int64)),
        "score": _lists(_stack([one.scores_QK for one in hits], width, -np.inf, np.float32)),
        "view": _lists(_stack([one.views_QK for one in hits], width, -1, np.int16)),
        "frontier": pa.array(np.concatenate([empty, *(one.frontier_Q for one in hits)]).astype(np.float32)),
        "rescored": pa.array(np.concatenate([empty, *(one.rescored_Q for one in results)]).astype(np.int64)),
        "rows_R": _first_of_each(np.concatenate([empty, *(one.rows_R for one in results)]), offsets, num_queries),
        "ids_R": _first_of_each(
            pa.concat_arrays([pa.array([], pa.string()), *(one.ids_R for one in results)]), offsets, num_queries
        ),
    }
    return _encode(columns, {"shards": [one.shard for one in results], "failures": failures})


def decode_results(message: pa.Buffer) -> ShardResults:
    """The results in a message; arrays are views of it."""
    batch, settings = _decode(message)
    shards = settings["shards"]
    num_queries = batch.num_rows // max(len(shards), 1)
    row, score, view = (_matrix(batch.column(name)) for name in ("row", "score", "view"))
    frontier, rescored_counts = (batch.column(name).to_numpy() for name in ("frontier", "rescored"))
    results = []
    for number, shard in enumerate(shards):
        own = slice(number * num_queries, (number + 1) * num_queries)
        hits = ShardHits(row[own], score[own], view[own], frontier[own])
        rows_R, ids_R = (batch.column(name)[own.start].values for name in ("rows_R", "ids_R"))
        results.append(ShardResult(shard, hits, rescored_counts[own], rows_R.to_numpy(), ids_R))
    return ShardResults(results, [_failure(fields) for fields in settings["failures"]])


def encode_views_request(request: ViewsRequest) -> pa.Buffer:
    """The request as one message."""
    return _encode({}, {"ids": list(request.ids.items()), "version": request.version})


def decode_views_request(message: pa.Buffer) -> ViewsRequest:
    """The request in a message."""
    _, settings = _decode(message)
    return ViewsRequest(dict(settings["ids"]), settings["version"])


def encode_views(answer: ViewResults) -> pa.Buffer:
    """Stored views as one message."""
    views = list(answer.views.values())
    vectors_ND = np.concatenate([one.vectors_ND for one in views]) if views else np.empty((0, 1), np.float32)
    numbers_N = np.concatenate([np.empty(0, np.int16), *(one.view_numbers_N for one in views)]).astype(np.int16)
    passages = [(name, len(one.view_numbers_N)) for name, one in answer.views.items()]
    columns = {"view": pa.array(numbers_N), "vector": _lists(vectors_ND)}
    return _encode(columns, {"passages": passages, "failures": answer.failures})


def decode_views(message: pa.Buffer) -> ViewResults:
    """The stored views in a message."""
    batch, settings = _decode(message)
    numbers_N, vectors_ND = batch.column("view").to_numpy(), _matrix(batch.column("vector"))
    views, start = {}, 0
    for name, count in settings["passages"]:
        views[name] = Views(numbers_N[start : start + count], vectors_ND[start : start + count])
        start += count
    return ViewResults(views, [_failure(fields) for fields in settings["failures"]])


def _encode(columns: Mapping[str, pa.Array], settings: Mapping[str, Any]) -> pa.Buffer:
    batch = pa.RecordBatch.from_arrays(list(columns.values()), list(columns))
    batch = batch.replace_schema_metadata({_SETTINGS: json.dumps(settings)})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue()


def _decode(message: pa.Buffer) -> tuple[pa.RecordBatch, dict[str, Any]]:
    with pa.ipc.open_stream(message) as reader:
        return reader.read_next_batch(), json.loads(reader.schema.metadata[_SETTINGS])


def _lists(values_NW: np.ndarray) -> pa.FixedSizeListArray:
    return pa.FixedSizeListArray.from_arrays(pa.array(np.ascontiguousarray(values_NW).reshape(-1)), values_NW.shape[1])


def _matrix(lists: pa.FixedSizeListArray) -> Any:
    return lists.flatten().to_numpy().reshape(len(lists), lists.type.list_size)


def _stack(lists: Sequence[np.ndarray], width: int, padding: float, dtype: Any) -> np.ndarray:
    wide = [np.pad(one, ((0, 0), (0, width - one.shape[1])), constant_values=padding) for one in lists]
    return np.concatenate([np.empty((0, width), dtype), *wide]).astype(dtype, copy=False)


def _first_of_each(values: Any, offsets: IntArray, num_queries: int) -> pa.ListArray:
    """A list for each shard and query; the list of a shard's first query has all its values, the others are empty."""
    ends = np.repeat(offsets[1:], num_queries)
    return pa.ListArray.from_arrays(pa.array(np.concatenate([[0], ends]).astype(np.int32)), pa.array(values))


def _failure(fields: Sequence[Any]) -> ShardFailure:
    shards, reason, detail = fields
    return ShardFailure(tuple(shards), reason, detail)
