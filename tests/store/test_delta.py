"""Laws of changes laid over a shard: what is read is what rewriting gives, generation after generation."""

import tracemalloc
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from mvr_ray.store import paths
from mvr_ray.store.changes import MAX_CHANGED_SHARE, Changes, num_kept
from mvr_ray.store.delta import DeltaShard, open_embeddings, rewrite, views_by_id, write_changed
from mvr_ray.store.embeddings import BATCH_PASSAGES, EmbeddingShard, EmbeddingWriter, Views
from mvr_ray.store.local_files import sha256_of
from mvr_ray.types import EmbeddingBlock

DIMENSION, NUM_VIEWS = 3, 4


def random_views(rng: np.random.Generator) -> Views:
    numbers_N = np.sort(rng.choice(2 * NUM_VIEWS, rng.integers(1, 6), replace=False)).astype(np.int16)
    return Views(numbers_N, rng.standard_normal((len(numbers_N), DIMENSION)).astype(np.float16))


def make_shard(folder: Path, count: int, seed: int) -> EmbeddingShard:
    """A shard of passages with even numbers as names."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    return write_whole(folder, {f"p{2 * number:06d}": random_views(rng) for number in range(count)})


def write_whole(folder: Path, passages: dict[str, Views]) -> EmbeddingShard:
    names = sorted(passages)
    with EmbeddingWriter(folder / paths.EMBEDDINGS, DIMENSION, NUM_VIEWS) as writer:
        writer.write(
            EmbeddingBlock(
                names,
                np.cumsum([0, *(len(passages[name].view_numbers_N) for name in names)]),
                np.concatenate([passages[name].view_numbers_N for name in names]),
                np.concatenate([passages[name].vectors_ND for name in names]),
            )
        )
    return EmbeddingShard.open(folder / paths.EMBEDDINGS)


def open_views(folder: Path) -> EmbeddingShard:
    return open_embeddings(folder, [file.name for file in folder.iterdir()])


def num_changes(shard: EmbeddingShard) -> int:
    return len(shard.changes.ids()) if isinstance(shard, DeltaShard) else 0


def content(shard: EmbeddingShard) -> list[tuple[str, list[int], bytes]]:
    return [
        (name, block.view_numbers_N[start:stop].tolist(), block.vectors_ND[start:stop].tobytes())
        for block in shard.blocks()
        for name, start, stop in zip(block.ids, block.row_ptr, block.row_ptr[1:])
    ]


def passages_in(shard: EmbeddingShard) -> dict[str, Views]:
    views_of = {}
    for block in shard.blocks():
        for name, start, stop in zip(block.ids, block.row_ptr, block.row_ptr[1:]):
            views_of[name] = Views(block.view_numbers_N[start:stop], block.vectors_ND[start:stop])
    return views_of


def check_stored_blocks(shard, folder):
    """Every row is in one block, with the views it has now; the blocks of the first file are mapped, not copied."""
    blocks, rows = shard.stored_blocks()
    first = EmbeddingShard.open(folder / paths.EMBEDDINGS)
    assert all(one.vectors_ND.tobytes() == two.vectors_ND.tobytes() for one, two in zip(blocks, first.blocks()))
    assert not any(block.vectors_ND.flags.owndata for block in blocks[: len(first.blocks())])
    assert (rows is not None) == (folder / paths.CHANGES).exists()
    row_N = np.arange(shard.num_passages) if rows is None else np.concatenate(rows)
    views = [views for block in blocks for views in views_by_id([block]).items()]
    places = np.flatnonzero(row_N >= 0)
    assert sorted(row_N[places]) == list(range(shard.num_passages)) and len(views) == len(row_N)
    now, ids = passages_in(shard), shard.ids()
    for name, own in (views[place] for place in places):
        assert own.vectors_ND.tobytes() == now[name].vectors_ND.tobytes()
        assert own.view_numbers_N.tolist() == now[name].view_numbers_N.tolist()
    assert [views[place][0] for place in places] == [ids[row] for row in row_N[places]]


CHANGES = st.tuples(st.sets(st.integers(0, 90), max_size=12), st.sets(st.integers(0, 90), max_size=5)) | st.tuples(
    st.sets(st.integers(0, 90), max_size=1), st.sets(st.integers(0, 90), max_size=1)
)
"""Numbers of passages to upsert and to delete; even ones may be of the first file, odd ones never are."""


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(8, 45), st.lists(CHANGES.filter(any), min_size=1, max_size=6), st.integers(0, 10_000), st.data())
def test_changes_laid_over_read_as_the_shard_written_whole(tmp_path_factory, count, generations, seed, data):
    root = tmp_path_factory.mktemp("overlay")
    rng = np.random.default_rng(seed)
    shard = make_shard(root / "base", count, seed)
    truth = passages_in(shard)
    in_base, base_count, hidden_ids = set(truth), count, set()
    for number, (upsert_numbers, deletion_numbers) in enumerate(generations):
        upserts = {f"p{at:06d}": random_views(rng) for at in data.draw(st.permutations(sorted(upsert_numbers)))}
        deletions = {f"p{at:06d}" for at in deletion_numbers} - set(upserts)
        truth = {name: views for name, views in (truth | upserts).items() if name not in deletions}
        if not truth:
            return
        folder, other = root / f"laid{number}", root / f"plain{number}"
        folder.mkdir()
        files = write_changed(shard, folder, upserts, sorted(deletions))
        hidden_ids = {name for name in hidden_ids | set(upserts) | deletions if name in truth or name in in_base}
        assert bool(files) == (paths.EMBEDDINGS in files) == (len(hidden_ids) <= MAX_CHANGED_SHARE * base_count)
        assert (folder / paths.CHANGES).exists() == bool(files)
        assert all(sha256_of(folder / name) == sha256_of(shard.path.with_name(name)) for name in files)
        if files:
            names = paths.embedding_files([file.name for file in folder.iterdir()])
            assert names[:-1] == files, "one file is new"
            below_ids = open_embeddings(folder, names[:-1]).ids()
            assert set(EmbeddingShard.open(folder / names[-1]).deleted_ids) <= set(below_ids)
            event(f"files of changes: {len(names) - 1}")
        else:
            in_base, base_count, hidden_ids = set(truth), len(truth), set()
        other.mkdir()
        shard, plain = open_views(folder), write_whole(other, truth)
        assert content(shard) == content(plain)
        assert num_changes(shard) == len(hidden_ids)
        assert (shard.num_passages, shard.num_vectors) == (plain.num_passages, plain.num_vectors)
        assert shard.ids() == plain.ids() == shard.arrow_ids().to_pylist() == sorted(truth)
        check_stored_blocks(shard, folder)
        views = shard.find([f"p{at:06d}" for at in rng.permutation(92)])
        assert set(views) == set(truth)
        assert all(views[name].vectors_ND.tobytes() == truth[name].vectors_ND.tobytes() for name in truth)
        assert all(np.array_equal(views[name].view_numbers_N, truth[name].view_numbers_N) for name in truth)


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=60))
def test_files_of_changes_are_few_and_a_change_is_written_again_only_into_a_larger_file(updates):
    sizes: list[int] = []
    for own in updates:
        num_files = num_kept(sizes, own)
        new_size = own + sum(sizes[num_files:])
        assert all(3 * new_size >= 5 * size for size in sizes[num_files:])
        sizes = [*sizes[:num_files], new_size]
        assert all(2 * before > 3 * after for before, after in pairwise(sizes))
    assert sum(sizes) == sum(updates) and 1.5 ** (len(sizes) - 1) <= sum(updates)


@given(st.lists(st.dictionaries(st.sampled_from("abcde"), st.none() | st.integers(0, 9)), max_size=6))
def test_of_several_changes_the_last_one_to_name_a_row_decides(parts):
    """A value is a row's new content, None deletes it."""

    def changes(part: dict) -> Changes:
        upserts = {name: own for name, own in part.items() if own is not None}
        return Changes(upserts, part.keys() - upserts.keys())

    last = {name: own for part in parts for name, own in part.items()}
    assert Changes.join(map(changes, parts)) == changes(last)


