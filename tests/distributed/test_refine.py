"""Refinement of a real index with SQuAD passages, MiniLM and actors: learned, unchanged and published views."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import ray
from prepared_corpus import only_corpus

from mvr_ray.checksums import with_trailer
from mvr_ray.config import RefineConfig, RunConfig
from mvr_ray.core.encoding.encoder import DualEncoder
from mvr_ray.core.judging.answers import has_answer
from mvr_ray.core.refining.pseudo_labels import labels_from_hits
from mvr_ray.distributed import refine as refining
from mvr_ray.distributed.cluster import session
from mvr_ray.distributed.indexing import build_index
from mvr_ray.distributed.refinement.journal import Journal
from mvr_ray.distributed.refinement.questions import gather
from mvr_ray.distributed.refinement.refiner_pool import RefinerPool
from mvr_ray.distributed.refinement.report import RefineReport
from mvr_ray.distributed.refinement.shard_refiner import RefinerTask
from mvr_ray.distributed.refinement.state import PUBLISHED, StateId
from mvr_ray.errors import ConfigError, DataError
from mvr_ray.store import corpus, manifest, paths, prepare
from mvr_ray.store.delta import open_embeddings
from mvr_ray.store.embeddings import EmbeddingShard
from mvr_ray.store.files import Store
from mvr_ray.store.questions import query_key, read_questions, write_questions

pytestmark = [pytest.mark.data, pytest.mark.ray]

NUM_ARTICLES, PARAGRAPHS = 8, 14
FAST = {"rounds": 3, "depth": 20, "gate": ["squad_gate"], "report": ["squad_other", "squad_unseen"]}


def config(store: Path, **refine) -> RunConfig:
    return RunConfig.model_validate(
        {
            "store": {"path": str(store)},
            "prepare": {
                "corpus": "squad",
                "num_shards": 4,
                "sources": [{"path": str(store / "squad.json"), "format": "squad", "questions": "squad"}],
                "splits": [{"source": "squad", "known_share": 0.5, "gate_share": 0.2}],
            },
            "encoder": {"num_views": 4, "max_passage_tokens": 128},
            "index": {"name": "squad", "encoder": "untrained", "precision": "fp32", "recall_sample": 10},
            "refine": {"questions": "squad_known", **FAST, **refine},
        }
    )


def fill(store: Path, squad_dev: dict, **encoder) -> Path:
    """Prepare the articles and index them in this process; later runs take the encoder of the index."""
    articles = [{**a, "paragraphs": a["paragraphs"][:PARAGRAPHS]} for a in squad_dev["data"][:NUM_ARTICLES]]
    (store / "squad.json").write_text(json.dumps({"version": "1.1", "data": articles}))
    run = config(store)
    prepare.prepare(run.prepare, Store(str(store)))
    with session.staying_local():
        build_index.index(run.model_copy(update={"encoder": run.encoder.model_copy(update=encoder)}))
    return store


@pytest.fixture(scope="module")
def base_store(tmp_path_factory, squad_dev, ray_session) -> Path:
    """A store with a read-only index; `store` gives each test its own copy."""
    return fill(tmp_path_factory.mktemp("refine"), squad_dev)


@pytest.fixture(scope="module")
def tiny_store(tmp_path_factory, squad_dev, tiny_backbone, ray_session) -> Path:
    """The same of the tiny backbone, for tests that compare bytes: each refinement embeds all questions again."""
    return fill(tmp_path_factory.mktemp("tiny"), squad_dev, backbone=str(tiny_backbone))


@pytest.fixture
def store(base_store, tmp_path) -> Path:
    return shutil.copytree(base_store, tmp_path / "store")


def digests(version: manifest.Manifest) -> list[str]:
    return [entry.digest for entry in version.shards] + sorted(version.refined_queries.values())


def all_views(store: Path, version: int) -> dict[str, dict[int, bytes]]:
    """Every passage of a version as {view number: stored bytes}."""
    views = {}
    for entry in manifest.read(Store(str(store)), "squad", version).shards:
        folder = store / paths.shard_dir("squad", entry.digest)
        for block in open_embeddings(folder, entry.files).blocks():
            for row, passage_id in enumerate(block.ids):
                span = range(*block.row_ptr[row : row + 2])
                views[passage_id] = {int(block.view_numbers_N[n]): block.vectors_ND[n].tobytes() for n in span}
    return views


def accuracy(report, group: str, kind: str):
    return next(row for row in report.accuracy if (row.group, row.kind) == (group, kind))


def feedback_and_own(views_of: dict[str, dict[int, bytes]]) -> list[dict[str, dict[int, bytes]]]:
    """The feedback views of the passages that have any, and the own views of all."""
    extra = {p: {number: data for number, data in views.items() if number >= 4} for p, views in views_of.items()}
    own = {p: {number: data for number, data in views.items() if number < 4} for p, views in views_of.items()}
    return [{p: views for p, views in extra.items() if views}, own]


@pytest.mark.slow
def test_feedback_views_teach_the_known_questions_and_leave_own_views_alone(store, without_ray):
    report = refining.refine(config(store, method="feedback_views", rounds=2))
    known_row = accuracy(report, "squad_known", "answer")
    assert known_row.protocol == "transductive"
    assert known_row.after[0] > known_row.before[0] + 0.10
    assert {row.protocol for row in report.accuracy if row.group in ("squad_other", "squad_unseen")} == {"held-out"}
    assert report.published is not None
    assert report.published.operation == "refine:feedback_views"
    assert report.published.parent == 1
    before, after = all_views(store, 1), all_views(store, 2)
    assert before.keys() == after.keys()
    extra, own = feedback_and_own(after)
    assert own == before
    assert report.dirty_share == len(extra) / len(before)
    assert {tuple(views) for views in extra.values()} == {(4,), (4, 5)}, "at most two, without a gap"
    norms = [np.linalg.norm(np.frombuffer(data, np.float16)) for views in extra.values() for data in views.values()]
    np.testing.assert_allclose(norms, report.settings["feedback_weight"], atol=2e-3)
    assert not list((store / "indexes/squad/staging").glob("refine-*"))

    other = {"questions": "squad_other", "report": [], "max_heldout_loss": 100}
    again = refining.refine(config(store, rounds=1, feedback_clusters=1, feedback_weight=0.9, **other))
    assert again.base_version == 2
    now, own = feedback_and_own(all_views(store, 3))
    assert own == before
    changed_ids = {passage_id for passage_id in now if now[passage_id] != extra.get(passage_id)}
    assert {tuple(now[passage_id]) for passage_id in changed_ids} == {(4,)}, "one new view takes the place of two"
    assert any(len(extra.get(passage_id, ())) == 2 for passage_id in changed_ids)
    assert any(len(now[passage_id]) == 2 for passage_id in now), "what is not labelled again keeps its own"
    assert extra.keys() <= now.keys()
    assert again.published.refinement == {"feedback_weight": 0.9, "feedback_clusters": 1}


class ViewLabels(NamedTuple):
    """AOpt's eq. 8 on a version: positive and negative partners of every labelled view and of every question."""

    views: dict[str, dict[int, np.ndarray]]
    queries: dict[str, np.ndarray]
    of_view: dict[tuple[str, int], tuple[list, list]]
    of_question: dict[str, tuple[list, list]]


