"""A ranking, a measurement, a tuning, an analysis, a reading and a mining that are stopped continue where they were."""

import json
import shutil
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path

import pytest
from prepared_corpus import only_corpus

from mvr_ray.config import EvaluateConfig, RunConfig
from mvr_ray.core.reading.cross_encoder import CrossEncoder
from mvr_ray.distributed import mine, result_store
from mvr_ray.distributed.evaluate import evaluate, tune
from mvr_ray.distributed.models import pair_spec, save_model
from mvr_ray.distributed.result_store import ResultStore
from mvr_ray.distributed.retrieve import QuestionRanker, retrieve
from mvr_ray.store import gc, paths
from mvr_ray.store.files import Store
from mvr_ray.store.model_records import CROSS_ENCODERS
from mvr_ray.store.questions import read_questions

NUM_BATCHES = 7
BATCHES = [json.dumps([number, "bird"]) for number in range(NUM_BATCHES)]


class WorkInterruption(Exception):
    pass


class Computation:
    """Computes results, notes for which batches, and stops before the batch `stop_at`."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.batches: list[str] = []
        self.stop_at = stop_at

    def __call__(self, batches: Sequence[str]) -> Iterator[str]:
        for batch in batches:
            if len(self.batches) == self.stop_at:
                raise WorkInterruption
            self.batches.append(batch)
            yield batch.upper()


@pytest.fixture
def store(tmp_path) -> Store:
    return Store(str(tmp_path / "store"))


@pytest.fixture
def saves_at_once(monkeypatch) -> None:
    monkeypatch.setattr(result_store, "SAVE_S", 0.0)


def staged_files(store: Store) -> list[Path]:
    return sorted(file for file in Path(store.root).rglob("*") if file.is_file() and "staging" in file.parts)


def results_of(store: Store, compute: Computation, inputs: object = "inputs") -> list[str]:
    with ResultStore(store, "index") as result_store:
        return list(result_store.map(inputs, BATCHES, compute))


@pytest.mark.usefixtures("saves_at_once")
@pytest.mark.parametrize("stop_at", range(NUM_BATCHES))
def test_each_batch_is_computed_once_and_nothing_stays(store, stop_at):
    with pytest.raises(WorkInterruption):
        results_of(store, Computation(stop_at))
    assert len(staged_files(store)) == stop_at
    rest = Computation()
    assert results_of(store, rest) == [batch.upper() for batch in BATCHES]
    assert rest.batches == BATCHES[stop_at:]
    assert not staged_files(store)


def test_what_takes_less_than_a_minute_stores_nothing_and_a_file_holds_what_came_since_the_last(store, monkeypatch):
    with pytest.raises(WorkInterruption):
        results_of(store, Computation(NUM_BATCHES - 1))
    assert not staged_files(store)
    monkeypatch.setattr(result_store, "SAVE_CHARS", 2 * len(BATCHES[0]))  # more than two are three
    with pytest.raises(WorkInterruption):
        results_of(store, Computation(NUM_BATCHES - 1))
    assert [file.name for file in staged_files(store)] == ["results-000000000.jsonl", "results-000000003.jsonl"]
    rest = Computation()
    assert results_of(store, rest) == [batch.upper() for batch in BATCHES]
    assert rest.batches == BATCHES[6:]


@pytest.mark.usefixtures("saves_at_once")
def test_damaged_results_and_those_of_other_inputs_are_not_taken(store, caplog):
    with pytest.raises(WorkInterruption):
        results_of(store, Computation(5))
    others = Computation()
    assert results_of(store, others, {"filter": {"opened": date(1950, 1, 23)}}) == [batch.upper() for batch in BATCHES]
    assert others.batches == BATCHES
    file = staged_files(store)[2]
    file.write_bytes(file.read_bytes().replace(b"BIRD", b"BARD"))
    rest = Computation()
    assert results_of(store, rest) == [batch.upper() for batch in BATCHES]
    assert rest.batches == BATCHES[2:]
    assert "stored results are computed again: " in caplog.text
    assert not staged_files(store)


@pytest.mark.usefixtures("saves_at_once")
def test_a_store_that_cannot_be_written_is_reported_once(store, monkeypatch, caplog):
    def refuse(*_: object) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr(Store, "write_bytes", refuse)
    assert results_of(store, Computation()) == [batch.upper() for batch in BATCHES]
    assert caplog.text.count("starts over, as its results cannot be stored: read-only") == 1


@pytest.mark.data
@pytest.mark.ray
@pytest.mark.usefixtures("saves_at_once")
def test_a_collection_removes_old_results_and_keeps_young_ones(own_index):
    store = Store(str(own_index))
    with pytest.raises(WorkInterruption):
        results_of(store, Computation(2))
    gc.collect(store, "index", 1, grace_s=3600)
    assert len(staged_files(store)) == 2
    gc.collect(store, "index", 1, grace_s=0)
    assert not staged_files(store)


class Calls:
    """Counts the calls of a method, and stops the `stop_at`-th."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
        self.count, self.stop_at, own = 0, -1, getattr(owner, name)

        def call(*arguments, **options):
            if self.count == self.stop_at:
                raise WorkInterruption
            self.count += 1
            return own(*arguments, **options)

        monkeypatch.setattr(owner, name, call)


