"""Laws of embedding shards: what goes in comes out, mapped; bytes depend on the rows alone; no row without a view."""

from pathlib import Path

import numpy as np
import pytest
from file_size_limit import file_size_limit
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mvr_ray.errors import MissingInputError, StorageError
from mvr_ray.store.embeddings import BATCH_PASSAGES, EmbeddingShard, EmbeddingWriter, Views
from mvr_ray.types import EmbeddingBlock

DIMENSION = 3
Rows = list[tuple[str, Views]]


def make_rows(num_passages: int, seed: int, max_views: int = 4, dtype: type = np.float16) -> Rows:
    rng = np.random.default_rng(seed)
    rows = []
    for number in range(num_passages):
        views = np.sort(rng.choice(max_views * 2, rng.integers(1, max_views + 1), replace=False)).astype(np.int16)
        rows.append((f"ä{number:06d}", Views(views, rng.normal(size=(len(views), DIMENSION)).astype(dtype))))
    return rows


def to_block(rows: Rows) -> EmbeddingBlock:
    counts = [len(views.view_numbers_N) for _, views in rows]
    return EmbeddingBlock(
        [name for name, _ in rows],
        np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        np.concatenate([views.view_numbers_N for _, views in rows]),
        np.concatenate([views.vectors_ND for _, views in rows]),
    )


def to_rows(shard: EmbeddingShard) -> Rows:
    rows: Rows = []
    for block in shard.blocks():
        for i, name in enumerate(block.ids):
            span = slice(int(block.row_ptr[i]), int(block.row_ptr[i + 1]))
            rows.append((name, Views(block.view_numbers_N[span], block.vectors_ND[span])))
    return rows


def same(rows: Rows, others: Rows) -> bool:
    return len(rows) == len(others) and all(
        a == b and np.array_equal(x.view_numbers_N, y.view_numbers_N) and np.array_equal(x.vectors_ND, y.vectors_ND)
        for (a, x), (b, y) in zip(rows, others)
    )


def write(path: Path, blocks: list[EmbeddingBlock], dtype: str = "fp16") -> EmbeddingShard:
    with EmbeddingWriter(path, DIMENSION, 8, dtype) as writer:
        for block in blocks:
            writer.write(block)
    shard = EmbeddingShard.open(path)
    return shard


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(1, 40), min_size=0, max_size=5), st.integers(0, 99), st.sampled_from(["fp16", "fp32"]))
def test_rows_come_back_as_they_were_however_they_came(tmp_path: Path, sizes: list[int], seed: int, dtype: str):
    rows = make_rows(sum(sizes), seed, dtype={"fp16": np.float16, "fp32": np.float32}[dtype])
    blocks = []
    at = 0
    for size in sizes:
        blocks.append(to_block(rows[at : at + size]))
        at += size
    shard = write(tmp_path / "a.arrow", blocks, dtype)
    assert same(to_rows(shard), rows)
    assert (shard.dtype, shard.dimension, shard.num_views) == (dtype, DIMENSION, 8)
    assert shard.ids() == [name for name, _ in rows]
    write(tmp_path / "b.arrow", [to_block(rows)] if rows else [], dtype)
    assert (tmp_path / "a.arrow").read_bytes() == (tmp_path / "b.arrow").read_bytes()


def test_batches_are_bounded_and_vectors_are_not_copied(tmp_path: Path):
    rows = make_rows(2 * BATCH_PASSAGES + 10, 0)
    shard = write(tmp_path / "a.arrow", [to_block(rows[:5000]), to_block(rows[5000:])])
    blocks = shard.blocks()
    assert [len(block.ids) for block in blocks] == [BATCH_PASSAGES, BATCH_PASSAGES, 10]
    assert not any(block.vectors_ND.flags.owndata or block.vectors_ND.flags.writeable for block in blocks)
    assert same(to_rows(shard), rows)


