"""Approximate indexes: k distinct passages with true scores, the same bytes on every build, clear refusals."""

import dataclasses
import json
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from file_size_limit import file_size_limit
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pickle_payload import Payload

from mvr_ray.core.searching.exact import BlockTable
from mvr_ray.errors import ShardIndexError
from mvr_ray.index import candidates, flat
from mvr_ray.index.base import IndexParams, measured_recall
from mvr_ray.index.candidates import ApproximateIndex
from mvr_ray.index.kinds import build_index, check_params, open_index, update_index
from mvr_ray.types import EmbeddingBlock

KINDS = [
    IndexParams("hnsw", hnsw_m=8, hnsw_ef_construction=40, hnsw_ef_search=16),
    IndexParams("faiss", "Flat"),
    IndexParams("faiss", "IVF8,SQfp16", nprobe=2),
    IndexParams("faiss", "IVF8,PQ4x4", nprobe=3),
    IndexParams("faiss", "IVF8,PQ4x4fs", nprobe=3),
    IndexParams("faiss", "PCA8,IVF8,SQ8", nprobe=8),
    IndexParams("faiss", "HNSW8", hnsw_ef_search=16),
    IndexParams("faiss", "IVF8,PQ4x4,RFlat", nprobe=4),
]


@pytest.fixture(params=KINDS, ids=lambda params: f"{params.kind}-{params.factory}", scope="module")
def params(request) -> IndexParams:
    return request.param


@pytest.fixture(scope="module")
def built_index(params, shard, tmp_path_factory):
    blocks, folder = shard(1), tmp_path_factory.mktemp("index")
    build_index(params, blocks, folder)
    return blocks, open_index(params, blocks, folder)


@pytest.mark.parametrize("k", [1, 10, 150, 299, 300, 320])
def test_k_distinct_passages_with_their_true_scores(built_index, queries, oracle, k):
    blocks, index = built_index
    queries_QD = queries(1, 6)
    hits = index.search(queries_QD, k)
    assert not index.exact
    assert (index.num_passages, index.dimension) == (300, 16)
    for query, ranking in enumerate(oracle(queries_QD, blocks)):
        truth = {row: (-score, view) for score, _, row, view in ranking}
        rows = [row for row in hits.rows_QK[query].tolist() if row >= 0]
        assert len(rows) == len(set(rows)) == min(k, 300)
        actual = list(zip(hits.scores_QK[query].tolist(), hits.views_QK[query].tolist()))
        assert actual[: len(rows)] == [truth[row] for row in rows]
        assert sorted(rows, key=lambda row: (-truth[row][0], row)) == rows
        assert hits.frontier_Q[query] == (np.inf if k < 300 else -np.inf)


@pytest.mark.parametrize("k", [1, 10, 300])
def test_the_candidates_that_were_scored_are_counted(built_index, queries, monkeypatch, k):
    _, index = built_index
    counts: list[int] = []
    rescore = BlockTable.rescore
    monkeypatch.setattr(BlockTable, "rescore", lambda *args: (counts.append(len(args[2].row_M)), rescore(*args))[1])
    actual = index.search_with_counts(queries(1, 6), k)
    assert actual.rescored_Q.shape == (6,)
    assert actual.rescored_Q.sum() == sum(counts)
    assert (actual.rescored_Q >= k).all() and actual.rescored_Q.max() <= 300


def test_ties_duplicates_and_passages_without_views_do_no_harm(params, shard, queries, tmp_path, palette):
    blocks = shard(2, palette=palette, empty=True)
    build_index(params, blocks, tmp_path)
    hits = open_index(params, blocks, tmp_path).search(queries(2, 3, palette=palette), 40)
    empty = np.flatnonzero(np.concatenate([np.diff(block.row_ptr) for block in blocks]) == 0)
    assert len(empty)
    for rows in hits.rows_QK.tolist():
        assert len(set(rows)) == 40
        assert not set(rows) & {-1, *empty.tolist()}


