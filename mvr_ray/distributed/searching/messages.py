"""Encodes the messages between routers and searchers, one each way.

    scan     queries [Q, D]; settings                      ->  hits, counts and ids of every shard
    views    settings name the passages                    ->  numbers and vectors of all views

A message is a header in JSON, with settings, failures, and the type and shape of every array, and then the arrays, in
little-endian order as in Arrow's buffers. Decoding creates arrays, strings and numbers, and runs no code.

Shapes: Q queries, D dimension, R distinct rows among the hits, N view vectors.
"""

import json
import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from mvr_ray.store.embeddings import Views
from mvr_ray.types import FloatArray, HybridQueries, IntArray, ShardHits

_LENGTH_BYTES = 8
_ALIGNMENT = 64
"""A header is padded to a multiple of this length, and so is every array, so that arrays stay aligned."""
_TYPES = {name: np.dtype(name) for name in ("<i8", "<i4", "<i2", "|u1", "<f4", "<f2")}


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
    """Encode the request as one message."""
    queries_QD, *settings = request
    return _encode(settings, [np.asarray(queries_QD, np.float32)])


def decode_scan(message: pa.Buffer) -> ScanRequest:
    """Decode the request in a message."""
    (k, shards, version, filter, hybrid), (queries_QD,) = _decode(message)
    words = HybridQueries(tuple(hybrid[0]), hybrid[1]) if hybrid else None
    return ScanRequest(queries_QD, k, tuple(shards), version, filter, words)


def encode_results(answer: ShardResults) -> pa.Buffer:
    """Encode results as one message."""
    results, failures = answer
    fields = zip(*((*one.hits, one.rescored_Q, one.rows_R, *_flatten(one.ids_R)) for one in results))
    return _encode([[one.shard for one in results], failures], [*chain.from_iterable(fields)])


def decode_results(message: pa.Buffer) -> ShardResults:
    """Decode the results in a message; arrays are views of it."""
    (shards, failures), arrays = _decode(message)
    results = []
    for place, shard in enumerate(shards):
        *hits, rescored_Q, rows_R, ends, texts = arrays[place :: len(shards)]
        ids_R = pa.StringArray.from_buffers(len(rows_R), pa.py_buffer(ends), pa.py_buffer(texts))
        results.append(ShardResult(shard, ShardHits(*hits), rescored_Q, rows_R, ids_R))
    return ShardResults(results, _failures(failures))


def encode_views_request(ids: Mapping[int, Sequence[str]], version: int) -> pa.Buffer:
    """Encode a request for the stored views of these passages of a version, by the shard that holds them, as one
    message."""
    return frame([list(ids.items()), version])


def decode_views_request(message: pa.Buffer) -> tuple[dict[int, list[str]], int]:
    """Decode the passages by shard, and the version, of the request in a message."""
    (ids, version), _ = split_frame(message)
    return dict(ids), version


def encode_views(answer: ViewResults) -> pa.Buffer:
    """Encode stored views as one message."""
    return _encode([list(answer.views), answer.failures], [*chain.from_iterable(answer.views.values())])


def decode_views(message: pa.Buffer) -> ViewResults:
    """Decode the stored views in a message."""
    (names, failures), arrays = _decode(message)
    return ViewResults(dict(zip(names, map(Views, arrays[::2], arrays[1::2]))), _failures(failures))


def frame(header: Any, *parts: pa.Buffer | bytes | memoryview) -> pa.Buffer:
    """Join the length of a header, the header in JSON, and the bytes after it."""
    line = json.dumps(header).encode()
    head = len(line).to_bytes(_LENGTH_BYTES, "little") + line
    return pa.py_buffer(b"".join((head, bytes(-len(head) % _ALIGNMENT), *parts)))


def split_frame(message: pa.Buffer) -> tuple[Any, pa.Buffer]:
    """Return the header of a frame, and the bytes after it."""
    view = memoryview(message)
    end = _LENGTH_BYTES + int.from_bytes(view[:_LENGTH_BYTES], "little")
    return json.loads(bytes(view[_LENGTH_BYTES:end])), message.slice(-(-end // _ALIGNMENT) * _ALIGNMENT)


def _encode(settings: Any, arrays: Sequence[np.ndarray]) -> pa.Buffer:
    parts = [part for array in arrays for part in (np.ascontiguousarray(array).data, bytes(-array.nbytes % _ALIGNMENT))]
    return frame([settings, [(array.dtype.str, array.shape) for array in arrays]], *parts)


def _decode(message: pa.Buffer) -> tuple[Any, list[np.ndarray]]:
    """Decode the settings in a message, and its arrays, which are views of it."""
    (settings, types), body = split_frame(message)
    arrays, start = [], 0
    for name, shape in types:
        array = np.frombuffer(body, _TYPES[name], math.prod(shape), start).reshape(shape)
        start += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        arrays.append(array)
    return settings, arrays


def _flatten(texts: pa.StringArray) -> tuple[np.ndarray, np.ndarray]:
    """Return the end of each text in the bytes of all of them, after a 0, and these bytes."""
    _, ends, characters = texts.buffers()
    ends = np.frombuffer(ends, np.int32)[texts.offset : texts.offset + len(texts) + 1]
    return ends - ends[0], np.frombuffer(characters or b"", np.uint8)[ends[0] : ends[-1]]


def _failures(fields: Sequence[Sequence[Any]]) -> list[ShardFailure]:
    return [ShardFailure(tuple(shards), reason, detail) for shards, reason, detail in fields]
