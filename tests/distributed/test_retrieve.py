"""Rankings and measurements of a real index, against exhaustive search and slow counting."""

import dataclasses
import json
import math
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from bm25_index import BM25Index
from prepared_corpus import only_corpus

from mvr_ray.config import RunConfig
from mvr_ray.core.encoding.encoder import DualEncoder
from mvr_ray.core.judging.answers import has_answer
from mvr_ray.distributed import mine
from mvr_ray.distributed.analyze import ALL_VIEWS, analyze
from mvr_ray.distributed.cluster import session
from mvr_ray.distributed.evaluate import evaluate, system_result
from mvr_ray.distributed.refine import refine
from mvr_ray.distributed.retrieve import TRIES, QuestionRanker, QuestionSet, RankSettings, question_set, retrieve
from mvr_ray.distributed.router import Router, open_router
from mvr_ray.distributed.searching.messages import ShardFailure, ShardResults
from mvr_ray.errors import ConfigError, CoverageError, DataError, MissingInputError, ShardIndexError
from mvr_ray.store import corpus, manifest, paths
from mvr_ray.store.embeddings import EmbeddingShard, EmbeddingWriter
from mvr_ray.store.files import Store
from mvr_ray.store.formats.rankings import RankedPassage, RankedQuestion
from mvr_ray.store.questions import articles_of, query_key, read_questions, write_questions
from mvr_ray.types import EmbeddingBlock, Passage, Question

pytestmark = [pytest.mark.data, pytest.mark.ray]
without_ray = pytest.mark.usefixtures("without_ray")


def all_views(store: Path) -> list[tuple[str, int, np.ndarray]]:
    """(passage id, view number, vector) of every stored view, in float64."""
    views = []
    for entry in manifest.read(Store(str(store)), "index").shards:
        folder = store / paths.shard_dir("index", entry.digest)
        for block in EmbeddingShard.open(folder / paths.EMBEDDINGS).blocks():
            for row, passage_id in enumerate(block.ids):
                for at in range(block.row_ptr[row], block.row_ptr[row + 1]):
                    views.append((passage_id, int(block.view_numbers_N[at]), block.vectors_ND[at].astype(np.float64)))
    return views


@pytest.fixture(scope="module")
def expected(small_index) -> dict[str, list[tuple[str, float, int]]]:
    """Every question's passages as (id, score, view), best first, by comparing it with every view in turn."""
    store = Store(str(small_index))
    views = all_views(small_index)
    fingerprint = manifest.read(store, "index").encoder_fingerprint
    encoder = DualEncoder.load(small_index / paths.encoder_dir("encoder", fingerprint))
    rankings = {}
    for question in read_questions(only_corpus(store), "dev"):
        query_D = encoder.embed_queries([question.text])[0].astype(np.float64)
        best: dict[str, tuple[float, int]] = {}
        for passage_id, view, vector_D in views:
            score = float(query_D @ vector_D)
            if passage_id not in best or score > best[passage_id][0]:
                best[passage_id] = score, view
        rankings[question.id] = sorted(((i, s, v) for i, (s, v) in best.items()), key=lambda hit: (-hit[1], hit[0]))
    return rankings


