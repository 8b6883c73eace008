"""Search the live version of a router whose version changes."""

from typing import Any

from mvr_ray.distributed.hot_swap import HotSwapRouter
from mvr_ray.types import Answer, FloatArray


def live_search(live: HotSwapRouter, queries_QD: FloatArray, k: int, **options: Any) -> Answer:
    with live.pin() as router:
        return router.search(queries_QD, k, **options)