@pytest.fixture
def run(lexical_index, run_over, tmp_path) -> RunConfig:
    root = shutil.copytree(lexical_index, tmp_path / "store")
    corpus = only_corpus(Store(str(root)))
    assert len(read_questions(corpus, "dev")) > 24
    sections = {"retrieve": {"batch": 8, "k": 5}, "search": {"hybrid": 3}, "evaluate": {"questions": ["dev"]}}
    return run_over(root, **sections, mine={"questions": "dev", "output": "mined", "method": "index", "rank_to": 9})


def stop_and_continue(calls: Calls, work, store: Store, stop_at: int) -> tuple[object, object]:
    """Results of `work` undisturbed, and stopped in one call and repeated; no call is made again but the last."""
    first = work()
    num_calls, calls.count = calls.count, 0
    calls.stop_at = stop_at
    with pytest.raises(WorkInterruption):
        work()
    assert staged_files(store)
    calls.count, calls.stop_at = 0, -1
    second = work()
    assert 0 < calls.count == num_calls - stop_at
    assert not staged_files(store)
    return first, second


@pytest.mark.data
@pytest.mark.ray
@pytest.mark.usefixtures("saves_at_once", "without_ray")
@pytest.mark.parametrize("stop_at", [1, 3])
def test_a_ranking_that_was_stopped_continues_to_the_same_bytes(run, tmp_path, monkeypatch, stop_at):
    def work() -> bytes:
        retrieve(run, "dev", tmp_path / "ranking.jsonl", "jsonl")
        return (tmp_path / "ranking.jsonl").read_bytes()

    calls = Calls(monkeypatch, QuestionRanker, "rank")
    first, second = stop_and_continue(calls, work, Store(run.store.path), stop_at)
    assert first == second


@pytest.mark.data
@pytest.mark.ray
@pytest.mark.usefixtures("saves_at_once", "without_ray")
def test_a_measurement_that_was_stopped_in_its_second_ranking_continues_to_the_same_report(run, monkeypatch):
    calls = Calls(monkeypatch, QuestionRanker, "rank")
    num_batches = -(-len(read_questions(only_corpus(Store(run.store.path)), "dev")) // run.retrieve.batch)
    first, second = stop_and_continue(calls, lambda: evaluate(run), Store(run.store.path), num_batches + 2)
    assert first == second


@pytest.mark.data
@pytest.mark.ray
@pytest.mark.usefixtures("saves_at_once", "without_ray")
@pytest.mark.parametrize("stop_at", [1, 7, 40])
def test_a_choice_of_the_weight_that_was_stopped_continues_to_the_same_curve(run, monkeypatch, stop_at):
    tuning_run = run.model_copy(update={"evaluate": EvaluateConfig(questions=[])})
    calls = Calls(monkeypatch, QuestionRanker, "search")
    first, second = stop_and_continue(calls, lambda: tune(tuning_run, "dev"), Store(run.store.path), stop_at)
    assert first == second and len({row.top1 for row in second.rows}) > 1


@pytest.mark.data
@pytest.mark.ray
@pytest.mark.usefixtures("saves_at_once", "without_ray")
@pytest.mark.parametrize(("owner", "name"), [(QuestionRanker, "search"), (mine.PairScorer, "__call__")])
def test_a_mining_that_was_stopped_continues_to_the_same_negatives(run, tiny_backbone, monkeypatch, owner, name):
    monkeypatch.setattr(mine, "_BATCH", 8)
    monkeypatch.setattr(mine, "_SCORE_BATCH", 8)
    store = Store(run.store.path)
    scorer = CrossEncoder.from_backbone(str(tiny_backbone), pair_spec(run))
    latest = {"fingerprint": save_model(store, CROSS_ENCODERS, "raw", scorer)}
    store.write_bytes(paths.latest_model("cross_encoders", "raw"), json.dumps(latest).encode())
    mining = run.mine.model_copy(update={"cross_encoder": "raw", "denoise_share": 0.999})
    resources = run.resources.model_copy(update={"local_passages": 1000})
    denoised_run = run.model_copy(update={"mine": mining, "resources": resources})

    def work() -> list[object]:
        report = mine.mine(denoised_run)
        return [report, read_questions(only_corpus(store), "mined")]

    first, second = stop_and_continue(Calls(monkeypatch, owner, name), work, store, 2)
    assert first == second
