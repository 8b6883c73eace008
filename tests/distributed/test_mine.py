"""Mining against plain transcriptions: BM25 by its formula, the filters by loops, the live index by its ranking."""

import json
import math
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest
import Stemmer
import yaml
from bm25_index import BM25Index
from prepared_corpus import only_corpus

from mvr_ray.cli import main
from mvr_ray.config import MineConfig, RunConfig, StoreConfig, load_run, parse_run
from mvr_ray.core.judging.answers import AnswerMatcher, has_answer
from mvr_ray.distributed.indexing.build_index import index
from mvr_ray.distributed.mine import choose_negatives, filter_hits, mine
from mvr_ray.distributed.router import open_router
from mvr_ray.distributed.training.examples import open_question_examples
from mvr_ray.errors import ConfigError, MissingInputError
from mvr_ray.store.corpus import Corpus
from mvr_ray.store.files import Store
from mvr_ray.store.prepare import prepare
from mvr_ray.store.questions import read_questions
from mvr_ray.store.update import update
from mvr_ray.types import Passage, Question

STOP_WORDS = frozenset(
    (
        *("a", "an", "and", "are", "as", "at", "be", "but", "by", "for", "if", "in", "into", "is", "it", "no", "not"),
        *("of", "on", "or", "such", "that", "the", "their", "then", "there", "these", "they", "this", "to", "was"),
        *("will", "with"),
    )
)


@pytest.fixture(scope="module")
def run(squad_dev, tmp_path_factory) -> RunConfig:
    """Sixty paragraphs of three articles."""
    folder = tmp_path_factory.mktemp("mine")
    data = [
        {
            "title": article["title"],
            "paragraphs": [{"context": p["context"], "qas": p["qas"][:2]} for p in article["paragraphs"][:20]],
        }
        for article in squad_dev["data"][:3]
    ]
    (folder / "squad.json").write_text(json.dumps({"version": "1.1", "data": data}))
    config = run_of(folder, {})
    prepare(config.prepare, Store(config.store.path))
    return config


def run_of(folder: Path, mining: dict) -> RunConfig:
    return parse_run(
        {
            "store": {"path": str(folder / "store")},
            "prepare": {"sources": [{"path": str(folder / "squad.json"), "questions": "asked"}], "num_shards": 2},
            "mine": {"questions": "asked", "output": "mined", **mining},
            "encoder": {"strategy": "mean", "max_passage_tokens": 64},
            "resources": {"encoders_max": 1},
        },
        "test",
    )


def with_mining(run: RunConfig, **mining) -> RunConfig:
    return run.model_copy(update={"mine": MineConfig(**{"questions": "asked", "output": "mined", **mining})})


def plain_bm25(texts: dict[str, str], query: str, k: int) -> list[tuple[str, float]]:
    """Lucene's BM25, written out: idf = ln(1 + (N - n + .5) / (n + .5)), tf / (tf + k1 (1 - b + b l / mean l))."""
    stem = Stemmer.Stemmer("english").stemWord

    def words(text: str) -> list[str]:
        return [stem(word) for word in re.findall(r"(?u)\b\w\w+\b", text.lower()) if word not in STOP_WORDS]

    counts = {name: Counter(words(text)) for name, text in texts.items()}
    mean = sum(sum(count.values()) for count in counts.values()) / len(counts)
    scores: dict[str, float] = {}
    for word in words(query):
        holding = sum(word in count for count in counts.values())
        idf = math.log(1 + (len(counts) - holding + 0.5) / (holding + 0.5))
        for name, count in counts.items():
            if word in count:
                norm = 0.9 * (1 - 0.4 + 0.4 * sum(count.values()) / mean)
                scores[name] = scores.get(name, 0.0) + idf * count[word] / (count[word] + norm)
    return sorted(scores.items(), key=lambda pair: (-pair[1], pair[0]))[:k]


