"""Shows the score of every view of a passage with some questions, as values and as an HTML page (CAMVR, Figure 4).

The page is self-contained: no script and no external resource, readable in light and dark mode. A passage is a table:
a row for each view with its snippet, a column for each question with the view's score as a bar from 0.
"""

from collections.abc import Callable, Sequence
from html import escape
from itertools import cycle
from typing import Literal

from pydantic import BaseModel

SHOWN_CHARS = 80
"""Of a view's text in a printed table."""


class ExplainedView(BaseModel):
    """One view: of the snippet text[start:stop], of the title, of the whole passage, or a feedback view, which is
    computed from questions and represents no part of the text. A snippet and the title have `text`, which is empty for
    a viewer after the last snippet, or before no title. `scores` has one number a question.
    """

    view: int
    kind: Literal["snippet", "title", "passage", "feedback"]
    start: int | None = None
    stop: int | None = None
    text: str | None = None
    scores: list[float]


class Winner(BaseModel):
    """The best view for one question; `rank` counts from 1 if the passage is among the question's hits. A hybrid
    search adds the BM25 score `lexical`, and the `total` that ranks the passage."""

    view: int
    score: float
    rank: int | None = None
    lexical: float | None = None
    total: float | None = None


class ExplainedPassage(BaseModel):
    """All stored views of one passage, and the best one for each question. A missing view is not listed."""

    id: str
    title: str
    text: str
    views: list[ExplainedView]
    winners: list[Winner]


class Explanation(BaseModel):
    """The scores of some questions with some passages, from one index version. `hybrid` is the weight of the dense
    score in the sum with BM25, rrf for reciprocal ranks; None if only the dense score ranks passages."""

    index: str
    version: int
    encoder_fingerprint: str
    num_views: int
    questions: list[str]
    passages: list[ExplainedPassage]
    hybrid: float | Literal["rrf"] | None = None

    def __repr__(self) -> str:
        """Return a table for each passage: views down, questions across, the best view of each marked with «."""
        lines = [f"question {number}: {question}" for number, question in enumerate(self.questions, 1)]
        for passage in self.passages:
            table = [["view", *(str(number) for number in range(1, len(self.questions) + 1)), "stands for"]]
            for view in passage.views:
                marks = [" «" if winner.view == view.view else "" for winner in passage.winners]
                scores = [f"{score:z.4f}{mark}" for score, mark in zip(view.scores, marks)]
                text = " ".join(describe_view(view).split())
                table.append([str(view.view), *scores, text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}…"])
            widths = [max(map(len, column)) for column in zip(*table)]
            lines += ["", f"{passage.title or passage.id}  [{passage.id}]"]
            lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in table]
        return "\n".join(lines)

    __str__ = __repr__

    def _repr_html_(self) -> str:
        """Return the page in a frame, as a notebook shows it: the page's style stays inside."""
        frame = "width: 100%; height: 40rem; border: 0; resize: vertical"
        return f'<iframe sandbox style="{frame}" srcdoc="{escape(render_html(self))}"></iframe>'


_STYLE = """
:root { color-scheme: light dark; --ink: #1c1e21; --soft: #5c636b; --paper: #ffffff; --line: #d9dde2; --shade: #f3f5f7;
  --rest: #a9b4c0; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8ea; --soft: #9aa3ad; --paper: #16181b; --line: #343a41;
  --shade: #202429; --rest: #56616d; } }
body { margin: 2rem auto; padding: 0 1rem; max-width: 75rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.3rem; } h2 { font-size: 1.1rem; margin: 2.5rem 0 .3rem; }
.soft { color: var(--soft); font-size: .85rem; }
.wide { overflow-x: auto; }
table { width: 100%; border-collapse: collapse; }
th, td { padding: .4rem .6rem; border-top: 1px solid var(--line); text-align: left; vertical-align: top; }
th { font-weight: 600; } thead th { vertical-align: bottom; }
td.score { min-width: 9rem; width: 14rem; font-variant-numeric: tabular-nums; }
.bar { position: relative; display: block; height: .55rem; margin-top: .2rem; background: var(--shade); }
.bar i { position: absolute; top: 0; bottom: 0; min-width: 1px; background: var(--rest); }
td.won { font-weight: 700; background: var(--shade); } td.won i { background: var(--mark); }
tr.feedback td, tr.feedback th { font-style: italic; }
.key { border-left: .3rem solid var(--mark); padding-left: .4rem; }
"""
_MARKS = ("#2f7ed8", "#d9662b", "#3a9d5d", "#a04fc0", "#c23b5e", "#8a7a1f")


