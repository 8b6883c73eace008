"""Read SQuAD v1.1: articles of paragraphs, each with questions and answer offsets.

A paragraph's id is `<title>_<n>`: the article's title with white space as `_`, and the paragraph's place in it from 0.
Articles are read one at a time.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mvr_ray.errors import DataError
from mvr_ray.store.formats.json_stream import JsonReader
from mvr_ray.store.formats.records import BadRow, DroppedRow, Record, passage_record, question_record, slug
from mvr_ray.store.formats.text_files import open_text


def read_squad(path: Path) -> Iterator[Record]:
    with open_text(path) as file:
        reader = JsonReader(file, str(path))
        has_data = False
        for key in reader.members():
            if key != "data":
                reader.value()
                continue
            has_data = True
            for article in reader.items():
                yield from _article(article, f"{path}:{reader.line}")
        reader.finish()
    if not has_data:
        raise DataError(f"{path} has no `data` list and is not a SQuAD file; set the source's format")


def _article(article: Any, where: str) -> Iterator[Record]:
    if not isinstance(article, dict) or not isinstance(article.get("paragraphs"), list):
        yield BadRow(where, "an article is not an object with `paragraphs`")
        return
    title = article.get("title")
    if not isinstance(title, str) or not title.strip():
        yield BadRow(where, "an article has no title, which its paragraphs' ids are made from")
        return
    for number, paragraph in enumerate(article["paragraphs"]):
        place = f"{where} ({title}, paragraph {number})"
        if not isinstance(paragraph, dict):
            yield BadRow(place, "a paragraph is not an object")
            continue
        passage_id = f"{slug(title)}_{number}"
        context = paragraph.get("context")
        yield passage_record(passage_id, title.replace("_", " "), context, place)
        for qa in _list(paragraph.get("qas")):
            yield _question(qa, context, passage_id, place)


def _question(qa: Any, context: Any, passage_id: str, where: str) -> Record:
    if not isinstance(qa, dict):
        return BadRow(where, "a question is not an object")
    if qa.get("is_impossible"):
        return DroppedRow(where, "SQuAD 2 question without an answer")
    pairs: dict[tuple[str, int], None] = {}
    for answer in _list(qa.get("answers")):
        text = answer.get("text") if isinstance(answer, dict) else None
        if not isinstance(text, str) or not isinstance(context, str):
            return BadRow(where, f"question {qa.get('id')!r} has an answer without text")
        start = answer.get("answer_start")
        true = isinstance(start, int) and start >= 0 and context.startswith(text, start)
        pairs[text, start if true else -1] = None
    return question_record(
        qa.get("id"),
        qa.get("question"),
        where,
        answers=[text for text, _ in pairs],
        answer_starts=[start for _, start in pairs],
        positive_ids=[passage_id],
    )


def _list(value: Any) -> list[Any]:
    """Return a list; anything else is the only entry of one, which is then a bad row."""
    return value if isinstance(value, list) else [value] if value else []