def label_views(store: Path, run: RunConfig) -> ViewLabels:
    """Labels passage by passage, from version 1."""
    own_store = Store(str(store))
    version = manifest.read(own_store, "squad", 1)
    encoder = DualEncoder.load(store / paths.encoder_dir(version.encoder_name, version.encoder_fingerprint))
    questions = read_questions(only_corpus(own_store), "squad_known")
    texts = {passage.id: passage.text for passage in corpus.Corpus.open(own_store, "squad")}
    views = {
        passage_id: {number: np.frombuffer(data, np.float16).astype(np.float64) for number, data in mine.items()}
        for passage_id, mine in all_views(store, 1).items()
    }
    queries = encoder.embed_queries([question.text for question in questions])
    labels = ViewLabels(views, {q.id: query for q, query in zip(questions, queries)}, {}, {})
    for question, query in zip(questions, queries):
        best = {p: max((np.float32(v @ query), -number) for number, v in mine.items()) for p, mine in views.items()}
        for passage_id in sorted(best, key=lambda p: (-best[p][0], p))[: run.refine.depth]:
            side = 0 if has_answer(texts[passage_id], question.answers) else 1
            number = -best[passage_id][1]
            labels.of_view.setdefault((passage_id, number), ([], []))[side].append(query)
            labels.of_question.setdefault(question.id, ([], []))[side].append(views[passage_id][number])
    return labels


