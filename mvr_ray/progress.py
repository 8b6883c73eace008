"""Shows progress with rate and time left, on stderr.

On a terminal it is a live bar; elsewhere a plain line every ten seconds, so that a job's log stays short.
"""

import math
import sys
import time
from dataclasses import dataclass
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column

INTERVAL_S = 10.0


@dataclass
class ProgressTask:
    """A task that is under way: where its clock started, its newest count, and the time of its last plain line."""

    bar: TaskID
    start_s: float
    first: int
    count: int
    line_s: float = -math.inf


class Reporter:
    """A `Progress` callable that draws each call: reporter(what, count, total). Use it as a context manager."""

    def __init__(self, stream: TextIO | None = None, interval_s: float = INTERVAL_S) -> None:
        output = stream or sys.stderr
        self._console = Console(file=output, highlight=False, markup=False, emoji=False, force_jupyter=False)
        self._interval_s = interval_s
        self._tasks: dict[str, ProgressTask] = {}
        cut = Column(no_wrap=True, overflow="ellipsis", max_width=max(20, self._console.width - 50))
        whole = Column(no_wrap=True)
        description = TextColumn("{task.description}", markup=False, table_column=cut)
        numbers = MofNCompleteColumn(table_column=whole), "{task.fields[rate]}", TimeRemainingColumn(table_column=whole)
        self._bars = Progress(
            description, BarColumn(), *numbers, console=self._console, disable=not self._console.is_terminal
        )

    def __enter__(self) -> "Reporter":
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def __call__(self, what: str, count: int, total: int) -> None:
        now, name = time.monotonic(), what.partition(" (")[0]  # "train (loss 0.3)" and "train (loss 0.2)" are one task
        task = self._tasks.get(name)
        if task is None:
            bar = self._bars.add_task(what, total=total or None, rate="")
            task = self._tasks[name] = ProgressTask(bar, now, count, count)
        elif count < task.count:  # the same task again, as in a study's steps
            task.start_s, task.first = now, count
            self._bars.reset(task.bar, total=total or None)
        task.count = count
        rate = (count - task.first) / (now - task.start_s) if now > task.start_s else 0.0
        if self._console.is_terminal:
            self._bars.update(task.bar, description=what, completed=count, total=total or None, rate=_rate(rate))
        elif (total and count >= total) or now - task.line_s >= self._interval_s:
            task.line_s = now
            self._console.print(progress_line(what, count, total, rate), soft_wrap=True)

    def say(self, line: str) -> None:
        self._console.print(line, soft_wrap=True)


def progress_line(what: str, count: int, total: int, rate: float) -> str:
    """Format a line such as `encode: 1,024 of 4,096 (25 %), 31.5/s, 1 min 38 s left`."""
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
