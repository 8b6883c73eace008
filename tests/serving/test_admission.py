"""Checks deadlines, retry hints and cancelled work.

No deadline is later than what it was made from, one formula gives every hint, and cancelled work never begins.
"""

import asyncio
import math
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers

from mvr_ray import deadline as deadline_module
from mvr_ray.deadline import Deadline
from mvr_ray.errors import CoverageError, OverloadedError
from mvr_ray.serving.admission import Admission, Workers
from mvr_ray.serving.middleware import request_deadline
from mvr_ray.serving.schemas import LONGEST_RETRY_S, retry_seconds, to_request_error

seconds = st.floats(0, 1e6)


@given(timeout_s=seconds, own_s=st.none() | seconds, share=st.floats(0, 1))
def test_no_deadline_made_from_another_one_is_later(timeout_s, own_s, share) -> None:
    now = [5.0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deadline_module.time, "monotonic", lambda: now[0])
        deadline = Deadline.after(timeout_s)
        now[0] += timeout_s / 3
        within, part = deadline.within(own_s), deadline.share(share)
        assert within.left_s <= deadline.left_s
        assert within.start_s == deadline.start_s, "the time of a request begins when it arrives"
        assert part.left_s == pytest.approx(share * deadline.left_s, abs=1e-6)


@pytest.mark.parametrize(
    ("header", "allowed_s"),
    [(None, 10), ("40", 0.04), ("99999", 10), ("0", 0), ("-1", 10), ("1e3", 10), ("9" * 30, 10), ("", 10), ("²", 10)],
)
def test_a_sender_may_shorten_its_time_and_never_lengthen_it(header, allowed_s) -> None:
    headers = Headers({} if header is None else {"x-timeout-ms": header})
    assert request_deadline(headers, 10).timeout_s == allowed_s


@given(wait_s=st.floats(0, 1e9))
def test_a_retry_hint_is_the_expected_wait_in_whole_seconds_up_to_a_minute(wait_s) -> None:
    hint = retry_seconds(wait_s)
    assert 1 <= hint <= LONGEST_RETRY_S
    assert hint == math.ceil(wait_s) or wait_s <= 0 or wait_s > LONGEST_RETRY_S
    assert to_request_error(OverloadedError("full", wait_s)).headers == {"retry-after": str(hint)}


def test_a_retry_hint_of_a_long_wait_is_a_minute() -> None:
    assert [retry_seconds(wait_s) for wait_s in (0, 0.2, 60, 61, 1e9)] == [1, 1, 60, 60, 60]


def test_what_cannot_be_answered_now_has_a_retry_hint() -> None:
    error = to_request_error(CoverageError("1 of 2 shards did not answer"))
    assert (error.status, error.code, error.headers) == (503, "not_covered", {"retry-after": "1"})


def test_queued_work_whose_sender_hung_up_never_begins() -> None:
    async def serve() -> list[str]:
        admission, workers, deadline = Admission(3), Workers(1, lambda _: None), Deadline.after(60)
        end_event, calls = threading.Event(), []
        first, second = (
            asyncio.create_task(workers.run(admission.acquire(), work, deadline))
            for work in (end_event.wait, lambda: calls.append("second"))
        )
        await asyncio.sleep(0)  # both are submitted
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        end_event.set()
        await first
        await workers.run(admission.acquire(), lambda: calls.append("third"), deadline)
        workers.close()
        return calls

    assert asyncio.run(serve()) == ["third"]
