"""Hybrid search against exhaustive search over both scores: weights, depths, shards, precisions, ties."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mvr_ray.core.searching.exact import BlockTable, exact_scores
from mvr_ray.core.searching.hybrid import hybrid_scores, hybrid_search, lexical_search
from mvr_ray.core.searching.merging import merge, uncertain_queries
from mvr_ray.index.flat import FlatIndex, build_codes, open_codes
from mvr_ray.types import CountedHits, EmbeddingBlock, FloatArray, ShardHits

Q, D, V = 3, 6, 3


def random_shard(rng: np.random.Generator, first: int, size: int, precision: str, levels: int) -> EmbeddingBlock:
    """Views of few distinct values, so that scores tie."""
    counts = rng.integers(1, V + 1, size)
    dtype = np.float16 if precision == "fp16" else np.float32
    vectors_ND = rng.integers(-levels, levels + 1, (int(counts.sum()), D)).astype(dtype)
    views_N = np.concatenate([np.arange(count) for count in counts]).astype(np.int16)
    ids = [f"p{number:04d}" for number in range(first, first + size)]
    return EmbeddingBlock(ids, np.concatenate([[0], np.cumsum(counts)]), views_N, vectors_ND)


def exhaustive(block: EmbeddingBlock, queries_QD: FloatArray, lexical_QP: FloatArray, weight: float) -> list[list]:
    """(-score, id, view) of every passage, in order."""
    lists = []
    for query_D, lexical_P in zip(queries_QD, lexical_QP):
        one = []
        for row, name in enumerate(block.ids):
            own = slice(block.row_ptr[row], block.row_ptr[row + 1])
            scores = exact_scores(query_D, block.vectors_ND[own])
            dense = scores.max()
            view = int(block.view_numbers_N[own][scores.argmax()])
            one.append((-float(np.float32(float(lexical_P[row]) + weight * float(dense))), name, view))
        lists.append(sorted(one))
    return lists


def search(index: FlatIndex, block: EmbeddingBlock, queries_QD, lexical_QP, weight: float, k: int, min_depth: int):
    table = BlockTable([block])
    return hybrid_search(
        lambda queries, depth: index.search_with_counts(queries_QD[queries], depth),
        lambda pairs: table.rescore(queries_QD, pairs),
        lambda query: lexical_QP[query],
        np.arange(table.num_passages),
        len(queries_QD),
        weight,
        k,
        min_depth=min_depth,
    ).hits


@given(st.data())
@settings(max_examples=80)
def test_hybrid_search_over_shards_is_exhaustive_search_over_both_scores_to_the_last_tie(tmp_path_factory, data):
    rng = np.random.default_rng(data.draw(st.integers(0, 9999)))
    num_shards, size = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 40))
    precision = data.draw(st.sampled_from(["fp32", "fp16", "int8"]))
    weight = data.draw(st.sampled_from([0.0, 0.1, 0.5, 1.0, 30.0]) | st.floats(0, 100))
    k, depth = data.draw(st.integers(1, size + 2)), data.draw(st.integers(1, 8))
    share, levels = data.draw(st.sampled_from([0.0, 0.1, 0.6])), data.draw(st.integers(1, 3))
    queries_QD = rng.integers(-2, 3, (Q, D)).astype(np.float32)
    whole: list[list] = [[] for _ in range(Q)]
    per_shard: list[tuple[int, ShardHits]] = []
    again: list[tuple[int, ShardHits]] = []
    for shard in range(num_shards):
        block = random_shard(rng, shard * size, size, precision, levels)
        codes = None
        if precision == "int8":
            folder = tmp_path_factory.mktemp("codes")
            build_codes([block], folder)
            codes = open_codes(folder, [block])
        index = FlatIndex([block], codes=codes, threads=1)
        lexical_QP = (rng.integers(0, 9, (Q, size)) * (rng.random((Q, size)) < share)).astype(np.float32)
        own = exhaustive(block, queries_QD, lexical_QP, weight)
        whole = [sorted(before + now) for before, now in zip(whole, own)]
        for rows, lists in ((max(1, k // num_shards), per_shard), (k, again)):
            hits = search(index, block, queries_QD, lexical_QP, weight, rows, depth)
            lists.append((shard * size, hits))
            for query in range(Q):
                expected = own[query][:rows]
                actual = zip(hits.scores_QK[query], hits.rows_QK[query], hits.views_QK[query])
                assert [(-s, block.ids[row], view) for s, row, view in actual if row >= 0] == expected
                left_out = own[query][rows:]
                least, most = (-left_out[0][0], -expected[-1][0]) if left_out else (-np.inf, -np.inf)
                assert least <= hits.frontier_Q[query] <= (least if depth >= size else most)

    def ids_of(numbers):
        return [f"p{number:04d}" for number in numbers]

    best = merge(per_shard, k, ids_of)
    doubts = uncertain_queries(per_shard, best, ids_of)
    overlaid = [again[at] if len(queries) else own for at, (queries, own) in enumerate(zip(doubts, per_shard))]
    best = merge(overlaid, k, ids_of)
    for query in range(Q):
        rows = best.rows_QK[query][best.rows_QK[query] >= 0]
        actual = zip((-best.scores_QK[query]).tolist(), ids_of(rows), best.views_QK[query].tolist())
        assert list(actual) == whole[query][:k]


def test_a_dense_search_goes_deeper_until_the_words_of_no_passage_can_lift_it_into_the_hits(monkeypatch):
    """Words that all passages share bring every passage near the best: the first depth cannot settle it. All scorings
    count, those of searches that were not deep enough, too."""
    rng = np.random.default_rng(1)
    block = random_shard(rng, 0, 400, "fp32", 3)
    queries_QD = rng.integers(-2, 3, (1, D)).astype(np.float32)
    lexical_QP = rng.integers(0, 40, (1, 400)).astype(np.float32)
    index, depths, counts = FlatIndex([block], threads=1), [], []
    table, rescore = BlockTable([block]), BlockTable.rescore
    monkeypatch.setattr(BlockTable, "rescore", lambda *args: (counts.append(len(args[2].row_M)), rescore(*args))[1])

    def dense(queries, depth):
        depths.append(depth)
        return index.search_with_counts(queries_QD[queries], depth)

    hits, rescored_Q = hybrid_search(
        dense,
        lambda pairs: table.rescore(queries_QD, pairs),
        lambda query: lexical_QP[query],
        np.arange(400),
        1,
        1.0,
        5,
        min_depth=5,
    )
    expected = exhaustive(block, queries_QD, lexical_QP, 1.0)[0][:5]
    assert [(-float(s), block.ids[row]) for s, row in zip(hits.scores_QK[0], hits.rows_QK[0])] == [
        hit[:2] for hit in expected
    ]
    assert len(depths) > 1 and depths == sorted(depths)
    assert rescored_Q.tolist() == [sum(counts)]


def test_rows_that_may_not_be_hits_are_none_and_an_approximate_index_has_no_frontier():
    rng = np.random.default_rng(2)
    block = random_shard(rng, 0, 30, "fp32", 2)
    queries_QD = rng.integers(-2, 3, (Q, D)).astype(np.float32)
    lexical_QP = rng.integers(0, 5, (Q, 30)).astype(np.float32)
    table, rows_P = BlockTable([block]), np.arange(10, 20)
    some = EmbeddingBlock(
        block.ids[10:20],
        block.row_ptr[10:21] - block.row_ptr[10],
        block.view_numbers_N[block.row_ptr[10] : block.row_ptr[20]],
        block.vectors_ND[block.row_ptr[10] : block.row_ptr[20]],
    )
    index = FlatIndex([some], threads=1)

    def dense(queries, depth):
        hits, rescored_Q = index.search_with_counts(queries_QD[queries], depth)
        return CountedHits(hits._replace(rows_QK=np.where(hits.rows_QK >= 0, hits.rows_QK + 10, -1)), rescored_Q)

    arguments = dense, lambda pairs: table.rescore(queries_QD, pairs), lambda query: lexical_QP[query], rows_P, Q, 2.0
    expected = exhaustive(some, queries_QD, lexical_QP[:, 10:20], 2.0)
    for is_exact in (True, False):
        hits = hybrid_search(*arguments, 4, exact=is_exact, min_depth=4).hits
        for query in range(Q):
            names = [block.ids[row] for row in hits.rows_QK[query]]
            if is_exact:
                assert names == [hit[1] for hit in expected[query][:4]]
            assert set(names) <= set(some.ids)
        assert is_exact or (hits.frontier_Q == np.inf).all()


def test_an_approximate_search_has_the_best_of_both_sides_and_knows_when_it_has_all():
    block = EmbeddingBlock(
        list("abcd"), np.arange(5), np.zeros(4, np.int16), np.array([[4], [3], [2], [1]], np.float32)
    )
    index, table, queries_QD = FlatIndex([block], threads=1), BlockTable([block]), np.ones((1, 1), np.float32)
    for lexical, k, expected, frontier in (
        ([0, 0, 0, 9], 2, [(3, 10), (0, 4)], np.inf),
        ([0, 0, 7, 9], 2, [(3, 10), (2, 9)], 4),
    ):
        result = hybrid_search(
            lambda queries, depth: CountedHits(index.search(queries_QD[queries], 2), np.zeros(1, np.int64)),
            lambda pairs: table.rescore(queries_QD, pairs),
            lambda _, own=lexical: np.array(own, np.float32),
            np.arange(4), 1, 1.0, k, exact=False,
        )  # fmt: skip
        hits = result.hits
        assert list(zip(hits.rows_QK[0].tolist(), hits.scores_QK[0].tolist())) == expected
        assert (hits.frontier_Q[0], result.rescored_Q[0]) == (frontier, sum(own > 0 for own in lexical))


@given(seed=st.integers(0, 9999), size=st.integers(1, 30), k=st.integers(1, 12), share=st.sampled_from([0.0, 0.3, 0.9]))
@settings(max_examples=60)
def test_search_by_words_alone_is_exhaustive_over_the_rows_that_have_one(seed, size, k, share):
    rng = np.random.default_rng(seed)
    block, queries_QD = random_shard(rng, 0, size, "fp32", 2), rng.integers(-2, 3, (Q, D)).astype(np.float32)
    lexical_QP = (rng.integers(1, 4, (Q, size)) * (rng.random((Q, size)) < share)).astype(np.float32)
    rows_P, table = np.flatnonzero(rng.random(size) < 0.7), BlockTable([block])
    hits, rescored_Q = lexical_search(
        lambda pairs: table.rescore(queries_QD, pairs), lambda query: lexical_QP[query], rows_P, Q, k
    )
    views = [{name: view for _, name, view in one} for one in exhaustive(block, queries_QD, lexical_QP, 1.0)]
    for query in range(Q):
        ranking = sorted((-float(lexical_QP[query, row]), row) for row in rows_P.tolist() if lexical_QP[query, row])
        expected = [(row, -score, views[query][block.ids[row]]) for score, row in ranking]
        assert [hit for hit in zip(*(own[query].tolist() for own in hits[:3])) if hit[0] >= 0] == expected[:k]
        assert hits.frontier_Q[query] == (expected[k][1] if len(expected) > k else -np.inf)
        assert rescored_Q[query] == len(expected[:k])


def test_the_sum_grows_with_both_scores_after_rounding():
    rng = np.random.default_rng(3)
    lexical, dense = np.sort(rng.random(999).astype(np.float32) * 40), rng.random(999).astype(np.float32)
    assert (np.diff(hybrid_scores(lexical, dense[0], 7.3)) >= 0).all()
    assert (np.diff(hybrid_scores(lexical[0], np.sort(dense), 7.3)) >= 0).all()