@pytest.mark.parametrize("scan_vectors", [0, candidates.SCAN_VECTORS])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.04, 0.2, 0.6, 1.0])
def test_under_a_mask_hits_pass_it_and_are_as_many_as_there_are(
    built_index, queries, oracle, monkeypatch, share, scan_vectors
):
    """Their scores are the true ones, and where few pass the hits are those of exhaustive search."""
    monkeypatch.setattr(candidates, "SCAN_VECTORS", scan_vectors)
    blocks, index = built_index
    queries_QD = queries(9, 7)
    mask_P = np.random.default_rng(3).random(index.num_passages) < share
    truth = oracle(queries_QD, blocks, mask_P)
    for k in (1, 10, 60):
        hits = index.search(queries_QD, k, mask_P)
        for rows, scores, ranking in zip(hits.rows_QK.tolist(), hits.scores_QK.tolist(), truth):
            score_of = {row: -score for score, _, row, _ in ranking}
            actual = [row for row in rows if row >= 0]
            assert len(set(actual)) == len(actual) == min(k, len(ranking))
            assert [score_of[row] for row in actual] == scores[: len(actual)]
            if share <= 0.04 or (scan_vectors and k == 60):
                assert actual == [row for _, _, row, _ in ranking[:k]]
    if not scan_vectors:
        mask_P = np.ones(index.num_passages, bool)
        assert (index.search(queries_QD, 10, mask_P).rows_QK == index.search(queries_QD, 10).rows_QK).all()


def test_same_vectors_same_bytes(params, shard, tmp_path):
    files = []
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir()
        files.append([(file, (folder / file).read_bytes()) for file in build_index(params, shard(3), folder)])
        assert sorted(path.name for path in folder.iterdir()) == [file for file, _ in files[-1]]
    assert files[0] == files[1]


@pytest.mark.parametrize(
    ("params", "recall"),
    [
        (IndexParams("hnsw"), 0.99),
        (IndexParams("faiss", "Flat"), 1.0),
        (IndexParams("faiss", "IVF8,SQfp16", nprobe=8), 0.99),
    ],
)
def test_a_thorough_index_finds_nearly_everything(params, recall, shard, queries, tmp_path):
    blocks = shard(4)
    build_index(params, blocks, tmp_path)
    flat, index = open_index(IndexParams(), blocks, tmp_path), open_index(params, blocks, tmp_path)
    assert measured_recall(index, flat, queries(4, 30), 10) >= recall
    assert measured_recall(flat, flat, queries(4, 30), 10) == 1.0


@pytest.mark.parametrize(
    ("params", "setting", "few", "many"),
    [
        (IndexParams("hnsw", hnsw_m=2), "hnsw_ef_search", 1, 200),
        (IndexParams("faiss", "HNSW4"), "hnsw_ef_search", 1, 200),
        (IndexParams("hnsw", hnsw_ef_search=1), "hnsw_m", 2, 16),
        (IndexParams("hnsw", hnsw_m=4, hnsw_ef_search=1), "hnsw_ef_construction", 1, 200),
        (IndexParams("faiss", "HNSW8", hnsw_ef_search=1), "hnsw_ef_construction", 1, 200),
    ],
    ids=lambda value: value.kind if isinstance(value, IndexParams) else str(value),
)
def test_a_graph_with_more_links_or_a_wider_beam_finds_more(params, setting, few, many, shard, queries, tmp_path):
    blocks, queries_QD = shard(3, 500, 1, gaps=False), queries(3, 40)
    best_Q1 = open_index(IndexParams(), blocks, tmp_path).search(queries_QD, 1).rows_QK
    num_nearest, num_hits = [], []
    for value in (few, many):
        own = dataclasses.replace(params, **{setting: value})
        build_index(own, blocks, tmp_path)
        index = open_index(own, blocks, tmp_path)
        num_nearest.append(np.count_nonzero(index.nearest(queries_QD, 1) == best_Q1))
        num_hits.append(np.count_nonzero(index.search(queries_QD, 1).rows_QK == best_Q1))
    assert num_nearest[0] < num_nearest[1]
    assert num_hits[0] < num_hits[1]


def test_recall_is_the_share_of_the_best_passages_found(built_index, shard, queries, oracle, tmp_path):
    blocks, index = built_index
    queries_QD = queries(5, 8)
    flat = open_index(IndexParams(), blocks, tmp_path)
    actual = index.search(queries_QD, 10).rows_QK.tolist()
    shares = [len({row for _, _, row, _ in r[:10]} & set(f)) / 10 for r, f in zip(oracle(queries_QD, blocks), actual)]
    assert measured_recall(index, flat, queries_QD, 10) == pytest.approx(np.mean(shares))


class Stingy(ApproximateIndex):
    """Finds only the vectors below `num_known`, and no more than `largest` at a time."""

    kind, num_known, largest = "stingy", 20, 10**9

    def nearest_labels(self, queries_QD, fetch):
        number_F = np.arange(fetch)
        return np.tile(np.where(number_F < self.num_known, number_F, -1), (len(queries_QD), 1))

    def max_fetch(self):
        return min(self.largest, self.num_vectors)