def test_any_passage_is_found_with_its_own_views_and_no_other(tmp_path: Path, monkeypatch):
    """No batch is read whole for it."""
    rows = make_rows(2 * BATCH_PASSAGES + 10, 4)
    shard = write(tmp_path / "a.arrow", [to_block(rows)])
    edges = [0, 1, BATCH_PASSAGES - 1, BATCH_PASSAGES, 2 * BATCH_PASSAGES - 1, 2 * BATCH_PASSAGES, len(rows) - 1]
    sample = [rows[at] for at in (*edges, *range(7, len(rows), 97))]
    absent = ["", "a", "ä", "ä0", f"{rows[3][0]}0", f"{rows[-1][0]}0", "ö"]
    monkeypatch.setattr(EmbeddingShard, "_block", None)
    views_by_id = shard.find([*absent, *(name for name, _ in reversed(sample))])
    assert same(sorted(views_by_id.items()), sorted(dict(sample).items()))
    assert all(views.vectors_ND.flags.owndata for views in views_by_id.values())
    assert write(tmp_path / "empty.arrow", []).find(["a"]) == {}


ONE = np.ones((1, DIMENSION), np.float16)


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (EmbeddingBlock(["b", "a"], np.array([0, 1, 2]), np.array([0, 0]), np.ones((2, DIMENSION))), "ids must ascend"),
        (EmbeddingBlock(["a", "a"], np.array([0, 1, 2]), np.array([0, 0]), np.ones((2, DIMENSION))), "none twice"),
        (EmbeddingBlock(["a", "b"], np.array([0, 1, 1]), np.array([0]), ONE), "'b' has no view"),
        (EmbeddingBlock(["a"], np.array([0, 2]), np.array([1, 1]), np.ones((2, DIMENSION))), "view numbers"),
        (EmbeddingBlock(["a"], np.array([0, 1]), np.array([0]), np.ones((1, 5))), r"\(1, 5\)"),
        (EmbeddingBlock(["a"], np.array([0, 1]), np.array([0]), ONE * np.float16(np.nan)), "'a' is not finite"),
        (EmbeddingBlock(["a"], np.array([0, 1]), np.array([0]), np.full((1, DIMENSION), 1e6)), "index.dtype=fp32"),
    ],
)
@pytest.mark.filterwarnings("ignore:overflow")
def test_wrong_blocks_are_refused_and_leave_no_file(tmp_path: Path, block: EmbeddingBlock, message: str):
    with pytest.raises(StorageError, match=message):
        write(tmp_path / "a.arrow", [block])
    assert list(tmp_path.iterdir()) == []


def test_ids_ascend_over_blocks_too(tmp_path: Path):
    rows = make_rows(4, 0)
    with pytest.raises(StorageError, match="ids must ascend"):
        write(tmp_path / "a.arrow", [to_block(rows[2:]), to_block(rows[:2])])


def test_files_that_are_missing_foreign_or_cut_short_are_refused(tmp_path: Path):
    with pytest.raises(MissingInputError, match="mvr-ray index CONFIG"):
        EmbeddingShard.open(tmp_path / "none.arrow")
    write(tmp_path / "a.arrow", [to_block(make_rows(50, 0))])
    whole = (tmp_path / "a.arrow").read_bytes()
    for content in (whole[: len(whole) // 2], b"", b"text" * 100):
        (tmp_path / "bad.arrow").write_bytes(content)
        with pytest.raises(StorageError, match=r"bad\.arrow"):
            EmbeddingShard.open(tmp_path / "bad.arrow")


def test_a_file_that_cannot_be_written_whole_raises_and_leaves_nothing(tmp_path: Path):
    block = to_block(make_rows(2000, 0))
    message = r"cannot write .*a\.arrow: .*free space and run the same command again"
    with file_size_limit(10_000), pytest.raises(StorageError, match=message):
        write(tmp_path / "a.arrow", [block])
    assert list(tmp_path.iterdir()) == []
    assert write(tmp_path / "a.arrow", [block]).num_passages == 2000
