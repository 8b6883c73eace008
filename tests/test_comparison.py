"""Two rankings compared question by question, against counting by hand."""

import gzip
import json
from pathlib import Path

import ir_measures
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mvr_ray.comparison import compare, difference
from mvr_ray.core.judging.metrics import cluster_interval, interval_over_seeds, paired_test
from mvr_ray.errors import ConfigError, DataError
from mvr_ray.store.formats.question_ranks import QuestionRanks, question_ranks_bytes, read_question_ranks
from mvr_ray.store.formats.rankings import RankedPassage, RankedQuestion, RankingFormat, write_ranking
from mvr_ray.types import Question


def ranking(path: Path, ranks: list[int | None]) -> Path:
    """A DPR ranking of five passages a question, whose answer stands at this rank (None: nowhere)."""
    rows = [
        {
            "question": f"q{i}",
            "answers": ["a"],
            "ctxs": [{"id": str(j), "title": "", "text": "", "score": "1", "has_answer": j == at} for j in range(1, 6)],
        }
        for i, at in enumerate(ranks)
    ]
    path.write_text(json.dumps(rows))
    return path


def test_accuracies_and_difference_are_counted_by_hand(tmp_path: Path) -> None:
    first = ranking(tmp_path / "a.json", [1, 2, None, 1])
    second = ranking(tmp_path / "b.json", [1, 1, 5, 3])
    top1, top5 = compare(first, second, [1, 5])
    assert (top1.first, top1.second, top1.difference, top1.questions) == (50, 50, 0, 4)
    assert (top5.first, top5.second, top5.difference) == (75, 100, 25)


def test_a_ranking_differs_from_itself_by_nothing(tmp_path: Path) -> None:
    same = ranking(tmp_path / "a.json", [1, 2, None] * 20)
    assert [(row.difference, row.p) for row in compare(same, same, [1, 5])] == [(0, 1), (0, 1)]


def test_an_interval_of_too_few_questions_is_none_and_a_warning_says_so(tmp_path: Path, caplog) -> None:
    first, second = ranking(tmp_path / "a.json", [2, 2]), ranking(tmp_path / "b.json", [1, 1])
    [row] = compare(first, second, [1])
    assert row.difference == 100 and np.isnan([row.low, row.high]).all()
    assert caplog.messages == ["no interval, as articles agree: metrics=top-1 articles=2"]


def test_a_large_difference_is_distinguished_from_chance(tmp_path: Path) -> None:
    first, second = ranking(tmp_path / "a.json", [2] * 60), ranking(tmp_path / "b.json", [1] * 50 + [2] * 10)
    [row] = compare(first, second, [1])
    assert row.p < 0.001
    [back] = compare(second, first, [1])
    assert back.p == pytest.approx(row.p, abs=1e-3)


def test_a_ranking_differs_from_its_own_first_hits_by_nothing_at_any_cut_off(tmp_path: Path, caplog) -> None:
    names = [f"p{rank}" for rank in range(100)]
    rows = [
        RankedQuestion(
            Question(f"q{i}", f"q{i}", ("a",)),
            [RankedPassage(name, "", "", 1 - rank / 100, rank == at) for rank, name in enumerate(names)],
        )
        for i, at in enumerate([0, 3, 10, 50] * 10)
    ]
    first_hits = [row._replace(passages=row.passages[:20]) for row in rows]
    for form in ("jsonl", "parquet", "trec"):
        deep, shallow = tmp_path / f"deep.{form}", tmp_path / f"shallow.{form}"
        write_ranking(rows, deep, form)
        write_ranking(first_hits, shallow, form)
        qrels = tmp_path / "qrels"
        qrels.write_text("".join(f"q{i} 0 p{at} 1\n" for i, at in enumerate([0, 3, 10, 50] * 10)))
        caplog.clear()
        results = compare(shallow, deep, qrels=qrels)
        metrics = ["top-1", "top-5", "top-20", "gold/mrr", "gold/ndcg@10"]
        assert [(row.metric, row.difference, row.p) for row in results] == [(metric, 0, 1) for metric in metrics]
        assert caplog.messages[0] == f"cut-offs left out: k=100 ranking={shallow} depth=20"
        assert [row.metric for row in compare(deep, deep, qrels=qrels)] == [*metrics[:3], "top-100", *metrics[3:]]
        with pytest.raises(ConfigError, match=r"-k is 21, but .*shallow.* is known to rank only 20 passages"):
            compare(deep, shallow, [20, 21], qrels=qrels)