def render_html(explanation: Explanation) -> str:
    """Render the page as HTML; every text of passages and questions is escaped."""
    scores = [score for passage in explanation.passages for view in passage.views for score in view.scores]
    low, high = min([0.0, *scores]), max([0.0, *scores]) or 1.0

    def bar(score: float) -> str:
        """Return the place of a score's bar, in percent of the width; 0 lies between `low` and `high`."""
        start, width = 100 * (min(score, 0.0) - low) / (high - low), 100 * abs(score) / (high - low)
        return f"left: {start:.2f}%; width: {width:.2f}%"

    legend = (
        f"index {explanation.index} version {explanation.version}, encoder {explanation.encoder_fingerprint}; "
        f"a score is the inner product of question and view, a passage scores as its best view (bold); "
        f"bars run from {low:.3g} to {high:.3g}"
    )
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">",
            f"<title>{escape('; '.join(explanation.questions))}</title>",
            f"<style>{_STYLE}</style></head><body>",
            "<h1>Which view answers?</h1>",
            f'<p class="soft">{escape(legend)}</p>',
            *(_passage(passage, explanation.questions, bar) for passage in explanation.passages),
            "</body></html>",
            "",
        ]
    )


def _passage(passage: ExplainedPassage, questions: Sequence[str], bar: Callable[[float], str]) -> str:
    heads = ""
    for mark, question, winner in zip(cycle(_MARKS), questions, passage.winners):
        rank = f", hit {winner.rank}" if winner.rank is not None else ""
        words = f" and words with {winner.lexical:.4f}" if winner.lexical is not None else ""
        heads += (
            f'<th scope="col"><div class="key" style="--mark: {mark}"><bdi>{escape(question)}</bdi><br>'
            f'<span class="soft">view {winner.view} with {winner.score:z.4f}{words}{rank}</span></div></th>'
        )
    whole = any(view.kind == "passage" for view in passage.views)
    return "\n".join(
        [
            f'<h2 dir="auto">{escape(passage.title or passage.id)}</h2>',
            f'<p class="soft">passage <bdi>{escape(passage.id)}</bdi></p>',
            f"<details{' open' if whole else ''}><summary class='soft'>the whole text</summary>"
            f'<p dir="auto">{escape(passage.text)}</p></details>',
            '<div class="wide"><table><thead><tr><th scope="col">view</th><th scope="col">stands for</th>'
            f"{heads}</tr></thead><tbody>",
            *(_view(view, passage.winners, bar) for view in passage.views),
            "</tbody></table></div>",
        ]
    )


def _view(view: ExplainedView, winners: Sequence[Winner], bar: Callable[[float], str]) -> str:
    cells = "".join(
        f'<td class="score{" won" if winner.view == view.view else ""}" style="--mark: {mark}">{score:z.4f}'
        f'<span class="bar"><i style="{bar(score)}"></i>'
        "</span></td>"
        for mark, score, winner in zip(cycle(_MARKS), view.scores, winners)
    )
    kind = ' class="feedback"' if view.kind == "feedback" else ""
    return f'<tr{kind}><th scope="row">{view.view}</th><td dir="auto">{escape(describe_view(view))}</td>{cells}</tr>'


def describe_view(view: ExplainedView) -> str:
    """Return the view's snippet, or a description of what the view represents instead."""
    words = {
        "feedback": "feedback: questions that this passage answered",
        "passage": "the whole passage",
        "title": f"title: {view.text}" if view.text else "no title",
    }
    return words.get(view.kind, view.text or "no snippet: a viewer after the last one")
