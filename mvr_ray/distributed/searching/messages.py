"""Encodes the messages between routers and searchers in Arrow, one each way.

    scan     queries [Q, D]; settings                      ->  hits, counts and ids of every shard
    views    settings name the passages                    ->  numbers and vectors of all views

A message is one row, with an array a column. The shapes of arrays, settings and failures of shards are JSON in the
schema's metadata. Decoding creates arrays, strings and numbers, and runs no code.

Shapes: Q queries, D dimension, R distinct rows among the hits, N view vectors.
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
    return _encode(settings, [np.asarray(queries_QD, np.float32)])


def decode_scan(message: pa.Buffer) -> ScanRequest:
    """The request in a message."""
    (k, shards, version, filter, hybrid), [queries_QD] = _decode(message)
    words = HybridQueries(tuple(hybrid[0]), hybrid[1]) if hybrid else None
    return ScanRequest(queries_QD, k, tuple(shards), version, filter, words)


def encode_results(answer: ShardResults) -> pa.Buffer:
    """Results as one message."""
    results, failures = answer
    arrays = [array for one in results for array in (*one.hits, one.rescored_Q, one.rows_R, one.ids_R)]
    return _encode([[one.shard for one in results], failures], arrays)


def decode_results(message: pa.Buffer) -> ShardResults:
    """The results in a message; arrays are views of it."""
    (shards, failures), arrays = _decode(message)
    width, results = len(arrays) // max(len(shards), 1), []
    for number, shard in enumerate(shards):
        *hits, rescored_Q, rows_R, ids_R = arrays[number * width : (number + 1) * width]
        results.append(ShardResult(shard, ShardHits(*hits), rescored_Q, rows_R, ids_R))
    return ShardResults(results, _failures(failures))


def encode_views_request(ids: Mapping[int, Sequence[str]], version: int) -> pa.Buffer:
    """A request for the stored views of these passages of a version, by the shard that holds them, as one message."""
    return _encode([list(ids.items()), version])


def decode_views_request(message: pa.Buffer) -> tuple[dict[int, list[str]], int]:
    """The passages by shard, and the version, of the request in a message."""
    (ids, version), _ = _decode(message)
    return dict(ids), version


def encode_views(answer: ViewResults) -> pa.Buffer:
    """Stored views as one message."""
    views = list(answer.views.values())
    numbers_N = np.concatenate([np.empty(0, np.int16), *(one.view_numbers_N for one in views)])
    vectors_ND = np.concatenate([one.vectors_ND for one in views]) if views else np.empty((0, 1), np.float32)
    counts = [(name, len(one.view_numbers_N)) for name, one in answer.views.items()]
    return _encode([counts, answer.failures], [numbers_N, vectors_ND])


def decode_views(message: pa.Buffer) -> ViewResults:
    """The stored views in a message."""
    (counts, failures), arrays = _decode(message)
    ends = np.cumsum([count for _, count in counts], dtype=np.int64)[:-1]
    numbers, vectors = (np.split(array, ends) for array in arrays)
    views = {name: Views(*own) for (name, _), *own in zip(counts, numbers, vectors)}
    return ViewResults(views, _failures(failures))


def _encode(settings: Any, arrays: Sequence[np.ndarray | pa.Array] = ()) -> pa.Buffer:
    values = [array if isinstance(array, pa.Array) else pa.array(array.reshape(-1)) for array in arrays]
    columns = [pa.ListArray.from_arrays(pa.array([0, len(one)], pa.int32()), one) for one in values]
    shapes = [None if isinstance(array, pa.Array) else array.shape for array in arrays]
    batch = pa.RecordBatch.from_arrays(columns, [str(number) for number in range(len(columns))])
    batch = batch.replace_schema_metadata({_SETTINGS: json.dumps([settings, shapes])})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue()


def _decode(message: pa.Buffer) -> tuple[Any, list[Any]]:
    """The settings and the arrays of a message; an array without a shape stays in Arrow."""
    with pa.ipc.open_stream(message) as reader:
        batch, (settings, shapes) = reader.read_next_batch(), json.loads(reader.schema.metadata[_SETTINGS])
    values = [column.values for column in batch.columns]
    return settings, [one if shape is None else one.to_numpy().reshape(shape) for one, shape in zip(values, shapes)]


def _failures(fields: Sequence[Sequence[Any]]) -> list[ShardFailure]:
    return [ShardFailure(tuple(shards), reason, detail) for shards, reason, detail in fields]