@without_ray
def test_evaluation_measures_the_served_hybrid_ranking_with_the_weight_given_or_chosen_elsewhere(
    lexical_index, small_index, run_over, tmp_path
):
    root = shutil.copytree(lexical_index, tmp_path / "store")
    store = Store(str(root))
    questions = read_questions(only_corpus(store), "dev")
    write_questions(only_corpus(store), "held", questions[:15])
    write_questions(only_corpus(store), "asked", questions[15:])
    words = BM25Index(corpus.Corpus.open(store, "corpus"))
    with open_router(run_over(root), local=True) as router:
        dense = router.search_text([question.text for question in questions], 60).hits

    def share(some: list[Question], at: int, weight: float, k: int) -> float:
        """Share of questions with their gold passage among the first k by the sum of both scores."""
        num_hits = 0
        for question, near in zip(some, dense[at:]):
            lexical = {hit.passage_id: hit.score for hit in words.search([question.text], 60)[0]}
            total = {hit.passage_id: lexical.get(hit.passage_id, 0.0) + weight * hit.score for hit in near}
            best = sorted(total, key=lambda i: (-total[i], i))[:k]
            num_hits += question.positive_ids[0] in best
        return num_hits / len(some)

    by_weight, by_set = {"search": {"hybrid": 7}}, {"evaluate": {"hybrid": "held"}}
    for settings in (by_weight, by_set, by_weight | by_set):
        evaluation = {"questions": ["asked"], "k": [1, 5], **settings.get("evaluate", {})}
        report = evaluate(run_over(root, **{**settings, "evaluate": evaluation}))
        assert report.configured_system == ("bm25 + 7 x dense" if "search" in settings else report.index)
        values = {(row.system, row.metric): row.value for row in report.rows if row.system.startswith("bm25 + ")}
        weight_of = {system: float(system.split()[2]) for system, _ in values}
        assert (7 in weight_of.values(), len(weight_of)) == ("search" in settings, len(settings))
        for system, weight in weight_of.items():
            for k in (1, 5):
                assert values[system, f"gold/top-{k}"] == pytest.approx(share(questions[15:], 15, weight, k))
    weight = [*weight_of.values()][-1]
    best_share = share(questions[:15], 0, weight, 1)
    assert all(share(questions[:15], 0, other, 1) <= best_share for other in (0.0, 1.0, 5.0, 20.0, 60.0, 200.0))
    with pytest.raises(ConfigError, match=r"hybrid: all 15 questions of 'held' with .* also reported, .*: asked, dev"):
        evaluate(run_over(root, evaluate={"questions": ["held"], "hybrid": "held"}))
    with pytest.raises(ConfigError, match=r"index\.name is bm25.*evaluate\.bm25=false"):
        evaluate(run_over(root, index={"name": "bm25"}, evaluate={"questions": ["held"], "bm25": True}))
    with pytest.raises(ShardIndexError, match=r"has no words of its passages.*set index\.lexical: true"):
        evaluate(run_over(small_index, evaluate={"questions": ["dev"]}, search={"hybrid": 7}))


@without_ray
def test_a_ranking_by_words_and_views_is_that_of_the_router_with_views_and_snippets(lexical_index, tmp_path, run_over):
    weight, store = 12.0, Store(str(lexical_index))
    run = run_over(lexical_index, search={"hybrid": weight}, retrieve={"k": 10})
    report = retrieve(run, "dev", tmp_path / "both.jsonl", "jsonl")
    assert report.exact
    questions = read_questions(only_corpus(store), "dev")
    words = BM25Index(corpus.Corpus.open(store, "corpus"))
    with open_router(run, local=True) as router:
        dense = router.search_text([question.text for question in questions], 60).hits
    rows = [json.loads(line) for line in (tmp_path / "both.jsonl").read_text().splitlines()]
    for question, near, row in zip(questions, dense, rows, strict=True):
        lexical = {hit.passage_id: hit.score for hit in words.search([question.text], 60)[0]}
        total = {hit.passage_id: float(np.float32(lexical.get(hit.passage_id, 0) + weight * hit.score)) for hit in near}
        view_of = {hit.passage_id: hit.view for hit in near}
        assert [hit["id"] for hit in row["hits"]] == sorted(total, key=lambda i: (-total[i], i))[:10]
        for hit in row["hits"]:
            assert (hit["score"], hit["view"]) == (pytest.approx(total[hit["id"]], rel=1e-6), view_of[hit["id"]])
            assert hit["snippet"]


