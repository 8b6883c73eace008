"""Compares the analysis of a real index with loops over every stored view."""

import itertools
import json
import math
from collections import Counter
from contextlib import nullcontext

import numpy as np
import pytest
import yaml
from prepared_corpus import only_corpus

from mvr_ray.cli import main
from mvr_ray.config import EvaluateConfig
from mvr_ray.core.encoding.encoder import DualEncoder, EncoderSpec
from mvr_ray.core.encoding.snippets import TITLE, find_snippet, snippet_spans
from mvr_ray.core.judging import answers
from mvr_ray.core.judging.answers import AnswerMatcher, has_answer
from mvr_ray.core.judging.attention import attention_kl, mean_attention_kl, view_attention
from mvr_ray.distributed import analyze as analysis
from mvr_ray.distributed.analyze import (
    ALL_VIEWS,
    ANSWER_VIEW,
    AnalyzedQuestions,
    _answer_view_ranks,
    _evenly_spaced,
    _examples,
    _of_whole_passages,
    _spans,
    analyze,
)
from mvr_ray.distributed.evaluate import evaluate, judge_hits
from mvr_ray.errors import ConfigError, DataError, MissingInputError
from mvr_ray.store import manifest, paths
from mvr_ray.store.corpus import Corpus
from mvr_ray.store.embeddings import EmbeddingShard
from mvr_ray.store.files import Store
from mvr_ray.store.formats.question_ranks import read_question_ranks
from mvr_ray.store.formats.question_views import read_question_views
from mvr_ray.store.formats.rankings import RankedQuestion
from mvr_ray.store.questions import read_questions, write_questions
from mvr_ray.types import Hit, Passage, Question

pytestmark = [pytest.mark.data, pytest.mark.ray, pytest.mark.usefixtures("without_ray")]


def view_of_offset(encoder: DualEncoder, passage: Passage, offset: int) -> int:
    """The view whose snippet holds the character at `offset`, or -1."""
    return find_snippet([span or (0, 0) for span in encoder.view_spans(passage)], offset)


@pytest.fixture(scope="module")
def view_vectors(small_index) -> dict[str, dict[int, np.ndarray]]:
    views: dict[str, dict[int, np.ndarray]] = {}
    for entry in manifest.read(Store(str(small_index)), "index").shards:
        folder = small_index / paths.shard_dir("index", entry.digest)
        for block in EmbeddingShard.open(folder / paths.EMBEDDINGS).blocks():
            for row, passage_id in enumerate(block.ids):
                here = slice(block.row_ptr[row], block.row_ptr[row + 1])
                vectors = block.vectors_ND[here].astype(np.float64)
                views[passage_id] = dict(zip(block.view_numbers_N[here].tolist(), vectors))
    return views


def test_all_views_score_as_evaluate_says_and_each_alone_as_a_loop_over_its_vectors(
    small_index, run_over, view_vectors
):
    run = run_over(small_index)
    steps: dict[str, tuple[int, int]] = {}

    def progress(what: str, count: int, total: int) -> None:
        steps[what] = count, total

    report = analyze(run, progress)
    assert {"embed questions", "judge views"} < steps.keys()
    values = {(row.system, row.metric): row.value for row in report.rows}
    for row in evaluate(run, progress).rows:
        assert values[ALL_VIEWS, row.metric] == row.value
    assert all(count == total for count, total in steps.values())
    store = Store(str(small_index))
    questions = read_questions(only_corpus(store), "dev")
    encoder = DualEncoder.load(small_index / paths.encoder_dir("encoder", report.encoder_fingerprint))
    queries_QD = encoder.embed_queries([question.text for question in questions]).astype(np.float64)
    for view in range(4):
        there = sorted(passage for passage, views in view_vectors.items() if view in views)
        scores_QP = queries_QD @ np.stack([view_vectors[passage][view] for passage in there]).T
        best = [there[at] for at in scores_QP.argmax(axis=1)]
        accuracy = np.mean([passage in question.positive_ids for passage, question in zip(best, questions)])
        assert values[f"view {view}", "gold/top-1"] == pytest.approx(accuracy)
    assert values[ALL_VIEWS, "gold/top-1"] > values["view 3", "gold/top-1"]
    ranks = {part.system: part for part in report.ranks}
    assert set(ranks) == {row.system for row in report.rows} | {ANSWER_VIEW}
    for (system, metric), value in values.items():
        kind, _, k = metric.partition("/top-")
        if kind in ("answer", "gold"):
            ranks_Q = ranks[system].answer_ranks if kind == "answer" else ranks[system].gold_ranks
            assert np.mean([0 <= rank < int(k) for rank in ranks_Q]) == pytest.approx(value)


