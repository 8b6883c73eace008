"""What views are worth on a real index, against loops over every stored view."""

import math
from collections import Counter

import numpy as np
import pytest

from mvr_ray.core.encoder import DualEncoder
from mvr_ray.distributed.analyze import ALL_VIEWS, analyze
from mvr_ray.distributed.retrieve import evaluate
from mvr_ray.errors import ConfigError, MissingInputError
from mvr_ray.store import corpus, layout, manifest
from mvr_ray.store.corpus import Corpus
from mvr_ray.store.embeddings import EmbeddingShard
from mvr_ray.store.files import Store
from mvr_ray.types import Question

pytestmark = [pytest.mark.data, pytest.mark.ray]


@pytest.fixture(scope="module")
def stored(small_index) -> dict[str, dict[int, np.ndarray]]:
    found: dict[str, dict[int, np.ndarray]] = {}
    for entry in manifest.read(Store(str(small_index)), "index").shards:
        folder = small_index / layout.shard_dir("index", entry.digest)
        for block in EmbeddingShard.open(folder / layout.EMBEDDINGS).blocks():
            for row, passage_id in enumerate(block.ids):
                here = slice(block.row_ptr[row], block.row_ptr[row + 1])
                vectors = block.vectors_ND[here].astype(np.float64)
                found[passage_id] = dict(zip(block.view_numbers_N[here].tolist(), vectors))
    return found


def test_all_views_score_as_evaluate_says_and_each_alone_as_a_loop_over_its_vectors(small_index, run_over, stored):
    run = run_over(small_index)
    report = analyze(run)
    values = {(row.system, row.metric): row.value for row in report.rows}
    for row in evaluate(run).rows:
        assert values[ALL_VIEWS, row.metric] == row.value
    store = Store(str(small_index))
    questions = corpus.read_questions(store, "dev")
    encoder = DualEncoder.load(small_index / layout.encoder_dir("encoder", report.encoder_fingerprint))
    queries_QD = encoder.embed_queries([question.text for question in questions]).astype(np.float64)
    for view in range(4):
        there = sorted(passage for passage, views in stored.items() if view in views)
        scores_QP = queries_QD @ np.stack([stored[passage][view] for passage in there]).T
        best = [there[at] for at in scores_QP.argmax(axis=1)]
        found = np.mean([passage in question.positive_ids for passage, question in zip(best, questions)])
        assert values[f"view {view + 1}", "gold/top-1"] == pytest.approx(found)
    assert values[ALL_VIEWS, "gold/top-1"] > values["view 4", "gold/top-1"]


def test_what_wins_is_counted_as_a_slow_loop_counts_it(small_index, run_over, stored):
    report = analyze(run_over(small_index))
    store = Store(str(small_index))
    questions = corpus.read_questions(store, "dev")
    encoder = DualEncoder.load(small_index / layout.encoder_dir("encoder", report.encoder_fingerprint))
    texts = Corpus.open(store, "corpus").get(question.positive_ids[0] for question in questions)
    wins, right, lift, used = Counter(), [], [], {}
    for question in questions:
        own = stored[question.positive_ids[0]]
        query_D = encoder.embed_queries([question.text])[0].astype(np.float64)
        cosine = {v: query_D @ p / np.linalg.norm(query_D) / np.linalg.norm(p) for v, p in own.items()}
        winner = min(v for v, score in cosine.items() if score >= max(cosine.values()) - 1e-3)
        wins[winner] += 1
        used.setdefault(question.positive_ids[0], []).append(winner)
        answer = encoder.view_of_offset(texts[question.positive_ids[0]], question.answer_starts[0])
        right += [winner == answer] if answer >= 0 else []
        if len(cosine) > 1:
            others = sorted(cosine.values())[:-1]
            lift.append(max(cosine.values()) - np.mean(others))
    assert report.num_questions == len(questions)
    assert report.win_shares == pytest.approx([wins[view] / len(questions) for view in range(4)])
    assert report.answer_view_accuracy == pytest.approx(np.mean(right))
    assert report.lv == pytest.approx(np.mean(lift))
    entropies = [-sum(n / len(own) * math.log(n / len(own)) for n in Counter(own).values()) for own in used.values()]
    assert report.ppl == pytest.approx(np.mean([math.exp(entropy) for entropy in entropies]))
    assert 1 < report.ppl_answer < 4
    assert report.view_pair_cosine < 0.99
    table = report.attention_kl_table
    assert len(table) == 4 and all(table[view][view] == pytest.approx(0, abs=1e-9) for view in range(4))
    assert report.attention_kl == pytest.approx(np.mean([table[i][j] for i in range(4) for j in range(4) if i != j]))
    assert report.attention_kl > 0


def test_questions_that_cannot_be_asked_are_refused_by_name(small_index, own_index, run_over):
    with pytest.raises(ConfigError, match=r"analyze\.questions names no question set"):
        analyze(run_over(small_index, evaluate={"questions": []}))
    corpus.write_questions(Store(str(own_index)), "strays", [Question("q", "Who?", positive_ids=("nowhere",))])
    with pytest.raises(MissingInputError, match="no question of 'strays' has its passage in index 'index'"):
        analyze(run_over(own_index, analyze={"questions": "strays"}))


def test_one_view_has_nothing_to_compare(own_index, run_over):
    from mvr_ray.distributed.reindex import index

    run = run_over(own_index, encoder={"strategy": "mean"}, index={"name": "one"})
    index(run)
    report = analyze(run)
    assert {row.system for row in report.rows} == {ALL_VIEWS}
    values = report._asdict()
    assert [values[name] for name in ("lv", "ppl", "view_pair_cosine", "attention_kl")] == [None] * 4
