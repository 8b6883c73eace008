"""Tests of functions that a background thread calls."""

import threading

import pytest

from mvr_ray.distributed.cluster import periodic
from mvr_ray.distributed.cluster.periodic import LastResult, run_periodically
from mvr_ray.errors import NoAnswerError


def test_a_function_that_fails_is_called_again_and_its_error_is_logged(caplog, monkeypatch):
    """A follower of versions or a health monitor that stopped would not be noticed."""
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


def test_the_last_result_holds_while_the_next_call_fails_or_takes_long():
    answers, may_end = ["first", NoAnswerError("down"), "late", "last"], threading.Event()

    def function() -> str:
        answer = answers.pop(0)
        if answer == "late":
            may_end.wait(60)
        if isinstance(answer, Exception):
            raise answer
        return answer

    result = LastResult(function, 0.0, 0.05)
    assert [result.get() for _ in range(5)] == ["first"] * 5 and answers == ["last"]
    result = LastResult(function, 60.0, 60.0)
    assert [result.get() for _ in range(2)] == ["last"] * 2 and not answers
    may_end.set()


def test_the_first_result_is_waited_for_and_its_error_raised():
    def function() -> str:
        raise NoAnswerError("down")

    with pytest.raises(NoAnswerError, match="down"):
        LastResult(function, 60.0, 0.0).get()
