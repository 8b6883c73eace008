"""Refinements in memory against loops that a reader can check, and against what they promise."""

import itertools
import re

import numpy as np
import pytest

from mvr_ray.core.judging.metrics import first_ranks
from mvr_ray.core.refining.pseudo_labels import Labels
from mvr_ray.studies.refinement_simulator import (
    NUM_WAVES,
    LabelledQuestions,
    RefinementSimulator,
    Setting,
    count_hubs,
    make_feedback,
    simulate_clicks,
    wave_ages,
)
from mvr_ray.types import EmbeddingBlock

D = 8
rng = np.random.default_rng(5)


def unit(shape: tuple[int, ...], generator: np.random.Generator) -> np.ndarray:
    vectors = generator.normal(size=shape)
    return (vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)).astype(np.float32)


def simulate_index(row_ptr: np.ndarray, numbers: np.ndarray, vectors: np.ndarray, num_views: int = 3):
    """A simulator over these views; passage i says `word<i mod 7>`."""
    block = EmbeddingBlock([f"p{row:02d}" for row in range(len(row_ptr) - 1)], row_ptr, numbers, vectors)
    return RefinementSimulator(block, num_views, lambda row: f"it is word{row % 7}")


def test_answers_that_are_patterns_are_found_as_by_an_independent_search():
    block = EmbeddingBlock(
        ["p0", "p1", "p2"], np.arange(4), np.zeros(3, np.int16), unit((3, D), np.random.default_rng(1))
    )
    texts, answers = ["it was in 1975", "it was in 1977", "it is 19(75|76)"], ["19(75|76)", r"197\d$"]
    simulator = RefinementSimulator(block, 3, texts.__getitem__, "regex")
    questions = LabelledQuestions(
        "years", unit((2, D), np.random.default_rng(2)), [[answer] for answer in answers], [set(), set()]
    )
    half = questions._replace(name="half", answers_Q=[[r"19(75|76|77)"], []], gold_Q=[set(), {1}])
    accuracy = simulator._measure(half, np.tile(np.arange(3), (2, 1)), (1,))
    assert (accuracy.answer[1], accuracy.answer_ranks) == (1.0, [0, None]), "a question without answers is no miss"
    assert (accuracy.gold[1], accuracy.gold_ranks) == (0.0, [None, 1])
    marks_QP = simulator.bears_answer(questions, np.tile(np.arange(3), (2, 1)))
    assert marks_QP.tolist() == [[re.search(answer, text) is not None for text in texts] for answer in answers]


@pytest.fixture
def simulator() -> RefinementSimulator:
    """40 passages of one to three views."""
    generator = np.random.default_rng(1)
    counts = generator.integers(1, 4, 40)
    row_ptr = np.concatenate([[0], np.cumsum(counts)])
    numbers = np.concatenate([np.arange(count) for count in counts])
    return simulate_index(row_ptr, numbers, unit((row_ptr[-1], D), generator))


def questions(name: str, num: int, seed: int) -> LabelledQuestions:
    generator = np.random.default_rng(seed)
    gold = generator.integers(0, 40, num)
    return LabelledQuestions(
        name, unit((num, D), generator), [(f"word{row % 7}",) for row in gold], [{int(row)} for row in gold]
    )


def slow_ranking(views: dict[int, list[np.ndarray]], query: np.ndarray) -> list[int]:
    scores = {row: max(float(query @ view) for view in own) for row, own in views.items()}
    return sorted(scores, key=lambda row: (-scores[row], row))


def views_of(simulator: RefinementSimulator, vectors: np.ndarray) -> dict[int, list[np.ndarray]]:
    row_ptr = simulator.block.row_ptr
    return {row: list(vectors[row_ptr[row] : row_ptr[row + 1]]) for row in range(40)}


def test_the_round_before_the_first_is_the_ranking_of_a_slow_search(simulator):
    source, unseen = questions("known", 12, 2), questions("unseen", 9, 3)
    [before] = simulator.simulate(Setting(rounds=0), source, [unseen], ks=(1, 5))
    views = views_of(simulator, simulator.block.vectors_ND)
    for accuracy, sets in zip(before.sets, (source, unseen)):
        rankings = [slow_ranking(views, query)[:5] for query in sets.queries_QD]
        bears = [[f"word{row % 7}" == own[0] for row in rows] for rows, own in zip(rankings, sets.answers_Q)]
        gold = [[row in own for row in rows] for rows, own in zip(rankings, sets.gold_Q)]
        for k in (1, 5):
            assert accuracy.answer[k] == np.mean([any(row[:k]) for row in bears])
            assert accuracy.gold[k] == np.mean([any(row[:k]) for row in gold])