@given(num_known=st.integers(0, 200), largest=st.integers(1, 200), k=st.integers(1, 50), num_queries=st.integers(0, 3))
@settings(max_examples=40, suppress_health_check=list(HealthCheck))
def test_what_the_index_cannot_find_is_scanned(shard, queries, check_exact, num_known, largest, k, num_queries):
    blocks = shard(6, 40)
    index = Stingy(blocks, Path())
    index.num_known, index.largest = num_known, largest
    hits = index.search(queries(6, num_queries), k)
    reach = min(num_known, largest)
    holders = [row for row, end in enumerate(index.ends) if end - 1 < reach]
    assert (hits.rows_QK >= 0).sum(axis=1).tolist() == [min(k, 40)] * num_queries
    if len(holders) + 1 < k:
        exact = hits._replace(
            frontier_Q=open_index(IndexParams(), blocks, Path()).search(queries(6, num_queries), k)[3]
        )
        check_exact(exact, queries(6, num_queries), blocks, k)


@given(
    num_known=st.integers(0, 200), largest=st.integers(1, 200), k=st.integers(1, 20), beam=st.integers(0, 50),
    first_fetch=st.integers(1, 12),
)  # fmt: skip
@settings(max_examples=40, suppress_health_check=list(HealthCheck))
def test_a_beam_holds_as_many_passages_as_it_shall_or_all_within_reach(
    shard, queries, num_known, largest, k, beam, first_fetch
):
    blocks = shard(6, 40)
    index = Stingy(blocks, Path())
    index.num_known, index.largest, index.beam_passages, index.first_fetch = num_known, largest, beam, first_fetch
    pairs, unlucky_Q = index._candidates(queries(6, 2), k)
    num_reachable = int(np.searchsorted(index.ends, min(num_known, largest, index.num_vectors) - 1, side="right")) + 1
    num_reachable = num_reachable if min(num_known, largest) else 0
    assert unlucky_Q.tolist() == ([0, 1] if num_reachable < k else [])
    for query in (0, 1):
        rows = pairs.row_M[pairs.query_M == query]
        assert len(rows) == len(set(rows.tolist()))
        assert len(rows) >= min(max(k, beam), num_reachable) if num_reachable >= k else not len(rows)


def test_a_shard_without_vectors_builds_and_answers(params, shard, queries, tmp_path):
    blocks = shard(0, 0)
    assert build_index(params, blocks, tmp_path) == []
    assert open_index(params, blocks, tmp_path).search(queries(0, 2), 3).rows_QK.tolist() == [[-1] * 3] * 2


def test_an_index_of_other_vectors_is_refused(params, shard, tmp_path):
    build_index(params, shard(1), tmp_path)
    with pytest.raises(ShardIndexError, match="build the index again"):
        open_index(params, shard(2, 200), tmp_path)


def test_a_missing_or_damaged_file_is_refused(params, shard, tmp_path):
    with pytest.raises(ShardIndexError, match=r"no (Faiss|hnswlib) index at .*; build the index again"):
        open_index(params, shard(1), tmp_path)
    [name] = build_index(params, shard(1), tmp_path)
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:100])
    with pytest.raises(
        ShardIndexError, match=r"cannot read .*; delete that file, and `mvr-ray index CONFIG` builds it again"
    ):
        open_index(params, shard(1), tmp_path)


@pytest.mark.parametrize(
    ("params", "name"),
    [
        (KINDS[0], candidates.LABELS_FILE),
        (KINDS[1], candidates.LABELS_FILE),
        (IndexParams(scan="int8"), flat.CODES_FILE),
        (IndexParams(scan="int8"), flat.SCALES_FILE),
    ],
)
@pytest.mark.parametrize("is_array", [True, False])
def test_a_pickle_in_place_of_an_array_is_refused_and_never_loaded(params, name, is_array, shard, tmp_path):
    build_index(params, shard(1), tmp_path)
    trace = tmp_path / "trace"
    if is_array:
        np.save(tmp_path / name, np.array([Payload(trace)], object), allow_pickle=True)
    else:
        (tmp_path / name).write_bytes(pickle.dumps(Payload(trace)))
    with pytest.raises(ShardIndexError, match="build the index again"):
        open_index(params, shard(1), tmp_path)
    assert not trace.exists()


