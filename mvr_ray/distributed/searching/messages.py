"""Encodes the messages between routers and searchers in Arrow, one each way.

    scan     queries [Q, D]; settings                      ->  hits, counts and ids of every shard
    views    settings name the passages                    ->  numbers and vectors of all views

A message is a table of lists, a row a shard or a passage and a column a field: columns cost time, rows do not. Settings
and failures are JSON in the metadata of the schema. Decoding creates arrays, strings and numbers, and runs no code.

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
    return _encode([*settings, queries_QD.shape], [[np.asarray(queries_QD, np.float32)]])


def decode_scan(message: pa.Buffer) -> ScanRequest:
    """The request in a message."""
    (k, shards, version, filter, hybrid, shape), [[queries]] = _decode(message)
    words = HybridQueries(tuple(hybrid[0]), hybrid[1]) if hybrid else None
    return ScanRequest(queries.reshape(shape), k, tuple(shards), version, filter, words)


def encode_results(answer: ShardResults) -> pa.Buffer:
    """Results as one message, a row a shard."""
    results, failures = answer
    rows = [(*one.hits, one.rescored_Q, one.rows_R, one.ids_R) for one in results]
    return _encode([[one.shard for one in results], failures], [*zip(*rows)])


def decode_results(message: pa.Buffer) -> ShardResults:
    """The results in a message; arrays are views of it."""
    (shards, failures), columns = _decode(message)
    results = []
    for shard, *lists, frontier_Q, rescored_Q, rows_R, ids_R in zip(shards, *columns):
        rows_QK, scores_QK, views_QK = (one.reshape(len(frontier_Q), -1) for one in lists)
        hits = ShardHits(rows_QK, scores_QK, views_QK, frontier_Q)
        results.append(ShardResult(shard, hits, rescored_Q, rows_R, ids_R))
    return ShardResults(results, _failures(failures))


def encode_views_request(ids: Mapping[int, Sequence[str]], version: int) -> pa.Buffer:
    """A request for the stored views of these passages of a version, by the shard that holds them, as one message."""
    return _encode([list(ids.items()), version])


def decode_views_request(message: pa.Buffer) -> tuple[dict[int, list[str]], int]:
    """The passages by shard, and the version, of the request in a message."""
    (ids, version), _ = _decode(message)
    return dict(ids), version


def encode_views(answer: ViewResults) -> pa.Buffer:
    """Stored views as one message, a row a passage."""
    shapes = {name: one.vectors_ND.shape for name, one in answer.views.items()}
    return _encode([shapes, answer.failures], [*zip(*answer.views.values())])


def decode_views(message: pa.Buffer) -> ViewResults:
    """The stored views in a message."""
    (shapes, failures), columns = _decode(message)
    rows = zip(shapes.items(), *columns)
    views = {name: Views(numbers_N, vectors.reshape(shape)) for (name, shape), numbers_N, vectors in rows}
    return ViewResults(views, _failures(failures))


def _encode(settings: Any, columns: Sequence[Sequence[np.ndarray | pa.Array]] = ()) -> pa.Buffer:
    lists = [_list_column(arrays) for arrays in columns]
    batch = pa.RecordBatch.from_arrays(lists, [str(number) for number in range(len(lists))])
    batch = batch.replace_schema_metadata({_SETTINGS: json.dumps(settings)})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue()


def _list_column(arrays: Sequence[np.ndarray | pa.Array]) -> pa.ListArray:
    if isinstance(arrays[0], pa.Array):
        values, sizes = pa.concat_arrays(arrays), map(len, arrays)
    else:
        values, sizes = pa.array(np.concatenate([array.reshape(-1) for array in arrays])), (one.size for one in arrays)
    return pa.ListArray.from_arrays(pa.array([0, *accumulate(sizes)], pa.int32()), values)


def _decode(message: pa.Buffer) -> tuple[Any, list[list[Any]]]:
    """The settings and the columns of a message; numbers as flat arrays, texts in Arrow."""
    with pa.ipc.open_stream(message) as reader:
        batch, settings = reader.read_next_batch(), json.loads(reader.schema.metadata[_SETTINGS])
    columns = []
    for column in batch.columns:
        ends, values = column.offsets.to_pylist(), column.values
        if not pa.types.is_string(values.type):
            values = values.to_numpy()
        columns.append([values[begin:end] for begin, end in pairwise(ends)])
    return settings, columns


def _failures(fields: Sequence[Sequence[Any]]) -> list[ShardFailure]:
    return [ShardFailure(tuple(shards), reason, detail) for shards, reason, detail in fields]
