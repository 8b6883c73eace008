"""What a user sees: progress with rate and time left, tables, and hits with the matching snippet marked.

On a terminal progress is a live bar; elsewhere it is a plain line every ten seconds, so that a job's log stays short.
Progress and errors go to stderr, results to stdout: `--json` output can be piped. Ray prints on stdout what becomes of
workers; while `results_only` holds, that goes to stderr, too.
"""

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from types import TracebackType
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from mvr_ray.explanation import ExplainedPassage, Explanation, stands_for
from mvr_ray.plan import Plan
from mvr_ray.serving.service import Exact, FoundPassage

INTERVAL_S = 10.0
_results: list[TextIO] = []


class Reporter:
    """A `Progress` callable that draws what it is told: reporter(what, done, total). Use it as a context manager."""

    def __init__(self, stream: TextIO | None = None, interval_s: float = INTERVAL_S) -> None:
        self._console = Console(file=stream or sys.stderr)
        self._interval_s = interval_s
        self._started: dict[str, tuple[float, int]] = {}
        self._last: dict[str, int] = {}
        self._said: dict[str, float] = {}
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

    def __call__(self, what: str, done: int, total: int) -> None:
        now, work = time.monotonic(), what.partition(" (")[0]  # "train (loss 0.3)" and "train (loss 0.2)" are one work
        if work not in self._started or done < self._last[work]:  # the same work once more, as in a study's steps
            self._started[work] = (now, done)
            if work in self._tasks:
                self._bars.reset(self._tasks[work], total=total or None)
        self._last[work] = done
        since, first = self._started[work]
        rate = (done - first) / (now - since) if now > since else 0.0
        if self._console.is_terminal:
            if work not in self._tasks:
                self._tasks[work] = self._bars.add_task(what, total=total or None, rate="")
            self._bars.update(
                self._tasks[work], description=what, completed=done, total=total or None, rate=_rate(rate)
            )
        elif (total and done >= total) or now - self._said.get(work, -self._interval_s) >= self._interval_s:
            self._said[work] = now
            self._console.print(progress_line(what, done, total, rate), highlight=False, soft_wrap=True)

    def say(self, line: str) -> None:
        self._console.print(line, highlight=False, soft_wrap=True, markup=False)


def progress_line(what: str, done: int, total: int, rate: float) -> str:
    """`encode: 1,024 of 4,096 (25 %), 31.5/s, 1 min 38 s left`"""
    parts = [f"{what}: {done:,} of {total:,} ({100 * done // total} %)" if total else f"{what}: {done:,}"]
    if rate > 0:
        parts.append(_rate(rate))
        if done < total:
            parts.append(f"{duration((total - done) / rate)} left")
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


def size(num_bytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if num_bytes < 1000 or unit == "TB":
            break
        num_bytes /= 1000
    return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.3g} {unit}" if num_bytes < 1000 else ">999 TB"


def hit_text(rank: int, found: FoundPassage) -> Text:
    """One hit as a person reads it; the winning view's snippet stands between » and «, in reverse on a terminal. A
    snippet that is the title stands before the text."""
    text = Text(f"{rank:>2}. {found.title or found.id}", style="bold")
    told = "feedback view" if found.feedback else "view"
    text.append(f"  [{found.id}] score {found.score:.4f}, {told} {found.view}\n", style="dim")
    body, snippet = found.text or "", found.snippet
    if snippet is None:
        return text.append(body, style="not bold")
    text.append(body[: snippet.start], style="not bold")
    text.append(f"»{snippet.text}«", style="reverse")
    text.append("" if snippet.stop else " ", style="not bold")
    return text.append(body[snippet.stop :], style="not bold")


def exactness(told: Exact) -> str:
    """What an answer is worth: certified or not, by which method, and an approximate index's recall."""
    recall = "" if told.recall is None else f", recall {told.recall:.3f} when built"
    method = "" if told.certified and told.method == "flat" else f" ({told.method}{recall})"
    return f"{'exact' if told.certified else 'approximate'}{method}"


def explanation_tables(explanation: Explanation) -> list[Table]:
    """A table a passage: views down, with the snippet that each stands for; a question's best view is marked with «."""
    return [_explained(passage, explanation.questions) for passage in explanation.passages]


def _explained(passage: ExplainedPassage, questions: Sequence[str]) -> Table:
    drawn = Table(title=Text(f"{passage.title or passage.id}  [{passage.id}]"), title_justify="left", show_lines=True)
    drawn.add_column("view", justify="right")
    drawn.add_column("stands for", ratio=1)
    for question in questions:
        drawn.add_column(Text(question), min_width=9, max_width=30)
    for view in passage.views:
        won = [winner.view == view.view for winner in passage.winners]
        scores = [Text(f"{score:.4f}{' «' * best}", style="bold" * best) for score, best in zip(view.scores, won)]
        drawn.add_row(str(view.view), Text(stands_for(view)), *scores)
    return drawn


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Table:
    drawn = Table(title=title, title_justify="left", show_header=any(columns))
    for i, column in enumerate(columns):
        numeric = all(isinstance(row[i], int | float) for row in rows if row[i] is not None)
        drawn.add_column(column, justify="right" if rows and numeric else "left")
    for row in rows:
        drawn.add_row(*(cell(value) for value in row))
    return drawn


def cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, dict):
        return ", ".join(f"{name} {cell(part)}" for name, part in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(cell(part) for part in value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def plan_table(made: Plan) -> Table:
    title = (
        f"{made.passages:,} passages x {made.num_views} views = {made.vectors:,} vectors of {made.dimension} "
        f"in {made.shards:,} shards"
    )
    rows = [(i.kind, i.what, size(i.bytes_each), i.count, size(i.bytes_all), i.note) for i in made.lines]
    for kind in ("disk", "memory", "gpu"):
        rows.append((kind, "in all", "", sum(1 for i in made.lines if i.kind == kind), size(made.total(kind)), ""))
    return table(title, ("kind", "what", "each", "count", "all", "how"), rows)


def report_tables(title: str, report: Mapping[str, Any]) -> list[Table]:
    """A report of plain values: its single values as two columns, each list of records as a table of its own."""
    single: list[tuple[str, str]] = []
    tables: list[Table] = []
    for name, value in report.items():
        label = name.replace("_", " ")
        if name == "shards" and isinstance(value, list):
            single.append((label, f"{len(value):,}"))
        elif isinstance(value, dict) and "shards" in value:
            single.append((label, f"version {value['version']} of index {value['index']}"))
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            columns = list(value[0])
            rows = [[row.get(column) for column in columns] for row in value]
            tables.append(table(label, [column.replace("_", " ") for column in columns], rows))
        elif value not in (None, "", [], {}):
            single.append((label, cell(value)))
    return [*([table(title, ("", ""), single)] if single else []), *tables]


@contextmanager
def results_only() -> Iterator[None]:
    """What is printed by others goes to stderr; `write`, `print_json` and `print_shown` still reach stdout."""
    _results.append(_stdout())
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _results.pop()


def write(text: str) -> None:
    _stdout().write(text)


def _stdout() -> TextIO:
    return _results[-1] if _results else sys.stdout


def print_json(value: Any) -> None:
    write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def print_shown(shown: Table | Text | str) -> None:
    """Results for people, on stdout; a file or pipe gets lines of 160 characters."""
    console = Console(file=_stdout(), highlight=False, soft_wrap=not isinstance(shown, Table))
    if not console.is_terminal:
        console.width = 160
    console.print(shown)
