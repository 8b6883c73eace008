"""Opens a service for one question of the command line; a refused request becomes a ConfigError.

A question needs no cluster: without an address, the shards are opened in this process.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from mvr_ray.config import RunConfig
from mvr_ray.errors import ConfigError
from mvr_ray.serving.schemas import ExplainRequest, RequestError, SearchRequest, without_limits
from mvr_ray.serving.service import SearchService
from mvr_ray.store import manifest as manifests
from mvr_ray.store.files import Store


@contextmanager
def open_service(
    command: str, run: RunConfig, version: int | None, request: SearchRequest | ExplainRequest
) -> Iterator[SearchService]:
    """Open a service over one version (None: the live one), after checking the request that the block sends to it."""
    from mvr_ray.distributed.cluster import session

    try:
        limits = without_limits(run.serve)
        request.check(limits)
        store = Store(run.store.path)
        live = manifests.read(store, run.index.name, version)  # before torch is imported
        from mvr_ray.distributed.encoders import require_encoder
        from mvr_ray.distributed.router import open_router

        require_encoder(store, live)
        with open_router(run, version, local=not session.cluster_address(run.resources)) as router:
            yield SearchService(router, limits, hybrid=run.search.hybrid)
    except RequestError as error:
        raise ConfigError(f"{command}: {error.in_process()}") from None
