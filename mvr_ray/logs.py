"""Format the log lines of serving processes: one JSON object each, with the id of its request.

    {"time": "2026-01-31T12:00:00.123+00:00", "level": "INFO", "logger": "mvr_ray.serving.middleware",
     "request": "4f1c...", "message": "request: method=POST route=/v1/search status=200 took_ms=8.1"}

Commands write their own plain lines; this module never writes to standard output.
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
    """Return the request id of the current thread or task, empty if there is none."""
    return _request.get()


@contextmanager
def request_context(request: str) -> Iterator[None]:
    """Attach a request id to the log lines of the block. A thread started in the block needs its own context."""
    before = _request.set(request)
    try:
        yield
    finally:
        _request.reset(before)


class JsonLines(logging.Formatter):
    """Format a record as one JSON object, with `request` and `exception` where there is one."""

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
    """Write this package's log records, from INFO on, to standard error. A second call adds nothing."""
    logger = logging.getLogger("mvr_ray")
    if any(isinstance(handler.formatter, JsonLines) for handler in logger.handlers):
        return
    handler = logging.StreamHandler(sys.__stderr__)  # Ray Serve replaces sys.stderr
    handler.setFormatter(JsonLines())
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
