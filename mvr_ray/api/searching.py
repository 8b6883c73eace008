"""Answers queries of a caller in this process, by the service that answers HTTP requests, without its limits."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from mvr_ray.api import rows
from mvr_ray.api.hits import SearchHits
from mvr_ray.config import RunConfig
from mvr_ray.errors import ConfigError, DataError
from mvr_ray.explanation import Explanation
from mvr_ray.serving.schemas import ExplainRequest, Hybrid, RequestError, SearchRequest, validate, without_limits
from mvr_ray.serving.service import SearchService

if TYPE_CHECKING:
    from mvr_ray.distributed.hot_swap import HotSwapRouter
    from mvr_ray.distributed.router import Router

BATCH_QUERIES = 256


def search(
    run: RunConfig,
    hot_swap: "HotSwapRouter",
    queries: Sequence[str | list[float]],
    k: int,
    filter: Mapping[str, Any] | None,
    hybrid: Hybrid,
    version: int | None,
    *,
    is_single: bool,
) -> list[SearchHits]:
    """Return the hits of every query in a version, None: the live one; messages number the queries unless the caller
    gave a single one."""
    texts = [one if isinstance(one, str) else f"vector {number}" for number, one in enumerate(queries)]
    results: list[SearchHits] = []
    with _pin(hot_swap, version) as router:  # all queries are answered by one version
        own = {"k": k, "filter": filter, "fields": list(router.corpus.fields), "hybrid": hybrid}
        for start in range(0, len(queries), BATCH_QUERIES):
            with _service(run, router, "search", None if is_single else start) as service:
                request = validate(SearchRequest, queries=queries[start : start + BATCH_QUERIES], **own)
                response = service.search(request)
            names = texts[start : start + BATCH_QUERIES]
            results += [SearchHits(name, hits, response) for name, hits in zip(names, response.results)]
    return results


def explain(
    run: RunConfig,
    hot_swap: "HotSwapRouter",
    questions: Sequence[str],
    passages: Sequence[str],
    k: int,
    hybrid: Hybrid,
    version: int | None,
    *,
    is_single: bool,
) -> Explanation:
    """Score every view of passages with questions, as `Index.explain` says."""
    with _pin(hot_swap, version) as router, _service(run, router, "explain", None if is_single else 0) as service:
        return service.explain(validate(ExplainRequest, questions=questions, passages=passages, k=k, hybrid=hybrid))


def _pin(hot_swap: "HotSwapRouter", version: int | None) -> "AbstractContextManager[Router]":
    """Open the router of a version. Raises ConfigError for what is no number, MissingInputError for an unknown one."""
    return hot_swap.pin(version_number(version))


def version_number(version: int | None) -> int | None:
    """Return the number of a version. Raises ConfigError for what is no number."""
    if version is not None and (isinstance(version, bool) or not isinstance(version, int | np.integer)):
        raise ConfigError(f"version is {version!r:.60}; give a number, as Index.versions() lists them")
    return None if version is None else int(version)


@contextmanager
def _service(run: RunConfig, router: "Router", method: str, first: int | None) -> Iterator[SearchService]:
    """Answer requests from a router. Raises ConfigError, in the method's name, for one that is refused;
    `first` numbers the request's first query, None: the caller gave a single one."""
    try:
        yield SearchService(router, without_limits(run.serve), hybrid=run.search.hybrid)
    except RequestError as error:
        place = re.match(r"(queries|questions)\.(\d+)", error.field)
        noun = "query" if place and place[1] == "queries" else "question"
        item = f"{noun} {first + int(place[2])}: " if place and first is not None else ""
        raise ConfigError(f"{method}: {item}{error.in_process()}") from None


def questions_of(questions: Any) -> list[Any]:
    """Return the items of an iterable or a column. Raises ConfigError for what has none."""
    try:
        return list(rows.rows_of(questions))
    except DataError:
        raise ConfigError(f"explain: questions are {questions!r:.60}; give a text, or a list of texts") from None


def plain_queries(queries: Any) -> list[str | list[float]]:
    """Return texts and vectors as a request holds them. Raises ConfigError for anything else."""
    problem = f"queries are {queries!r:.60}"
    plain: list[str | list[float]] = []
    try:
        for number, one in enumerate(rows.rows_of(queries)):
            problem = f"query {number} is {one!r:.60}"
            if isinstance(one, Mapping):
                raise TypeError
            plain.append(one if isinstance(one, str) else [float(value) for value in one])
    except (DataError, TypeError, ValueError):
        raise ConfigError(
            f"search: {problem}; give a text, a list of texts, or vectors_QD, one vector as [vector]"
        ) from None
    return plain
