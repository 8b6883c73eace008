"""Files of question ranks: what is written is read back, and other files are refused by name."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mvr_ray.errors import DataError
from mvr_ray.store.formats.question_ranks import QuestionRanks, question_ranks_bytes, read_question_ranks

RANKS = st.none() | st.integers(-1, 10_000)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["one mean vector", "BM25"]),
            st.sampled_from(["dev", "dev_unseen"]),
            st.integers(0, 3),
            st.lists(st.tuples(st.text(max_size=5), st.text(max_size=5), RANKS, RANKS), min_size=1, max_size=6),
            st.none() | st.floats(0, 1),
        ),
        max_size=4,
        unique_by=lambda part: part[:3],
    )
)
def test_what_is_written_is_read_back(tmp_path_factory, groups):
    parts = [
        QuestionRanks(
            system,
            questions,
            *(list(column) for column in zip(*rows)),
            seed,
            () if ndcg is None else [ndcg] * len(rows),
        )
        for system, questions, seed, rows, ndcg in groups
    ]
    path = tmp_path_factory.mktemp("ranks") / "questions.parquet"
    path.write_bytes(question_ranks_bytes(parts))
    assert read_question_ranks(path) == parts
    assert question_ranks_bytes(parts) == path.read_bytes()


def test_a_file_of_an_earlier_version_has_no_ndcg(tmp_path: Path):
    path = tmp_path / "questions.parquet"
    ranks = QuestionRanks("BM25", "dev", ["a", "b"], ["x", "x"], [None, None], [0, -1], 1, [1.0, 0.0])
    path.write_bytes(question_ranks_bytes([ranks]))
    pq.write_table(pq.read_table(path).drop_columns(["gold_ndcg"]), path)
    assert read_question_ranks(path) == [ranks._replace(gold_ndcgs=())]


def test_lists_of_unequal_length_are_an_error_and_no_question_is_left_out():
    with pytest.raises(ValueError, match="shorter"):
        question_ranks_bytes([QuestionRanks("BM25", "dev", ["a", "b"], ["x", "x"], [0], [0, -1])])


def test_other_files_are_refused(tmp_path: Path):
    (tmp_path / "a.parquet").write_text("no parquet")
    with pytest.raises(DataError, match=r"a\.parquet is not a Parquet file of question ranks"):
        read_question_ranks(tmp_path / "a.parquet")
    pq.write_table(pa.table({"system": ["x"]}), tmp_path / "b.parquet")
    with pytest.raises(DataError, match="has no column 'seed'"):
        read_question_ranks(tmp_path / "b.parquet")
