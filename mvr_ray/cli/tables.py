"""Prints results on stdout: tables, JSON, and hits with the matching snippet marked.

Progress and errors go to stderr, so the output of `--json` can be piped. Ray prints events of workers on stdout; inside
`results_only` they go to stderr too.
"""

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mvr_ray.errors import StorageError, count_noun

if TYPE_CHECKING:  # these modules take a second to import, and most commands need none
    from mvr_ray.capacity import Plan
    from mvr_ray.explanation import ExplainedPassage
    from mvr_ray.serving.schemas import PassageHit
    from mvr_ray.types import Exactness

_results: list[TextIO] = []
_ESCAPES = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n\r"}
_ESCAPES |= {code: f"\\u{code:x}" for code in range(0xD800, 0xE000)}


def size(num_bytes: float) -> str:
    """Format a number of bytes with three digits and a decimal unit: `64.6 GB`."""
    if num_bytes < 999.5:
        return f"{num_bytes:.0f} B"
    for unit in ("kB", "MB", "GB", "TB"):
        num_bytes /= 1000
        if num_bytes < 999.5:
            return f"{num_bytes:.3g} {unit}"
    return ">999 TB"


def visible(text: str) -> str:
    """Replace control characters, which a terminal would obey, and halves of surrogate pairs, which UTF-8 cannot
    encode, by visible escapes; Rich drops carriage returns."""
    return text.translate(_ESCAPES)


def hit_text(rank: int, hit: "PassageHit") -> Text:
    """Format one hit; the winning view's snippet stands between » and «, in reverse on a terminal. A
    snippet that is the title stands before the text."""
    text = Text(f"{rank:>2}. {visible(hit.title or hit.id)}", style="bold")
    kind = "feedback view" if hit.feedback else "view"
    text.append(f"  [{visible(hit.id)}] score {hit.score:z.4f}, {kind} {hit.view}\n", style="dim")
    if hit.fields:
        texts = {name: str(value) if type(value) in (int, float) else cell(value) for name, value in hit.fields.items()}
        line = ", ".join(f"{name} {value}" for name, value in texts.items())
        text.append(f"    {visible(line)}\n", style="dim")
    body, snippet = hit.text or "", hit.snippet
    if snippet is None:
        return text.append(visible(body), style="not bold")
    text.append(visible(body[: snippet.start]), style="not bold")
    text.append(f"»{visible(snippet.text)}«", style="reverse")
    text.append("" if snippet.stop else " ", style="not bold")
    return text.append(visible(body[snippet.stop :]), style="not bold")


def exactness(exact: "Exactness") -> str:
    """Say whether an answer is certified, by which method, and an approximate index's recall."""
    recall = "" if exact.recall is None else f", recall {exact.recall:.3f} when built"
    method = "" if exact.certified and exact.method == "flat" else f" ({exact.method}{recall})"
    return f"{'exact' if exact.certified else 'approximate'}{method}"


def explanation_table(passage: "ExplainedPassage", questions: Sequence[str]) -> Table:
    """Make the table of a passage: views down, each with its snippet; a question's best view is marked with «."""
    from mvr_ray.explanation import describe_view

    title = visible(f"{passage.title or passage.id}  [{passage.id}]")
    output = Table(title=Text(title), title_justify="left", show_lines=True)
    output.add_column("view", justify="right")
    output.add_column("stands for", ratio=1)
    for question in questions:
        output.add_column(Text(visible(question)), min_width=9, max_width=30)
    for view in passage.views:
        wins = [winner.view == view.view for winner in passage.winners]
        scores = [Text(f"{score:z.4f}{' «' * best}", style="bold" * best) for score, best in zip(view.scores, wins)]
        output.add_row(str(view.view), Text(visible(describe_view(view))), *scores)
    for name, kind in (("words (BM25)", "lexical"), ("words and views together", "total")):
        scores = [getattr(winner, kind) for winner in passage.winners]
        if any(score is not None for score in scores):
            output.add_row("", name, *("" if score is None else f"{score:z.4f}" for score in scores))
    return output


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Table:
    """Make a table of rows; square brackets in a title, a column name or a cell are no markup."""
    heading = Text(visible(title), style="bold") if title else None
    output = Table(
        title=heading, title_justify="left", show_header=any(columns), box=SIMPLE_HEAD, show_edge=False, pad_edge=False
    )
    for i, column in enumerate(columns):
        numeric = all(_is_number(row[i]) for row in rows if row[i] is not None)
        output.add_column(Text(visible(column)), justify="right" if rows and numeric else "left", overflow="fold")
    for row in rows:
        output.add_row(*(Text(visible(cell(value))) for value in row))
    return output


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, str) and re.fullmatch(r"[\d.,]+|-", value) is not None)


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


