"""Opens a service for one question of the command line; a refused request becomes a ConfigError.

A question needs no cluster: without an address, the shards are opened in this process.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from mvr_ray.config import RunConfig
from mvr_ray.errors import ConfigError
from mvr_ray.serving.schemas import ExplainRequest, RequestError, SearchRequest
from mvr_ray.serving.service import SearchService
from mvr_ray.store import manifest as manifests
from mvr_ray.store.files import Store

MAX_MS = 3_600_000
"""Time of a search that a person waits for, in place of the server's `serve.timeout_ms`."""


@contextmanager
def open_service(
    command: str, run: RunConfig, version: int | None, request: SearchRequest | ExplainRequest
) -> Iterator[SearchService]:
    """Open a service over one version (None: the live one), after checking the request that the block sends to it."""
    from mvr_ray.distributed.cluster import session

    try:
        request.check(run.serve)
        store = Store(run.store.path)
        live = manifests.read(store, run.index.name, version)  # before torch is imported
        from mvr_ray.distributed.encoders import require_encoder
        from mvr_ray.distributed.router import open_router

        require_encoder(store, live)
        with open_router(run, version, local=not session.cluster_address(run.resources)) as router:
            limits = run.serve.model_copy(update={"timeout_ms": MAX_MS})  # a model may load for long
            yield SearchService(router, limits, hybrid=run.search.hybrid)
    except RequestError as error:
        raise ConfigError(f"{command}: {error.message}; {error.hint}") from None