def combine(x: np.ndarray, good: list, bad: list, refine: RefineConfig, keep_length: bool) -> np.ndarray:
    """AOpt eqs. 7 and 9, rescaled to the vector's original length."""
    target = x + refine.beta * np.mean(good, axis=0) + (refine.gamma * np.mean(bad, axis=0) if bad else 0)
    return target * np.linalg.norm(x) / np.linalg.norm(target) if keep_length else target


@pytest.mark.usefixtures("without_ray")
@pytest.mark.parametrize("keep_length", [None, False])
def test_the_linear_form_equals_a_plain_reading_of_the_paper(store, keep_length):
    """By default, `keep_length` is true in an index of unit vectors."""
    run = config(store, method="linear", positives="all", beta=0.2, max_heldout_loss=100, keep_length=keep_length)
    labels = label_views(store, run)
    targets: dict[str, dict[int, np.ndarray]] = {}
    for (passage_id, number), (good, bad) in labels.of_view.items():
        if good:
            new = combine(labels.views[passage_id][number], good, bad, run.refine, keep_length is None)
            targets.setdefault(passage_id, {})[number] = new
    report = refining.refine(run)
    before, after = all_views(store, 1), all_views(store, 2)
    assert len(report.rounds) == 1
    lengths = []
    for passage_id, views in after.items():
        for number, data in views.items():
            if number in targets.get(passage_id, {}):
                vector, target = np.frombuffer(data, np.float16), targets[passage_id][number]
                np.testing.assert_allclose(vector.astype(np.float64), target, atol=2e-3)
                lengths.append(np.linalg.norm(vector.astype(np.float64)))
            else:
                assert data == before[passage_id][number]
    assert np.mean(lengths) == pytest.approx(1.0, abs=1e-3) if keep_length is None else np.mean(lengths) > 1.05
    assert report.dirty_share == len(targets) / len(before)
    assert report.rounds[0].moved_share == report.dirty_share


@pytest.mark.usefixtures("without_ray")
def test_rocchio_moves_the_labelled_queries_by_equation_7_and_no_passage(store):
    run = config(store, method="rocchio", positives="all", beta=0.2, max_heldout_loss=100)
    labels = label_views(store, run)
    report = refining.refine(run)
    assert all_views(store, 2) == all_views(store, 1)
    assert (len(report.rounds), report.published.operation) == (1, "refine:rocchio")
    path = store / paths.refined_queries("squad", report.published.refined_queries["squad_known"])
    moved_queries = {
        key.partition("\t")[0]: vector
        for block in EmbeddingShard.open(path).blocks()
        for key, vector in zip(block.ids, block.vectors_ND.astype(np.float64))
    }
    for name, (good, bad) in labels.of_question.items():
        query = labels.queries[name].astype(np.float64)
        target = combine(query, good, bad, run.refine, keep_length=True) if good else query
        np.testing.assert_allclose(moved_queries[name], target, atol=2e-3)
    top1 = accuracy(report, "squad_known", "answer")
    assert top1.after[0] > top1.before[0]


def best_round(report: RefineReport) -> int:
    """Most of the labelled questions, then of the gate, then the earliest; the gate may have lost a point."""
    before = accuracy(report, "squad_gate", "gold").before[0]
    harmless = [row for row in report.rounds if row.gate_gold_top1 >= before - 0.01 - 1e-9]
    return max(harmless, key=lambda row: (row.labelled_gold_top1, row.gate_gold_top1, -row.number)).number