def test_rankings_of_different_questions_are_refused(tmp_path: Path) -> None:
    first, second = ranking(tmp_path / "a.json", [1, 1]), ranking(tmp_path / "b.json", [1])
    with pytest.raises(DataError, match="rank different questions: 1 are in only one of them"):
        compare(first, second, [1])


def test_what_is_no_ranking_is_refused(tmp_path: Path) -> None:
    wrong = tmp_path / "w.json"
    wrong.write_text('[{"question": "q"}]')
    with pytest.raises(DataError, match="entry 1: no question with its ctxs"):
        compare(wrong, wrong, [1])
    wrong.write_text('[{"question": "q", "answers": [], "ctxs": [{"has_answer": false}]}]')
    with pytest.raises(DataError, match="entry 1: it is not known which passages answer 'q'"):
        compare(wrong, wrong, [1])
    with pytest.raises(DataError, match="does not exist"):
        compare(tmp_path / "none.json", wrong, [1])
    with pytest.raises(ConfigError, match="-k is 0"):
        compare(wrong, wrong, [0])
    (tmp_path / "w.parquet").write_text("none")
    with pytest.raises(DataError, match="is not a Parquet ranking of"):
        compare(tmp_path / "w.parquet", wrong, [1])
    (tmp_path / "run.trec").write_text("1 Q0 2 1 0.5 tag\n")
    with pytest.raises(ConfigError, match="give --qrels FILE"):
        compare(tmp_path / "run.trec", wrong, [1])


def test_every_format_of_a_ranking_gives_the_same_comparison(tmp_path: Path) -> None:
    ranks = {"a": [1, 2, None, 1], "b": [1, 1, 5, 3]}
    (tmp_path / "qrels").write_text("".join(f"q{i} 0 right 1\nq{i} 0 wrong 0\n" for i in range(4)))
    paths = {name: write_formats(tmp_path / name, at) for name, at in ranks.items()}
    expected = compare(ranking(tmp_path / "a.json", ranks["a"]), ranking(tmp_path / "b.json", ranks["b"]), [1, 5])
    for form, first in paths["a"].items():
        for other, second in paths["b"].items():
            if "trec" not in (form, other):
                assert compare(first, second, [1, 5]) == expected, (form, other)
            if "dpr" not in (form, other):
                *by_cutoff, _ = compare(first, second, [1, 5], qrels=tmp_path / "qrels")
                assert by_cutoff == expected, (form, other)
                continue
            with pytest.raises(ConfigError) as refusal:
                compare(first, second, [1, 5], qrels=tmp_path / "qrels")
            assert str(refusal.value) == (
                f"compare: {first if form == 'dpr' else second} names its questions by their texts, so "
                f"{tmp_path / 'qrels'} does not say which passages count; retrieve it again with format=jsonl or "
                f"format=parquet, which write their ids"
            )


@pytest.mark.parametrize("form", ["dpr", "jsonl", "pyserini"])
def test_a_compressed_ranking_with_blanks_around_questions_is_compared_as_the_plain_one(
    tmp_path: Path, form: RankingFormat
) -> None:
    ranks = [1, 2, None, 1]
    path = write_formats(tmp_path / "a", ranks)[form]
    rows = [RankedQuestion(Question(f"q{i}", f" q{i}\n", ("a",)), hits(at)) for i, at in enumerate(ranks)]
    write_ranking(rows, tmp_path / "blanks", form)
    gzip_file = tmp_path / f"{path.name}.gz"
    gzip_file.write_bytes(gzip.compress((tmp_path / "blanks").read_bytes()))
    [row] = compare(path, gzip_file, [1])
    assert (row.first, row.second) == (50, 50)