@pytest.mark.data
def test_bm25_is_its_formula(run):
    corpus = Corpus.open(Store(run.store.path), "corpus")
    texts = {passage.id: f"{passage.title}\n{passage.text}" for passage in corpus}
    questions = [question.text for question in read_questions(corpus, "asked")][:25]
    for query, hits in zip(questions, BM25Index(corpus).search(questions, 10)):
        expected = plain_bm25(texts, query, 10)
        assert [hit.score for hit in hits] == pytest.approx([score for _, score in expected], rel=1e-4)
        clear = {name for name, score in expected if score > expected[-1][1] * 1.0001}
        assert clear <= {hit.passage_id for hit in hits}


def test_bm25_orders_equal_scores_by_id_and_finds_nothing_without_a_shared_word():
    passages = [Passage(name, "", "a harbour at night") for name in "cadb"]
    index = BM25Index([*passages, Passage("e", "", "a mill by day")])
    hits, nothing, empty = index.search(["the harbour", "zzyzx qwrtp", "the of and"], 3)
    assert [hit.passage_id for hit in hits] == ["a", "b", "c"] and len({hit.score for hit in hits}) == 1
    assert nothing == empty == []


@pytest.mark.data
def test_negatives_are_the_window_without_gold_and_answers_and_the_report_adds_up(run):
    cfg = {"rank_from": 1, "rank_to": 12, "num_negatives": 4}
    report = mine(with_mining(run, **cfg))
    store = Store(run.store.path)
    corpus = Corpus.open(store, "corpus")
    questions, mined_questions = (
        read_questions(only_corpus(store), "asked"),
        read_questions(only_corpus(store), "mined"),
    )
    ranking = BM25Index(corpus).search([question.text for question in questions], 12)
    gold = bearing = 0
    for question, mined_question, hits in zip(questions, mined_questions, ranking):
        assert mined_question._replace(hard_negative_ids=()) == question
        expected = []
        for hit in hits[1:]:
            if hit.passage_id in question.positive_ids:
                gold += 1
            elif has_answer(corpus.get([hit.passage_id])[hit.passage_id].text, question.answers):
                bearing += 1
            else:
                expected.append(hit.passage_id)
        assert list(mined_question.hard_negative_ids) == expected[:4]
    assert (report.dropped_gold, report.dropped_answer_bearing) == (gold, bearing)
    assert bearing > 0
    assert report.hits == gold + bearing + report.negatives + report.beyond_count
    assert report.negatives == sum(len(mined_question.hard_negative_ids) for mined_question in mined_questions)
    assert mine(with_mining(run, **cfg)) == report


@pytest.mark.data
def test_a_passage_has_at_most_so_many_mined_questions_with_the_negatives_that_they_have_among_all(run):
    corpus, output = only_corpus(Store(run.store.path)), "one_each"
    mine(with_mining(run, output=output, max_passage_questions=1))
    mine(with_mining(run, output="every"))
    one_each, every = read_questions(corpus, output), read_questions(corpus, "every")
    assert Counter(question.positive_ids[0] for question in one_each) == dict.fromkeys(
        {question.positive_ids[0] for question in every}, 1
    )
    assert len(one_each) < len(every) and all(question in every for question in one_each)


@pytest.mark.data
def test_negatives_mined_while_the_corpus_changes_are_in_the_last_corpus(run, tmp_path):
    store = Store(str(shutil.copytree(run.store.path, tmp_path / "store")))
    own = with_mining(run).model_copy(update={"store": StoreConfig(path=str(tmp_path / "store"))})
    changes = tmp_path / "changes.jsonl"
    changes.write_text(json.dumps({"id": "new", "title": "T", "text": "A new passage."}) + "\n")
    mine(own)
    before = read_questions(Corpus.open(store, "corpus"), "mined")

    def change(what: str, count: int, total: int) -> None:
        if (what, count) == ("mine", 1):
            update(own.prepare, store, str(changes))

    mine(with_mining(own, rank_from=3), change)
    corpus = Corpus.open(store, "corpus")
    assert "new" in corpus.get(["new"])
    after = read_questions(corpus, "mined")
    assert [question.id for question in after] == [question.id for question in before]
    assert [question.hard_negative_ids for question in after] != [question.hard_negative_ids for question in before]


