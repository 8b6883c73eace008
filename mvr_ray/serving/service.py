"""Executes requests against a router: limits, search, and hits with their matching snippets.

A plain class over a router: no HTTP and no Ray in here. `app.py` puts it on the network, and a client in the
same process calls it as it is.

Shapes: Q queries, D dimension.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np

from mvr_ray.config import ServeConfig
from mvr_ray.core.encoding.snippets import snippet_text
from mvr_ray.deadline import Deadline
from mvr_ray.errors import MissingInputError
from mvr_ray.explanation import Explanation
from mvr_ray.serving import explain as explaining
from mvr_ray.serving.catalog import VersionCatalog
from mvr_ray.serving.explain import ExplainRequest
from mvr_ray.serving.limits import check_request as check_request
from mvr_ray.serving.limits import parse_vectors
from mvr_ray.serving.manifest_payload import PublishRequest
from mvr_ray.serving.protocols import Explainable, VersionSwitcher
from mvr_ray.serving.recall_monitor import RecallMonitor
from mvr_ray.serving.schemas import (
    Coverage,
    Exact,
    PassageHit,
    PassageResponse,
    PassageView,
    Readiness,
    RequestError,
    SearchRequest,
    SearchResponse,
    Shard,
    Snippet,
    VersionDetail,
    VersionInfo,
    VersionList,
    is_text,
)
from mvr_ray.types import Answer, Hit, Passage

__all__ = ["PassageHit", "RequestError", "SearchRequest", "SearchResponse", "SearchService", "Snippet"]

log = logging.getLogger(__name__)

SEARCH_SHARE = 0.9
"""Of a request's time; the rest is for texts and the way back, so that a partial answer is not cut off as late."""


class SearchService:
    """Answers requests from one router, within the limits of the run file's `serve` section.

    Every method may be given `timeout_s`, the seconds that are left for it. All raise RequestError for what cannot be
    answered as asked.
    """

    def __init__(
        self,
        router: Explainable,
        limits: ServeConfig,
        catalog: VersionCatalog | None = None,
        switcher: VersionSwitcher | None = None,
        recall_monitor: RecallMonitor | None = None,
    ) -> None:
        """Without a catalog nothing is known about other versions than the router's; without `switcher` there is no
        other one to ask. `recall_monitor` is shown every answer.
        """
        self.router = router
        self.limits = limits
        self.catalog = catalog
        self.switcher = switcher
        self.recall_monitor = recall_monitor

    def search(self, request: SearchRequest, timeout_s: float | None = None) -> SearchResponse:
        """What the limits forbid is refused before anything is searched."""
        began = time.perf_counter()
        check_request(request, self.limits)
        texts = [query for query in request.queries if isinstance(query, str)]
        vectors = [query for query in request.queries if not isinstance(query, str)]
        own_ms = self.limits.timeout_ms if request.timeout_ms is None else request.timeout_ms
        own_s, least = own_ms / 1000, request.min_coverage
        allowed_s = SEARCH_SHARE * (own_s if timeout_s is None else min(timeout_s, own_s))
        with self._at(request.version, allowed_s) as router:
            require_encoder(request.encoder_fingerprint, current_version(router))
            deadline = Deadline.after(allowed_s - (time.perf_counter() - began))
            answer = (
                router.search_text(texts, request.k, deadline=deadline, min_coverage=least)
                if texts
                else router.search(
                    parse_vectors(vectors, router.dimension),
                    request.k,
                    deadline=deadline,
                    min_coverage=least,
                )
            )
            require_encoder(request.encoder_fingerprint, answer)
            if self.recall_monitor is not None:
                self.recall_monitor.note(request.queries, request.k, answer)
            results = [[bare(hit, router.num_views) for hit in hits] for hits in answer.hits]
            if request.text:
                wanted = sorted({hit.passage_id for hits in answer.hits for hit in hits})
                passages = router.passages(wanted)
                spans = {i: router.view_spans(passages[i]) for i in wanted}
                results = [[with_text(found, passages[found.id], spans[found.id]) for found in row] for row in results]
        took_ms = 1000 * (time.perf_counter() - began)
        log.info(
            "searched: index=%s version=%d queries=%d k=%d coverage=%.4f certified=%s took_ms=%.1f",
            *(answer.index, answer.version, len(request.queries), request.k),
            *(answer.coverage_share, answer.exact.certified, took_ms),
        )
        return SearchResponse(
            index=answer.index,
            version=answer.version,
            encoder_fingerprint=answer.encoder_fingerprint,
            coverage=coverage(answer),
            exact=Exact(**answer.exact._asdict()),
            took_ms=round(took_ms, 3),
            results=results,
        )

    def explain(self, request: ExplainRequest, timeout_s: float | None = None) -> Explanation:
        """Every view of some passages with every question."""
        allowed_s = self.limits.timeout_ms / 1000
        left_s = SEARCH_SHARE * (allowed_s if timeout_s is None else min(timeout_s, allowed_s))
        with self._at(request.version, left_s) as router:
            require_encoder(request.encoder_fingerprint, current_version(router))
            return explaining.explain(router, request, self.limits)

    def passage(self, passage_id: str) -> PassageResponse:
        """One passage as it was indexed."""
        with self._at(None) as router:
            of = current_version(router)
            found = router.passages([passage_id]) if is_text(passage_id) else {}
            if passage_id not in found:
                message = f"index {of.index!r} version {of.version} holds no passage of this id"
                hint = "give an id as a search shows it, percent-encoded as a part of the path"
                raise RequestError(404, "unknown_passage", "id", message, hint)
            passage = found[passage_id]
            views = [
                PassageView(view=view, start=span[0], stop=span[1], text=snippet_text(passage, span))
                for view, span in enumerate(router.view_spans(passage))
                if span is not None
            ]
        return PassageResponse(index=of.index, version=of.version, **passage._asdict(), views=views)

    def versions(self) -> VersionList:
        """The versions that are published, and the one that is answered from."""
        of, known = self.current_version(), self._catalog().all()
        live = max((one.version for one in known), default=0)
        return VersionList(index=of.index, live=live, serving=of.version, versions=known)

    def version(self, number: int) -> VersionDetail:
        return self._catalog().one(number)

    def publish(self, request: PublishRequest, timeout_s: float | None = None) -> VersionInfo:
        """Publish a manifest whose files are all in the store and whole; `promote` then answers from it at once."""
        allowed_s = self.limits.timeout_ms / 1000
        left_s = allowed_s if timeout_s is None else min(timeout_s, allowed_s)
        return self._catalog().publish(request, SEARCH_SHARE * left_s)

    def rollback(self, number: int) -> VersionInfo:
        """Publish the content of a version as a new one, and answer from it at once."""
        done = self._catalog().rollback(number)
        if self.switcher is not None:
            self.switcher.follow()
        return done

    def promote(self, number: int) -> Readiness:
        """Answer from the newest version now, which `number` names: other servers of it come to it by themselves."""
        of = self._catalog().one(number)
        if not of.live:
            told = f"version {number} is not the newest one of its index"
            hint = f"roll back to it (POST /v1/versions/{number}/rollback), or name the newest one"
            raise RequestError(409, "not_newest", "n", told, hint)
        if self.switcher is not None:
            self.switcher.follow()
        serving = self.current_version().version
        if serving != number:
            failure = self.switcher.failure if self.switcher is not None else ""
            why = failure or "it stays with the version that it was started with"
            told = f"version {number} could not be opened beside version {serving}, which goes on: {why}"
            raise RequestError(503, "not_opened", "n", told, "see `mvr-ray versions CONFIG verify`")
        return self.readiness()

    def ready(self) -> Answer:
        """A real search with a fixed vector: a health check that passes while searches hang proves nothing."""
        probe_QD = np.zeros((1, self.router.dimension), dtype=np.float32)
        probe_QD[0, 0] = 1.0
        return self.router.search(probe_QD, 1, min_coverage=0.0)

    def readiness(self) -> Readiness:
        """Whether that search covered every passage."""
        answer = self.ready()
        return Readiness(
            ready=answer.passages_searched == answer.passages_total,
            index=answer.index,
            version=answer.version,
            coverage=answer.coverage_share,
            shards=coverage(answer).shards,
        )

    def current_version(self) -> Answer:
        """What is answered from now."""
        return current_version(self.router)

    @contextmanager
    def _at(self, version: int | None, timeout_s: float | None = None) -> Iterator[Explainable]:
        """The router of one version, for all that one request asks of it; `timeout_s` to wait for that version."""
        if self.switcher is None:
            of = current_version(self.router)
            if version not in (None, of.version):
                raise RequestError(
                    404,
                    "unknown_version",
                    "version",
                    f"this service answers from version {of.version} of index {of.index!r} alone, not from {version}",
                    "leave version out",
                )
            yield self.router
            return
        with ExitStack() as stack:
            try:
                router = stack.enter_context(
                    self.switcher.pinned(version, None if timeout_s is None else Deadline.after(timeout_s))
                )
            except MissingInputError as error:
                told, _, hint = str(error).partition("; ")
                raise RequestError(404, "unknown_version", "version", told, hint or "see GET /v1/versions") from None
            yield router

    def _catalog(self) -> VersionCatalog:
        if self.catalog is None:
            hint = "ask a server of `mvr-ray serve`"
            raise RequestError(404, "no_versions", "", "this service answers from one version alone", hint)
        return self.catalog