@pytest.mark.parametrize("params", KINDS[:2], ids=lambda params: params.kind)
def test_an_index_that_a_full_disk_cuts_anywhere_is_an_error(params, shard, tmp_path):
    blocks, folder = shard(1), tmp_path / "full"
    folder.mkdir()
    [name] = build_index(params, blocks, tmp_path)
    num_bytes = (tmp_path / name).stat().st_size
    message = (
        r"File too large|cannot write .* bytes were written \(\d+ bytes free\); free space and run the same command"
    )
    for limit in (0, num_bytes // 2, num_bytes - 1):
        with file_size_limit(limit), pytest.raises(OSError, match=message):
            build_index(params, blocks, folder)
        with file_size_limit(limit), pytest.raises(OSError, match=message):
            update_index(params, blocks, blocks, set(), tmp_path, folder, 1.0)
    update_index(params, blocks, blocks, set(), tmp_path, folder, 1.0)
    labels = candidates.LabelUpdate(candidates.read_labels(folder), 0)
    with file_size_limit((folder / candidates.LABELS_FILE).stat().st_size - 1), pytest.raises(OSError, match=message):
        labels.write(folder)


def test_a_damaged_vector_is_not_indexed(params, shard, tmp_path):
    blocks = shard(1)
    vectors_ND = blocks[2].vectors_ND.copy()
    vectors_ND[blocks[2].row_ptr[5]] = np.inf
    with pytest.raises(ShardIndexError, match=rf"passage '{blocks[2].ids[5]}' \(row 205\) has a vector with NaN"):
        build_index(params, [*blocks[:2], blocks[2]._replace(vectors_ND=vectors_ND)], tmp_path)


def test_the_same_refusals_as_flat(built_index, queries):
    _, index = built_index
    with pytest.raises(ShardIndexError, match="k is 0"):
        index.search(queries(1, 2), 0)
    with pytest.raises(ShardIndexError, match=r"shape \(2, 5\), the index has dimension 16"):
        index.search(queries(1, 2, 5), 3)
    with pytest.raises(ShardIndexError, match="query 0 holds NaN"):
        index.search(queries(1, 2) * np.nan, 3)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        (IndexParams("annoy"), "index kind 'annoy' is unknown; it is one of flat, faiss, hnsw"),
        (
            IndexParams("faiss", "IVFx,Flat"),
            "factory string 'IVFx,Flat' does not work .* dimension 16: could not parse",
        ),
        (
            IndexParams("faiss", "PQ5"),
            "factory string 'PQ5' does not work .*: .*multiple of the number of subquantizers",
        ),
        (IndexParams("faiss", "LSH"), "factory string 'LSH' does not work for inner products"),
        (IndexParams("faiss", "IDMap,Flat"), "leave IDMap out"),
        (IndexParams("faiss", "Flat", nprobe=0), "nprobe is 0"),
        (IndexParams("hnsw", hnsw_m=1), "hnsw_m is 1"),
        (IndexParams("hnsw", hnsw_ef_search=0), "hnsw_ef_search 0; both must be at least 1"),
    ],
)
def test_senseless_parameters_are_refused_before_any_work(params, words, shard, tmp_path):
    with pytest.raises(ShardIndexError, match=words):
        check_params(params, 16)
    with pytest.raises(ShardIndexError, match=words):
        build_index(params, shard(0), tmp_path)
    assert not list(tmp_path.iterdir())


def test_too_few_vectors_for_a_factory_are_reported(shard, tmp_path):
    with pytest.raises(
        ShardIndexError, match=r"'IVF900,Flat' over 30 vectors .*\(30\).*\(900\); use a smaller factory"
    ):
        build_index(IndexParams("faiss", "IVF900,Flat"), shard(0, 10, 3, gaps=False), tmp_path)


def test_blocks_are_needed_to_know_the_dimension(tmp_path):
    with pytest.raises(ShardIndexError, match="without blocks"):
        build_index(IndexParams(), [], tmp_path)


def test_parameters_survive_json():
    params = IndexParams("faiss", "IVF8,PQ4x4", nprobe=7)
    assert IndexParams(**json.loads(json.dumps(dataclasses.asdict(params)))) == params


def test_a_query_does_not_load_numpy_for_hnswlib():
    """hnswlib binds numpy's arrays at their first use in a process, and two threads that do wait for each other."""
    script = """
import sys
import numpy as np
from mvr_ray.index.hnsw_index import hnswlib
sys.modules["numpy._core.multiarray"] = None
graph = hnswlib.Index(space="ip", dim=4)
graph.init_index(max_elements=1)
graph.add_items(np.ones((1, 4), np.float32))
print(graph.knn_query(np.ones((1, 4), np.float32), k=1)[0].tolist())
"""
    reply = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False)
    assert (reply.returncode, reply.stdout) == (0, "[[0]]\n"), reply.stderr[-2500:]


