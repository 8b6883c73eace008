"""Encodes the messages between routers and searchers in Arrow, one each way.

    scan     queries [Q, D]; settings                      ->  hits, counts and ids of every shard
    views    settings name the passages                    ->  numbers and vectors of all views

A message is a header in JSON, with settings and failures, and a record batch of lists: a row a shard or a passage, a
column a field. The columns have fixed types, so no schema is sent. Decoding creates arrays, strings and numbers, and
runs no code.

Shapes: Q queries, D dimension, R distinct rows among the hits, N view vectors.
"""

import json
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from mvr_ray.store.embeddings import Views
from mvr_ray.types import FloatArray, HybridQueries, IntArray, ShardHits

_LENGTH_BYTES = 8
_ALIGNMENT = 64
"""A header is padded to a multiple of this length, so that the arrays after it stay aligned."""


def _lists(**types: pa.DataType) -> pa.Schema:
    return pa.schema([(name, pa.list_(type)) for name, type in types.items()])


_SCAN = _lists(queries=pa.float32())
_RESULTS = _lists(
    rows=pa.int64(),
    scores=pa.float32(),
    views=pa.int16(),
    frontier=pa.float32(),
    rescored=pa.int64(),
    passages=pa.int64(),
    ids=pa.string(),
)
_VIEWS = {name: _lists(numbers=pa.int16(), vectors=pa.type_for_alias(name)) for name in ("float16", "float32")}


class ScanRequest(NamedTuple):
    """A request for each query's best `k` passages of each of these shards of one version that pass a filter (its JSON;
    empty: none)."""

    queries_QD: FloatArray
    k: int
    shards: tuple[int, ...]
    version: int
    filter: str = ""
    hybrid: HybridQueries | None = None


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
    queries_QD, *settings = request
    return _encode([*settings, queries_QD.shape], _SCAN, [[np.asarray(queries_QD, np.float32)]])


def decode_scan(message: pa.Buffer) -> ScanRequest:
    """The request in a message."""
    (k, shards, version, filter, hybrid, shape), body = split_frame(message)
    [[queries]] = _columns(body, _SCAN)
    words = HybridQueries(tuple(hybrid[0]), hybrid[1]) if hybrid else None
    return ScanRequest(queries.reshape(shape), k, tuple(shards), version, filter, words)


def encode_results(answer: ShardResults) -> pa.Buffer:
    """Results as one message, a row a shard."""
    results, failures = answer
    rows = [(*one.hits, one.rescored_Q, one.rows_R, one.ids_R) for one in results]
    return _encode([[one.shard for one in results], failures], _RESULTS, [*zip(*rows)])


def decode_results(message: pa.Buffer) -> ShardResults:
    """The results in a message; arrays are views of it."""
    (shards, failures), body = split_frame(message)
    results = []
    for shard, *lists, frontier_Q, rescored_Q, rows_R, ids_R in zip(shards, *_columns(body, _RESULTS)):
        num_queries = len(frontier_Q)
        rows_QK, scores_QK, views_QK = (one.reshape(num_queries, one.size // max(1, num_queries)) for one in lists)
        hits = ShardHits(rows_QK, scores_QK, views_QK, frontier_Q)
        results.append(ShardResult(shard, hits, rescored_Q, rows_R, ids_R))
    return ShardResults(results, _failures(failures))


def encode_views_request(ids: Mapping[int, Sequence[str]], version: int) -> pa.Buffer:
    """A request for the stored views of these passages of a version, by the shard that holds them, as one message."""
    return frame([list(ids.items()), version])


def decode_views_request(message: pa.Buffer) -> tuple[dict[int, list[str]], int]:
    """The passages by shard, and the version, of the request in a message."""
    (ids, version), _ = split_frame(message)
    return dict(ids), version


def encode_views(answer: ViewResults) -> pa.Buffer:
    """Stored views as one message, a row a passage."""
    views = answer.views.values()
    dtype = next((str(one.vectors_ND.dtype) for one in views), "float32")
    shapes = {name: one.vectors_ND.shape for name, one in answer.views.items()}
    return _encode([dtype, shapes, answer.failures], _VIEWS[dtype], [*zip(*views)])


def decode_views(message: pa.Buffer) -> ViewResults:
    """The stored views in a message."""
    (dtype, shapes, failures), body = split_frame(message)
    rows = zip(shapes.items(), *_columns(body, _VIEWS[dtype]))
    views = {name: Views(numbers_N, vectors.reshape(shape)) for (name, shape), numbers_N, vectors in rows}
    return ViewResults(views, _failures(failures))


def frame(header: Any, body: pa.Buffer | bytes = b"") -> pa.Buffer:
    """The length of a header, the header in JSON, and the bytes after it."""
    line = json.dumps(header).encode()
    head = len(line).to_bytes(_LENGTH_BYTES, "little") + line
    return pa.py_buffer(head.ljust(-(-len(head) // _ALIGNMENT) * _ALIGNMENT) + memoryview(body))


def split_frame(message: pa.Buffer) -> tuple[Any, pa.Buffer]:
    """The header of a frame, and the bytes after it."""
    end = _LENGTH_BYTES + int.from_bytes(message.slice(0, _LENGTH_BYTES).to_pybytes(), "little")
    header = json.loads(message.slice(_LENGTH_BYTES, end - _LENGTH_BYTES).to_pybytes())
    return header, message.slice(-(-end // _ALIGNMENT) * _ALIGNMENT)


def _encode(settings: Any, schema: pa.Schema, columns: Sequence[Sequence[np.ndarray | pa.Array]]) -> pa.Buffer:
    lists = [_list_column(arrays) for arrays in columns]
    return frame(settings, pa.RecordBatch.from_arrays(lists, schema=schema).serialize() if lists else b"")


def _list_column(arrays: Sequence[np.ndarray | pa.Array]) -> pa.ListArray:
    if isinstance(arrays[0], pa.Array):
        values, sizes = pa.concat_arrays(arrays), map(len, arrays)
    else:
        values, sizes = pa.array(np.concatenate([array.reshape(-1) for array in arrays])), (one.size for one in arrays)
    return pa.ListArray.from_arrays(pa.array([0, *accumulate(sizes)], pa.int32()), values)


def _columns(body: pa.Buffer, schema: pa.Schema) -> list[list[Any]]:
    """The columns of a message: numbers as flat arrays, texts in Arrow."""
    columns = []
    for column in pa.ipc.read_record_batch(body, schema).columns if body.size else ():
        ends, values = column.offsets.to_pylist(), column.values
        if not pa.types.is_string(values.type):
            values = values.to_numpy()
        columns.append([values[begin:end] for begin, end in pairwise(ends)])
    return columns


def _failures(fields: Sequence[Sequence[Any]]) -> list[ShardFailure]:
    return [ShardFailure(tuple(shards), reason, detail) for shards, reason, detail in fields]