def test_a_passage_is_prepared_once_for_the_answers_of_all_systems(small_index, run_over, monkeypatch):
    prepare, passages = answers._haystack, {passage.text for passage in Corpus.open(Store(str(small_index)), "corpus")}
    texts: Counter[str] = Counter()
    monkeypatch.setattr(answers, "_haystack", lambda text, match: (texts.update([text]), prepare(text, match))[1])
    analyze(run_over(small_index))
    assert {texts[text] for text in passages} <= {0, 1}
    assert any(texts[text] for text in passages)


def test_what_wins_is_counted_as_a_slow_loop_counts_it(small_index, run_over, view_vectors):
    report = analyze(run_over(small_index))
    store = Store(str(small_index))
    questions = read_questions(only_corpus(store), "dev")
    encoder = DualEncoder.load(small_index / paths.encoder_dir("encoder", report.encoder_fingerprint))
    texts = Corpus.open(store, "corpus").get(question.positive_ids[0] for question in questions)
    wins, right, lift, winners = Counter(), [], [], {}
    wins_of_answer = {}
    for question in questions:
        own = view_vectors[question.positive_ids[0]]
        query_D = encoder.embed_queries([question.text])[0].astype(np.float64)
        longest = np.linalg.norm(query_D) * max(np.linalg.norm(p) for p in own.values())
        scores = {v: query_D @ p / longest for v, p in own.items()}
        winner = min(v for v, score in scores.items() if score >= max(scores.values()) - 1e-3)
        wins[winner] += 1
        winners.setdefault(question.positive_ids[0], []).append(winner)
        answer = view_of_offset(encoder, texts[question.positive_ids[0]], question.answer_starts[0])
        right += [winner == answer] if answer >= 0 else []
        wins_of_answer[question.id] = winner == answer if answer >= 0 else None
        if len(scores) > 1:
            others = sorted(scores.values())[:-1]
            lift.append((question.id, max(scores.values()) - np.mean(others)))
    assert report.num_questions == len(questions)
    assert report.questions_per_passage == pytest.approx(len(questions) / len(winners))
    assert report.win_shares == pytest.approx([wins[view] / len(questions) for view in range(4)])
    assert report.gold_answer_view_share == pytest.approx(np.mean(right))
    assert report.lv == pytest.approx(np.mean([value for _, value in lift]))
    values = {views.question_id: views for views in report.values}
    assert list(values) == [question.id for question in questions]
    assert {i: views.lv for i, views in values.items() if views.lv is not None} == pytest.approx(dict(lift), abs=1e-6)
    assert {i: views.gold_answer_view for i, views in values.items()} == wins_of_answer
    assert [views.passage_id for views in report.values] == [question.positive_ids[0] for question in questions]
    assert [views.article for views in report.values] == [texts[views.passage_id].title for views in report.values]
    entropies = [-sum(n / len(own) * math.log(n / len(own)) for n in Counter(own).values()) for own in winners.values()]
    assert report.ppl == pytest.approx(np.mean([math.exp(entropy) for entropy in entropies]))
    assert report.ppl_of_mean_entropy == pytest.approx(math.exp(np.mean(entropies)))
    assert report.ppl_of_mean_entropy < report.ppl < report.questions_per_passage
    assert 1 < report.ppl_answer < 4
    assert report.view_pair_cosine < 0.99
    table = report.attention_kl_table
    assert len(table) == 4 and all(table[view][view] == pytest.approx(0, abs=1e-9) for view in range(4))
    assert report.attention_kl == pytest.approx(np.mean([table[i][j] for i in range(4) for j in range(i + 1, 4)]))
    assert report.attention_kl > 0
    divergence_of = {views.passage_id: views.attention_kl for views in report.values}
    assert report.attention_passages == len(divergence_of) and None not in divergence_of.values()
    for passage_id in list(divergence_of)[:3]:
        [own] = view_attention(encoder, encoder.tokenize_passages([texts[passage_id]]))
        assert divergence_of[passage_id] == pytest.approx(mean_attention_kl(attention_kl(own)), abs=1e-6)


