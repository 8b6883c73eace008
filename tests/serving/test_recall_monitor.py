"""Checks which queries the recall monitor measures, and that it stops when its server does."""

import itertools
import threading
from contextlib import nullcontext
from types import SimpleNamespace

from in_memory_index import InMemoryIndex

from mvr_ray.serving.recall_monitor import RecallMonitor
from mvr_ray.types import Exactness


def test_one_query_of_every_so_many_is_measured_however_many_come_at_once() -> None:
    index, samples, numbers = InMemoryIndex(exact=Exactness(False, "hnsw", 1, 0, 0.5)), [], itertools.count()
    monitor = RecallMonitor(SimpleNamespace(), print, every=5)

    def measure(query: str, *_: object) -> None:
        samples.append(query)
        monitor._busy = False

    monitor._measure = measure
    for size in (1, 3, 2, 4, 7, 3):
        queries = [f"nile {number}" for number in itertools.islice(numbers, size)]
        monitor.note(queries, 1, index.search(index.embed(queries), 1))
        monitor._thread.submit(int).result(20)
    monitor.close()
    assert samples == [f"nile {number}" for number in (4, 9, 14, 19)]


def test_an_answer_of_less_than_every_passage_is_not_measured() -> None:
    index, samples = InMemoryIndex(missing=1, exact=Exactness(False, "hnsw", 1, 0, 0.5)), []
    monitor = RecallMonitor(SimpleNamespace(), print, every=1)
    monitor._measure = lambda *arguments: samples.append(arguments)
    monitor.note(["nile"], 1, index.search(index.embed(["nile"]), 1, min_coverage=0))
    monitor._thread.submit(int).result(20)
    monitor.close()
    assert samples == []


def test_queries_that_are_answered_during_or_after_the_close_are_not_measured() -> None:
    index, recalls = InMemoryIndex(exact=Exactness(False, "hnsw", 1, 0, 0.5)), []
    start = threading.Event()

    def exact(queries_QD, k, router):
        start.set()
        return index.search(queries_QD, k).hits

    answer = index.search(index.embed(["nile"]), 1)
    index.manifest = SimpleNamespace(version=answer.version)
    monitor = RecallMonitor(SimpleNamespace(pin=lambda: nullcontext(index), exact=exact), recalls.append, every=1)
    index.gate.clear()
    monitor.note(["nile"], 1, answer)
    assert start.wait(20)
    monitor.close()
    monitor.note(["nile"], 1, answer)
    index.gate.set()
    monitor._thread.shutdown(wait=True)
    monitor.note(["nile"], 1, answer)
    assert recalls == [1.0]