@without_ray
def test_a_filtered_ranking_is_exhaustive_search_over_what_passes(small_index, tmp_path, run_over, expected):
    store = Store(str(small_index))
    titles = {passage.id: passage.title for passage in only_corpus(store)}
    title = sorted(set(titles.values()))[0]
    run = run_over(small_index, retrieve={"filter": {"not": {"title": title}}})
    assert retrieve(run, "dev", tmp_path / "some.jsonl", "jsonl").exact
    for line in (tmp_path / "some.jsonl").read_text().splitlines():
        row = json.loads(line)
        best = [name for name, _, _ in expected[row["id"]] if titles[name] != title][:10]
        assert [hit["id"] for hit in row["hits"]] == best
    with pytest.raises(
        ConfigError,
        match=r"^retrieve\.filter: .* no field 'year'; there are: id \(string\), title \(string\)",
    ):
        retrieve(run_over(small_index, retrieve={"filter": {"year": 3}}), "dev", tmp_path / "no.jsonl")


@pytest.mark.slow
def test_a_ranking_is_exhaustive_search_in_question_order_whoever_did_it(small_index, tmp_path, run_over, expected):
    """This process, or two rankers and two searchers on Ray."""
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    with session.staying_local():
        report = retrieve(run_over(small_index, resources={"local_passages": 1000}), "dev", one, "jsonl")
    many = {"encoders_min": 2, "encoders_max": 2, "searchers": 2}
    retrieve(run_over(small_index, resources=many), "dev", two, "jsonl")
    assert one.read_bytes() == two.read_bytes()
    assert (report.questions, report.k, report.version, report.exact) == (40, 10, 1, True)

    store = Store(str(small_index))
    questions = read_questions(only_corpus(store), "dev")
    passages = {passage.id: passage for passage in corpus.Corpus.open(store, "corpus")}
    rows = [json.loads(line) for line in one.read_text().splitlines()]
    assert [row["id"] for row in rows] == [question.id for question in questions]
    for question, row in zip(questions, rows):
        for hit, (passage_id, score, view) in zip(row["hits"], expected[question.id][:10], strict=True):
            assert hit["score"] == pytest.approx(score, abs=1e-5)
            assert hit["text"] == passages[hit["id"]].text and hit["snippet"] in hit["text"]
            assert hit["has_answer"] == has_answer(hit["text"], question.answers)
            assert (hit["id"], hit["view"]) == (passage_id, view)


@without_ray
def test_a_set_of_another_corpus_is_refused_with_the_number_of_its_gold_passages_that_are_not_there(
    own_index, run_over
):
    store = Store(str(own_index))
    questions = read_questions(only_corpus(store), "dev")
    foreign = [question._replace(positive_ids=("nowhere",)) for question in questions[:2]]
    write_questions(only_corpus(store), "foreign", [*foreign, *questions[2:]])
    total = len({"nowhere", *(question.positive_ids[0] for question in questions[2:])})
    message = (
        f"question set 'foreign': 1 of its {total} gold passages are not in corpus 'corpus' \\(first: 'nowhere'\\)"
    )
    with pytest.raises(MissingInputError, match=message):
        evaluate(run_over(own_index, evaluate={"questions": ["dev", "foreign"]}))


@without_ray
def test_measurements_under_a_filter_are_those_of_what_passes(small_index, run_over, caplog):
    """The articles have 20 paragraphs: all that pass are among the first 20."""
    store = Store(str(small_index))
    questions, passages = read_questions(only_corpus(store), "dev"), corpus.Corpus.open(store, "corpus")
    title = passages.get(questions[0].positive_ids)[questions[0].positive_ids[0]].title
    retrieval = {"filter": {"title": title}}
    share = sum(passages.get(one.positive_ids)[one.positive_ids[0]].title == title for one in questions) / 40
    rows = {row.metric: row.value for row in evaluate(run_over(small_index, retrieve=retrieval)).rows}
    plain = {row.metric: row.value for row in evaluate(run_over(small_index)).rows}
    assert 0 < share < 1 and rows["gold/top-20"] == pytest.approx(share)
    assert rows["gold/top-1"] != plain["gold/top-1"]
    analyzed_rows = analyze(run_over(small_index, retrieve=retrieval)).rows
    assert {row.metric: row.value for row in analyzed_rows if row.system == ALL_VIEWS}.items() >= rows.items()
    assert all(row.value <= share for row in analyzed_rows if row.metric == "gold/top-1")
    with pytest.raises(ConfigError, match=r"evaluate\.bm25 ranks all passages.*set evaluate\.bm25=false"):
        evaluate(run_over(small_index, retrieve=retrieval, evaluate={"bm25": True}))
    for stage in (evaluate, analyze):
        with pytest.raises(ConfigError, match=r"^retrieve\.filter: .* no field 'nothing'"):
            stage(run_over(small_index, retrieve={"filter": {"nothing": 1}}))
    with pytest.raises(ConfigError, match=r"refine\.questions names no question set"):
        refine(run_over(small_index, retrieve=retrieval, refine={"questions": None}))
    assert "retrieve.filter has no effect on refine" in caplog.text


