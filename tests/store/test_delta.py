"""Laws of changes laid over a shard: what is read is what rewriting gives, generation after generation."""

from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mvr_ray.store import paths
from mvr_ray.store.delta import MOST_SHARE, DeltaShard, open_embeddings, write_changed
from mvr_ray.store.embeddings import BATCH_PASSAGES, EmbeddingShard, EmbeddingWriter, Views, rewrite
from mvr_ray.store.files import sha256_of
from mvr_ray.types import EmbeddingBlock

DIMENSION, NUM_VIEWS = 3, 4


def random_views(rng: np.random.Generator) -> Views:
    numbers_N = np.sort(rng.choice(2 * NUM_VIEWS, rng.integers(1, 6), replace=False)).astype(np.int16)
    return Views(numbers_N, rng.standard_normal((len(numbers_N), DIMENSION)).astype(np.float16))


def make_shard(folder: Path, count: int, seed: int) -> EmbeddingShard:
    """A shard of passages with even numbers as names."""
    rng = np.random.default_rng(seed)
    passages = [random_views(rng) for _ in range(count)]
    folder.mkdir(parents=True)
    with EmbeddingWriter(folder / paths.EMBEDDINGS, DIMENSION, NUM_VIEWS) as writer:
        writer.write(
            EmbeddingBlock(
                [f"p{2 * number:06d}" for number in range(count)],
                np.cumsum([0, *(len(one.view_numbers_N) for one in passages)]),
                np.concatenate([one.view_numbers_N for one in passages]),
                np.concatenate([one.vectors_ND for one in passages]),
            )
        )
    return EmbeddingShard.open(folder / paths.EMBEDDINGS)


def open_views(folder: Path) -> EmbeddingShard:
    return open_embeddings(folder, [file.name for file in folder.iterdir()])


def content(shard: EmbeddingShard) -> list[tuple[str, list[int], bytes]]:
    return [
        (name, block.view_numbers_N[start:stop].tolist(), block.vectors_ND[start:stop].tobytes())
        for block in shard.blocks()
        for name, start, stop in zip(block.ids, block.row_ptr, block.row_ptr[1:])
    ]


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1, 40), st.lists(st.integers(1, 12), min_size=1, max_size=4), st.integers(0, 10_000))
def test_changes_laid_over_read_as_the_shard_rewritten(tmp_path_factory, count, generations, seed):
    root = tmp_path_factory.mktemp("overlay")
    rng = np.random.default_rng(seed)
    laid = plain = make_shard(root / "base", count, seed)
    for number, num_changes in enumerate(generations):
        rows = rng.permutation(count)[:num_changes].tolist()
        changes = {row: random_views(rng) for row in rows}
        before = laid.delta.num_passages if isinstance(laid, DeltaShard) else 0
        folder, other = root / f"laid{number}", root / f"plain{number}"
        folder.mkdir()
        other.mkdir()
        kept = write_changed(laid, folder, changes)
        rewrite(plain, other / paths.EMBEDDINGS, changes)
        assert kept == (before + len(changes) <= MOST_SHARE * count)
        assert (folder / paths.CHANGES).exists() == kept
        if kept:
            assert sha256_of(folder / paths.EMBEDDINGS) == sha256_of(laid.path)
        laid, plain = open_views(folder), open_views(other)
        assert content(laid) == content(plain)
        assert (laid.num_passages, laid.num_vectors) == (plain.num_passages, plain.num_vectors)
        assert laid.ids() == plain.ids()
        wanted = [f"p{n:06d}" for n in rng.permutation(2 * count + 2)]
        found, truth = laid.find(wanted), plain.find(wanted)
        assert set(found) == set(truth)
        assert all(found[name].vectors_ND.tobytes() == truth[name].vectors_ND.tobytes() for name in truth)
        assert all(np.array_equal(found[name].view_numbers_N, truth[name].view_numbers_N) for name in truth)


def test_the_same_changes_are_the_same_bytes_in_whatever_order_they_come(tmp_path):
    shard, rng = make_shard(tmp_path / "base", 40, 1), np.random.default_rng(2)
    changes = {row: random_views(rng) for row in (30, 2, 17)}
    for name, rows in (("a", (30, 2, 17)), ("b", (2, 17, 30))):
        (tmp_path / name).mkdir()
        assert write_changed(shard, tmp_path / name, {row: changes[row] for row in rows})
    assert (tmp_path / "a" / paths.CHANGES).read_bytes() == (tmp_path / "b" / paths.CHANGES).read_bytes()


def test_a_block_without_a_change_stays_mapped(tmp_path):
    shard = make_shard(tmp_path / "base", BATCH_PASSAGES + 10, 3)
    (tmp_path / "new").mkdir()
    write_changed(shard, tmp_path / "new", {2: random_views(np.random.default_rng(4))})
    first, second = open_views(tmp_path / "new").blocks()
    assert first.vectors_ND.flags.writeable and first.vectors_ND.base is None
    assert not second.vectors_ND.flags.writeable


def test_a_file_that_the_shard_does_not_name_is_not_laid_over(tmp_path):
    shard = make_shard(tmp_path / "base", 20, 5)
    (tmp_path / "new").mkdir()
    write_changed(shard, tmp_path / "new", {2: random_views(np.random.default_rng(6))})
    assert content(open_embeddings(tmp_path / "new", [paths.EMBEDDINGS])) == content(shard)
