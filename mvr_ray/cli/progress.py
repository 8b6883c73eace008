"""Shows progress with rate and time left, on stderr.

On a terminal it is a live bar; elsewhere a plain line every ten seconds, so that a job's log stays short.
"""

import sys
import time
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

INTERVAL_S = 10.0


class Reporter:
    """A `Progress` callable that draws each call: reporter(what, count, total). Use it as a context manager."""

    def __init__(self, stream: TextIO | None = None, interval_s: float = INTERVAL_S) -> None:
        self._console = Console(file=stream or sys.stderr)
        self._interval_s = interval_s
        self._starts: dict[str, tuple[float, int]] = {}
        self._last: dict[str, int] = {}
        self._last_line: dict[str, float] = {}
        self._tasks: dict[str, TaskID] = {}
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            console=self._console,
        )

    def __enter__(self) -> "Reporter":
        if self._console.is_terminal:
            self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._console.is_terminal:
            self._bars.stop()

    def __call__(self, what: str, count: int, total: int) -> None:
        now, task = time.monotonic(), what.partition(" (")[0]  # "train (loss 0.3)" and "train (loss 0.2)" are one task
        if task not in self._starts or count < self._last[task]:  # the same task again, as in a study's steps
            self._starts[task] = (now, count)
            if task in self._tasks:
                self._bars.reset(self._tasks[task], total=total or None)
        self._last[task] = count
        start_s, first = self._starts[task]
        rate = (count - first) / (now - start_s) if now > start_s else 0.0
        if self._console.is_terminal:
            if task not in self._tasks:
                self._tasks[task] = self._bars.add_task(what, total=total or None, rate="")
            self._bars.update(
                self._tasks[task], description=what, completed=count, total=total or None, rate=_rate(rate)
            )
        elif (total and count >= total) or now - self._last_line.get(task, -self._interval_s) >= self._interval_s:
            self._last_line[task] = now
            self._console.print(progress_line(what, count, total, rate), highlight=False, soft_wrap=True)

    def say(self, line: str) -> None:
        self._console.print(line, highlight=False, soft_wrap=True, markup=False)


def progress_line(what: str, count: int, total: int, rate: float) -> str:
    """`encode: 1,024 of 4,096 (25 %), 31.5/s, 1 min 38 s left`"""
    parts = [f"{what}: {count:,} of {total:,} ({100 * count // total} %)" if total else f"{what}: {count:,}"]
    if rate > 0:
        parts.append(_rate(rate))
        if count < total:
            parts.append(f"{duration((total - count) / rate)} left")
    return ", ".join(parts)


def _rate(rate: float) -> str:
    return f"{rate:,.0f}/s" if rate >= 100 else f"{rate:.3g}/s" if rate > 0 else ""


def duration(seconds: float) -> str:
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