@without_ray
def test_a_search_without_the_refined_queries_that_it_is_to_use_is_reported(small_index, run_over, tmp_path, caplog):
    run = run_over(small_index, retrieve={"refined_queries": True})
    message = r"refined_queries has no effect: version 1 of index index has no refined queries of dev \(there are: none"
    for stage in (lambda: evaluate(run), lambda: retrieve(run, "dev", tmp_path / "ranking.json")):
        caplog.clear()
        stage()
        assert re.search(message, caplog.text)


@without_ray
def test_measurements_are_what_slow_counting_says(small_index, run_over, expected):
    report = evaluate(run_over(small_index, evaluate={"bm25": True}))
    store = Store(str(small_index))
    questions = read_questions(only_corpus(store), "dev")
    passages = corpus.Corpus.open(store, "corpus")
    texts = {passage.id: passage.text for passage in passages}
    words = BM25Index(passages).search([question.text for question in questions], 20)
    systems = {
        "index": [[hit[0] for hit in expected[question.id]][:20] for question in questions],
        "bm25": [[hit.passage_id for hit in hits] for hits in words],
    }
    rows = {(row.system, row.metric): row for row in report.rows}
    figures = {}
    for system, lists in systems.items():
        for k in (1, 5, 20):
            answer = [any(has_answer(texts[i], q.answers) for i in ids[:k]) for q, ids in zip(questions, lists)]
            gold = [any(i in q.positive_ids for i in ids[:k]) for q, ids in zip(questions, lists)]
            figures[system, f"answer/top-{k}"], figures[system, f"gold/top-{k}"] = np.mean(answer), np.mean(gold)
        places = [[rank for rank, i in enumerate(ids, 1) if i in q.positive_ids] for q, ids in zip(questions, lists)]
        figures[system, "gold/mrr"] = np.mean([1 / at[0] if at else 0 for at in places])
        gains = [1 / math.log2(1 + at[0]) if at and at[0] <= 10 else 0 for at in places]  # one gold passage each
        figures[system, "gold/ndcg@10"] = np.mean(gains)
    assert all(len(question.positive_ids) == 1 for question in questions)
    assert rows.keys() == figures.keys()
    for key, value in figures.items():
        assert rows[key].value == pytest.approx(value), key
        assert rows[key].n == 40
        assert rows[key].low <= value <= rows[key].high or (value == 1 and math.isnan(rows[key].low)), "few articles"
    assert (report.version, report.passages, report.exact) == (1, 60, True)


@without_ray
def test_all_systems_of_one_encoder_are_measured_by_one_embedding_of_the_questions(
    lexical_index, run_over, monkeypatch
):
    embed, texts = DualEncoder.embed_queries, Counter()
    monkeypatch.setattr(
        DualEncoder, "embed_queries", lambda own, of, *more: (texts.update(of), embed(own, of, *more))[1]
    )
    dense = evaluate(run_over(lexical_index))
    expected = Counter(texts)
    texts.clear()
    both = evaluate(run_over(lexical_index, search={"hybrid": 7}))
    assert texts == expected and both.rows[: len(dense.rows)] == dense.rows
    assert len({row.system for row in both.rows}) == 2