@pytest.mark.parametrize("keep_length", [True, False])
@pytest.mark.parametrize("move", ["winner", "every"])
def test_the_linear_form_moves_each_view_by_the_means_of_its_questions(simulator, move, keep_length):
    """AOpt eq. 9, written out with loops."""
    source = questions("known", 12, 2)
    setting = Setting(
        method="linear", positives="all", move=move, depth=10, beta=0.5, gamma=-0.2, keep_length=keep_length
    )
    before, after = simulator.simulate(setting, source, [], ks=(1, 5))
    views = views_of(simulator, simulator.block.vectors_ND)
    positive: dict[tuple[int, int], list[np.ndarray]] = {}
    negative: dict[tuple[int, int], list[np.ndarray]] = {}
    for query, answers in zip(source.queries_QD, source.answers_Q):
        for row in slow_ranking(views, query)[:10]:
            winner = int(np.argmax([query @ view for view in views[row]]))
            for view in [winner] if move == "winner" else range(len(views[row])):
                side = positive if f"word{row % 7}" == answers[0] else negative
                side.setdefault((row, view), []).append(query)
    moved_views = {row: [view.astype(np.float64) for view in own] for row, own in views.items()}
    for (row, view), own in positive.items():
        moved_views[row][view] = moved_views[row][view] + 0.5 * np.mean(own, axis=0)
        if (row, view) in negative:
            moved_views[row][view] = moved_views[row][view] - 0.2 * np.mean(negative[row, view], axis=0)
        if keep_length:
            moved_views[row][view] /= np.linalg.norm(moved_views[row][view])
    rankings = [slow_ranking(moved_views, query)[:5] for query in source.queries_QD]
    bears = [[f"word{row % 7}" == own[0] for row in rows] for rows, own in zip(rankings, source.answers_Q)]
    assert after.sets[0].answer == {k: np.mean([any(row[:k]) for row in bears]) for k in (1, 5)}
    assert after.num_moved == len(positive)
    assert after.norm_mean == pytest.approx(1.0, abs=1e-6) if keep_length else after.norm_mean > 1.1
    assert before.sets[0].answer[1] < after.sets[0].answer[1]


def test_a_feedback_view_is_the_weighted_unit_mean_of_the_questions_that_it_answered(simulator):
    source = questions("known", 12, 2)
    setting = Setting(weight=0.6, depth=10)
    before, after = simulator.simulate(setting, source, [questions("unseen", 9, 3)], ks=(1, 5))
    views = views_of(simulator, simulator.block.vectors_ND)
    queries_of: dict[int, list[np.ndarray]] = {}
    for query, answers in zip(source.queries_QD, source.answers_Q):
        first = next((row for row in slow_ranking(views, query)[:10] if f"word{row % 7}" == answers[0]), None)
        if first is not None:
            queries_of.setdefault(first, []).append(query)
    for row, own in queries_of.items():
        mean = np.mean(own, axis=0)
        views[row].append(0.6 * mean / np.linalg.norm(mean))
    for accuracy, sets in zip(after.sets, (source, questions("unseen", 9, 3))):
        rankings = [slow_ranking(views, query)[:5] for query in sets.queries_QD]
        ranks = first_ranks([[row in own for row in rows] for rows, own in zip(rankings, sets.gold_Q)])
        assert accuracy.gold == {k: np.mean((ranks >= 0) & (ranks < k)) for k in (1, 5)}
    newest = [
        f"word{slow_ranking(views, query)[0] % 7}" == answers[0]
        for query, answers in list(zip(source.queries_QD, source.answers_Q))[NUM_WAVES - 1 :: NUM_WAVES]
    ]
    assert after.newest == np.mean(newest)
    assert after.num_moved == len(queries_of)
    assert after.norm_max == before.norm_max == 1.0, "the passage's own views stay"


