"""Store what the views of an index do for every question as a Parquet file, to compare variants of an encoder.

    system, seed                          which variant, trained with which seed
    question_id, article, passage_id      the question, and its own passage
    lv, gold_answer_view, attention_kl    the measures of `QuestionViews`, null where not defined

Shapes: Q questions.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from mvr_ray.errors import DataError
from mvr_ray.store.parts import parquet_bytes

QUESTION_VIEWS = "views.parquet"
"""Name of the file in the folder of a run and of a study's report."""


class QuestionViews(NamedTuple):
    """Measures of one question and its own passage; None where they are not defined.

    lv                MVR eq. 9
    gold_answer_view  whether the winning view is that of the answer's snippet (ours)
    attention_kl      mean of D(i, j) over i < j in the passage (CAMVR eq. 14)
    """

    question_id: str
    article: str
    passage_id: str
    lv: float | None
    gold_answer_view: bool | None
    attention_kl: float | None


SCHEMA = pa.schema(
    [
        ("system", pa.dictionary(pa.int32(), pa.string())),
        ("seed", pa.int64()),
        ("question_id", pa.string()),
        ("article", pa.dictionary(pa.int32(), pa.string())),
        ("passage_id", pa.string()),
        ("lv", pa.float64()),
        ("gold_answer_view", pa.bool_()),
        ("attention_kl", pa.float64()),
    ]
)


def question_views_bytes(parts: Mapping[tuple[str, int], Sequence[QuestionViews]]) -> bytes:
    """Write measures by system and seed as the bytes of a Parquet file, zstd-compressed; the order is kept."""
    return parquet_bytes(((*key, *views) for key, part in parts.items() for views in part), SCHEMA)


def read_question_views(path: Path) -> dict[tuple[str, int], list[QuestionViews]]:
    """Read the measures of a file by system and seed. Raises DataError for another kind of file."""
    try:
        rows = pq.read_table(path, columns=SCHEMA.names).to_pylist()
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path} is not a Parquet file of question views: {error}") from None
    parts: dict[tuple[str, int], list[QuestionViews]] = {}
    for row in rows:
        key = row.pop("system"), row.pop("seed")
        parts.setdefault(key, []).append(QuestionViews(**row))
    return parts
