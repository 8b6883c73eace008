"""Checks that files of question views return what was written."""

import pytest

from mvr_ray.errors import DataError
from mvr_ray.store.formats.question_views import QuestionViews, question_views_bytes, read_question_views


def test_every_measure_returns_with_its_system_and_seed(tmp_path):
    parts = {
        ("MVR", 1): [
            QuestionViews("q1", "Norway", "p1", 0.25, True, 1e-9),
            QuestionViews("q2", "", "p2", 0.0, False, 0),
        ],
        ("MVR", 2): [QuestionViews("q1", "Norway", "p1", None, None, None)],
    }
    path = tmp_path / "views.parquet"
    path.write_bytes(question_views_bytes(parts))
    assert read_question_views(path) == parts
    assert question_views_bytes(parts) == path.read_bytes()
    path.write_bytes(question_views_bytes({}))
    assert read_question_views(path) == {}


def test_another_file_is_refused_by_its_name(tmp_path):
    path = tmp_path / "other.parquet"
    path.write_text("no parquet")
    with pytest.raises(DataError, match=r"other\.parquet is not a Parquet file of question views"):
        read_question_views(path)