def test_a_task_and_this_process_hold_the_hits_of_a_block_of_questions_and_the_report_is_the_same(
    small_index, run_over, monkeypatch
):
    whole, num_questions = analyze(run_over(small_index)), list[int]()
    search, measure = analysis._search_shard, analysis.system_result

    def count_questions(*arguments):
        num_questions.append(len(arguments[3]))
        return search(*arguments)

    def count_hits(system: str, name: str, results: list[RankedQuestion], *others):
        own = [(row.question, hit) for row in results for hit in row.passages]
        num_gold = sum(hit.id in question.positive_ids for question, hit in own)
        depth = max(len(row.passages) for row in results)
        assert len({id(hit) for _, hit in own}) <= num_gold + 2 * depth < len(own)
        return measure(system, name, results, *others)

    monkeypatch.setattr(analysis, "QUESTIONS_AT_ONCE", 7)
    monkeypatch.setattr(analysis, "_search_shard", count_questions)
    monkeypatch.setattr(analysis, "system_result", count_hits)
    assert analyze(run_over(small_index)) == whole
    assert max(num_questions) == 7 and sum(num_questions) == 3 * whole.num_questions


def test_the_answer_view_metric_asks_the_matched_snippets_of_the_retrieved_passages(
    small_index, run_over, view_vectors
):
    """CAMVR eq. 15 by a loop: the snippet of each hit's best view, of any passage, and DPR's rule for answers."""
    run = run_over(small_index)
    report = analyze(run)
    values = {row.metric: row for row in report.rows if row.system == ALL_VIEWS}
    store = Store(str(small_index))
    questions = read_questions(only_corpus(store), "dev")
    encoder = DualEncoder.load(small_index / paths.encoder_dir("encoder", report.encoder_fingerprint))
    texts = Corpus.open(store, "corpus").get(view_vectors)
    spans = {i: encoder.view_spans(passage) for i, passage in texts.items()}
    queries_QD = encoder.embed_queries([question.text for question in questions]).astype(np.float64)
    ranks, elsewhere = [], 0
    for question, query_D in zip(questions, queries_QD):
        best = {i: max((float(query_D @ p), -v) for v, p in views.items()) for i, views in view_vectors.items()}
        order = sorted(best, key=lambda i: (-best[i][0], i))[: max(run.evaluate.k)]
        relevance = []
        for i in order:
            start, end = spans[i][-best[i][1]]
            relevance.append(has_answer(texts[i].text[start:end], question.answers))
        ranks.append(relevance.index(True) if True in relevance else -1)
        elsewhere += ranks[-1] >= 0 and order[ranks[-1]] not in question.positive_ids
    assert elsewhere, "other passages than the gold one count"
    [answer_view] = [part for part in report.ranks if part.system == ANSWER_VIEW]
    assert answer_view.answer_ranks == ranks and answer_view.question_ids == [question.id for question in questions]
    for k in run.evaluate.k:
        row = values[f"answer_view/top-{k}"]
        assert row.value == pytest.approx(np.mean([0 <= rank < k for rank in ranks]))
        assert row.n == len(questions) and row.low <= row.value <= row.high
        assert row.value <= values[f"answer/top-{k}"].value, "a snippet with an answer is a passage with an answer"
    assert not any("answer_view" in row.metric for row in report.rows if row.system != ALL_VIEWS)