def test_gradient_rounds_lower_the_loss_grow_norms_unless_length_is_kept_and_query_rounds_move_no_passage():
    """One view a passage, every passage labelled and every score positive, so that labels stay the same."""
    vectors = np.abs(unit((40, D), np.random.default_rng(1)))
    simulator = simulate_index(np.arange(41), np.zeros(40, np.int64), vectors, 1)
    source, unseen = (
        one._replace(queries_QD=np.abs(one.queries_QD)) for one in (questions("known", 12, 2), questions("u", 9, 3))
    )
    ascending = Setting(method="passage", positives="all", depth=40, step_size=0.01, rounds=6)
    passage = simulator.simulate(ascending, source, [unseen], (1,))
    assert [each.norm_max for each in passage] == pytest.approx([1.0] * 7, abs=1e-6)
    raw = simulator.simulate(ascending._replace(keep_length=False), source, [unseen], (1,))
    assert all(1 <= before.norm_mean < now.norm_mean for before, now in itertools.pairwise(raw))
    for rounds in (passage, raw):
        assert all(now.loss < before.loss for before, now in itertools.pairwise(rounds[1:]))
    assert {each.num_moved + each.skipped_no_positive for each in passage[1:]} == {40}
    query = simulator.simulate(ascending._replace(method="query", step_size=0.05), source, [unseen], (1,))
    assert {each.sets[1] for each in map(_plain, query)} == {_plain(query[0]).sets[1]}
    assert all(now.loss < before.loss for before, now in itertools.pairwise(query[1:]))


def _plain(each):
    return each._replace(sets=[(tuple(s.answer.items()), tuple(s.gold.items()), s.hubs) for s in each.sets])


def test_softmax_rounds_move_every_view_labelled_both_ways_whatever_its_scores(simulator):
    """Eq. 13 with exponentials, written out with loops; no view is outside the domain, for there is none."""
    source = questions("known", 12, 2)
    setting = Setting(
        method="softmax", positives="all", depth=40, step_size=0.02, temperature=0.3, rounds=1, keep_length=False
    )
    _, after = simulator.simulate(setting, source, [], ks=(1, 5))
    views = views_of(simulator, simulator.block.vectors_ND.astype(np.float64))
    signs: dict[tuple[int, int], list[tuple[np.ndarray, bool]]] = {}
    for query, answers in zip(source.queries_QD.astype(np.float64), source.answers_Q):
        for row, own in views.items():
            winner = int(np.argmax([query @ view for view in own]))
            signs.setdefault((row, winner), []).append((query, f"word{row % 7}" == answers[0]))
    both_ways = {at: own for at, own in signs.items() if len({good for _, good in own}) == 2}
    losses, moved_views = [], {row: list(own) for row, own in views.items()}
    for (row, view), own in both_ways.items():
        x = views[row][view]
        every, good = (np.array([np.exp(q @ x / 0.3) * (all_ or g) for q, g in own]) for all_ in (True, False))
        queries = np.array([q for q, _ in own])
        losses.append(np.log(every.sum() / good.sum()))
        moved_views[row][view] = x + 0.02 / 0.3 * (good / good.sum() - every / every.sum()) @ queries
    rankings = [slow_ranking(moved_views, query)[:5] for query in source.queries_QD]
    bears = [[f"word{row % 7}" == own[0] for row in rows] for rows, own in zip(rankings, source.answers_Q)]
    assert after.sets[0].answer == {k: np.mean([any(row[:k]) for row in bears]) for k in (1, 5)}
    assert (after.num_moved, after.skipped_domain) == (len(both_ways), 0)
    assert after.loss == pytest.approx(np.mean(losses), rel=1e-5)
    norms = [np.linalg.norm(moved_views[row][view]) for row, view in both_ways]
    assert after.norm_mean == pytest.approx(np.mean(norms), rel=1e-5)


def test_gold_labels_reach_gold_passages_that_were_not_retrieved(simulator):
    source = questions("known", 12, 2)
    shallow = Setting(labels="gold", weight=1.0, depth=1)
    after = simulator.simulate(shallow, source, [], ks=(1,))[-1]
    alone = [next(iter(gold)) for gold in source.gold_Q if sum(gold == other for other in source.gold_Q) == 1]
    assert after.num_moved == len({next(iter(gold)) for gold in source.gold_Q})
    assert after.sets[0].gold[1] >= len(alone) / 12, "a view of weight 1 made of one question scores 1 with it"


def test_gold_labels_are_the_hits_and_every_gold_passage_at_the_best_view(simulator):
    """Questions with two gold passages, one with three and one without, of which nothing is known; labels by loops."""
    source, generator = questions("known", 12, 2), np.random.default_rng(9)
    gold_Q = [{int(row) for row in generator.choice(40, 2, replace=False)} for _ in range(10)] + [{3, 17, 31}, set()]
    source = source._replace(gold_Q=gold_Q)
    state = simulator.start(source.queries_QD)
    views = views_of(simulator, simulator.block.vectors_ND)
    rankings = [slow_ranking(views, query) for query in source.queries_QD]
    labels = simulator.label(Setting(labels="gold", depth=4), source, state, np.array(rankings))
    expected = [
        (question, row, int(np.argmax([query @ view for view in views[row]])), row in gold)
        for question, (query, gold, ranking) in enumerate(zip(source.queries_QD, gold_Q, rankings))
        for row in sorted({*ranking[:4], *gold} if gold else ())
    ]
    assert list(zip(*(column.tolist() for column in labels))) == expected
    assert any(len(gold.difference(ranking[:4])) >= 2 for gold, ranking in zip(gold_Q, rankings))