@without_ray
def test_ndcg_at_ten_and_ranks_do_not_depend_on_deeper_or_shallower_cut_offs(lexical_index, run_over):
    evaluation = {"questions": ["dev"], "bm25": True}
    run = run_over(lexical_index, search={"hybrid": 7}, evaluate={**evaluation, "k": [1, 5, 20]})
    shallow_run = run_over(lexical_index, search={"hybrid": 7}, evaluate={**evaluation, "k": [5, 1]})
    for measure in (evaluate, analyze):
        deep, shallow = measure(run), measure(shallow_run)
        values = {(row.system, row.metric): row.value for row in deep.rows}
        assert shallow.rows and len(shallow.ranks) == len(deep.ranks)
        for row in shallow.rows:
            assert row.metric == "gold/mrr" or row.value == values[row.system, row.metric], row
        for own, other in zip(shallow.ranks, deep.ranks, strict=True):
            assert own.gold_ndcgs == other.gold_ndcgs
            for name in ("answer_ranks", "gold_ranks"):
                ranks, other_ranks = getattr(own, name), getattr(other, name)
                assert ranks == [rank if rank is None or rank < 5 else -1 for rank in other_ranks]
        assert any(5 <= rank < 10 for own in deep.ranks for rank in own.gold_ranks if rank is not None)


def test_questions_of_one_passage_are_of_one_article_also_without_a_title():
    gold_passages = [Passage("p1", "", "Iron."), Passage("p2", "Metals", "Salt.")]
    passages = SimpleNamespace(
        info=SimpleNamespace(counts={"chunk_words": 0}), get=lambda ids: {one.id: one for one in gold_passages}
    )
    positives = {"a": ("p1", "p2"), "b": ("p1",), "c": ("p2",), "d": ("gone",), "e": ()}
    articles = articles_of([Question(i, "?", positive_ids=own) for i, own in positives.items()], passages)
    assert articles == {"a": "passage p1", "b": "passage p1", "c": "Metals", "d": "question d", "e": "question e"}


def test_all_chunks_of_a_text_are_of_one_article_also_without_a_title():
    chunks = [Passage("p#1#0", "", "Iron."), Passage("p#1#1", "", "Salt."), Passage("q#0", "Metals", "Tin.")]
    passages = SimpleNamespace(
        info=SimpleNamespace(counts={"chunk_words": 1}), get=lambda ids: {one.id: one for one in chunks}
    )
    articles = articles_of([Question(one.id, "?", positive_ids=(one.id,)) for one in chunks], passages)
    assert list(articles.values()) == ["passage p#1", "passage p#1", "Metals"]


@without_ray
def test_only_questions_that_can_be_judged_count(run_over, tmp_path):
    settings = run_over(tmp_path, evaluate={"k": [1]}).evaluate
    right, wrong = RankedPassage("p1", "", "", 1.0, True), RankedPassage("p2", "", "", 0.5, False)
    ranking = [
        RankedQuestion(Question("a", "?", answers=("x",)), [right, wrong]),
        RankedQuestion(Question("b", "?", answers=("x",)), [wrong]),
        RankedQuestion(Question("c", "?", positive_ids=("p2",)), [right, wrong]),
        RankedQuestion(Question("d", "?"), []),
    ]
    result = system_result("s", "q", ranking, dict.fromkeys("abcd", "one article"), settings)
    values = {row.metric: (row.value, row.n) for row in result.rows}
    assert values["answer/top-1"] == (0.5, 2)
    assert values["gold/top-1"] == (0.0, 1)
    assert values["gold/mrr"] == (0.0, 1)
    assert values["gold/ndcg@10"] == (pytest.approx(1 / math.log2(3)), 1)
    assert result.ranks.question_ids == ["a", "b", "c", "d"]
    assert (result.ranks.answer_ranks, result.ranks.gold_ranks) == ([0, -1, None, None], [None, None, -1, None])
    assert result.ranks.gold_ndcgs == [None, None, values["gold/ndcg@10"][0], None]


