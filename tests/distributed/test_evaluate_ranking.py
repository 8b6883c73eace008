"""Rankings of any program are measured as the index is, and as trec_eval measures them."""

import json
import shutil
from pathlib import Path

import ir_measures
import numpy as np
import pytest
import yaml

from mvr_ray.cli import main
from mvr_ray.comparison import compare
from mvr_ray.config import RunConfig
from mvr_ray.distributed.evaluate import evaluate, evaluate_ranking
from mvr_ray.distributed.indexing.build_index import index
from mvr_ray.distributed.refine import refine
from mvr_ray.distributed.refinement.measure import Evaluator
from mvr_ray.distributed.refinement.report import REPORT_DEPTHS
from mvr_ray.distributed.retrieve import retrieve
from mvr_ray.errors import ConfigError, DataError, MissingInputError
from mvr_ray.store.corpus import Corpus
from mvr_ray.store.files import Store
from mvr_ray.store.formats.rankings import RankingFormat
from mvr_ray.store.questions import read_questions, write_questions
from mvr_ray.types import Question

pytestmark = [pytest.mark.data, pytest.mark.usefixtures("without_ray")]
Scores = dict[str, dict[str, float]]


@pytest.fixture(scope="module")
def store(corpus_store: Path, run_over, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index; set `graded` has four gold passages a question, and one more question that is a passage itself."""
    store = Path(shutil.copytree(corpus_store, tmp_path_factory.mktemp("ranked") / "store"))
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        index(run_over(store, resources={"local_passages": 1000}))
    corpus, rng = corpus_of(store), np.random.default_rng(3)
    dev = read_questions(corpus, "dev")
    ids = sorted({question.positive_ids[0] for question in dev})
    [own] = corpus.get(ids[:1]).values()
    texts = {f"g{at}": question.text for at, question in enumerate(dev[:12])}
    for name, texts_of_set in {"graded": texts, "graded-with-own": {**texts, own.id: own.text}}.items():
        golds = [(i, text, tuple(rng.choice(ids[1:], 4, replace=False).tolist())) for i, text in texts_of_set.items()]
        write_questions(
            corpus, name, [Question(i, text, (), gold, positive_grades=(1, 3, 2, 1)) for i, text, gold in golds]
        )
    return store


def corpus_of(store: Path) -> Corpus:
    return Corpus.open(Store(str(store)), "corpus")


def gold_of(store: Path, name: str) -> dict[str, dict[str, int]]:
    return {question.id: question.grade_of for question in read_questions(corpus_of(store), name)}


@pytest.fixture
def run_of(store: Path, run_over):
    """A run that measures these question sets."""

    def run(*names: str, k: tuple[int, ...] = (1, 5, 20)) -> RunConfig:
        return run_over(store, evaluate={"questions": list(names), "k": list(k)}, retrieve={"k": 25})

    return run


def write_run(path: Path, scores: Scores) -> Path:
    lines = (f"{q} Q0 {name} 0 {score} tag\n" for q, own in scores.items() for name, score in own.items())
    path.write_text("".join(lines))
    return path


@pytest.mark.parametrize(
    ("form", "file"),
    [
        ("trec", "other.trec"),
        ("dpr", "other.json"),
        ("pyserini", "other.json"),
        ("jsonl", "other.jsonl"),
        ("parquet", "other.parquet"),
    ],
)
def test_the_rankings_of_an_index_have_the_figures_of_the_index(
    run_of, tmp_path: Path, form: RankingFormat, file: str
) -> None:
    for name in ("dev", "graded-with-own"):
        run, path = run_of(name), tmp_path / file
        retrieve(run, name, path, form)
        expected, report = evaluate(run), evaluate_ranking(run, str(path))
        assert report.rows == [row._replace(system="other") for row in expected.rows]
        assert report.ranks == [own._replace(system="other") for own in expected.ranks]
        assert (report.configured_system, report.ranking) == ("other", str(path))


def test_a_question_that_is_a_hit_of_itself_makes_no_ranking_deeper(run_of, store: Path, tmp_path: Path) -> None:
    names = sorted({name for own in gold_of(store, "dev").values() for name in own})[1:10]
    questions, corpus = gold_of(store, "graded-with-own"), corpus_of(store)
    scores = {q: dict.fromkeys([*corpus.get([q]), *names], 1) for q in questions}
    assert max(map(len, scores.values())) == 10
    report = evaluate_ranking(run_of("graded-with-own"), str(write_run(tmp_path / "own.trec", scores)))
    assert report.rows and not any(row.metric.endswith("10") for row in report.rows)


@pytest.mark.parametrize("labels", ["answers", "gold"])
def test_refinement_measures_and_labels_no_question_as_a_hit_of_itself(
    run_over, store: Path, tmp_path: Path, labels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A question that is a passage is the best hit of itself: `evaluate` does not count it, and it is no negative."""
    copy = Path(shutil.copytree(store, tmp_path / "own"))
    corpus = Corpus.open(Store(str(copy)), "corpus")
    passages = list(corpus)[:20]
    answers = [other.text.split(".")[0] for other in passages[1:]]
    same = [
        Question(one.id, one.text, (answer,), (other.id,))
        for one, other, answer in zip(passages, passages[1:], answers)
    ]
    write_questions(corpus, "first", same[:9])
    write_questions(corpus, "second", same[9:])
    label, labelled_pairs = Evaluator.label, []

    def labels_of(evaluator: Evaluator, *args):
        result = label(evaluator, *args)
        pairs = {(row, one) for row, own in evaluator.own_of.items() for one in own}
        labelled_pairs.append((len(result.question_L), pairs.intersection(zip(result.question_L, result.passage_L))))
        return result

    monkeypatch.setattr(Evaluator, "label", labels_of)
    settings = {"questions": "first", "gate": ["second"], "labels": labels, "rounds": 1, "depth": 5}
    report = refine(run_over(copy, refine={**settings, "method": "passage", "max_heldout_loss": 100}))
    evaluation = evaluate(run_over(copy, evaluate={"questions": ["first", "second"], "k": [*REPORT_DEPTHS]}))
    value_of = {(row.questions, row.metric): row.value for row in evaluation.rows}
    for row in report.accuracy:
        metrics = [f"{row.kind}/top-{depth}" for depth in REPORT_DEPTHS]
        assert row.before == tuple(value_of[row.group, metric] for metric in metrics)
    assert {row.group for row in report.accuracy} == {"first", "second"}
    [(num_labels, own_pairs)] = labelled_pairs
    assert num_labels >= 9 * 5 and not own_pairs


def test_another_systems_run_has_the_figures_of_trec_eval(run_of, store: Path, tmp_path: Path, caplog) -> None:
    """Its scores have ties, and it lacks a question, which counts as a miss."""
    gold, rng = gold_of(store, "graded"), np.random.default_rng(7)
    names = sorted({name for own in gold_of(store, "dev").values() for name in own})[:20]
    scores = {q: dict(zip(names, rng.integers(0, 9, len(names)).tolist())) for q in [*gold][1:]}
    file = write_run(tmp_path / "lucene.v1.trec", scores)
    report = evaluate_ranking(run_of("graded"), str(file))
    assert "questions not ranked, which count as misses: 1 of 12 set=graded" in caplog.messages
    measures = {f"gold/recall@{k}": ir_measures.R @ k for k in (1, 5, 20)}
    measures |= {f"gold/top-{k}": ir_measures.Success @ k for k in (1, 5, 20)}
    measures |= {"gold/mrr": ir_measures.RR, "gold/ndcg@10": ir_measures.nDCG @ 10}
    expected = ir_measures.calc_aggregate(list(measures.values()), gold, list(ir_measures.read_trec_run(str(file))))
    assert {row.metric: row.value for row in report.rows} == pytest.approx(
        {metric: expected[measure] for metric, measure in measures.items()}
    )
    assert all(row.system == "lucene.v1" and row.low <= row.value <= row.high and row.n == 12 for row in report.rows)


def test_the_command_measures_a_run_that_compare_takes_beside_the_index(run_of, store: Path, tmp_path: Path, capsys):
    gold = gold_of(store, "dev")
    run_file = tmp_path / "run.yaml"
    run_file.write_text(yaml.safe_dump(run_of("dev", k=(1, 5)).model_dump(mode="json", exclude_unset=True)))
    others = sorted({name for own in gold.values() for name in own})[:12]
    scores = {q: dict.fromkeys(others, 0.5) | dict.fromkeys(own, 1.0) for q, own in gold.items()}
    best = write_run(tmp_path / "best.trec", scores)
    reports = []
    for words in ([], [f"ranking={best}"]):
        with pytest.raises(SystemExit) as end:
            main(["evaluate", str(run_file), "--json", *words])
        assert not end.value.code
        reports.append(json.loads(capsys.readouterr().out))
    assert [report["ranking"] for report in reports] == ["", str(best)]
    own, other = (report["questions_file"] for report in reports)
    rows = {row.metric: row for row in compare(f"{own}:index", f"{other}:best")}
    assert list(rows) == ["top-1", "top-5", "gold/mrr", "gold/ndcg@10"]
    for report, side in zip(reports, ("first", "second"), strict=True):
        values = {row["metric"]: 100 * row["value"] for row in report["rows"]}
        assert getattr(rows["top-5"], side) == pytest.approx(values["answer/top-5"])
        for metric in ("gold/mrr", "gold/ndcg@10"):
            assert getattr(rows[metric], side) == pytest.approx(values[metric])
    assert rows["gold/mrr"].second == 100 > rows["gold/mrr"].first


def test_what_ranks_other_questions_or_passages_or_too_few_is_refused(run_of, store: Path, tmp_path: Path, caplog):
    run, gold = run_of("dev"), gold_of(store, "dev")
    [first, *_] = gold
    scores: Scores = {q: dict.fromkeys(own, 1.0) for q, own in gold.items()}
    file = write_run(tmp_path / "a.trec", {**scores, first: {"wiki:7": 1.0}})
    missing = f"question '{first}': passage 'wiki:7' is not in corpus 'corpus'; rank the passages of this corpus"
    with pytest.raises(MissingInputError, match=missing):
        evaluate_ranking(run, str(file))
    write_run(file, {f"other-{q}": hits for q, hits in scores.items()})
    with pytest.raises(DataError, match=r"ranks none of the 40 questions of set 'dev' \(first: .*'other-"):
        evaluate_ranking(run, str(file))
    write_run(file, scores)
    file.write_text(file.read_text() + file.read_text().splitlines()[0] + "\n")
    with pytest.raises(DataError, match=f"question '{first}' ranks passage '.*' twice"):
        evaluate_ranking(run, str(file))
    lines = tmp_path / "a.jsonl"  # of two sets that number their questions alike
    rows = [
        {"id": first, "question": text, "hits": [{"id": name, "score": 1}]} for text in "ab" for name in gold[first]
    ]
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match=f"a.jsonl ranks question '{first}' twice; give each question set a file"):
        evaluate_ranking(run, str(lines))
    write_run(file, scores)
    with pytest.raises(ConfigError, match=r"evaluate\.k is 5 or more, but .* ranks only 1 passage a question"):
        evaluate_ranking(run_of("dev", k=(5, 20)), str(file))
    caplog.clear()
    report = evaluate_ranking(run, str(file))
    assert caplog.messages == [f"cut-offs left out: k=5,10,20 ranking={file} depth=1"]
    assert [row.metric for row in report.rows] == ["answer/top-1", "gold/top-1", "gold/mrr"]
    assert report.ranks[0].gold_ndcgs == ()
