"""A refinement runs and publishes while its index answers: each answer is one version's, whole, and none fails."""

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from live_search import live_search
from prepared_corpus import only_corpus
from random_index import Views, brute_force

from mvr_ray.distributed import refine as refining
from mvr_ray.distributed.cluster import session
from mvr_ray.distributed.hot_swap import HotSwapRouter, open_hot_swap_router
from mvr_ray.distributed.indexing import build_index
from mvr_ray.store import manifest, paths
from mvr_ray.store.delta import open_embeddings
from mvr_ray.store.files import Store
from mvr_ray.store.questions import read_questions
from mvr_ray.types import FloatArray

pytestmark = [pytest.mark.data, pytest.mark.ray, pytest.mark.slow]

K, ASKERS = 10, 3
METHODS = (
    {"method": "hybrid", "step_size": 0.05, "rounds": 4, "patience": 4},
    {"method": "feedback_views", "rounds": 2},
)
Ranked = tuple[tuple[str, float, int], ...]


def stored_views(root: Path, version: int) -> Views:
    """Every view of a version as its files have it, in float64."""
    views: Views = {}
    for entry in manifest.read(Store(str(root)), "index", version).shards:
        for block in open_embeddings(root / paths.shard_dir("index", entry.digest), entry.files).blocks():
            for row, passage_id in enumerate(block.ids):
                span = range(*block.row_ptr[row : row + 2])
                vectors = {int(block.view_numbers_N[n]): block.vectors_ND[n].astype(np.float64) for n in span}
                views[passage_id] = vectors
    return views


def exhaustive(root: Path, version: int, queries_QD: FloatArray) -> tuple[Ranked, ...]:
    views = stored_views(root, version)
    return tuple(tuple(brute_force(views, query_D, K)) for query_D in queries_QD.astype(np.float64))


class AnswerCounts:
    """How often each answer came of each version, and the longest that one took."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[int, tuple[Ranked, ...]]] = Counter()
        self.partial = 0
        self.longest_s = 0.0
        self.end = threading.Event()
        self._lock = threading.Lock()

    def of(self, version: int) -> int:
        with self._lock:
            return sum(count for (number, _), count in self.counts.items() if number == version)

    def ask(self, live: HotSwapRouter, queries_QD: FloatArray) -> None:
        while not self.end.is_set():
            began = time.monotonic()
            answer = live_search(live, queries_QD, K)
            took_s = time.monotonic() - began
            hits = tuple(tuple((hit.passage_id, hit.score, hit.view) for hit in row) for row in answer.hits)
            with self._lock:
                self.counts[answer.version, hits] += 1
                self.partial += not answer.exact.certified or answer.coverage_share < 1
                self.longest_s = max(self.longest_s, took_s)

    def wait_for(self, version: int, count: int) -> None:
        end = time.monotonic() + 60
        while self.of(version) < count:
            assert time.monotonic() < end, f"no {count} answers of version {version}: the others are {self.counts}"
            time.sleep(0.05)


@pytest.mark.chaos(
    "refined while it is read",
    "every answer is right for exactly one version, before, during and after; none fails",
)
def test_every_answer_is_one_versions_while_refinements_run_and_publish(empty_store, minilm, run_over, record_property):
    # A trained backbone: refinement of a random one finds no round worth publishing.
    sections = {"encoder": {"backbone": str(minilm)}, "resources": {"searchers": 2, "cpus_per_searcher": 0.25}}
    with session.staying_local():
        build_index.index(run_over(empty_store, encoder=sections["encoder"], resources={"local_passages": 1000}))
    settings = {"questions": "dev", "depth": 20, "max_heldout_loss": 100}
    runs = [run_over(empty_store, refine={**settings, **method}, **sections) for method in METHODS]
    texts = [question.text for question in read_questions(only_corpus(Store(str(empty_store))), "dev")[:5]]
    answers, during = AnswerCounts(), []
    with open_hot_swap_router(runs[0], follow_s=0.2) as live, ThreadPoolExecutor(ASKERS) as threads:
        with live.pin() as router:
            queries_QD = router.embed(texts)
        asking = [threads.submit(answers.ask, live, queries_QD) for _ in range(ASKERS)]
        try:
            for version, run in enumerate(runs, 1):
                answers.wait_for(version, 20)
                before = answers.of(version)
                refined_version = refining.refine(run).published
                assert refined_version and refined_version.version == version + 1
                during.append(answers.of(version) - before)
            answers.wait_for(3, 20)
        finally:
            answers.end.set()
        for one in asking:
            one.result()
    truth = {version: exhaustive(empty_store, version, queries_QD) for version in (1, 2, 3)}
    assert len(set(truth.values())) == 3, "two versions answer alike, so which one answered is not known"
    assert set(answers.counts) == set(truth.items())
    assert answers.partial == 0
    assert min(during) > 20
    summary = ", ".join(f"{answers.of(version)} of version {version}" for version in truth)
    record_property("figures", f"answers: {summary}; longest {1000 * answers.longest_s:.0f} ms")
