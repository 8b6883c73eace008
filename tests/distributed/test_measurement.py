"""Evaluation measures systems in this process, without holding their hits."""

import tracemalloc
from collections.abc import Iterator

import pytest

from mvr_ray.distributed.evaluate import _Measurement, system_result
from mvr_ray.distributed.retrieve import QuestionSet
from mvr_ray.store.corpus import Corpus
from mvr_ray.store.files import Store
from mvr_ray.store.formats.rankings import RankedPassage, RankedQuestion
from mvr_ray.store.questions import read_questions


@pytest.mark.data
def test_a_measurement_holds_of_all_hits_the_gold_ones_and_its_figures_are_those_of_all(corpus_store, run_over):
    own, run = Corpus.open(Store(str(corpus_store)), "corpus"), run_over(corpus_store)
    dev_questions = read_questions(own, "dev")
    questions = [one._replace(id=f"{one.id} {at}") for at in range(25) for one in dev_questions]
    ids = [passage.id for passage in own]

    def rank() -> Iterator[RankedQuestion]:
        for at, question in enumerate(questions):
            names = (ids[(at + 7 * k) % 60] for k in range(60))
            hits = [RankedPassage(name, "", "", 1 / (k + 1), k == at % 90) for k, name in enumerate(names)]
            yield RankedQuestion(question, hits)

    measurement = _Measurement(run, own, [QuestionSet("dev", questions)])
    whole = system_result("all", "dev", list(rank()), measurement.articles["dev"], run.evaluate)
    tracemalloc.start()
    measurement.add("all", rank())
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert measurement.rows_and_ranks() == (whole.rows, [whole.ranks])
    assert any(row.value > 0 for row in whole.rows if row.metric.startswith("gold"))
    num_hits = 60 * len(questions)
    assert peak_bytes < 50 * num_hits, "a hit as an object takes 200 bytes"