def test_updates_that_replace_a_whole_topic_of_a_sparse_graph_do_not_end_the_process(tmp_path):
    """hnswlib meets a layer near the new vectors that has deleted ones alone."""
    script = f"""
from pathlib import Path
import numpy as np
from mvr_ray.index.base import IndexParams
from mvr_ray.index.kinds import build_index, update_index
from mvr_ray.types import EmbeddingBlock
P, D, T, folder = 300, 32, 10, Path({str(tmp_path)!r})
ids = [f"{{i:05d}}" for i in range(P)]
block = lambda v: [EmbeddingBlock(ids, np.arange(P + 1), np.zeros(P, np.int16), v)]
params, topic_P = IndexParams(kind="hnsw", hnsw_m=2), np.arange(P) * T // P
for seed in (17, 22):
    rng = np.random.default_rng(seed)
    centre_TD = rng.normal(size=(T, D))
    draw = lambda topics: (centre_TD[topics] + 0.3 * rng.normal(size=(len(topics), D))).astype(np.float32)
    vectors, source = draw(topic_P), folder / f"{{seed}}"
    source.mkdir()
    build_index(params, block(vectors), source)
    for n in range(6):
        new, own_P, target = vectors.copy(), topic_P == int(rng.integers(T)), folder / f"{{seed}}-{{n}}"
        new[own_P] = draw(topic_P[own_P])
        target.mkdir()
        changed = {{ids[at] for at in np.flatnonzero(own_P)}}
        if not update_index(params, block(vectors), block(new), changed, source, target, 0.25):
            break
        source, vectors = target, new
print("done")
"""
    reply = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False)
    assert (reply.returncode, reply.stdout) == (0, "done\n"), reply.stderr[-2500:]


def test_a_graph_that_takes_no_further_vectors_is_built_again_and_copied_for_deletions(shard, tmp_path):
    [block] = shard(13, 60, per_block=60)
    params, source = IndexParams("faiss", "NSG8,Flat"), tmp_path / "source"
    source.mkdir()
    build_index(params, [block], source)
    assert update_index(params, [block], [block], block.ids[:1], source, tmp_path, 1.0) == []
    stop = int(block.row_ptr[59])
    fewer = EmbeddingBlock(block.ids[:59], block.row_ptr[:60], block.view_numbers_N[:stop], block.vectors_ND[:stop])
    assert update_index(params, [block], [fewer], [], source, tmp_path, 1.0)
    assert open_index(params, [fewer], tmp_path).num_passages == 59


@pytest.mark.parametrize("params", KINDS[:2], ids=lambda params: params.kind)
def test_an_index_that_was_updated_twice_finds_what_a_scan_finds_and_not_what_was_deleted(
    params, shard, queries, change, tmp_path
):
    """Each time the first passages are deleted, and the next one changes. Blocks as stored give the same."""
    [block], queries_QD = shard(13, 60, per_block=60), queries(13, 5)
    folders = [tmp_path / f"{number}" for number in range(3)]
    for folder in folders:
        folder.mkdir()
    build_index(params, [block], folders[0])
    blocks = [block]
    for first, source, folder in ((3, *folders[:2]), (10, *folders[1:])):
        at, stop = block.row_ptr[first : first + 2]
        vectors_ND = block.vectors_ND[at:].copy()
        vectors_ND[: stop - at] = 2 * queries_QD[0]
        before, row_ptr = blocks, block.row_ptr[first:] - at
        blocks = [EmbeddingBlock(block.ids[first:], row_ptr, block.view_numbers_N[at:], vectors_ND)]
        update = params, before, blocks, block.ids[first : first + 1], source, folder
        assert update_index(*update, 1.0)
        share = float((np.load(folder / candidates.LABELS_FILE) == candidates.DELETED).mean())
        assert update_index(*update, share) and update_index(*update, share - 1e-9) == []
        stored_blocks, rows = change(blocks, first, 0.3)
        indexes = [open_index(own, blocks, folder) for own in (IndexParams(), params)]
        exact, *others = *indexes, open_index(params, stored_blocks, folder, rows)
        for index in others:
            for column, expected in zip(index.search(queries_QD, 12)[:3], exact.search(queries_QD, 12)[:3]):
                np.testing.assert_array_equal(column, expected)