@pytest.mark.parametrize("kind", ["dpr", "jsonl", "parquet"])
def test_a_ranking_is_read_by_its_ending_in_capitals_and_compressed_too(tmp_path: Path, kind: str) -> None:
    plain = write_formats(tmp_path / "plain", [0, 2, None])[kind]
    copies = [plain.with_suffix(plain.suffix.upper())]
    copies += [plain.with_name(f"{plain.name}.gz")] * (kind != "parquet")
    for copy in copies:
        copy.write_bytes(gzip.compress(plain.read_bytes()) if copy.suffix == ".gz" else plain.read_bytes())
        assert [row.difference for row in compare(plain, copy, [1, 2])] == [0, 0]


def test_line_separators_of_unicode_in_texts_end_no_line_and_an_error_names_its_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    hit = RankedPassage("p", "", "\u2028", 1.0, True)
    rows = [RankedQuestion(Question(f"q{i}", "a\u2028b\u2029c\u0085d?", ("a",)), [hit]) for i in range(3)]
    write_ranking(rows, path, "jsonl")
    [row] = compare(path, path, [1])
    assert (row.first, row.questions) == (100, 3)
    lines = path.read_text(encoding="utf-8").split("\n")
    path.write_text("\n".join([lines[0], "", lines[1], lines[2][:-9]]), encoding="utf-8")
    with pytest.raises(DataError, match=r"a\.jsonl:4: not valid JSON: .*retrieve"):
        compare(path, path, [1])
    path.write_text(f"{lines[0]}\n[]\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"a\.jsonl:2: not a JSON object"):
        compare(path, path, [1])
    document = tmp_path / "b.json"
    document.write_text("[\n{]")
    with pytest.raises(DataError, match=r"b\.json:2: not valid JSON: .*"):
        compare(document, path, [1])
    question = '"q1": {"question": "q", "contexts": []}'
    document.write_text(f"{{{question}, {question}}}")
    with pytest.raises(DataError, match=r"b\.json:1: not valid JSON: an object has the key 'q1' twice"):
        compare(document, path, [1])


def test_questions_of_the_same_text_are_compared_in_their_order(tmp_path: Path) -> None:
    rows = [RankedQuestion(Question(f"q{i}", "why?", ("a",)), hits(at)) for i, at in enumerate([1, 3])]
    write_ranking(rows, tmp_path / "a.json", "dpr")
    write_ranking(rows, tmp_path / "b.jsonl", "jsonl")
    [row] = compare(tmp_path / "a.json", tmp_path / "b.jsonl", [1])
    assert (row.first, row.second, row.questions) == (50, 50, 2)


@pytest.mark.parametrize("form", ["trec", "jsonl", "parquet"])
def test_judgements_count_for_both_sides_in_place_of_answers(tmp_path: Path, form: str) -> None:
    (tmp_path / "qrels").write_text("q0 0 other2 1\nq1 0 right 1\n")
    rows = [RankedQuestion(Question(f"q{i}", f"question {i}", ("a",)), hits(1)) for i in range(3)]
    first, second = tmp_path / f"a.{form}", tmp_path / "b.jsonl"
    write_ranking(rows, first, form)
    write_ranking(rows, second, "jsonl")
    row, _ = compare(first, second, [1], qrels=tmp_path / "qrels")
    assert (row.first, row.second, row.questions) == (50, 50, 2)


def test_judgements_count_for_a_file_of_question_ranks_too(tmp_path: Path) -> None:
    """The same ranking on both sides: an answer is first everywhere, the gold passage first or second."""
    ids, at = [f"q{i}" for i in range(20)], [1 + i % 2 for i in range(20)]
    part = QuestionRanks("ours", "dev", ids, ids, [0] * 20, [rank - 1 for rank in at])
    (tmp_path / "questions.parquet").write_bytes(question_ranks_bytes([part]))
    (tmp_path / "qrels").write_text("".join(f"{i} 0 right 1\n" for i in ids))
    rows = [RankedQuestion(Question(i, i, ("a",)), hits(rank)) for i, rank in zip(ids, at)]
    write_ranking(rows, tmp_path / "theirs.trec", "trec")
    sides = f"{tmp_path}/questions.parquet:ours", tmp_path / "theirs.trec"
    top1, mrr = compare(*sides, [1], qrels=tmp_path / "qrels")
    assert (top1.first, top1.second, top1.p) == (50, 50, 1) and mrr.difference == 0
    without_gold = part._replace(gold_ranks=[None] * 20)
    (tmp_path / "questions.parquet").write_bytes(question_ranks_bytes([without_gold]))
    with pytest.raises(ConfigError, match=r"questions\.parquet:ours has no ranks of gold passages"):
        compare(*sides, [1], qrels=tmp_path / "qrels")


def test_a_difference_of_seeds_that_disagree_is_not_certain_however_alike_the_articles_are() -> None:
    better, than = np.repeat([[1.0], [0.0], [0.4]], 20, axis=1), np.full((3, 20), 0.4)
    gap = difference(better, than, range(20))
    assert gap.articles_p < 0.001 and gap.p == gap.paired_t > 0.8
    assert difference(better, than[:1], range(20)).p == gap.p, "against an untrained system, too"
    assert difference(better[:1], than[:1], range(20)).p == gap.articles_p


def test_two_trainings_of_one_method_seldom_differ() -> None:
    rng, false_alarms = np.random.default_rng(0), 0
    for _ in range(60):
        ease = rng.beta(4, 4, 50)[:, None]
        both = [
            (rng.random((5, 50, 8)) < ease + rng.normal(0, 0.03, (5, 1, 1))).reshape(5, 400).astype(float)
            for _ in range(2)
        ]
        false_alarms += difference(*both, np.repeat(np.arange(50), 8)).p < 0.05
    assert false_alarms <= 6


def test_judgements_that_no_side_can_use_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--qrels has no effect on FILE:SYSTEM"):
        compare("a.parquet:one", "a.parquet:two", qrels=tmp_path / "qrels")


def test_a_question_set_that_no_side_can_use_is_refused(tmp_path: Path) -> None:
    same = ranking(tmp_path / "a.json", [1])
    with pytest.raises(ConfigError, match="--questions dev has no effect on rankings"):
        compare(same, same, question_set="dev")


def test_only_questions_with_a_relevant_passage_are_compared(tmp_path: Path, caplog) -> None:
    rows = [RankedQuestion(Question(f"q{i}", f"question {i}", ("a",)), hits(1)) for i in range(3)]
    write_ranking(rows, tmp_path / "a.trec", "trec")
    qrels = tmp_path / "qrels"
    qrels.write_text("q0 0 right 1\nq0 0 other2 0\nq1 0 right 0\nq2 0 right -1\nunranked 0 right 2\n")
    row, _ = compare(tmp_path / "a.trec", tmp_path / "a.trec", [1], qrels=qrels)
    assert (row.first, row.second, row.questions) == (50, 50, 2)
    assert caplog.messages[0] == "questions left out whose judged passages are all irrelevant (trec_eval: 0): 2"
    lines = (tmp_path / "a.trec").read_text().splitlines()
    (tmp_path / "b.trec").write_text("\n".join([*lines, lines[0]]))
    with pytest.raises(DataError, match=r"question 'q0' ranks passage '.*' twice; keep the better rank"):
        compare(tmp_path / "a.trec", tmp_path / "b.trec", [1], qrels=qrels)
    write_ranking([rows[0], *rows], tmp_path / "b.jsonl", "jsonl")
    with pytest.raises(DataError, match=r"b\.jsonl ranks question 'q0' twice; give each question set a file"):
        compare(tmp_path / "a.trec", tmp_path / "b.jsonl", [1], qrels=qrels)


def test_gold_passages_of_a_question_file_count_as_judgements_do(tmp_path: Path) -> None:
    rows = [RankedQuestion(Question(f"q{i}", f"question {i}", ("a",)), hits(1 + i)) for i in range(3)]
    write_ranking(rows, tmp_path / "a.trec", "trec")
    questions = [
        {"id": "q0", "question": "question 0", "positive_ids": ["right"]},
        {"id": "q1", "question": "question 1", "positive_ids": ["other1", "right"]},
        {"id": "q2", "question": "question 2", "positive_ids": []},
    ]
    for name, text in (
        ("qrels", "q0 0 right 1\nq1 0 other1 1\nq1 0 right 1\n"),
        ("own.jsonl", "".join(json.dumps(one) + "\n" for one in questions)),
    ):
        (tmp_path / name).write_text(text)
    rows, own = (
        compare(tmp_path / "a.trec", tmp_path / "a.trec", [1], qrels=tmp_path / name) for name in ("qrels", "own.jsonl")
    )
    assert rows[0].questions == 2 and [row[:4] for row in own] == [row[:4] for row in rows]
    (tmp_path / "own.jsonl").write_text(json.dumps(questions[2]) + "\n")
    with pytest.raises(DataError, match=r"judges no passage relevant; give --qrels questions with gold passages"):
        compare(tmp_path / "a.trec", tmp_path / "a.trec", [1], qrels=tmp_path / "own.jsonl")


@pytest.mark.parametrize("key", ["id", "passage_id", "psg_id", "docid"])
def test_hits_of_every_form_are_judged_by_their_ids(tmp_path: Path, key: str) -> None:
    file, qrels = tmp_path / "a.json", tmp_path / "qrels"
    file.write_text(json.dumps([{"id": "q0", "question": "who?", "ctxs": [{key: "d2"}, {key: "d1"}]}]))
    qrels.write_text("q0 0 d1 1\n")
    assert [row.first for row in compare(file, file, [1, 2], qrels=qrels)] == [0, 100, 50]


def test_judgements_that_cannot_judge_a_run_are_refused(tmp_path: Path) -> None:
    run, qrels = tmp_path / "a.trec", tmp_path / "qrels"
    write_ranking([RankedQuestion(Question("q0", "question", ("a",)), hits(1))], run, "trec")
    with pytest.raises(DataError) as refusal:
        compare(run, run, [1], qrels=qrels)
    assert str(refusal.value) == f"qrels {qrels} does not exist or is not a file; give --qrels the file of judgements"
    for text in ("", "q0 0 right 0\n"):
        qrels.write_text(text)
        with pytest.raises(DataError) as refusal:
            compare(run, run, [1], qrels=qrels)
        assert str(refusal.value) == (
            f"qrels {qrels} judges no passage relevant; give --qrels a file with grades above 0"
        )
    qrels.write_text("x1 0 right 1\nx2 0 right 1\n")
    with pytest.raises(DataError) as refusal:
        compare(run, run, [1], qrels=qrels)
    assert str(refusal.value) == (
        f"{run} ranks none of the 2 questions that {qrels} judges (first: 'x1'; the ranking's first: 'q0'); give "
        f"--qrels the judgements of its question set"
    )


@given(st.data())
def test_a_run_with_equal_scores_is_ranked_as_trec_eval_ranks_it(tmp_path_factory, data: st.DataObject):
    """Scores that differ below 32 bits are equal too; ranks say nothing."""
    scores = st.sampled_from([1.0, 1.0 + 1e-9, 0.5, -2.0])
    run = data.draw(st.dictionaries(st.sampled_from(["10", "9", "a", "b", "C"]), scores, min_size=2))
    relevant = data.draw(st.sampled_from(sorted(run)))
    folder = tmp_path_factory.mktemp("run")
    lines = [f"q Q0 {name} {rank} {score:.12f} tag\n" for rank, (name, score) in enumerate(run.items(), 1)]
    (folder / "run").write_text("".join(lines))
    (folder / "qrels").write_text(f"q 0 {relevant} 1\n")
    read_run, qrels = ir_measures.read_trec_run(str(folder / "run")), ir_measures.read_trec_qrels(str(folder / "qrels"))
    measures = [ir_measures.Success @ 1, ir_measures.RR]
    expected = ir_measures.calc_aggregate(measures, list(qrels), list(read_run))
    rows = compare(folder / "run", folder / "run", [1], qrels=folder / "qrels")
    assert [row.first for row in rows] == pytest.approx([100 * expected[measure] for measure in measures])


def test_graded_judgements_of_two_runs_give_the_measures_of_trec_eval(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    names = [f"p{at}" for at in range(30)]
    grades = rng.choice([0, 0, 0, 1, 2, 3], (20, len(names)))
    grades[:, 0] = 1  # trec_eval counts questions without a relevant passage as 0
    qrels = tmp_path / "qrels"
    qrels.write_text(
        "".join(f"q{q} 0 {name} {own[at]}\n" for q, own in enumerate(grades) for at, name in enumerate(names))
    )
    for file in ("a", "b"):
        scores = rng.integers(0, 8, grades.shape)
        lines = (f"q{q} Q0 {name} 0 {own[at]} tag\n" for q, own in enumerate(scores) for at, name in enumerate(names))
        (tmp_path / file).write_text("".join(lines))
    rows = {row.metric: row for row in compare(tmp_path / "a", tmp_path / "b", [5], qrels=qrels)}
    measures = {"top-5": ir_measures.Success @ 5, "gold/mrr": ir_measures.RR, "gold/ndcg@10": ir_measures.nDCG @ 10}
    assert list(rows) == list(measures)
    for side, file in (("first", "a"), ("second", "b")):
        read = list(ir_measures.read_trec_qrels(str(qrels))), list(ir_measures.read_trec_run(str(tmp_path / file)))
        expected = ir_measures.calc_aggregate(list(measures.values()), *read)
        for metric, measure in measures.items():
            assert getattr(rows[metric], side) == pytest.approx(100 * expected[measure]), (metric, side)


FORMATS = {"dpr": ".json", "jsonl": ".jsonl", "parquet": ".parquet", "trec": ".trec", "pyserini": ".pyserini.json"}


def write_formats(path: Path, ranks: list[int | None]) -> dict[str, Path]:
    """The ranking in every format."""
    rows = [RankedQuestion(Question(f"q{i}", f"q{i}", ("a",)), hits(at)) for i, at in enumerate(ranks)]
    for form, suffix in FORMATS.items():
        write_ranking(rows, path.with_suffix(suffix), form)
    return {form: path.with_suffix(suffix) for form, suffix in FORMATS.items()}


def hits(at: int | None) -> list[RankedPassage]:
    names = ["right" if rank == at else f"other{rank}" for rank in range(1, 6)]
    return [RankedPassage(name, "", "", 1 / rank, rank == at) for rank, name in enumerate(names, 1)]


@pytest.fixture
def ranks_file(tmp_path: Path) -> Path:
    """Two systems, one of them with two seeds, on six questions of three articles, and one on another set."""
    articles = ["a", "a", "b", "b", "c", "c"]
    ids = [f"q{number}" for number in range(6)]

    def part(system: str, ranks: list[int | None], seed: int = 1, questions: str = "dev") -> QuestionRanks:
        return QuestionRanks(system, questions, ids, articles, ranks, [None] * 6, seed)

    path = tmp_path / "questions.parquet"
    path.write_bytes(
        question_ranks_bytes(
            [
                part("one vector", [1, 1, -1, 0, 4, 5]),
                part("several: views", [0, 0, 0, 0, 0, -1]),
                part("several: views", [0, 0, 2, 0, -1, -1], seed=2),
                part("several: views", [0] * 6, questions="dev_unseen"),
            ]
        )
    )
    return path


def test_systems_of_a_file_of_question_ranks_are_compared_over_seeds_and_articles(ranks_file: Path, caplog) -> None:
    [row] = compare(f"{ranks_file}:one vector", f"{ranks_file}:several: views", [1], question_set="dev")
    one, several = np.array([0, 0, 0, 1, 0, 0.0]), np.array([1, 1, 0.5, 1, 0.5, 0])
    articles = [0, 0, 1, 1, 2, 2]
    assert (row.first, row.second) == pytest.approx((100 / 6, 400 / 6))
    seeds = np.array([[1, 1, 1, 1, 1, 0], [1, 1, 0, 1, 0, 0.0]])
    assert (row.low, row.high) == pytest.approx(tuple(interval_over_seeds(100 * (seeds - one), articles)))
    assert row.high - row.low > np.ptp(cluster_interval(100 * (several - one), articles))
    assert row.p == paired_test(one, several, articles) == 0.25
    assert row.questions == 6
    system = f"{ranks_file}:one vector"
    expected = f"one seed, whose spread is in no interval and no p, unless it is untrained: ranking={system}"
    assert caplog.messages == [expected]


def test_a_seed_of_one_system_is_compared_with_the_same_seed_of_the_other(ranks_file: Path) -> None:
    first, second = (part for part in read_question_ranks(ranks_file)[1:] if part.questions == "dev")
    systems = {
        "both": [first, second],
        "reverse": [second, first],
        "others": [first._replace(seed=2), second._replace(seed=3)],
    }
    parts = [part._replace(system=system) for system, own in systems.items() for part in own]
    ranks_file.write_bytes(question_ranks_bytes(parts))
    both, reverse, others = (f"{ranks_file}:{system}" for system in systems)
    [row] = compare(both, reverse, [1])
    assert (row.difference, row.p) == (0, 1)
    with pytest.raises(ConfigError, match=r"both has seeds 1, 2 and .*others has 2, 3; compare systems of the same"):
        compare(both, others, [1])


def write_report(folder: Path, content: object) -> None:
    (folder / "report.json").write_text(json.dumps(content))


def test_question_ranks_are_as_deep_as_their_report_tells_and_else_as_their_deepest_rank(
    ranks_file: Path, caplog
) -> None:
    one = f"{ranks_file}:one vector"

    def cutoffs() -> list[str]:
        return [row.metric for row in compare(one, one, question_set="dev")]

    assert cutoffs() == ["top-1", "top-5"]
    assert caplog.messages[0] == f"cut-offs left out: k=20,100 ranking={one} depth=6"
    with pytest.raises(ConfigError, match=r"-k is 7, but .* is known to rank only 6 passages"):
        compare(one, one, [7], question_set="dev")
    evaluation = {"report": {"rows": [{"metric": f"answer/top-{k}"} for k in (1, 20)] + [{"metric": "gold/mrr"}]}}
    write_report(ranks_file.parent, {"stage": "evaluate", **evaluation})
    assert cutoffs() == ["top-1", "top-5", "top-20"]
    grid = {"report": {"tried": [{"rounds": [{"sets": [{"answer": {"1": 0.5, "100": 1.0}}]}]}]}}
    write_report(ranks_file.parent, {"steps": [{"report": {"passages": 9}}, grid]})
    assert cutoffs() == ["top-1", "top-5", "top-20", "top-100"]
    write_report(ranks_file.parent, {"steps": [evaluation, grid]})
    assert cutoffs() == ["top-1", "top-5", "top-20"]
    write_report(ranks_file.parent, {"steps": [grid, {"report": {"sets": [{"rows": [{"k": 5}, {"k": 20}]}]}}]})
    assert cutoffs() == ["top-1", "top-5", "top-20"]
    (ranks_file.parent / "report.json").write_text("{")
    with pytest.raises(DataError, match=r"report\.json, which tells how deep questions\.parquet is, is not JSON"):
        cutoffs()


def test_gold_passages_count_where_no_question_has_answers(ranks_file: Path) -> None:
    gold_file = ranks_file.with_name("judged.parquet")
    parts = read_question_ranks(ranks_file)
    gold_file.write_bytes(
        question_ranks_bytes([p._replace(answer_ranks=[None] * 6, gold_ranks=p.answer_ranks) for p in parts])
    )
    rows = [
        compare(f"{file}:one vector", f"{file}:several: views", [1, 5], 0, None, "dev")
        for file in (ranks_file, gold_file)
    ]
    by_answers, (*by_gold, ranks) = rows
    assert by_answers == by_gold and by_gold[0].questions == 6
    reciprocals = [np.mean([1 / 2, 1 / 2, 0, 1, 1 / 5, 1 / 6]), np.mean([1, 1, 2 / 3, 1, 1 / 2, 0])]
    assert (ranks.metric, ranks.first, ranks.second) == ("gold/mrr", *(pytest.approx(100 * one) for one in reciprocals))


def test_questions_with_answers_and_gold_passages_are_compared_by_both(ranks_file: Path) -> None:
    both = ranks_file.with_name("both.parquet")
    parts = [part for part in read_question_ranks(ranks_file) if part.questions == "dev"][:2]
    gold = {"gold_ranks": [0, 0, 1, -1, None, 9], "gold_ndcgs": [1, 1, 0.63, 0, None, 0.3]}
    both.write_bytes(question_ranks_bytes([parts[0]._replace(**gold), parts[1]._replace(gold_ranks=[0] * 6)]))
    one, several = f"{both}:one vector", f"{both}:several: views"
    rows = compare(one, one, [1])
    assert [(row.metric, row.questions) for row in rows] == [("top-1", 6), ("gold/mrr", 5), ("gold/ndcg@10", 5)]
    assert [row.first for row in rows] == pytest.approx([100 / 6, 100 * (2 + 1 / 2 + 1 / 10) / 5, 58.6])
    assert [(row.metric, row.second, row.questions) for row in compare(one, several, [1])[1:]] == [("gold/mrr", 100, 5)]


def test_a_system_or_set_that_a_file_does_not_hold_is_named_beside_those_that_it_holds(ranks_file: Path) -> None:
    several = f"{ranks_file}:several: views"
    with pytest.raises(ConfigError, match=r"no system ' many'.*'one vector', 'several: views'"):
        compare(f"{ranks_file}: many", several, [1])
    with pytest.raises(ConfigError, match=r"questions\.parquet:SYSTEM, one of one vector, several: views"):
        compare(ranks_file, several, [1])
    with pytest.raises(ConfigError, match="several question sets; give --questions, one of dev, dev_unseen"):
        compare(several, several, [1])
    with pytest.raises(ConfigError, match="no question set 'train'; there are dev, dev_unseen"):
        compare(several, several, [1], question_set="train")
    three = [part._replace(seed=seed) for part in read_question_ranks(ranks_file)[:1] for seed in range(3)]
    (ranks_file.parent / "three.parquet").write_bytes(question_ranks_bytes(three))
    with pytest.raises(ConfigError, match=r"has seeds 0, 1, 2 and .* has 1, 2"):
        compare(f"{ranks_file.parent}/three.parquet:one vector", several, [1], question_set="dev")
    with pytest.raises(DataError, match="does not exist; `mvr-ray evaluate` and `mvr-ray study` write"):
        compare(f"{ranks_file.parent}/none.parquet:x", several, [1])