def test_a_feedback_view_the_title_and_a_missing_view_match_no_snippet(small_index, minilm):
    passages = Corpus.open(Store(str(small_index)), "corpus")
    encoder = DualEncoder.from_backbone(str(minilm), EncoderSpec(strategy="snippets", num_views=8, title_view=True))
    passage, spans = next((p, own) for p in passages if None in (own := encoder.view_spans(p)))
    missing, (start, end) = spans.index(None), spans[1]
    word = passage.text[start:end].split()[0]
    questions = [Question(f"q{at}", "Who?", answers=(word,)) for at in range(5)]
    views = [(1,), (8, 1), (0, 9, missing, -1), (0, 1), ()]
    hits = [[Hit(passage.id, 1.0 - at, view, 0, at) for at, view in enumerate(own)] for own in views]
    ranking = judge_hits(questions, hits, passages, AnswerMatcher())
    assert spans[0] == TITLE and all(hit.has_answer for row in ranking for hit in row.passages)
    ranks = _answer_view_ranks(ranking, hits, passages, encoder, EvaluateConfig())
    assert list(ranks.values()) == [0, 1, -1, 1, -1]
    empty_ranking = [RankedQuestion(Question("q", "Who?"), [])]
    assert _answer_view_ranks(empty_ranking, [[]], passages, encoder, EvaluateConfig()) == {}


def test_the_examples_are_passages_with_two_questions_answered_in_different_snippets(
    small_index, run_over, view_vectors
):
    report = analyze(run_over(small_index))
    store = Store(str(small_index))
    questions = {question.text: question for question in read_questions(only_corpus(store), "dev")}
    encoder = DualEncoder.load(small_index / paths.encoder_dir("encoder", report.encoder_fingerprint))
    texts = Corpus.open(store, "corpus").get(view_vectors)
    assert len(report.examples) == 4
    assert [one.passage_id for one in report.examples[::2]] == [one.passage_id for one in report.examples[1::2]]
    assert len({one.passage_id for one in report.examples}) == 2
    for one in report.examples:
        question, passage = questions[one.question], texts[one.passage_id]
        assert question.positive_ids[0] == passage.id and one.title == passage.title
        assert one.answer_view == view_of_offset(encoder, passage, question.answer_starts[0])
        query_D = encoder.embed_queries([one.question])[0].astype(np.float64)
        expected = [
            float(query_D @ view_vectors[passage.id][v]) if v in view_vectors[passage.id] else None for v in range(4)
        ]
        assert one.scores == pytest.approx(expected, rel=1e-4)
    assert all(a.answer_view != b.answer_view for a, b in zip(report.examples[::2], report.examples[1::2]))
    assert analyze(run_over(small_index)).examples == report.examples


def test_examples_are_those_of_most_snippets_then_by_id_with_each_questions_first_other_view():
    rng = np.random.default_rng(4)
    passages = {i: Passage(i, f"title {i}", "") for i in "abcde"}
    spans = {"a": [(0, 1), (1, 2), None], "b": [(0, 1)] * 3, "c": [(0, 1)] * 3, "d": [(0, 1)] * 3, "e": [(0, 1)] * 3}
    own = [
        ("d", 1),
        ("c", 0),
        ("d", 1),
        ("a", 0),
        ("c", -1),
        ("d", 2),
        ("b", 2),
        ("c", 2),
        ("a", 1),
        ("e", 0),
        ("b", 0),
    ]
    questions = [Question(f"q{at}", f"Question {at}?", positive_ids=(i,)) for at, (i, _) in enumerate(own)]
    mask_QV = np.ones((len(own), 3), bool)
    mask_QV[7, 1] = False
    views_QVD = rng.random((len(own), 3, 4), np.float32) * mask_QV[..., None]
    queries_QD = rng.random((len(own), 4), np.float32)
    own_questions = AnalyzedQuestions(questions, queries_QD, views_QVD, mask_QV)
    examples = _examples(own_questions, np.array([view for _, view in own]), passages, spans)
    rows = [(one.passage_id, one.title, one.question, one.answer_view) for one in examples]
    assert rows == [
        ("b", "title b", "Question 6?", 2),
        ("b", "title b", "Question 10?", 0),
        ("c", "title c", "Question 1?", 0),
        ("c", "title c", "Question 7?", 2),
    ]
    assert examples[3].scores[1] is None
    assert examples[3].scores[2] == pytest.approx(sum(views_QVD[7, 2] * queries_QD[7]), rel=1e-5)


