"""Writes the log lines of processes that serve: one JSON object each, with the request that it was written for.

    {"time": "2026-01-31T12:00:00.123+00:00", "level": "INFO", "logger": "mvr_ray.serving.middleware",
     "request": "4f1c...", "message": "request: method=POST route=/v1/search status=200 took_ms=8.1"}

Commands keep their own plain lines; nothing here writes to standard output.
"""

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime

_request: ContextVar[str] = ContextVar("mvr_ray_request", default="")


def request_id() -> str:
    """The id of the request that this thread or task works for; empty where there is none."""
    return _request.get()


@contextmanager
def request_context(request: str) -> Iterator[None]:
    """Lines written in the block are this request's. A thread that is started in it needs a context of its own."""
    before = _request.set(request)
    try:
        yield
    finally:
        _request.reset(before)


class JsonLines(logging.Formatter):
    """Formats a record as one JSON object; `request` and `exception` stand in it where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
        }
        if request := request_id():
            fields["request"] = request
        fields["message"] = record.getMessage()
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields)


def to_stderr() -> None:
    """Write what this package logs, from INFO on, to the standard error of this process. A second call adds nothing."""
    logger = logging.getLogger("mvr_ray")
    if any(isinstance(handler.formatter, JsonLines) for handler in logger.handlers):
        return
    handler = logging.StreamHandler(sys.__stderr__)  # Ray Serve puts another stream in the place of sys.stderr
    handler.setFormatter(JsonLines())
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
