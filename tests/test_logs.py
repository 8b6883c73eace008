"""Log lines of processes that serve: one JSON object each, with the request that it was written for."""

import io
import json
import logging
import threading

import numpy as np
import pytest

from mvr_ray import logs
from mvr_ray.deadline import Deadline
from mvr_ray.distributed.searching.batching import DynamicBatcher
from mvr_ray.distributed.searching.messages import ScanRequest, ShardResults


@pytest.fixture
def log_lines():
    """A logger of the package's name, on its own, and what it wrote; not every message may be in a report."""
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    handler.setFormatter(logs.JsonLines())
    log = logging.Logger("mvr_ray.tested", logging.INFO)
    log.addHandler(handler)
    return log, lambda: [json.loads(line) for line in text.getvalue().splitlines()]


def test_a_line_is_one_object_with_its_request_whatever_the_message_holds(log_lines):
    log, lines = log_lines
    log.info("before: n=%d", 1)
    with logs.request_context("r1"):
        log.warning('two lines:\n"quoted" %s', "\udcff")
        with logs.request_context("r2"):
            try:
                raise ValueError("broken")
            except ValueError:
                log.exception("within")
        log.info("after")
    records = lines()
    assert [line.get("request") for line in records] == [None, "r1", "r2", "r1"]
    assert [line["level"] for line in records] == ["INFO", "WARNING", "ERROR", "INFO"]
    assert records[1]["message"] == 'two lines:\n"quoted" \udcff'
    assert "ValueError: broken" in records[2]["exception"]
    assert all(line["logger"] == "mvr_ray.tested" and line["time"].endswith("+00:00") for line in records)


def test_searches_that_go_together_are_the_first_ones_request():
    request_ids, runs, goes_on = [], threading.Event(), threading.Event()

    class Fleet:
        def fan_out(self, request, deadline, admit=False, on_partial=None):
            request_ids.append(logs.request_id())
            runs.set()
            assert goes_on.wait(30)
            return ShardResults([], [])

    fleet = DynamicBatcher(Fleet(), concurrent_calls=1)

    def ask(request: str) -> None:
        with logs.request_context(request):
            fleet.fan_out(ScanRequest(np.zeros((1, 2), np.float32), 1, (0,), 1), Deadline.after(60))

    threads = [threading.Thread(target=ask, args=("r1",))]
    threads[0].start()
    assert runs.wait(30)
    for request in ("r2", "r3"):
        threads.append(threading.Thread(target=ask, args=(request,)))
        threads[-1].start()
        while len(fleet._queue) < len(threads) - 1:
            threading.Event().wait(0.001)
    goes_on.set()
    for thread in threads:
        thread.join(30)
    assert request_ids == ["r1", "r2"]
