"""Read training rows, which hold a question and the texts of its passages.

They are those of DPR, Tevatron, sentence-transformers and BGE, in any file of rows, and MS MARCO's triples.
"""

import hashlib
import re
from collections.abc import Iterator, KeysView, Mapping, Sequence
from pathlib import Path
from typing import Any

from mvr_ray.store.formats.records import (
    BadRow,
    DroppedRow,
    Record,
    answers_of,
    passage_record,
    plain_apostrophes,
    question_id,
    question_record,
)
from mvr_ray.store.formats.text_files import separated_rows

CONTEXTS = ("positive_ctxs", "hard_negative_ctxs", "negative_ctxs")
"""Names in DPR's training rows of the positive passages, the hard negatives, and the negatives in place of these."""
QUESTIONS = ("question", "query", "anchor")
POSITIVES = (CONTEXTS[0], "positive_passages", "positive", "pos")
NEGATIVES = (CONTEXTS[1], "negative_passages", "negative", "neg")
"""Names in training rows of a question, its positive passages and its hard negatives; so is `negative_1`, and so on."""
NOT_TRAINING = ("text", "contents", "positive_ids")
"""Names that a training row does not have: it would be a passage, or a question that names its passages."""


def read_triples(path: Path) -> Iterator[Record]:
    """Read `question`, `positive` and negatives, tab-separated without header and quotes, as MS MARCO's triples are."""
    for number, row in enumerate(separated_rows(path, "\t", is_quoted=False)):
        if isinstance(row, BadRow):
            yield row
        else:
            question, positive, *negatives = (*row.values, "")
            values = {"question": question, "positive": positive, "negative": [*filter(None, negatives)]}
            yield from training_records(values, number, path, row.where)


def is_training_row(names: KeysView[str]) -> bool:
    """Return whether a row of these names is a question with the texts of its passages."""
    return not (names.isdisjoint(POSITIVES) or names.isdisjoint(QUESTIONS)) and names.isdisjoint(NOT_TRAINING)


def training_records(row: Mapping[str, Any], number: int, path: Path, where: str) -> Iterator[Record]:
    """Yield the passages of a training row, then its question; a bad row, or a dropped one without a positive: of
    DPR's always, of others without answers."""
    more_negatives = (name for name in row if re.fullmatch(r"negative_\d+", name))
    ids: list[list[Any]] = []
    records: list[Record] = []
    for names in (POSITIVES, (*NEGATIVES, *more_negatives), CONTEXTS[2:]):
        try:
            contexts = [context for name in names for context in _contexts(row, name)]
        except ValueError as error:
            yield BadRow(where, str(error))
            return
        ids.append([context_id(context) for context in contexts])
        passages = zip(ids[-1], contexts)
        records += [
            passage_record(id_, one.get("title"), one.get("text"), where, repeats=True) for id_, one in passages
        ]
    yield from records
    positive_ids, hard_negative_ids, other_negative_ids = ids
    answers = answers_of(row)[0] or row.get("answer")
    if not positive_ids and (not answers or row.keys() & {*CONTEXTS}):
        yield DroppedRow(where, "training row without a positive passage")
        return
    own_id = _first(row, ("id", "query_id"))
    yield question_record(
        question_id(path, number) if own_id is None else own_id,
        plain_apostrophes(_first(row, QUESTIONS)),
        where,
        answers=answers,
        positive_ids=positive_ids,
        hard_negative_ids=hard_negative_ids or other_negative_ids,
    )


def context_id(context: dict[str, Any]) -> Any:
    """Return the id of a context: its own, else one made from title and text."""
    for key in ("passage_id", "psg_id", "id", "docid"):
        if context.get(key) not in (None, ""):
            return context[key]
    content = f"{context.get('title') or ''}\0{context.get('text') or ''}"
    return f"ctx-{hashlib.blake2b(content.encode(errors='replace'), digest_size=8).hexdigest()}"


def _contexts(row: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """Return the contexts under a name, a text or an object each, as objects. Raises ValueError."""
    value = row.get(name) or []
    contexts = [
        {"text": one} if isinstance(one, str) else one for one in (value if isinstance(value, list) else [value])
    ]
    if not all(isinstance(context, dict) for context in contexts):
        raise ValueError(f"{name} is {value!r:.60}, no text or object and no list of these")
    return contexts


def _first(row: Mapping[str, Any], names: Sequence[str]) -> Any:
    """Return the first value that a row has under one of these names; None without any."""
    return next((row[name] for name in names if row.get(name) not in (None, "")), None)