def test_ndcg_gains_by_the_grades_of_the_judgements():
    question = Question("q", "why?", (), ("low", "high", "unfound"), positive_grades=(1, 3, 2))
    passages = [RankedPassage(name, "", "", 1.0) for name in ("low", "other", "high")]
    result = system_result("dense", "q", [RankedQuestion(question, passages)], {"q": "q"}, RunConfig().evaluate)
    [value] = [row.value for row in result.rows if row.metric == "gold/ndcg@10"]
    ideal = 3 + 2 / math.log2(3) + 1 / 2
    assert value == pytest.approx((1 + 3 / 2) / ideal)
    shares = {row.metric: row.value for row in result.rows if row.metric in ("gold/recall@1", "gold/recall@5")}
    assert shares == pytest.approx({"gold/recall@1": 1 / 3, "gold/recall@5": 2 / 3})


class LosesOnce:
    """A fleet in which shard 1 dies in the first search and is back after waiting for all shards."""

    def __init__(self, whole) -> None:
        self.whole, self.dead, self.num_waits = whole, True, 0

    def ready(self, manifest) -> None:
        self.dead, self.num_waits = False, self.num_waits + 1

    def fan_out(self, request, deadline, admit=False, on_partial=None) -> ShardResults:
        results = self.whole.fan_out(request, deadline).results
        if not self.dead:
            return ShardResults(results, [])
        return ShardResults([answer for answer in results if answer.shard != 1], [ShardFailure((1,), "died")])


class LosesForever(LosesOnce):
    """A fleet in which shard 1 stays away."""

    def ready(self, manifest) -> None:
        self.num_waits += 1


def lossy_opener(kind: type[LosesOnce], fleets: list[LosesOnce]) -> Callable[..., AbstractContextManager[Router]]:
    """`open_router` with fleets of a kind, which go to `fleets`."""

    @contextmanager
    def open_lossy(run: RunConfig, version: int) -> Iterator[Router]:
        with open_router(run, version, local=True) as router:
            fleets.append(kind(router.fleet))
            yield Router(router.store, router.manifest, fleets[-1])

    return open_lossy


def test_a_batch_waits_for_a_searcher_that_died_and_loses_nothing(small_index, run_over, expected):
    with open_router(run_over(small_index), local=True) as router:
        fleet = LosesOnce(router.fleet)
        lossy = Router(router.store, router.manifest, fleet)
        questions = question_set(router.corpus, "dev")
        with pytest.raises(CoverageError):
            lossy.search_text(["Who won?"], 3)
        rankings = QuestionRanker(lossy, RankSettings(k=5)).rank(questions)
    assert fleet.num_waits == 1
    for question, hits in zip(questions.questions, rankings):
        assert [hit.id for hit in hits] == [hit[0] for hit in expected[question.id]][:5]


def test_mining_waits_for_a_searcher_that_died_and_loses_nothing(own_index, run_over, monkeypatch):
    run = run_over(own_index, mine={"method": "index", "questions": "dev", "rank_to": 8, "num_negatives": 3})
    report = mine.mine(run)
    before = read_questions(only_corpus(Store(str(own_index))), run.mine.output)
    fleets: list[LosesOnce] = []
    monkeypatch.setattr(mine, "open_router", lossy_opener(LosesOnce, fleets))
    assert mine.mine(run) == report and fleets[0].num_waits == 1
    assert read_questions(only_corpus(Store(str(own_index))), run.mine.output) == before


@without_ray
def test_no_stage_takes_a_ranking_without_a_shard_that_stays_away(own_index, run_over, monkeypatch, tmp_path):
    fleets: list[LosesOnce] = []
    mining = {"method": "index", "questions": "dev", "rank_to": 8, "num_negatives": 3}
    run, output = run_over(own_index, mine=mining, retrieve={"batch": 40}), tmp_path / "ranking.jsonl"
    stages = {
        "retrieve": lambda: retrieve(run, "dev", output, "jsonl"),
        "evaluate": lambda: evaluate(run),
        "mine": lambda: mine.mine(run),
    }
    for name, stage in stages.items():
        monkeypatch.setattr(f"mvr_ray.distributed.{name}.open_router", lossy_opener(LosesForever, fleets))
        with pytest.raises(CoverageError, match=r"1 \(died\)"):
            stage()
    assert [fleet.num_waits for fleet in fleets] == [TRIES - 1] * len(stages)
    assert not output.exists() and corpus.question_sets(only_corpus(Store(str(own_index)))) == ["dev"]