def current_version(router: Explainable) -> Answer:
    """The answer to no query at all: index, version and encoder, and no shard is asked."""
    return router.search(np.zeros((0, router.dimension), dtype=np.float32), 1, min_coverage=0.0)


def require_encoder(wanted: str | None, of: Answer) -> None:
    """Raises RequestError (409) where a request is meant for another encoder than the version's."""
    if wanted is not None and wanted != of.encoder_fingerprint:
        message = (
            f"the request is for encoder {wanted[:80]!r}, index {of.index!r} version {of.version} was made by encoder "
            f"{of.encoder_fingerprint!r}"
        )
        hint = "embed with the index's encoder, or send texts and leave encoder_fingerprint out"
        raise RequestError(409, "encoder_mismatch", "encoder_fingerprint", message, hint)


def coverage(answer: Answer) -> Coverage:
    return Coverage(
        share=answer.coverage_share,
        passages_searched=answer.passages_searched,
        passages_total=answer.passages_total,
        shards=[Shard(**shard._asdict()) for shard in answer.shards],
    )


def bare(hit: Hit, num_views: int) -> PassageHit:
    """View numbers from V on are feedback views: questions that the passage answered, no part of its text."""
    return PassageHit(id=hit.passage_id, score=hit.score, view=hit.view, feedback=hit.view >= num_views)


def with_text(found: PassageHit, passage: Passage, spans: Sequence[tuple[int, int] | None]) -> PassageHit:
    span = spans[found.view] if found.view < len(spans) and not found.feedback else None
    snippet = Snippet(start=span[0], stop=span[1], text=snippet_text(passage, span)) if span else None
    return found.model_copy(update={"title": passage.title, "text": passage.text, "snippet": snippet})
