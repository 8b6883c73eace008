"""Checks that the recall monitor stops when its server does."""

import threading
from contextlib import nullcontext
from types import SimpleNamespace

from in_memory_index import InMemoryIndex

from mvr_ray.serving.recall_monitor import RecallMonitor
from mvr_ray.types import Exactness


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
