"""Show the hits of one question: as text where Python prints them, as a table in a notebook."""

from html import escape
from typing import Any

from mvr_ray.serving.schemas import Exact, PassageHit, SearchResponse

SHOWN_CHARS = 400


class SearchHits(list[PassageHit]):
    """The best passages of one question, best first.

    Each has `id`, `score`, `title`, `text`, `view` (the view that won), `snippet` (its piece of the text: `start`,
    `stop`, `text`; None where the view reads the whole passage) and `fields`.
    """

    def __init__(self, question: str, hits: list[PassageHit], response: SearchResponse) -> None:
        super().__init__(hits)
        self.question = question
        self.version: int = response.version
        """The index version that answered."""
        self.exact: Exact = response.exact
        """Whether the hits are certified to be those of exhaustive search."""

    def __repr__(self) -> str:
        return "\n".join([self.question, *(_line(rank, hit) for rank, hit in enumerate(self, 1))])

    def _repr_html_(self) -> str:
        head = "<tr><th></th><th>score</th><th>passage</th></tr>"
        rows = "".join(
            f"<tr><td>{rank}</td><td>{hit.score:.4f}</td><td style='text-align:left'>{_passage_html(hit)}</td></tr>"
            for rank, hit in enumerate(self, 1)
        )
        return f"<p><b>{escape(self.question)}</b></p><table>{head}{rows}</table>"


def _line(rank: int, hit: PassageHit) -> str:
    head = f"{rank:>2}. {hit.score:.4f}  {hit.title or hit.id}  [{hit.id}]"
    fields = ", ".join(f"{name} {value}" for name, value in (hit.fields or {}).items() if value is not None)
    before, snippet, after = _parts(hit)
    text = f"{before}»{snippet}«{after}" if snippet else before
    return "\n".join(line for line in (head, fields and f"    {fields}", f"    {text}") if line)


def _passage_html(hit: PassageHit) -> str:
    fields = {name: value for name, value in (hit.fields or {}).items() if value is not None}
    extra = "".join(f" · {escape(name)} {escape(str(value))}" for name, value in fields.items())
    before, snippet, after = map(escape, _parts(hit))
    mark = f"<mark>{snippet}</mark>" if snippet else ""
    return f"<b>{escape(hit.title or hit.id)}</b> <small>{escape(hit.id)}{extra}</small><br>{before}{mark}{after}"


def _parts(hit: PassageHit) -> tuple[Any, ...]:
    """Return the text before the snippet that won, the snippet, and the text after it; long ones are cut."""
    text = hit.text or ""
    if hit.snippet is None or not hit.snippet.stop:
        return _cut(text), "", ""
    before, after = text[: hit.snippet.start], text[hit.snippet.stop :]
    num_chars = max(0, SHOWN_CHARS - len(hit.snippet.text))
    before = f"…{before[len(before) - num_chars // 2 :]}" if len(before) > num_chars // 2 else before
    return before, hit.snippet.text, _cut(after, num_chars - len(before))


def _cut(text: str, num_chars: int = SHOWN_CHARS) -> str:
    return text if len(text) <= num_chars else f"{text[: max(num_chars, 0)]}…"