def test_hubs_count_places_in_top_ten_lists_that_are_not_earned():
    lists = np.array([[0, 1, 2], [0, 2, 1], [0, 3, -1]])
    relevant = np.array([[True, False, False], [False, False, False], [False, False, False]])
    hub = count_hubs(lists, relevant, 5, depth=2)
    counts = np.array([2, 1, 1, 1, 0])
    assert hub.most == 2
    assert hub.skewness == pytest.approx(((counts - 1) ** 3).mean() / counts.std() ** 3)
    assert count_hubs(lists, np.ones_like(relevant), 5).most == 0


def test_clicks_fall_on_answers_near_the_top_and_nothing_below_the_last_is_seen():
    relevant = np.zeros((4000, 6), bool)
    relevant[:, 2] = True
    click_flags, seen_flags = simulate_clicks(relevant, seed=4)
    assert click_flags[:, 2].mean() == pytest.approx(0.9 * 0.9**2, abs=0.02)
    assert click_flags[:, 4].mean() == pytest.approx(0.1 * 0.9**4, abs=0.02)
    assert (seen_flags >= click_flags).all()
    for row in range(50):
        last = max(np.flatnonzero(click_flags[row]), default=-1)
        assert seen_flags[row].tolist() == [rank <= last for rank in range(6)]
    again, _ = simulate_clicks(relevant, seed=4)
    assert (again == click_flags).all()


def test_two_bundles_of_questions_give_two_feedback_views_and_negatives_push_them_away(simulator):
    generator = np.random.default_rng(8)
    bundles = np.eye(D)[:2].repeat(3, axis=0) + 0.01 * generator.normal(size=(6, D))
    away = np.eye(D)[[2]] + 0.5 * np.eye(D)[[0]]
    queries = np.concatenate([bundles, away])
    labels = Labels(np.arange(7), np.full(7, 3), np.zeros(7, np.int16), np.array([True] * 6 + [False]))
    norms = np.full(40, 2.0)
    feedback = make_feedback(Setting(weight=0.5, clusters=2), queries, labels, norms)
    vectors = feedback.vectors_FD
    assert feedback.passage_F.tolist() == [3, 3]
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, rtol=1e-5)
    assert sorted(np.abs(vectors).argmax(axis=1).tolist()) == [0, 1]
    one, with_push = (
        make_feedback(Setting(weight=0.5, push=push), queries, labels, norms).vectors_FD for push in (0.0, 0.5)
    )
    assert (with_push @ away[0])[0] < (one @ away[0])[0] - 0.1
    old = make_feedback(Setting(weight=0.5, decay=0.01), queries, labels, norms).vectors_FD
    assert wave_ages(7).tolist() == [3, 2, 1, 0, 3, 2, 1], (
        "a passage's questions stand side by side and are of all ages"
    )
    assert old[0, 1] > 0.49, "the newest, of the second bundle, is what is left"


def test_new_feedback_views_stand_in_for_those_that_the_index_has(simulator):
    """Passage 3 has a stored feedback view that wins everything; a new one, of no interest, drops it."""
    source = questions("known", 12, 2)
    block = simulator.block
    end = block.row_ptr[4]
    vectors = np.insert(block.vectors_ND, end, 50 * source.queries_QD.sum(axis=0), axis=0)
    numbers = np.insert(block.view_numbers_N, end, 3)
    other = simulate_index(block.row_ptr + (np.arange(41) > 3), numbers, vectors)
    assert other.norms_P.tolist() == simulator.norms_P.tolist()
    queries = source.queries_QD[source.queries_QD @ vectors[end] > 0]
    labels = Labels(np.array([0]), np.array([3]), np.zeros(1, np.int16), np.array([True]))
    setting = Setting(weight=0.01)
    before, after, plain = (
        other.start(queries),
        *(one.step(setting, one.start(queries), labels) for one in (other, simulator)),
    )
    assert (other.search(other.open_index(before), queries, 5)[:, 0] == 3).all()
    hits = [one.search(one.open_index(state), queries, 5) for one, state in ((other, after), (simulator, plain))]
    assert np.array_equal(*hits)
