"""Checks requests against the `serve` section of the run file, and vectors against float32.

Shapes: Q queries, D dimension.
"""

import unicodedata
from collections.abc import Sequence

import numpy as np

from mvr_ray.config import ServeConfig
from mvr_ray.serving.schemas import RequestError, SearchRequest, check_is_text
from mvr_ray.types import FloatArray

MAX_NORM = 1e16
"""Of a query vector: its square, and its product with any fp16 view of 65,504 dimensions, stay finite in float32."""


def check_request(request: SearchRequest, limits: ServeConfig) -> None:
    """What can be refused before any index is open. Raises RequestError."""
    if not 1 <= request.k <= limits.max_k:
        hint = f"ask for 1 to {limits.max_k} passages (serve.max_k)"
        raise RequestError(422, "k_out_of_range", "k", f"k is {request.k}", hint)
    if request.timeout_ms is not None and not 1 <= request.timeout_ms <= limits.timeout_ms:
        hint = f"give 1 to {limits.timeout_ms} ms (serve.timeout_ms), or leave it out"
        raise RequestError(422, "timeout_out_of_range", "timeout_ms", f"timeout_ms is {request.timeout_ms}", hint)
    if not 0 <= request.min_coverage <= 1:
        said = f"min_coverage is {request.min_coverage:g}"
        raise RequestError(422, "coverage_out_of_range", "min_coverage", said, "give a share from 0 to 1")
    if len(request.queries) > limits.max_batch:
        hint, said = (
            f"send at most {limits.max_batch} (serve.max_batch)",
            f"{len(request.queries)} queries in one request",
        )
        raise RequestError(422, "too_many_queries", "queries", said, hint)
    for i, query in enumerate(request.queries):
        if isinstance(query, str):
            check_text(query, f"queries.{i}", "query", limits)


def check_text(text: str, field: str, what: str, limits: ServeConfig) -> None:
    """Raises RequestError for a text that cannot be embedded within the limits; `what` it is called in the message."""
    if len(text) > limits.max_query_chars:
        hint = f"send at most {limits.max_query_chars} (serve.max_query_chars)"
        raise RequestError(422, f"{what}_too_long", field, f"the {what} has {len(text)} characters", hint)
    check_is_text(text, field)
    if not any(_is_readable(char) for char in text):
        raise RequestError(422, f"empty_{what}", field, f"the {what} is empty", "send a text with words in it")


def _is_readable(char: str) -> bool:
    """Letter, number, punctuation or symbol: tokenizers of BERT's kind drop the rest, and the replacement character."""
    return unicodedata.category(char)[0] in "LNPS" and char != "\ufffd"


def parse_vectors(queries: Sequence[Sequence[float]], dimension: int) -> FloatArray:
    """queries_QD float32. Raises RequestError naming the first vector that cannot be searched with."""
    for i, query in enumerate(queries):
        if len(query) != dimension:
            message = f"the vector has {len(query)} numbers, the index {dimension} dimensions"
            hint = "send vectors of the index's own encoder"
            raise RequestError(422, "wrong_dimension", f"queries.{i}", message, hint)
    with np.errstate(over="ignore"):
        queries_QD = np.asarray(queries, dtype=np.float64).astype(np.float32)
        norms_Q = np.linalg.norm(queries_QD.astype(np.float64), axis=1)
    for code, bad_Q, message, hint in (
        ("not_finite", ~np.isfinite(norms_Q), "the vector holds a number that is not finite", "send float32"),
        ("zero_vector", norms_Q == 0, "the vector is zero", "it scores all passages alike; send another"),
        ("vector_too_long", norms_Q > MAX_NORM, f"the vector's norm is above {MAX_NORM:g}", "scale it down"),
    ):
        if bad_Q.any():
            raise RequestError(422, code, f"queries.{int(bad_Q.argmax())}", message, hint)
    return queries_QD