def test_where_views_read_the_whole_passage_examples_go_by_the_snippets_that_camvr_would_cut(minilm):
    encoder = DualEncoder.from_backbone(str(minilm), EncoderSpec(strategy="viewers", num_views=2))
    passage = Passage("p", "", "One comes first. Two follows it. Three ends it.")
    assert list(_spans(encoder, passage)) == snippet_spans(passage.text, 2, encoder.splitter)
    assert encoder.view_spans(passage) == [None, None]


def test_an_index_with_a_title_view_says_title_where_the_title_won_and_numbers_the_texts_views_after_it(
    own_index, run_over, minilm
):
    from mvr_ray.distributed.indexing.build_index import index
    from mvr_ray.distributed.router import open_router

    encoder = {"strategy": "snippets", "title_view": True, "empty_snippets": "kept", "num_views": 4, "name": "titled"}
    encoder["backbone"] = str(minilm)
    run = run_over(own_index, encoder=encoder, index={"name": "titled", "encoder": "untrained"})
    index(run)
    report = analyze(run)
    assert {row.system for row in report.rows} == {*(f"view {view}" for view in range(4)), ALL_VIEWS}
    assert all(1 <= one.answer_view <= 3 and None not in one.scores for one in report.examples)
    kinds = set()
    with open_router(run, local=True) as router:
        for question in read_questions(only_corpus(Store(str(own_index))), "dev")[:40]:
            for hit in router.search_text([question.text], 20).hits[0]:
                passage = router.passages([hit.passage_id])[hit.passage_id]
                span, text = router.view_spans(passage)[hit.view], router.matching_snippet(passage, hit.view)
                kind = "passage" if span is None else "title" if span == TITLE else "snippet"
                kinds.add((hit.view == 0, kind))
                if kind == "snippet":
                    first, *_ = snippet_spans(passage.text, 3, router.encoder.splitter)
                    assert (hit.view == 1) == (span == first)
                if kind == "title":
                    assert text == passage.title
    assert (True, "title") in kinds and kinds <= {(True, "title"), (False, "snippet"), (False, "passage")}


def test_questions_that_cannot_be_asked_are_refused_by_name(small_index, own_index, run_over):
    with pytest.raises(ConfigError, match=r"analyze\.questions names no question set.*`questions: NAME`"):
        analyze(run_over(small_index, evaluate={"questions": []}))
    write_questions(only_corpus(Store(str(own_index))), "strays", [Question("q", "Who?", positive_ids=("nowhere",))])
    with pytest.raises(MissingInputError, match="no question of 'strays' has its passage in index 'index'"):
        analyze(run_over(own_index, analyze={"questions": "strays"}))


def test_empty_answers_are_refused_as_in_evaluate(own_index, run_over):
    corpus = only_corpus(Store(str(own_index)))
    first, *others = read_questions(corpus, "dev")[:5]
    write_questions(corpus, "dev", [first._replace(answers=("",), answer_starts=(-1,)), *others])
    for is_strict in (False, True):
        run = run_over(own_index, retrieve={"strict_answers": is_strict})
        for stage in (evaluate, analyze):
            with pytest.raises(DataError, match="answer ''") if is_strict else nullcontext():
                stage(run)


def test_one_view_has_nothing_to_compare(own_index, run_over):
    from mvr_ray.distributed.indexing.build_index import index

    run = run_over(own_index, encoder={"strategy": "mean"}, index={"name": "one"})
    index(run)
    report = analyze(run)
    assert {row.system for row in report.rows} == {ALL_VIEWS}
    values = report._asdict()
    assert [values[name] for name in ("lv", "ppl", "view_pair_cosine", "attention_kl")] == [None] * 4