@without_ray
@pytest.mark.parametrize("key", [query_key, attrgetter("id")], ids=["key", "id of earlier commits"])
def test_refined_vectors_are_used_when_asked_for_and_only_for_their_set(own_index, run_over, key):
    store = Store(str(own_index))
    questions = question_set(only_corpus(store), "dev")
    passage_id, _, vector_D = all_views(own_index)[17]
    own_question = min(questions.questions, key=attrgetter("id"))
    file = own_index / "moved.arrow"
    with EmbeddingWriter(file, len(vector_D), 1, "fp32") as writer:
        writer.write(
            EmbeddingBlock(
                [key(own_question)], np.array([0, 1]), np.zeros(1, np.int16), vector_D[None].astype(np.float32)
            )
        )
    live = manifest.read(store, "index")
    digest = manifest.add_refined_queries(store, "index", file)
    manifest.publish(
        store, dataclasses.replace(live, parent=1, operation="refine:query", refined_queries={"dev": digest})
    )
    with open_router(run_over(own_index), local=True) as router:
        plain = QuestionRanker(router, RankSettings(k=1)).rank(questions)
        refined_ranking = QuestionRanker(router, RankSettings(k=1, refined_queries=True)).rank(questions)
        other = QuestionRanker(router, RankSettings(k=1, refined_queries=True)).rank(
            QuestionSet("file", questions.questions)
        )
        another = QuestionSet("dev", [own_question._replace(text="Who won?")])
        [query_D] = QuestionRanker(router, RankSettings(k=1, refined_queries=True)).embed(another)
        is_own = np.array_equal(query_D, router.embed(another.texts)[0])
    assert is_own == (key is query_key), "another text under the id, as after the set was stored again"
    assert plain == other
    for question, before, after in zip(questions.questions, plain, refined_ranking):
        if question.id == own_question.id:
            assert after[0].id == passage_id and after[0].score == pytest.approx(float(vector_D @ vector_D), abs=1e-4)
        else:
            assert after == before


def test_questions_come_from_a_set_or_any_file_and_the_error_names_the_sets(small_index, tmp_path):
    store = Store(str(small_index))
    file = tmp_path / "asked.txt"
    file.write_text("Who won?\nWho lost?\n")
    assert [question.text for question in question_set(only_corpus(store), str(file)).questions] == [
        "Who won?",
        "Who lost?",
    ]
    assert question_set(only_corpus(store), "dev").questions == read_questions(only_corpus(store), "dev")
    with pytest.raises(MissingInputError, match=r"'nothing'.*sets: dev"):
        question_set(only_corpus(store), "nothing")


@without_ray
@pytest.mark.parametrize(
    ("question", "format", "message"),
    [
        (Question("q 1", "Who?"), "trec", "question id 'q 1' is empty or holds white space"),
        (Question("q1", "Who?", (" ",)), "dpr", "question 'q1': answer ' ' of 'Who\\?' holds nothing to find"),
    ],
)
def test_what_a_ranking_cannot_hold_is_refused_before_any_search(
    small_index, run_over, tmp_path, monkeypatch, question, format, message
):
    monkeypatch.setattr("mvr_ray.distributed.retrieve.open_router", None)
    monkeypatch.setattr("mvr_ray.distributed.retrieve.question_set", lambda *_: QuestionSet("own", [question]))
    with pytest.raises(DataError, match=message):
        retrieve(run_over(small_index, retrieve={"strict_answers": True}), "own", tmp_path / "out", format)


def test_evaluating_nothing_names_what_could_be(small_index, run_over):
    with pytest.raises(ConfigError, match=r"corpus 'corpus' has: dev\. Name a source's set by `questions: NAME`"):
        evaluate(run_over(small_index, evaluate={"questions": []}))
