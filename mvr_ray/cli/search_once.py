"""Answers a question of the command line with a router of its own; a refused request becomes a ConfigError.

A question needs no cluster: without an address, the shards are opened in this process.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mvr_ray.config import RunConfig
from mvr_ray.errors import ConfigError
from mvr_ray.explanation import Explanation, render_html
from mvr_ray.serving.schemas import ExplainRequest, RequestError, SearchRequest, SearchResponse, validate
from mvr_ray.serving.service import SearchService
from mvr_ray.store import manifest as manifests
from mvr_ray.store.files import Store

if TYPE_CHECKING:
    from mvr_ray.distributed.router import Router


def search(
    run: RunConfig,
    version: int | None,
    question: str,
    k: int,
    filter: Mapping[str, Any] | None = None,
    fields: Sequence[str] = (),
) -> SearchResponse:
    """Return the best k passages of one question, from a version (None: the live one), that pass a filter."""
    with _refusals_as_errors("search"):
        request = validate(SearchRequest, queries=[question], k=k, filter=filter, fields=list(fields))
        request.check(run.serve)
        with _router(run, version) as router:
            return SearchService(router, run.serve, hybrid=run.search.hybrid).search(request)


def explain_once(run: RunConfig, version: int | None, request: ExplainRequest, html: Path | None = None) -> Explanation:
    """Score every view of some passages with every question; also as a page in the file `html`."""
    with _refusals_as_errors("explain"):
        request.check(run.serve)
        if html is not None and (html.is_dir() or not html.parent.is_dir()):
            raise ConfigError(f"explain: --html {html} cannot be written; name a file in a folder that exists")
        with _router(run, version) as router:
            explanation = SearchService(router, run.serve, hybrid=run.search.hybrid).explain(request)
    if html is not None:
        html.write_text(render_html(explanation), encoding="utf-8")
    return explanation


@contextmanager
def _refusals_as_errors(command: str) -> Iterator[None]:
    try:
        yield
    except RequestError as error:
        raise ConfigError(f"{command}: {error.message}; {error.hint}") from None


@contextmanager
def _router(run: RunConfig, version: int | None) -> "Iterator[Router]":
    from mvr_ray.distributed import session

    store = Store(run.store.path)
    live = manifests.read(store, run.index.name, version)  # before torch is imported
    from mvr_ray.distributed.encoders import require_encoder
    from mvr_ray.distributed.router import open_router

    require_encoder(store, live)
    with open_router(run, version, local=not session.cluster_address(run.resources)) as router:
        yield router
