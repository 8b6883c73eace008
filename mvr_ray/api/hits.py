"""Show the hits of one question: as text where Python prints them, as a table in a notebook."""

from html import escape
from typing import Any

from mvr_ray.serving.schemas import PassageHit, SearchResponse
from mvr_ray.types import Exactness

SHOWN_CHARS = 400


class SearchHits(list[PassageHit]):
    """The best passages of one question, best first.

    Each has `id`, `score`, `title`, `text`, `view` (the view that won), `snippet` (its piece of the text: `start`,
    `stop`, `text`; None where the view reads the whole passage, or is one of feedback; `stop` 0: its title), `fields`
    (by name; dates and timestamps as ISO 8601 texts), `feedback` (whether the view is one of feedback), and of a hybrid
    search `lexical` (BM25) and `dense`.
    """

    def __init__(self, question: str, hits: list[PassageHit], response: SearchResponse) -> None:
        super().__init__(hits)
        self.question = question
        self.version: int = response.version
        """The index version that answered."""
        self.exact: Exactness = response.exact
        """Whether the hits are certified to be those of exhaustive search."""

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The hits as flat rows, for a frame: question, rank, id, score, title, snippet, text, view, and each field.

            pandas.DataFrame(row for hits in index.search(questions) for row in hits.rows)

        A field of the name of another column, such as `score`, is the column `fields.score`.
        """
        return [hit.row(question=self.question, rank=rank) for rank, hit in enumerate(self, 1)]

    def __repr__(self) -> str:
        lines = [self.question]
        for rank, hit in enumerate(self, 1):
            before, snippet, after = _parts(hit)
            fields = ", ".join(f"{name} {value}" for name, value in _fields(hit).items())
            text = f"{before}»{snippet}«{after}" if snippet else before
            lines.append(f"{rank:>2}. {hit.score:z.4f}  {hit.title or hit.id}  [{hit.id}]")
            lines += [f"    {fields}", f"    {text}"] if fields else [f"    {text}"]
        lines += [] if self else ["    no passage"]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        rows = "<tr><th></th><th>score</th><th>passage</th></tr>"
        for rank, hit in enumerate(self, 1):
            before, snippet, after = map(escape, _parts(hit))
            mark = f"<mark>{snippet}</mark>" if snippet else ""
            extra = "".join(f" · {escape(name)} {escape(str(value))}" for name, value in _fields(hit).items())
            title = f"<b>{escape(hit.title or hit.id)}</b> <small>{escape(hit.id)}{extra}</small>"
            rows += f"<tr><td>{rank}</td><td>{hit.score:z.4f}</td><td style='text-align:left'>"
            rows += f"{title}<div dir='auto'>{before}{mark}{after}</div></td></tr>"
        table = f"<table>{rows}</table>" if self else "<p>no passage</p>"
        return f"<p><b>{escape(self.question)}</b></p>{table}"


def _fields(hit: PassageHit) -> dict[str, Any]:
    return {name: value for name, value in (hit.fields or {}).items() if value is not None}


def _parts(hit: PassageHit) -> tuple[Any, ...]:
    """Return the text before the snippet that won, the snippet, and the text after it; long ones are cut."""
    text = hit.text or ""
    if hit.snippet is None or not hit.snippet.stop:
        return _cut(text), "", ""
    before, after = text[: hit.snippet.start], text[hit.snippet.stop :]
    num_chars = max(0, SHOWN_CHARS - len(hit.snippet.text))
    before = f"…{before[len(before) - num_chars // 2 :]}" if len(before) > num_chars // 2 else before
    return before, _cut(hit.snippet.text), _cut(after, num_chars - len(before))


def _cut(text: str, num_chars: int = SHOWN_CHARS) -> str:
    return text if len(text) <= max(num_chars, 0) else f"{text[: max(num_chars, 0)]}…"