def test_deletions_count_among_the_changes_that_let_a_shard_be_written_whole(tmp_path):
    shard = make_shard(tmp_path / "base", 40, 1)
    for num_changes, names in ((10, [paths.EMBEDDINGS]), (11, [])):
        (tmp_path / f"{num_changes}").mkdir()
        upserts = {name: random_views(np.random.default_rng(2)) for name in shard.ids()[:4]}
        deletions = shard.ids()[4:num_changes]
        assert write_changed(shard, tmp_path / f"{num_changes}", upserts, deletions) == names


def test_few_changes_after_many_are_written_alone(tmp_path):
    shard, rng = make_shard(tmp_path / "base", 400, 1), np.random.default_rng(2)
    ids = shard.ids()
    folders = [tmp_path / name for name in ("many", "few", "gone", "both")]
    for folder in folders:
        folder.mkdir()
    many = {name: random_views(rng) for name in ids[:60]}
    first = {ids[0]: random_views(rng)}
    assert write_changed(shard, folders[0], many) == [paths.EMBEDDINGS]
    assert write_changed(open_views(folders[0]), folders[1], first) == [paths.EMBEDDINGS, paths.CHANGES]
    assert EmbeddingShard.open(folders[1] / paths.changes_file(2)).ids() == ids[:1]
    assert write_changed(open_views(folders[1]), folders[2], {}, ids[:1]) == [paths.EMBEDDINGS, paths.CHANGES]
    last = EmbeddingShard.open(folders[2] / paths.changes_file(2))
    assert (last.ids(), last.deleted_ids) == ([], ids[:1]), "the second file was about as small"
    truth = passages_in(shard) | many
    del truth[ids[0]]
    (tmp_path / "whole").mkdir()
    assert content(open_views(folders[2])) == content(write_whole(tmp_path / "whole", truth))
    assert write_changed(open_views(folders[2]), folders[3], {name: random_views(rng) for name in ids[30:90]})
    assert paths.embedding_files([file.name for file in folders[3].iterdir()]) == [paths.EMBEDDINGS, paths.CHANGES]
    assert num_changes(open_views(folders[3])) == 90


