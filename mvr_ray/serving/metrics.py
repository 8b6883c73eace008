"""Counts requests, stages and answers of one replica in Prometheus' text format.

Stages: `queue` from arrival to a free thread, `service` all that follows; of that, `encode` the questions, `search` the
shards (each round), `merge` their answers, as the router reports them.
Compute shares in Prometheus: rate(answers{certified="true"}) / rate(answers) is the certified share, and
rate(sampled_recall) / rate(sampled_queries) the recall of an approximate index. Calls to searchers, and the share of
passages that the version changed, are read when Prometheus scrapes.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from mvr_ray.serving.schemas import SearchResponse

if TYPE_CHECKING:
    from mvr_ray.distributed.hot_swap import HotSwapRouter
    from mvr_ray.serving.freshness import FreshnessMonitor

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class Metrics:
    """The counters of one replica, apart from those of any other in the process. Every series has `replica` as a label,
    if not empty: scrapes reach several replicas in turn, and one series of them all would go up and down."""

    def __init__(self, replica: str = "") -> None:
        self.replica = replica
        self.registry = own = CollectorRegistry()
        self.requests = Counter("mvr_ray_requests", "Answered requests.", ("route", "method", "status"), registry=own)
        self.request_s = Histogram(
            "mvr_ray_request_seconds", "From arrival to the last byte.", ("route",), buckets=_SECONDS, registry=own
        )
        self.stage_s = Histogram(
            "mvr_ray_stage_seconds", "Time in one stage of a request.", ("stage",), buckets=_SECONDS, registry=own
        )
        self.in_flight = Gauge("mvr_ray_requests_in_flight", "Requests waiting or at work.", registry=own)
        self.queries = Counter("mvr_ray_queries", "Queries of answered searches.", registry=own)
        self.answers = Counter("mvr_ray_answers", "Searches, by their certificate.", ("certified",), registry=own)
        self.partial = Counter("mvr_ray_partial_answers", "Searches of less than every passage.", registry=own)
        self.second_rounds = Counter("mvr_ray_second_rounds", "Searches that asked shards again.", registry=own)
        coverage, version = "Passages searched for the newest answer.", "Version of the newest answer."
        self.coverage = Gauge("mvr_ray_coverage_share", coverage, ("index",), registry=own)  # absent until an answer
        self.version = Gauge("mvr_ray_index_version", version, ("index",), registry=own)
        self.samples = Counter("mvr_ray_sampled_queries", "Queries answered exactly too.", registry=own)
        self.recall = Counter("mvr_ray_sampled_recall", "Sum of their recalls.", registry=own)
        for value in ("true", "false"):
            self.answers.labels(value)

    def add_router(self, router: "HotSwapRouter") -> None:
        """Export the counts of this router, too."""
        self.registry.register(_SeriesCollector(partial(_of_searchers, router)))

    def add_freshness(self, monitor: "FreshnessMonitor") -> None:
        """Export the age of the changes that answers do not include yet, too."""
        self.registry.register(_SeriesCollector(partial(_of_changes, monitor)))

    def note_recall(self, recall: float) -> None:
        self.samples.inc()
        self.recall.inc(recall)

    def note_stage(self, stage: str, seconds: float) -> None:
        self.stage_s.labels(stage).observe(seconds)

    def note_request(self, route: str, method: str, status: int, seconds: float) -> None:
        self.requests.labels(route, method, str(status)).inc()
        self.request_s.labels(route).observe(seconds)

    def note_answer(self, answer: SearchResponse) -> None:
        self.queries.inc(len(answer.results))
        self.answers.labels(str(answer.exact.certified).lower()).inc()
        if answer.coverage.share < 1:
            self.partial.inc()
        if answer.exact.rounds > 1:
            self.second_rounds.inc()
        self.note_served(answer.index, answer.version, answer.coverage.share)

    def note_served(self, index: str, version: int, coverage_share: float) -> None:
        self.coverage.labels(index).set(coverage_share)
        self.version.labels(index).set(version)

    def text(self) -> bytes:
        own = self.registry
        return generate_latest(_SeriesCollector(partial(_of_replica, own, self.replica)) if self.replica else own)


@dataclass(eq=False)
class _SeriesCollector(Collector):
    """Series that a function yields when Prometheus scrapes."""

    series: Callable[[], Iterable[Metric]]

    def collect(self) -> Iterable[Metric]:
        return self.series()


def _of_replica(registry: CollectorRegistry, replica: str) -> Iterator[Metric]:
    """Yield the series of a registry, with a label more."""
    for metric in registry.collect():
        metric.samples = [one._replace(labels={**one.labels, "replica": replica}) for one in metric.samples]
        yield metric


def _of_searchers(router: "HotSwapRouter") -> Iterator[Metric]:
    """Yield the counts of a router."""
    counts = router.searchers.counts()
    for family, name, meaning, value in (
        (CounterMetricFamily, "hedged_calls", "Calls made because another replica was slow.", counts.hedges),
        (CounterMetricFamily, "hedge_wins", "Hedged calls that answered first.", counts.hedge_wins),
        (CounterMetricFamily, "refused_searches", "Searches that a group's full queues refused.", counts.refusals),
        (GaugeMetricFamily, "calls_waiting", "Calls that wait or run at all searchers.", counts.waiting),
        (GaugeMetricFamily, "most_calls_waiting", "Calls that wait or run at one searcher.", counts.most_waiting),
    ):
        yield family(f"mvr_ray_{name}", meaning, value=value)
    dirty = GaugeMetricFamily("mvr_ray_dirty_share", "Passages that the live version changed.", labels=["index"])
    if (dirty_share := router.manifest.dirty_share) is not None:
        dirty.add_metric([router.index], dirty_share)
    yield dirty


def _of_changes(monitor: "FreshnessMonitor") -> Iterator[Metric]:
    """Yield the ages of changes."""
    freshness = monitor.measure()
    for name, meaning, value in (
        ("oldest_change_seconds", "Age of the oldest change that answers do not include yet.", "oldest_change_s"),
        ("newest_passage_seconds", "Age of the newest change that answers include.", "newest_passage_s"),
        ("waiting_change_files", "Change files that answers do not include yet.", "waiting_files"),
    ):
        gauge = GaugeMetricFamily(f"mvr_ray_{name}", meaning)
        if freshness is not None:
            gauge.add_metric([], getattr(freshness, value))
        yield gauge