def plan_table(plan: "Plan", *, with_notes: bool) -> Table:
    """Make a table of bytes by kind; `with_notes` adds a column on each number, which needs 130 characters."""
    title = (
        f"{count_noun(plan.passages, 'passage')} x {count_noun(plan.num_views, 'view')} = "
        f"{count_noun(plan.vectors, 'vector')} of {plan.dimension} in {count_noun(plan.shards, 'shard')}"
    )
    rows = [(i.kind, i.what, size(i.bytes_each), i.count, size(i.bytes_all), i.note) for i in plan.lines]
    for kind in ("disk", "memory", "gpu"):
        rows.append((kind, "in all", "", sum(1 for i in plan.lines if i.kind == kind), size(plan.total(kind)), ""))
    columns = ("kind", "what", "each", "count", "all", "how")[: 6 if with_notes else 5]
    return table(title, columns, [row[: len(columns)] for row in rows])


def version_text(manifest: Mapping[str, Any]) -> str:
    return f"version {manifest['version']} of index {manifest['index']}"


def report_tables(title: str, report: Mapping[str, Any]) -> list[Table]:
    """Make tables of a plain report: its single values as two columns, each list of records as a table of its own."""
    single, tables = [], []
    for name, value in report.items():
        label = name.replace("_", " ")
        if name == "shards" and isinstance(value, list):
            single.append((label, f"{len(value):,}"))
        elif isinstance(value, dict) and "shards" in value:
            single.append((label, version_text(value)))
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            columns = [column.replace("_", " ") for column in value[0]]
            tables.append(table(label, columns, [[row.get(column) for column in value[0]] for row in value]))
        elif value not in (None, "", [], {}):
            single.append((label, cell(value)))
    return [*([table(title, ("", ""), single)] if single else []), *tables]


@contextmanager
def results_only() -> Iterator[None]:
    """Send prints of other modules to stderr; `write`, `print_json` and `print_result` still reach stdout."""
    _results.append(_stdout())
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _results.pop()


@contextmanager
def translate_stdout_errors() -> Iterator[None]:
    """Write what the block prints at once; raise StorageError if stdout cannot be written, and exit without a word if
    its reader ended, such as `head`."""
    try:
        yield
        _stdout().flush()
    except BrokenPipeError:
        _drop_stdout()
        raise typer.Exit(1) from None
    except OSError as error:
        raise stdout_error(error) from None


def _drop_stdout() -> None:
    with Path(os.devnull).open("wb") as null, suppress(OSError):  # else Python writes the rest again at its exit
        os.dup2(null.fileno(), _stdout().fileno())


def stdout_error(error: OSError) -> StorageError:
    """Drop what stdout did not take, and return the error of it to raise."""
    _drop_stdout()
    return StorageError(f"standard output cannot be written: {error.strerror}; free space or redirect it")


def write(text: str) -> None:
    with translate_stdout_errors():
        _stdout().write(text.encode(errors="backslashreplace").decode())  # JSON's own escapes, too


def _stdout() -> TextIO:
    return _results[-1] if _results else sys.stdout


def print_json(value: Any) -> None:
    """Print a report, plain or not, as JSON on stdout."""
    from mvr_ray.store.runs import to_plain

    is_ascii = not (_stdout().encoding or "utf-8").lower().startswith("utf")
    write(json.dumps(to_plain(value), indent=2, ensure_ascii=is_ascii) + "\n")


def print_result(*results: Table | Text | str) -> None:
    """Print tables and texts on stdout, square brackets and colons as they are; a file or pipe gets lines of 160
    characters."""
    for result in results:
        is_table = isinstance(result, Table)
        console = Console(file=_stdout(), highlight=False, markup=False, emoji=False, soft_wrap=not is_table)
        if not console.is_terminal:
            console.width = 160
        with translate_stdout_errors():
            console.print(visible(result) if isinstance(result, str) else result)