@pytest.mark.parametrize(
    ("train", "missing"),
    [
        ({"num_hard_negatives": 0}, ["train.questions=asked", "train.num_hard_negatives=1"]),
        ({"num_hard_negatives": 3, "questions": "asked"}, []),
    ],
)
def test_the_command_after_mining_trains_with_its_negatives(run, tmp_path, capsys, train, missing):
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(run.model_dump(mode="json") | {"train": train}))
    with pytest.raises(SystemExit):
        main(["mine", str(path), "mine.num_negatives=2"])
    *_, line = capsys.readouterr().err.splitlines()
    command, _, words = line.partition(f"next: mvr-ray train {path} ")
    assert command == "" and words.split() == ["mine.num_negatives=2", *missing, "train.hard_negatives=mined"]
    own = load_run(path, words.split())
    corpus = Corpus.open(Store(run.store.path), "corpus")
    assert any(example.negatives for example in open_question_examples(corpus, own.train).get(range(20), 0))


@pytest.mark.data
def test_a_draw_depends_on_the_seed_and_the_question_alone(run):
    corpus = Corpus.open(Store(run.store.path), "corpus")
    ids = [passage.id for passage in corpus][:30]
    question = Question("q", "Who?", ("nothing like this",))

    def draw(seed: int, number: int) -> tuple[str, ...]:
        cfg = MineConfig(num_negatives=5, sample=True, seed=seed)
        return choose_negatives(filter_hits(question, (), ids, corpus, AnswerMatcher(), cfg), cfg, number=number).ids

    assert draw(0, 1) == draw(0, 1)
    assert len({draw(0, 1), draw(0, 2), draw(1, 1)}) == 3
    assert [ids.index(i) for i in draw(0, 1)] == sorted(ids.index(i) for i in draw(0, 1))


@pytest.mark.data
def test_an_empty_window_a_missing_set_and_one_that_would_be_cut_are_refused(run):
    with pytest.raises(ConfigError, match=r"rank_from is 9 and mine\.rank_to 9"):
        mine(with_mining(run, rank_from=9, rank_to=9))
    with pytest.raises(ConfigError, match=r"output is 'asked', as mine\.questions, .*; give another mine\.output"):
        mine(with_mining(run, output="asked", max_passage_questions=1))
    missing = run.model_copy(update={"mine": MineConfig(questions="nobody")})
    with pytest.raises(MissingInputError, match="'nobody' not found"):
        mine(missing)


@pytest.mark.data
@pytest.mark.usefixtures("without_ray")
def test_mining_with_the_index_takes_from_its_ranking(run, tiny_backbone):
    own = run.encoder.model_copy(update={"backbone": str(tiny_backbone)})
    run = with_mining(run, method="index", rank_to=8, num_negatives=3).model_copy(update={"encoder": own})
    index(run)
    report = mine(run)
    store = Store(run.store.path)
    corpus = Corpus.open(store, "corpus")
    questions, mined_questions = (read_questions(only_corpus(store), name)[:10] for name in ("asked", "mined"))
    with open_router(run, local=True) as router:
        answer = router.search_text([question.text for question in questions], 8)
    for question, one, hits in zip(questions, mined_questions, answer.hits):
        texts = corpus.get(hit.passage_id for hit in hits)
        expected = [
            hit.passage_id
            for hit in hits
            if hit.passage_id not in question.positive_ids
            and not has_answer(texts[hit.passage_id].text, question.answers)
        ]
        assert list(one.hard_negative_ids) == expected[:3]
    assert report.method == "index"