@pytest.mark.usefixtures("without_ray")
def test_what_the_labelled_questions_gain_decides_while_the_gate_bears_it(store):
    own_store = Store(str(store))
    write_questions(only_corpus(own_store), "few", read_questions(only_corpus(own_store), "squad_known")[:12])
    raw = {"labels": "gold", "keep_length": False}
    report = refining.refine(config(store, method="passage", questions="few", step_size=0.2, rounds=3, **raw))
    best_row = report.rounds[report.best_round - 1]
    assert report.best_round == best_round(report)
    assert best_row.gate_gold_top1 < max(row.gate_gold_top1 for row in report.rounds)
    few = accuracy(report, "few", "gold")
    assert few.before[0] < few.after[0] == pytest.approx(best_row.labelled_gold_top1)
    assert report.published is not None


@pytest.mark.usefixtures("without_ray")
def test_rounds_that_hurt_are_undone_and_clean_shards_are_shared(store):
    """The step is far too large: later rounds cost held-out accuracy, the first does not."""
    own_store = Store(str(store))
    write_questions(only_corpus(own_store), "few", read_questions(only_corpus(own_store), "squad_known")[:12])
    raw = {"labels": "gold", "keep_length": False}
    run = config(store, method="passage", questions="few", depth=5, step_size=0.3, rounds=6, patience=6, **raw)
    report = refining.refine(run)
    assert report.best_round == best_round(report)
    gates = [row.gate_gold_top1 for row in report.rounds]
    assert gates[-1] < max(gates) == pytest.approx(accuracy(report, "squad_gate", "gold").after[0])
    assert report.published is not None
    old, new = digests(manifest.read(own_store, "squad", 1)), digests(report.published)
    before, after = all_views(store, 1), all_views(store, 2)
    dirty = {corpus.shard_of(passage_id, 4) for passage_id in before if before[passage_id] != after[passage_id]}
    assert [a != b for a, b in zip(old, new)] == [shard in dirty for shard in range(4)]
    assert 0 < report.rewritten_shards == len(dirty) < 4


@pytest.mark.usefixtures("without_ray")
def test_a_refinement_that_costs_too_much_is_not_published_and_says_why(store):
    report = refining.refine(config(store, method="passage", step_size=1.0, rounds=2, max_heldout_loss=0.5))
    assert report.published is None
    assert "cost the gate or the labelled questions more than the 0.5 points allowed" in report.reason
    gate = accuracy(report, "squad_gate", "answer")
    assert gate.after[0] < gate.before[0] - 0.005
    assert manifest.list_versions(Store(str(store)), "squad") == [1]
    assert not list((store / "indexes/squad/staging").glob("refine-*"))


