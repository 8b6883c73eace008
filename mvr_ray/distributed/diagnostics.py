"""Read diagnostics of a hot-swap router: call counts, the live version, and exhaustive search.

Shapes: Q queries, D dimension.
"""

from contextlib import AbstractContextManager

from mvr_ray.core.searching.exact import check_k, check_queries
from mvr_ray.deadline import Deadline
from mvr_ray.distributed.hot_swap import HotSwapRouter
from mvr_ray.distributed.router import Router
from mvr_ray.distributed.searching.merged_results import MergedResults, shard_starts
from mvr_ray.types import FleetCounts, FloatArray, Hit


class RouterDiagnostics:
    """Read-only diagnostics of a router and exhaustive search; bypasses request queues."""

    def __init__(self, live: HotSwapRouter) -> None:
        self.live = live

    @property
    def index(self) -> str:
        return self.live.index

    @property
    def dirty_share(self) -> float | None:
        """Share of passages that the live version changed, None where its manifest lacks it."""
        return self.live.manifest.dirty_share

    def counts(self) -> FleetCounts:
        """Counts of this process's calls to searchers so far."""
        return self.live.searchers.counts()

    def pin(self, version: int | None = None) -> AbstractContextManager[Router]:
        return self.live.pin(version)

    def exact(self, queries_QD: FloatArray, k: int, version: int | None = None) -> list[list[Hit]]:
        """Search a version exhaustively for the exact best k, whatever its index is.

        Raises ResourceError where a searcher died, TimeoutError after the time limit of an answer.
        """
        with self.live.pin(version) as router:
            queries_QD = check_queries(queries_QD, router.dimension)
            fleet = self.live.searchers.fleet(router.manifest)
            results = fleet.exact(queries_QD, check_k(k), Deadline.after(router.timeout_s))
            return MergedResults(results, shard_starts(router.manifest.shards), k).hits()
