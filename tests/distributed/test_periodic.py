"""Tests of functions that a background thread calls."""

import threading

from mvr_ray.distributed import periodic
from mvr_ray.distributed.periodic import run_periodically


def test_a_function_that_fails_is_called_again_and_its_error_is_logged(caplog, monkeypatch):
    """A follower of versions or a health monitor that stopped would be missed by nobody."""
    monkeypatch.setattr(periodic, "RETRY_S", 0.0)
    second_event, calls = threading.Event(), []

    def function() -> float:
        calls.append(len(calls))
        if len(calls) == 1:
            raise KeyError("what no one expected")
        second_event.set()
        return 60.0

    with run_periodically(function, 0.0, "mvr-test"):
        assert second_event.wait(10)
    assert "mvr-test failed" in caplog.text and "what no one expected" in caplog.text