def test_attention_is_measured_over_passages_that_one_window_holds(own_index, run_over):
    from mvr_ray.distributed.indexing.build_index import index

    settings = {"overlap_tokens": 16, "max_passage_tokens": 160}
    run = run_over(own_index, encoder=settings, index={"name": "windows"}, analyze={"attention_passages": 40})
    index(run)
    report = analyze(run)
    store = Store(str(own_index))
    encoder = DualEncoder.load(own_index / paths.encoder_dir("encoder", report.encoder_fingerprint))
    passages = list(dict.fromkeys(views.passage_id for views in report.values))
    texts = only_corpus(store).get(_evenly_spaced(passages, 40))
    has_one_window = {name: encoder.tokenize_passages([own])[0].num_tokens <= 160 for name, own in texts.items()}
    measured_ids = {views.passage_id for views in report.values if views.attention_kl is not None}
    assert measured_ids == {name for name, whole in has_one_window.items() if whole}
    assert 0 < report.attention_passages == len(measured_ids) < len(texts)


def test_attention_is_measured_over_passages_at_equal_distances_and_not_over_the_first_ones(small_index, run_over):
    ids = [f"p{at}" for at in range(100)]
    assert _evenly_spaced(ids, 100) == _evenly_spaced(ids, 7000) == ids
    for limit in (1, 7, 64, 99):
        places = [int(name[1:]) for name in _evenly_spaced(ids, limit)]
        assert len(places) == limit and places[0] == 0
        assert {later - before for before, later in itertools.pairwise(places)} <= {100 // limit, -(-100 // limit)}
    few = analyze(run_over(small_index, analyze={"attention_passages": 3}))
    passage_ids = list(dict.fromkeys(views.passage_id for views in few.values))
    measured_ids = {views.passage_id for views in few.values if views.attention_kl is not None}
    assert measured_ids == {passage_ids[at * len(passage_ids) // 3] for at in range(3)}
    assert few.attention_passages == 3


@pytest.mark.parametrize("limit", [1, 7, 50, 199])
def test_fewer_questions_are_those_of_whole_passages_at_equal_distances(limit):
    counts = np.random.default_rng(limit).integers(1, 8, 60).tolist()
    owners = [f"p{number}" for number, count in enumerate(counts) for _ in range(count)]
    questions = [Question(f"q{at}", "?", positive_ids=(owner,)) for at, owner in enumerate(owners)]
    subset = _of_whole_passages(questions, limit)
    assert len(subset) <= limit and [question for question in questions if question in subset] == subset
    count_of = Counter(question.positive_ids[0] for question in subset)
    whole = [counts[int(name[1:])] == count for name, count in count_of.items()]
    assert all(whole[:-1]), "only the last passage may lack questions"
    places = [int(name[1:]) for name in count_of]
    assert places == sorted(places)
    if limit >= 50:
        assert (
            places[0] == 0
            and max(later - before for before, later in itertools.pairwise(places)) <= 60 // len(count_of) + 1
        )
    assert _of_whole_passages(questions, 0) == _of_whole_passages(questions, len(questions)) == questions


def test_the_command_stores_the_ranks_and_the_measures_of_every_question_beside_its_report(
    own_index, run_over, tmp_path, capsys
):
    run = run_over(own_index)
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(run.model_dump(mode="json")))
    with pytest.raises(SystemExit) as end:
        main(["analyze", str(file), "--json"])
    assert not end.value.code
    summary = json.loads(capsys.readouterr().out)
    folder = (own_index / summary["questions_file"].removeprefix(f"{own_index}/")).parent
    report = analyze(run)
    assert list(read_question_views(folder / "views.parquet").values()) == [report.values]
    assert read_question_ranks(folder / "questions.parquet") == report.ranks
    assert "values" not in summary and json.loads((folder / "report.json").read_text())["report"]["values"] == []