@pytest.mark.parametrize(
    ("counts", "settings"),
    [
        pytest.param((1, 2), {"method": "hybrid"}, id="hybrid"),
        pytest.param(
            (1, 4),
            {"method": "feedback_views", "feedback_clusters": 3, "feedback_weight": [0.8, 0.6]},
            id="feedback_views",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_number_of_refiners_changes_no_byte(tiny_store, tmp_path, counts, settings):
    versions = []
    for refiners in counts:
        store = shutil.copytree(tiny_store, tmp_path / f"with-{refiners}")
        run = config(store, **settings, max_heldout_loss=100, rounds=2)
        run = run.model_copy(update={"resources": run.resources.model_copy(update={"refiners": refiners})})
        with session.staying_local(refiners == 1):  # one is this process
            versions.append(refining.refine(run).published)
    assert digests(versions[0]) == digests(versions[1])
    assert versions[0].metrics == versions[1].metrics
    assert digests(versions[0]) != digests(manifest.read(Store(str(tiny_store)), "squad", 1))


@pytest.mark.usefixtures("without_ray")
def test_the_weight_that_gains_most_within_the_bound_is_chosen_and_made_as_if_it_were_the_only_one(
    base_store, tmp_path
):
    whole, single = (shutil.copytree(base_store, tmp_path / name) for name in ("whole", "single"))
    settings = {"rounds": 2, "feedback_clusters": 4, "max_heldout_loss": 2.0}
    report = refining.refine(config(whole, feedback_weight=[1.0, 0.5, 0.8, 0.5], **settings))
    assert [row.weight for row in report.weights] == [0.5, 0.8, 1.0]
    accuracies = [row.labelled_top1 for row in report.weights]
    assert accuracies == sorted(accuracies) and accuracies[0] < accuracies[-1]
    gate = 100 * accuracy(report, "squad_gate", "answer").before[0]
    for row in report.weights:
        assert row.lost_points == pytest.approx(gate - 100 * row.gate_top1)
    candidates = [row for row in report.weights if row.lost_points <= 2.0 + 1e-9]
    assert 0 < len(candidates) < 3, "the bound decides nothing here"
    best_row = max(candidates, key=lambda row: row.labelled_top1)
    assert report.settings == report.published.refinement
    assert report.settings == {"feedback_weight": best_row.weight, "feedback_clusters": 4}
    first = report.rounds[0]
    assert (first.labelled_top1, first.gate_top1) == (best_row.labelled_top1, best_row.gate_top1)
    assert manifest.read(Store(str(whole)), "squad").refinement == report.settings

    alone = refining.refine(config(single, feedback_weight=best_row.weight, **settings))
    assert alone.weights == ()
    assert alone.rounds == report.rounds
    assert digests(alone.published) == digests(report.published)
    assert not list((whole / "indexes/squad/staging").glob("refine-*"))


@pytest.mark.usefixtures("without_ray")
def test_moved_queries_are_kept_and_no_passage_changes(store):
    report = refining.refine(config(store, method="query", step_size=0.05, rounds=3))
    known_row = accuracy(report, "squad_known", "answer")
    assert known_row.after[0] > known_row.before[0] + 0.05
    assert all(row.after == row.before for row in report.accuracy if row.protocol != "transductive")
    assert report.published is not None
    assert report.dirty_share == 0
    base = manifest.read(Store(str(store)), "squad", 1)
    assert report.published.shards == base.shards
    digest = report.published.refined_queries["squad_known"]
    moved_queries = EmbeddingShard.open(store / paths.refined_queries("squad", digest))
    questions = read_questions(only_corpus(Store(str(store))), "squad_known")
    assert moved_queries.ids() == sorted(query_key(question) for question in questions)
    assert manifest.verify(Store(str(store)), report.published).problems == []


KILLED = """
import sys
from pathlib import Path
from mvr_ray.config import RunConfig
from mvr_ray.distributed.refine import refine
def tell(what, done, total):
    print(what, done, flush=True)
refine(RunConfig.model_validate_json(Path(sys.argv[1]).read_text()), tell)
"""


WEIGHTS = {"feedback_weight": [0.5, 0.6, 0.7], "feedback_clusters": 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "until", "stage"),
    [
        ({"method": "hybrid"}, "refine round 3", ("refine: first", "refine round 1")),
        ({"method": "feedback_views", **WEIGHTS}, "refine weight 0.7", ("refine weight 0.5", "refine weight 0.6")),
    ],
    ids=["rounds", "weights"],
)
def test_a_driver_killed_between_rounds_or_weights_continues_to_the_same_bytes(
    tiny_store, tmp_path, method, until, stage, without_ray
):
    """Without Ray; `test_kill.py` kills a driver with refiners on a cluster."""
    whole = shutil.copytree(tiny_store, tmp_path / "whole")
    cut_store = shutil.copytree(tiny_store, tmp_path / "cut")
    settings = {**method, "rounds": 4, "patience": 4, "max_heldout_loss": 100}
    expected = refining.refine(config(whole, **settings))
    run = config(cut_store, **settings)
    (tmp_path / "run.json").write_text(run.model_dump_json())
    command = [sys.executable, "-c", KILLED, str(tmp_path / "run.json")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        last_line = next((line for line in driver.stdout if line.startswith(until)), None)
        driver.send_signal(signal.SIGKILL)
    assert last_line, f"the driver ended before {until}"
    assert manifest.list_versions(Store(str(cut_store)), "squad") == [1]

    steps = []
    report = refining.refine(run, lambda what, count, total: steps.append(what))
    assert not any(what.startswith(stage) for what in steps[: len(steps) // 2])
    assert report.published is not None
    assert digests(report.published) == digests(expected.published)
    assert report.accuracy == expected.accuracy
    assert report.rounds == expected.rounds
    assert report.weights == expected.weights


@pytest.mark.chaos(
    "refine driver killed after it published",
    "the same command says what was published, and publishes nothing",
)
@pytest.mark.usefixtures("without_ray")
def test_a_driver_killed_after_publishing_says_what_it_published(store, record_property):
    run = config(store, method="feedback_views", rounds=1)
    own_store = Store(str(store))
    base = manifest.read(own_store, "squad")
    report = refining.refine(run)
    journal = Journal(own_store, base, run, gather(only_corpus(own_store), run.refine))
    journal.save_report(report, report.published.content_digest())  # as it stood when the driver died
    again = refining.refine(run)
    assert again == report
    assert manifest.list_versions(own_store, "squad") == [1, 2]
    record_property(
        "figures", f"{len(again.rounds)} round reported again, version {again.published.version} stays the last"
    )


NEWER = with_trailer(b'{"weights": [], "rounds": [{"of_a_newer_program": 1}]}')


@pytest.mark.usefixtures("without_ray")
@pytest.mark.parametrize("damage", [b"", b'{"answer_ranks": [1, 2', NEWER], ids=["empty", "cut", "newer"])
def test_a_damaged_journal_is_begun_anew(store, damage):
    run = config(store, method="feedback_views", rounds=1)
    own_store = Store(str(store))
    base, questions = manifest.read(own_store, "squad"), gather(only_corpus(own_store), run.refine)
    journal = Journal(own_store, base, run, questions)
    journal.begin(np.array([[1], [0]]), 50.0, [40.0])
    assert Journal(own_store, base, run, questions).labelled_before == 50.0
    (store / journal.folder / "journal.json").write_bytes(damage)
    again = Journal(own_store, base, run, questions)
    assert (again.before, again.rounds, again.weights) == (None, [], [])


class StopError(Exception):
    """Ends a refinement from its progress callable, as a kill of its driver would."""


@pytest.mark.slow
@pytest.mark.chaos(
    "a byte flipped in, or bytes cut off, any file of an unfinished refinement",
    "the refinement begins anew, and the version has the same bytes",
)
def test_whatever_file_of_an_unfinished_refinement_is_damaged_the_version_has_the_same_bytes(
    tiny_store, tmp_path, without_ray, record_property
):
    settings = {"method": "hybrid", "rounds": 2, "patience": 2, "max_heldout_loss": 100}
    expected = refining.refine(config(shutil.copytree(tiny_store, tmp_path / "whole"), **settings)).published
    cut_store = shutil.copytree(tiny_store, tmp_path / "cut")

    def stop(what: str, number: int, total: int) -> None:
        if what.startswith("refine round 2"):
            raise StopError

    with pytest.raises(StopError):
        refining.refine(config(cut_store, **settings), stop)
    [folder] = (cut_store / paths.index_dir("squad", "staging")).iterdir()
    kinds = [folder / "journal.json", folder / "round-1/queries.npy", max((folder / "round-1").glob("shard-*.npz"))]
    for number, file in enumerate(kinds):
        data = bytearray(file.read_bytes())
        for kind, damage in (("flipped", len(data) // 2), ("cut", len(data) - 9)):
            damaged_store = shutil.copytree(cut_store, tmp_path / f"{number} {kind}")
            bad = bytes(data[:damage]) + (
                b"" if kind == "cut" else bytes([data[damage] ^ 1]) + bytes(data[damage + 1 :])
            )
            (damaged_store / file.relative_to(cut_store)).write_bytes(bad)
            version = refining.refine(config(damaged_store, **settings)).published
            assert version is not None and digests(version) == digests(expected), (file.name, kind)
    record_property("figures", f"{len(kinds)} kinds of file, flipped and cut: the same bytes each time")


@pytest.mark.chaos("refiner killed", "comes back to the round that is asked for")
def test_a_killed_actor_comes_back_to_the_round_that_is_asked_for(store, ray_session, record_property):
    own_store = Store(str(store))
    base = manifest.read(own_store, "squad")
    settings = RefineConfig(method="passage", step_size=0.05, keep_length=True)
    refine = settings.model_copy(update={"domain_guard": -1e9})
    task = RefinerTask(str(store), base, paths.staging_dir("squad", "refine-test"), refine)
    rng = np.random.default_rng(5)
    queries = rng.standard_normal((8, base.dimension)).astype(np.float32)
    first_round = StateId("round", 1)
    with RefinerPool(task, 2, 0.5) as refiners:
        hits = refiners.search(PUBLISHED, queries, 10, "", lambda *_: None)
        positive = rng.random(hits.rows_QK.shape) < 0.5
        labels = labels_from_hits(hits.rows_QK, hits.views_QK, positive)
        refiners.step(PUBLISHED, first_round, refiners.split(labels), queries)
        moved_hits = refiners.search(first_round, queries, 10, "", lambda *_: None)
        assert not np.array_equal(moved_hits.rows_QK, hits.rows_QK)
        for actor in refiners.actors:
            ray.kill(actor, no_restart=False)
        began = time.monotonic()
        again = refiners.search(first_round, queries, 10, "", lambda *_: None)
        took_s = time.monotonic() - began
        first = refiners.search(PUBLISHED, queries, 10, "", lambda *_: None)
    assert np.array_equal(again.rows_QK, moved_hits.rows_QK) and np.array_equal(again.views_QK, moved_hits.views_QK)
    assert np.array_equal(first.rows_QK, hits.rows_QK)
    record_property("figures", f"{len(refiners.actors)} of {len(refiners.actors)} killed, back in {took_s:.1f} s")


@pytest.mark.usefixtures("without_ray")
def test_feedback_from_a_file_teaches_its_questions(store):
    own_store = Store(str(store))
    questions = read_questions(only_corpus(own_store), "squad_known")[:40]
    ids = [passage.id for passage in corpus.Corpus.open(own_store, "squad")]
    rows = [{"question": q.text, "passage_id": q.positive_ids[0], "label": 1} for q in questions]
    rows += [
        {"question": q.text, "passage_id": next(i for i in ids if i not in q.positive_ids), "label": -1}
        for q in questions
    ]
    file = store / "clicks.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    run = config(store, questions=None, feedback=str(file), rounds=1, feedback_weight=0.95, max_heldout_loss=100)
    report = refining.refine(run)
    known_row = accuracy(report, "feedback", "gold")
    assert known_row.num_questions == 40
    assert known_row.after[0] > max(known_row.before[0], 0.9)
    views = all_views(store, 2)
    assert {i for i, mine in views.items() if 4 in mine} == {question.positive_ids[0] for question in questions}

    file.write_text(json.dumps({"question": "who?", "passage_id": "nowhere", "label": 1}))
    with pytest.raises(DataError, match=r"judges no passage that the index holds .first: 'nowhere'"):
        refining.refine(run)


@pytest.mark.usefixtures("without_ray")
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "linear", "alpha": 1e6, "keep_length": False}, "linear .* fp16 .* refine.alpha, beta and gamma"),
        ({"method": "passage", "step_size": 1e30, "keep_length": False}, "passage .* fp16 .* refine.step_size"),
        ({"method": "hybrid", "step_size": 1e300}, "hybrid .* fp32 .* refine.step_size nearer to 0"),
        ({"method": "rocchio", "alpha": 1e300}, "rocchio .* fp32 .* refine.alpha, beta and gamma nearer to 0"),
    ],
)
def test_a_move_beyond_the_stored_type_is_refused_with_the_settings_that_bound_it(store, settings, message):
    with pytest.raises(ConfigError, match=message):
        refining.refine(config(store, **settings))


@pytest.mark.usefixtures("without_ray")
def test_what_cannot_be_learned_from_is_refused_before_work(store):
    own_store, reports = Store(str(store)), []
    own_corpus = only_corpus(own_store)
    write_questions(own_corpus, "one", read_questions(own_corpus, "squad_known")[:1])
    for settings, message in (
        ({"questions": None}, "give one of them to learn from"),
        ({"questions": "one", "gate": []}, "'one' with 1 question is too small to hold a fifth"),
    ):
        with pytest.raises(ConfigError, match=message):
            refining.refine(config(store, **settings), lambda *report: reports.append(report))
    assert not reports and not own_store.list(paths.index_dir("squad", "staging"))