def test_stored_blocks_have_the_rows_of_any_ids_and_a_long_id_costs_its_own_length_alone(tmp_path):
    rng, folder = np.random.default_rng(0), tmp_path / "changed"
    names = ["a", "a\0", "b", *(f"p{number}" for number in range(2000)), "x" * 10_000]
    shard = write_whole(tmp_path, {name: random_views(rng) for name in names})
    folder.mkdir()
    assert write_changed(shard, folder, {"a\0": random_views(rng)})
    changed_shard = open_views(folder)
    check_stored_blocks(changed_shard, folder)
    tracemalloc.start()
    changed_shard.stored_blocks()
    assert tracemalloc.get_traced_memory()[1] < 10_000_000
    tracemalloc.stop()


def test_changes_cross_blocks(tmp_path):
    shard, rng = make_shard(tmp_path / "base", 2 * BATCH_PASSAGES + 5, 1), np.random.default_rng(2)
    last = 2 * (2 * BATCH_PASSAGES + 4)
    edges = [0, 1, 2 * BATCH_PASSAGES - 1, 2 * BATCH_PASSAGES, 2 * BATCH_PASSAGES + 1, last, last + 1]
    upserts = {f"p{at:06d}": random_views(rng) for at in edges}
    deletions = [f"p{at:06d}" for at in (2, 2 * BATCH_PASSAGES - 2, 2 * BATCH_PASSAGES + 2)]
    truth = {name: views for name, views in (passages_in(shard) | upserts).items() if name not in deletions}
    for folder in ("laid", "whole", "rewritten"):
        (tmp_path / folder).mkdir()
    assert write_changed(shard, tmp_path / "laid", upserts, deletions)
    write_whole(tmp_path / "whole", truth)
    rewrite(shard, tmp_path / "rewritten" / paths.EMBEDDINGS, upserts, deletions)
    assert content(open_views(tmp_path / "laid")) == content(open_views(tmp_path / "whole"))
    assert sha256_of(tmp_path / "rewritten" / paths.EMBEDDINGS) == sha256_of(tmp_path / "whole" / paths.EMBEDDINGS)


def test_a_program_that_knows_no_deletions_does_not_read_past_them(tmp_path):
    shard = make_shard(tmp_path / "base", 40, 1)
    for folder, deletions in (("with", ["p000004"]), ("without", [])):
        (tmp_path / folder).mkdir()
        assert write_changed(shard, tmp_path / folder, {"p000002": random_views(np.random.default_rng(1))}, deletions)
    formats = [
        pa.ipc.open_file(tmp_path / folder / paths.CHANGES).schema.metadata[b"format"] for folder in ("with", "without")
    ]
    assert formats == [b"mvr_ray.embeddings/2", b"mvr_ray.embeddings/1"]


def test_the_same_changes_are_the_same_bytes_in_whatever_order_they_come(tmp_path):
    shard, rng = make_shard(tmp_path / "base", 40, 1), np.random.default_rng(2)
    changes = {row: random_views(rng) for row in ("p000060", "p000004", "p000034")}
    for name, rows in (("a", ("p000060", "p000004", "p000034")), ("b", ("p000004", "p000034", "p000060"))):
        (tmp_path / name).mkdir()
        assert write_changed(shard, tmp_path / name, {row: changes[row] for row in rows})
    assert (tmp_path / "a" / paths.CHANGES).read_bytes() == (tmp_path / "b" / paths.CHANGES).read_bytes()


def test_blocks_with_few_changes_stay_mapped_and_those_with_many_are_copied_once(tmp_path):
    shard, rng = make_shard(tmp_path / "base", 2 * BATCH_PASSAGES + 10, 3), np.random.default_rng(4)
    ids = shard.ids()
    few, many = ids[5:7], ids[BATCH_PASSAGES + 3 : 2 * BATCH_PASSAGES : 40]
    (tmp_path / "new").mkdir()
    upserts = {name: random_views(rng) for name in [few[0], *many[1:]]}
    assert write_changed(shard, tmp_path / "new", upserts, [few[1], many[0]])
    before, changed_block, after, copied_block, last_block = open_views(tmp_path / "new").blocks()
    assert changed_block.ids == few[:1] and before.ids + few + after.ids == ids[:BATCH_PASSAGES]
    assert copied_block.vectors_ND.flags.writeable and copied_block.vectors_ND.base is None
    for block in (before, changed_block, after, last_block):
        assert not block.vectors_ND.flags.writeable, "mapped"
    assert len(copied_block.ids) == BATCH_PASSAGES - 1 and len(last_block.ids) == 10


def test_a_file_that_the_shard_does_not_name_is_not_laid_over(tmp_path):
    shard = make_shard(tmp_path / "base", 20, 5)
    (tmp_path / "new").mkdir()
    write_changed(shard, tmp_path / "new", {"p000004": random_views(np.random.default_rng(6))})
    assert content(open_embeddings(tmp_path / "new", [paths.EMBEDDINGS])) == content(shard)
