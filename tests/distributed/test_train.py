"""Training on real questions: accuracy rises, resuming gives the same bits, and the parts follow their formulas."""

import json
import math
import os
import shutil
import signal
import threading
import weakref
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
import torch
import yaml
from prepared_corpus import only_corpus
from ranks import train_on_ranks
from ray.train import WorkerGroupError
from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError
from ray.train.v2._internal.execution.storage import get_fs_and_path
from transformers.models.bert.modeling_bert import BertAttention
from waiting import until

from mvr_ray.cli import main
from mvr_ray.cli.stage_runs import run_stage
from mvr_ray.config import RunConfig, TrainConfig, load_run, parse_run
from mvr_ray.core.encoding.encoder import DualEncoder
from mvr_ray.core.encoding.views import EncoderSpec
from mvr_ray.distributed.cluster.session import ClusterInfo, Node
from mvr_ray.distributed.encoders import encoder_spec
from mvr_ray.distributed.train import (
    TrainedModel,
    _may_help,
    _may_pass,
    _storage,
    _translate_failure,
    save_best,
    train,
)
from mvr_ray.distributed.training import checkpoints, retriever, steps
from mvr_ray.distributed.training.retriever import loss_name, warm_start_steps
from mvr_ray.errors import (
    ConfigError,
    DataError,
    EncoderError,
    MissingInputError,
    NoAnswerError,
    ResourceError,
    StorageError,
)
from mvr_ray.store import paths
from mvr_ray.store.corpus import Corpus
from mvr_ray.store.files import Store
from mvr_ray.store.model_records import ENCODERS, latest_backbone, latest_fingerprint
from mvr_ray.store.prepare import prepare
from mvr_ray.store.questions import read_questions, write_questions
from mvr_ray.store.update import update
from mvr_ray.types import Passage, Question

QUICK = {"num_views": 2, "max_passage_tokens": 48, "max_query_tokens": 24}


def small_squad(squad_dev: dict, folder: Path, articles: int, paragraphs: int, questions: int) -> Path:
    """The beginning of SQuAD's development set, as a SQuAD file."""
    data = [
        {
            "title": article["title"],
            "paragraphs": [
                {"context": p["context"], "qas": p["qas"][:questions]} for p in article["paragraphs"][:paragraphs]
            ],
        }
        for article in squad_dev["data"][:articles]
    ]
    path = folder / "squad.json"
    path.write_text(json.dumps({"version": "1.1", "data": data}))
    return path


@pytest.fixture(scope="module")
def store_path(squad_dev, tiny_backbone, tmp_path_factory) -> Path:
    """Four articles of eight paragraphs with up to five questions each: two for training, the others for tests."""
    folder = tmp_path_factory.mktemp("train")
    (folder / "backbone").symlink_to(tiny_backbone)
    source = small_squad(squad_dev, folder, 4, 8, 5)
    run = run_of(folder / "store", {}, prepare={"sources": [{"path": str(source), "questions": "all"}]})
    prepare(run.prepare, Store(run.store.path))
    store = Store(run.store.path)
    questions = read_questions(only_corpus(store), "all")
    counts: dict[str, int] = {}
    parts: dict[str, list[Question]] = {"train": [], "dev": []}
    for question in questions:
        number = counts[question.positive_ids[0]] = counts.get(question.positive_ids[0], -1) + 1
        parts["dev" if number >= 2 else "train"].append(question)
    for name, part in parts.items():
        write_questions(only_corpus(store), name, part)
    write_questions(only_corpus(store), "tiny", parts["train"][:6])
    write_questions(only_corpus(store), "one", parts["train"][:1])
    return folder / "store"


def run_of(path: Path, train: dict, encoder: dict | None = None, **sections) -> RunConfig:
    sections.setdefault("resources", {"train_workers": 0})
    settings = {"questions": "train", "batch_questions": 8, **train}
    encoder = {"backbone": str(path.parent / "backbone"), **(encoder or {})}
    return parse_run({"store": {"path": str(path)}, "train": settings, "encoder": encoder, **sections}, "test")


class RetrieverStop(Exception):
    pass


def metrics_of(model: TrainedModel, store_path: Path) -> list[dict]:
    return [json.loads(line) for line in (store_path / model.metrics_file).read_text().splitlines()]


def stop_at(step: int):
    def progress(what: str, count: int, total: int) -> None:
        if count == step:
            raise RetrieverStop

    return progress


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "encoder", "settings"),
    [
        ("warm", {"strategy": "snippets", **QUICK}, {"warm_start_steps": 3, "dev_questions": "dev"}),
        pytest.param(
            "fp",
            {"strategy": "viewers", **QUICK},
            {"cache_chunk": 3, "questions_per_passage": 2, "siblings": True, "warm_start_steps": 0},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "cloze",
            {"strategy": "snippet_means", "tied": False, **QUICK},
            {"questions": None},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_training_killed_anywhere_ends_with_the_same_weights_and_metrics_to_the_bit(
    store_path, name, encoder, settings, monkeypatch
):
    monkeypatch.setattr(steps, "NUM_ROWS", 4)  # a row of the metrics for two steps
    cfg = {"epochs": 3, "max_steps": 5, "checkpoint_steps": 2, "batch_questions": 4, "questions": "tiny", **settings}
    cfg["snapshot_steps"] = [1, 4, 5]
    whole = train(run_of(store_path, cfg, {"name": f"{name}-whole", **encoder}))
    run = run_of(store_path, cfg, {"name": f"{name}-broken", **encoder})
    for step in (1, 5):
        with pytest.raises(RetrieverStop):
            train(run, stop_at(step))
    counts: list[int] = []
    again = train(run, lambda what, count, total: counts.append(count))
    assert counts[0] == 5, "the training continues from the checkpoint of step 4"
    assert again.fingerprint == whole.fingerprint
    assert again.metrics == whole.metrics
    assert again.epochs == whole.epochs
    assert metrics_of(again, store_path) == metrics_of(whole, store_path)
    store = Store(run.store.path)
    snapshots = [
        [latest_fingerprint(store, ENCODERS, f"{name}-{which}-step-{step}") for step in cfg["snapshot_steps"]]
        for which in ("whole", "broken")
    ]
    assert snapshots[0] == snapshots[1] and len({*snapshots[0]}) == 3
    if "dev_questions" not in settings:
        assert snapshots[0][-1] == whole.fingerprint, "without dev questions the last weights are the model"
    for step, fingerprint in zip(cfg["snapshot_steps"], snapshots[0]):
        folder = paths.model_dir(ENCODERS.store_dir, f"{name}-whole-step-{step}", fingerprint)
        assert DualEncoder.load(store.local_path(folder)).spec.max_passage_tokens == 48


CURVE = {"questions": "tiny", "dev_questions": "tiny", "batch_questions": 4, "epochs": 3, "warm_start_steps": 3}
CURVE |= {"checkpoint_steps": 4, "loss": "mvr"}


@pytest.mark.data
def test_the_command_says_where_loss_and_dev_figures_are_while_it_runs_and_keeps_them_with_its_record(
    store_path, capsys
):
    folder, dev_in_file, texts = store_path / "training" / "curve", [], []

    def progress(what: str, count: int, total: int) -> None:
        [file] = folder.glob("*/metrics.jsonl")
        dev_in_file.append([one["dev_top1"] for line in file.open() if "dev_top1" in (one := json.loads(line))])
        texts.append(what)

    run = run_of(store_path, CURVE, {"name": "curve", "strategy": "snippets", **QUICK})
    run_stage("train", run, lambda run, _: train(run, progress))
    [file] = folder.glob("*/metrics.jsonl")
    err = capsys.readouterr().err
    assert f"loss and dev figures, also while it runs: {file}\n" in err
    record = Path(err.partition("report: ")[2].strip()).with_name("metrics.jsonl")
    assert record.read_bytes() == file.read_bytes()
    rows = [json.loads(line) for line in file.open()]
    assert [row["step"] for row in rows] == [*range(10)]
    assert [row.get("phase") for row in rows] == [None, *["warm start"] * 3, *["train"] * 6]
    assert [row.get("epoch") for row in rows] == [None, 0, 0, 0, 0.5, 1, 1.5, 2, 2.5, 3]
    dev_rows = {row["step"]: row["dev_top1"] for row in rows if "dev_top1" in row}
    assert [*dev_rows] == [0, 5, 7, 9]
    assert dev_in_file[5] == [dev_rows[0], dev_rows[5]], "the sixth step, while it runs, sees the first epoch"
    assert texts[5] == f"train (loss {rows[6]['loss']:.3f}, dev {dev_rows[5]:.3f})"
    assert rows[9]["loss"] == pytest.approx(rows[9]["loss_global"] + 0.01 * rows[9]["loss_local"], rel=1e-4)
    assert rows[9].keys() - rows[8].keys() == {"dev_top1", "view_pair_cosine", "lv", "collapsed"}


@pytest.mark.data
def test_metrics_of_a_long_training_are_the_means_of_its_steps(store_path, monkeypatch):
    fine, coarse = [], []
    for rows, num_rows in ((fine, 1000), (coarse, 3)):
        monkeypatch.setattr(steps, "NUM_ROWS", num_rows)
        model = train(run_of(store_path, CURVE, {"name": f"rows-{num_rows}", "strategy": "snippets", **QUICK}))
        rows += metrics_of(model, store_path)
    assert [row["step"] for row in coarse] == [0, 2, 3, 4, 5, 6, 7, 8, 9], "warm start and epochs end with a row"
    for before, row in pairwise(coarse):
        own = fine[before["step"] + 1 : row["step"] + 1]
        for name in ("loss", "lr", "grad_norm"):
            assert row[name] == pytest.approx(sum(one[name] for one in own) / len(own), rel=1e-5)
        assert row.get("dev_top1") == own[-1].get("dev_top1")


@pytest.mark.data
def test_a_training_without_a_better_dev_accuracy_stops_at_the_same_step_when_it_was_killed_anywhere(
    store_path, monkeypatch
):
    """Scored after 3 steps each: steps 6 and 9 are not better, as a dev question alone is always right."""
    cfg = {"questions": "tiny", "dev_questions": "one", "batch_questions": 4, "epochs": 9, "checkpoint_steps": 2}
    cfg |= {"dev_steps": 3, "patience": 2}
    encoder = {"strategy": "mean", **QUICK}
    whole = train(run_of(store_path, cfg, {"name": "patient-whole", **encoder}))
    assert [epoch.step for epoch in whole.epochs] == [3, 6, 9] and whole.metrics["steps"] == 9
    run = run_of(store_path, cfg, {"name": "patient-broken", **encoder})
    with pytest.raises(RetrieverStop):
        train(run, stop_at(8))
    counts: list[int] = []
    with monkeypatch.context() as patch:  # killed when the last checkpoint was written
        patch.setattr("mvr_ray.distributed.train._save", lambda *args: stop_at(0)("", 0, 0))
        with pytest.raises(RetrieverStop):
            train(run, lambda what, count, total: counts.append(count))
    again = train(run, lambda what, count, total: counts.append(count))
    assert counts == [7, 8, 9], "the training continues from the checkpoint of step 6, and takes no step after the end"
    assert (again.fingerprint, again.epochs, again.metrics) == (whole.fingerprint, whole.epochs, whole.metrics)
    assert metrics_of(again, store_path) == metrics_of(whole, store_path)


@pytest.mark.data
def test_the_best_weights_of_an_interrupted_training_become_the_model_and_it_continues_to_the_same_end(
    store_path, tmp_path, capsys
):
    cfg = {"questions": "tiny", "dev_questions": "dev", "batch_questions": 4, "epochs": 3, "checkpoint_steps": 1}
    encoder, store = {"strategy": "mean", **QUICK}, Store(str(store_path))
    whole = train(run_of(store_path, cfg | {"snapshot_steps": [1, 2, 4]}, {"name": "so-far", **encoder}))
    run = run_of(store_path, cfg, {"name": "so-far-broken", **encoder})
    with pytest.raises(MissingInputError, match=r"training/so-far-broken/\w+ has no checkpoint: with these settings"):
        save_best(run)
    for step, first_step in ((2, 1), (5, 2)):
        counts: list[int] = []
        stop = stop_at(step)

        def progress(what: str, count: int, total: int, counts=counts, stop=stop) -> None:
            counts.append(count)
            stop(what, count, total)

        with pytest.raises(RetrieverStop):
            train(run, progress)
        assert counts[0] == first_step
        best = max(whole.epochs[: (step - 1) // 2], key=lambda epoch: epoch.dev_top1, default=None)
        model = save_best(run)
        expected = latest_fingerprint(store, ENCODERS, f"so-far-step-{best.step if best else 1}")
        assert latest_fingerprint(store, ENCODERS, "so-far-broken") == model.fingerprint == expected
        assert model.epochs == whole.epochs[: (step - 1) // 2] and metrics_of(model, store_path)
        assert (model.saved_step, model.total_steps) == (best.step if best else 1, whole.epochs[-1].step)
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(run.model_dump(mode="json")))
    with pytest.raises(SystemExit):
        main(["train", str(file), "save=best"])
    out = capsys.readouterr().out
    assert f"trained: so-far-broken/{model.fingerprint}\n" in out
    assert f"unfinished, weights of step {model.saved_step} of {model.total_steps};" in out
    end = train(run)
    assert (end.fingerprint, end.epochs, end.metrics) == (whole.fingerprint, whole.epochs, whole.metrics)
    assert save_best(run) == end


@pytest.mark.data
def test_the_newest_checkpoint_of_an_interrupted_training_without_dev_questions_becomes_the_model(store_path):
    cfg = {"questions": "tiny", "batch_questions": 4, "epochs": 3, "checkpoint_steps": 1, "snapshot_steps": [2, 3]}
    encoder = {"strategy": "mean", **QUICK}
    end = train(run_of(store_path, cfg, {"name": "newest", **encoder}))
    run = run_of(store_path, cfg, {"name": "newest-broken", **encoder})
    with pytest.raises(RetrieverStop):
        train(run, stop_at(4))  # after the checkpoint of step 3, the first one of the second epoch
    model = save_best(run)
    assert model.fingerprint == latest_fingerprint(Store(run.store.path), ENCODERS, "newest-step-3")
    assert model.metrics == {"steps": 3.0} and model.epochs == end.epochs[:1]


def test_new_settings_at_their_defaults_leave_the_key_of_a_checkpoint_as_it_was():
    """A training that an earlier program began continues; the digest is that program's."""
    assert RunConfig().digest("train") == "b5f171ac41d11950"
    assert TrainConfig(dev_steps=5, patience=2).model_dump().keys() > TrainConfig().model_dump().keys()


@pytest.mark.data
def test_training_shortens_passages_and_never_reads_more_of_them_than_the_encoder(store_path):
    """The encoder reads 48 tokens of a passage."""
    cfg = {"questions": "tiny", "batch_questions": 4, "max_steps": 2, "warm_start_steps": 0}
    fingerprints = [
        train(
            run_of(store_path, {**cfg, "max_passage_tokens": limit}, {"name": f"at-most-{limit}", **QUICK})
        ).fingerprint
        for limit in (0, 96, 24)
    ]
    assert fingerprints[0] == fingerprints[1] != fingerprints[2]
    with pytest.raises(EncoderError, match="max_passage_tokens is 3, too few for 2 views"):
        train(run_of(store_path, {**cfg, "max_passage_tokens": 3}, {"name": "at-most-3", **QUICK}))


@pytest.mark.data
def test_a_training_tokenizes_a_passage_once_and_learns_what_one_does_that_repeats_it(store_path, monkeypatch):
    passages: dict[str, list[Passage]] = {"tokenize_passages": [], "view_spans": []}
    for name, own in passages.items():
        method = getattr(DualEncoder, name)

        def count(model, passages, max_tokens=0, *, method=method, own=own):
            if max_tokens:
                own.extend(passages if isinstance(passages, list) else [passages])
            return method(model, passages, max_tokens)

        monkeypatch.setattr(DualEncoder, name, count)
    cfg = {"questions": "tiny", "batch_questions": 4, "max_steps": 6, "warm_start_steps": 0, "loss": "camvr"}
    fingerprints, counts = [], []
    for max_cached in (retriever.MAX_CACHED, 0):
        monkeypatch.setattr(retriever, "MAX_CACHED", max_cached)
        encoder = {"name": f"cached-{max_cached}", "strategy": "snippets", **QUICK}
        fingerprints.append(train(run_of(store_path, {**cfg, "max_passage_tokens": 24}, encoder)).fingerprint)
        counts.append([(len(own), len(set(own))) for own in passages.values()])
        for own in passages.values():
            own.clear()
    assert fingerprints[0] == fingerprints[1]
    assert all(count == distinct for count, distinct in counts[0])
    assert all(count > distinct for count, distinct in counts[1])


def test_a_checkpoint_copies_the_tensors_of_one_file_at_a_time(tmp_path, monkeypatch: pytest.MonkeyPatch):
    model = torch.nn.Linear(4, 4)
    optimiser = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimiser.step()
    saved_copies: list[weakref.ref[torch.Tensor]] = []
    clone = torch.Tensor.clone

    def clone_alone(tensor: torch.Tensor) -> torch.Tensor:
        assert not any(copy() is not None for copy in saved_copies)
        return clone(tensor)

    def save(tensors: dict[str, torch.Tensor], path: Path) -> None:
        saved_copies.extend(map(weakref.ref, tensors.values()))
        path.write_bytes(b"")

    monkeypatch.setattr(torch.Tensor, "clone", clone_alone)
    monkeypatch.setattr(checkpoints, "save_file", save)
    checkpoints.Checkpoints(Store(str(tmp_path)), "training").save(model, optimiser, checkpoints.TrainState())
    assert len(saved_copies) == 2 + 2 * 3


def linear_training(folder: Path, count: int):
    """Checkpoints of `count` processes that train one model, and a function that saves a step in one of them."""
    store, model = Store(str(folder)), torch.nn.Linear(4, 4)
    optimiser = torch.optim.AdamW(model.parameters())

    def save(own: checkpoints.Checkpoints, step: int, best_step: int) -> None:
        if best_step == step:
            own.save_weights(model, step, "best")
        own.save(model, optimiser, checkpoints.TrainState(step=step, best_step=best_step))

    return model, save, *(checkpoints.Checkpoints(store, "training/e/k") for _ in range(count))


def test_a_training_that_runs_twice_keeps_the_checkpoint_and_best_weights_of_the_further_one(tmp_path):
    model, save, first, second = linear_training(tmp_path, 2)
    save(first, 10, 10)
    save(first, 20, 20)
    save(first, 30, 20)
    save(second, 15, 10)
    assert first.latest_step() == 30
    save(second, 20, 20)
    second.save_weights(model, 38, "best")  # ahead now, without a checkpoint yet
    save(first, 35, 20)
    for own, step in ((first, 20), (second, 38)):
        own.load_model(model, step, "best")
    save(second, 40, 38)
    assert first.latest_step() == 40
    assert sorted(path.name for path in tmp_path.glob("training/e/k/*-*")) == ["best-00000038", "step-00000040"]


def test_a_checkpoint_of_an_older_program_has_no_metrics_and_continues_without(tmp_path):
    _, save, own = linear_training(tmp_path, 1)
    save(own, 10, 10)
    files = {name: digest for name, digest in own._latest()["files"].items() if not name.endswith(checkpoints.METRICS)}
    own._write(checkpoints.LATEST, {"step": 10, "files": files})
    (tmp_path / own.folder / "step-00000010" / checkpoints.METRICS).unlink()
    assert own.state(10) == checkpoints.TrainState(step=10, best_step=10)


def test_a_figure_that_is_not_finite_is_null_in_the_metrics(tmp_path):
    own = checkpoints.Checkpoints(Store(str(tmp_path)), "training/e/k")
    own.write_metrics([{"step": 1, "grad_norm": math.inf}])
    assert (tmp_path / own.metrics_file).read_text() == '{"step": 1, "grad_norm": null}\n'


def test_a_missing_file_of_a_checkpoint_is_an_error_that_says_what_to_do(tmp_path):
    model, save, first, second = linear_training(tmp_path, 2)
    save(first, 10, 10)
    first.finish({"fingerprint": "f", "metrics": {}, "epochs": []})
    with pytest.raises(StorageError, match=r"best-00000010/model.safetensors is missing; run the same command again"):
        second.load_model(model, 10, "best")


def test_a_full_disk_at_a_checkpoint_is_an_error_that_says_so(tiny_disk):
    if tiny_disk is None:
        pytest.skip("no file system can be mounted here")
    own = checkpoints.Checkpoints(Store(str(tiny_disk)), "training/e/k")
    with pytest.raises(
        StorageError, match=r"cannot write in .*No space left.*bytes free\); free space and run the same"
    ):
        own.save_weights(torch.nn.Linear(256, 512), 1, "best")


@pytest.mark.data
def test_a_training_that_another_process_finished_meanwhile_ends_with_its_model(store_path):
    cfg = {"questions": "tiny", "batch_questions": 4, "max_steps": 4, "epochs": 2, "dev_questions": "tiny"}
    run = run_of(store_path, cfg | {"checkpoint_steps": 1}, {"name": "twice", "strategy": "mean", **QUICK})
    others = []

    def train_beside(what: str, count: int, total: int) -> None:
        if count == 3:
            others.append(train(run))

    assert [train(run, train_beside)] == others
    folder = store_path / paths.training_dir("twice", "")
    assert {file.name for file in folder.glob("*/*")} == {checkpoints.FINISHED, checkpoints.METRICS}


@pytest.mark.data
def test_a_snapshot_behind_the_last_step_is_refused_before_training(store_path):
    cfg = {"questions": "tiny", "batch_questions": 4, "max_steps": 2, "snapshot_steps": [1, 3]}
    with pytest.raises(ConfigError, match=r"train\.snapshot_steps has 3, but training ends after 2 steps"):
        train(run_of(store_path, cfg, {"name": "late", **QUICK}))


@pytest.mark.data
def test_a_training_that_leaves_the_questions_of_its_corpus_out_says_so(store_path, caplog):
    steps = {"batch_questions": 4, "max_steps": 1}
    with_labels = train(run_of(store_path, {"questions": "tiny", **steps}, {"name": "labels", **QUICK}))
    assert (with_labels.questions, with_labels.num_examples) == ("tiny", 6)
    assert "train.questions is not set" not in caplog.text
    without = train(run_of(store_path, {"questions": None, **steps}, {"name": "sentences", **QUICK}))
    assert (without.questions, without.num_examples) == (None, only_corpus(Store(str(store_path))).num_passages)
    assert "train.questions is not set; question sets of the corpus: " in caplog.text and "tiny" in caplog.text


@pytest.mark.data
def test_a_finished_training_is_not_run_again_and_a_changed_one_is(store_path):
    run = run_of(store_path, {"questions": "tiny", "batch_questions": 4, "max_steps": 1}, {"name": "once", **QUICK})
    calls: list[int] = []
    first = train(run, lambda what, count, total: calls.append(count))
    assert train(run, lambda what, count, total: calls.append(count)) == first
    assert calls == [1]
    changed_run = run.model_copy(update={"train": run.train.model_copy(update={"lr": 1e-3})})
    other = train(changed_run)
    assert other.fingerprint != first.fingerprint
    store = Store(run.store.path)
    assert latest_fingerprint(store, ENCODERS, "once") == other.fingerprint
    encoder = DualEncoder.load(store.local_path(first.folder))
    assert encoder.fingerprint == first.fingerprint
    assert encoder.spec.max_passage_tokens == 48


@pytest.mark.slow
@pytest.mark.data
def test_training_lowers_the_loss_and_raises_dev_accuracy(store_path, minilm):
    """Viewers start as noise, worse than any plain pooling when untrained; 64 questions train them.

    (A backbone that was made for retrieval gains nothing from so few: [CLS] alone stayed at 60 % of 87 dev questions.)
    """
    settings = {
        "dev_questions": "dev",
        "epochs": 3,
        "batch_questions": 16,
        "questions_per_passage": 2,
        "siblings": True,
        "lr": 1e-4,
        "dropout": 0.0,
        "max_passage_tokens": 96,
        "warm_start_steps": 0,
    }
    encoder = {"name": "learns", "strategy": "snippets", "num_views": 4, "max_query_tokens": 32}
    encoder["backbone"] = str(minilm)
    model = train(run_of(store_path, settings, encoder))
    assert model.epochs[-1].loss < 0.5 * model.epochs[0].loss
    assert model.metrics["dev_top1"] >= model.metrics["dev_top1_before"] + 0.08
    assert model.metrics["dev_top1"] == max(epoch.dev_top1 for epoch in model.epochs)
    assert not model.epochs[-1].collapsed


@pytest.mark.data
def test_a_training_that_does_not_help_says_so(store_path, caplog):
    settings = {"questions": "tiny", "dev_questions": "tiny", "batch_questions": 4, "max_steps": 1, "lr": 1e-9}
    model = train(run_of(store_path, settings, {"name": "idle", "strategy": "mean", **QUICK}))
    assert model.metrics["dev_top1"] == model.metrics["dev_top1_before"]
    assert "training did not raise dev accuracy" in caplog.text


@pytest.mark.data
@pytest.mark.parametrize(
    ("workers", "precision"),
    [(0, "fp32"), (0, "fp16"), pytest.param(1, "fp32", marks=[pytest.mark.slow, pytest.mark.ray])],
)
def test_a_training_that_diverges_ends_with_its_step_and_rate_and_the_newest_model_stays(
    store_path, workers, precision, request
):
    """Workers are not started a second time: they would diverge again."""
    num_started = request.getfixturevalue("actors_started") if workers else lambda word: 0
    cfg = {"questions": "tiny", "dev_questions": "tiny", "batch_questions": 4, "max_steps": 20, "epochs": 10}
    own = {"name": f"diverges-{workers}-{precision}", "strategy": "mean", **QUICK}
    cfg["precision"] = precision
    model = train(run_of(store_path, cfg | {"max_steps": 1}, own))
    resources, num_before = {"train_workers": workers}, num_started("RayTrainWorker")
    with pytest.raises(ConfigError, match=r"diverged in step \d+ of 20: the loss is .*train.lr \(it is 1e\+30\)"):
        train(run_of(store_path, cfg | {"lr": 1e30, "warmup_share": 0}, own, resources=resources))
    assert latest_fingerprint(Store(str(store_path)), ENCODERS, own["name"]) == model.fingerprint
    assert num_started("RayTrainWorker") == num_before + workers
    [file] = set((store_path / "training" / own["name"]).glob("*/metrics.jsonl")) - {store_path / model.metrics_file}
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["step"] for row in rows] == [*range(len(rows))] and rows[1]["lr"] == 1e30


@pytest.mark.data
def test_a_damaged_checkpoint_is_an_error_that_says_what_to_do_and_stays(store_path):
    """That workers do not start again for it, other tests hold: of what may help, and of a training that diverges."""
    settings = {"questions": "tiny", "batch_questions": 4, "max_steps": 6, "epochs": 6, "checkpoint_steps": 2}
    own = {"name": "damaged-checkpoint", "strategy": "mean", **QUICK}
    with pytest.raises(RetrieverStop):
        train(run_of(store_path, settings, own), stop_at(4))
    [weights] = (store_path / "training" / own["name"]).glob("*/step-*/model.safetensors")
    weights.chmod(0o644)
    weights.write_bytes(b"")
    with pytest.raises(StorageError, match=r"model\.safetensors is damaged .* and train from the start"):
        train(run_of(store_path, settings, own))
    assert weights.exists()


@pytest.mark.parametrize(
    ("error", "restarts"),
    [
        (ray.exceptions.ActorDiedError(), True),
        (WorkerHealthCheckFailedError("", ray.exceptions.ActorDiedError()), True),
        (RuntimeError("[/pytorch/gloo/transport/tcp/pair.cc:553] Connection closed by peer"), True),
        (torch.distributed.DistBackendError("NCCL"), True),
        (NoAnswerError("the store does not answer"), True),
        (ConnectionResetError(), True),
        (StorageError("the disk is full"), False),
        (ResourceError("the GPU lacks memory"), False),
        (torch.OutOfMemoryError("CUDA out of memory"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (IndexError("index out of range in self"), False),
    ],
)
def test_workers_start_again_after_what_was_lost_and_not_after_what_is_wrong(error, restarts):
    assert _may_pass(error) == restarts


@pytest.mark.data
def test_weights_that_are_not_finite_are_not_stored(store_path):
    """The only step's gradient is finite, and the step too long."""
    cfg = {"questions": "tiny", "batch_questions": 4, "max_steps": 1, "lr": 1e39, "warmup_share": 0}
    with pytest.raises(EncoderError, match=r"encoder snapshot infinite is not stored: .*weight holds NaN or infinite"):
        train(run_of(store_path, cfg, {"name": "infinite", "strategy": "mean", **QUICK}))
    assert not (store_path / "encoders" / "infinite").exists()


@pytest.mark.data
def test_viewers_at_one_position_raise_the_collapse_alarm(store_path, caplog):
    settings = {"questions": "tiny", "batch_questions": 4, "max_steps": 1, "warm_start_steps": 0}
    model = train(run_of(store_path, settings, {"name": "collapsed", "strategy": "viewers", **QUICK}))
    assert model.epochs[-1].collapsed
    assert "views have collapsed" in caplog.text
    spread = train(run_of(store_path, settings, {"name": "spread", "strategy": "snippet_means", **QUICK}))
    assert not spread.epochs[-1].collapsed
    assert sum(spread.epochs[-1].view_shares) == pytest.approx(1)


@pytest.mark.parametrize(
    ("encoder", "train", "steps"),
    [
        ({"strategy": "viewers"}, {}, 30),
        ({"strategy": "viewers", "readout": "snippet_mean"}, {}, 30),
        ({"strategy": "snippets", "empty_snippets": "kept"}, {}, 30),
        ({"strategy": "snippets", "readout": "snippet_mean"}, {}, 0),
        ({"strategy": "snippet_means"}, {}, 0),
        ({"strategy": "first_k"}, {}, 0),
        ({"strategy": "viewers"}, {"init_from": "earlier"}, 0),
        ({"strategy": "viewers"}, {"warm_start_steps": 0}, 0),
        ({"strategy": "snippet_means"}, {"warm_start_steps": 7}, 7),
    ],
)
def test_viewers_that_no_training_has_seen_are_warmed_up_unless_configured_otherwise(tmp_path, encoder, train, steps):
    run = run_of(tmp_path, {"max_steps": 5, **train}, encoder)
    assert warm_start_steps(run, SimpleNamespace(spec=EncoderSpec(**encoder))) == steps


@pytest.mark.parametrize("preset", ["mvr", "camvr"])
def test_what_is_as_published_has_no_warm_start(preset):
    run = load_run(f"configs/presets/{preset}.yaml")
    assert warm_start_steps(run, SimpleNamespace(spec=encoder_spec(run))) == 0


@pytest.mark.parametrize(
    ("strategy", "views", "loss"),
    [
        ("snippet_means", 8, "dpr"),
        ("snippets", 8, "camvr"),
        ("splits", 8, "camvr"),
        ("viewers", 8, "mvr"),
        ("first_k", 4, "mvr"),
        ("mean", 1, "dpr"),
    ],
)
def test_a_loss_that_is_not_named_follows_the_strategy(tmp_path, strategy, views, loss):
    spec = EncoderSpec(strategy=strategy, num_views=views)
    model = SimpleNamespace(spec=spec, num_views=spec.effective_views)
    assert loss_name(run_of(tmp_path, {}), model) == loss


@pytest.mark.data
def test_the_temperature_falls_by_the_epoch_after_the_warm_start(store_path):
    """MVR eq. 8, exp(-alpha x epoch) down to the floor; an epoch of six questions in fours is two steps."""

    def temperatures(name: str, **settings) -> list[float]:
        cfg = {"questions": "tiny", "batch_questions": 4, "epochs": 4, "warm_start_steps": 3, "loss": "mvr", **settings}
        cfg |= {"temperature_decay": 0.5, "temperature_floor": 0.3}
        model = train(run_of(store_path, cfg, {"name": name, "strategy": "snippet_means", **QUICK}))
        epochs = [epoch for epoch in model.epochs if epoch.step > 3]
        assert epochs[-1].step == 3 + 8
        return [epoch.temperature for epoch in epochs]

    assert temperatures("epochs") == pytest.approx([1, math.exp(-0.5), math.exp(-1), 0.3])
    assert temperatures("steps", temperature_steps=1)[:2] == pytest.approx([math.exp(-0.5), 0.3])
    assert set(temperatures("fixed", temperature=0.7)) == {0.7}


@pytest.mark.data
def test_lower_precision_and_checkpointed_activations_train_to_nearly_the_same_loss(store_path, request):
    passes: list[BertAttention] = []

    def note(module: torch.nn.Module, _) -> None:
        if isinstance(module, BertAttention) and module.training:
            passes.append(module)

    request.addfinalizer(torch.nn.modules.module.register_module_forward_pre_hook(note).remove)

    def loss(**settings) -> float:
        cfg = {"questions": "tiny", "batch_questions": 4, "max_steps": 1, "dropout": 0.0, **settings}
        name = "-".join(settings) or "plain"
        return train(run_of(store_path, cfg, {"name": name, **QUICK})).metrics["loss"]

    plain, plain_passes = loss(), len(passes)
    passes.clear()
    assert (loss(gradient_checkpointing=True), len(passes)) == (plain, 2 * plain_passes)
    for precision in ("bf16", "fp16"):
        lower = loss(precision=precision)
        assert lower == pytest.approx(plain, rel=0.05) and lower != plain


@pytest.mark.data
def test_auto_is_the_precision_of_the_processor_where_training_began(store_path, monkeypatch):
    cfg = {"questions": "tiny", "batch_questions": 4, "max_steps": 3, "epochs": 2, "checkpoint_steps": 1}
    fingerprints = []
    for multiplies, precision in ((True, "bf16"), (False, "fp32")):
        reference = train(run_of(store_path, {**cfg, "precision": precision}, {"name": f"named-{precision}", **QUICK}))
        run = run_of(store_path, {**cfg, "precision": "auto"}, {"name": f"auto-{precision}", **QUICK})
        monkeypatch.setattr(steps, "multiplies_bf16", lambda device, here=multiplies: here)
        with pytest.raises(RetrieverStop):
            train(run, stop_at(2))
        monkeypatch.setattr(steps, "multiplies_bf16", lambda device, here=multiplies: not here)
        assert train(run).fingerprint == reference.fingerprint
        fingerprints.append(reference.fingerprint)
    assert fingerprints[0] != fingerprints[1]


@pytest.mark.data
def test_what_transformers_lacks_for_a_model_type_is_refused_and_auto_avoids_it(store_path, tiny, monkeypatch):
    monkeypatch.setattr(steps, "multiplies_bf16", lambda device: True)

    def train_one(kind: str, **settings) -> TrainedModel:
        cfg = {"questions": "tiny", "batch_questions": 4, "max_steps": 1, **settings}
        return train(run_of(store_path, cfg, {"name": "-".join([kind, *settings]), "backbone": tiny(kind), **QUICK}))

    with pytest.raises(ConfigError, match=r"gradient_checkpointing is true, but .* none for models of type mpnet; set"):
        train_one("mpnet", gradient_checkpointing=True)
    with pytest.raises(ConfigError, match=r"precision is bf16, but models of type deberta are trained in fp32 alone"):
        train_one("deberta", precision="bf16")
    assert train_one("deberta", precision="auto").fingerprint == train_one("deberta").fingerprint


@pytest.mark.data
def test_what_cannot_be_trained_is_refused_by_name(store_path):
    def check(error, message, train_settings=None, encoder=None, **sections):
        with pytest.raises(error, match=message):
            train(run_of(store_path, train_settings or {}, encoder or QUICK, **sections))

    check(ConfigError, "3 workers .* a multiple of 3", resources={"train_workers": 3})
    check(ConfigError, "batch_questions is 64, but there are only 6", {"questions": "tiny", "batch_questions": 64})
    check(ConfigError, "camvr, which needs snippets", {"loss": "camvr"}, {"strategy": "mean"})
    check(MissingInputError, "question set 'nobody' not found", {"questions": "nobody"})
    check(MissingInputError, "'0123'.* not found", {"init_from": "0123"})
    check(ResourceError, "sees no GPU", resources={"train_workers": 0, "gpus_per_trainer": 1})
    write_questions(only_corpus(Store(str(store_path))), "strays", [Question("q", "Who?", positive_ids=("nowhere",))])
    check(DataError, "none of the 1 questions", {"questions": "strays"})


@pytest.mark.data
def test_training_goes_on_from_a_snapshot_of_equal_settings_only(store_path):
    settings = {"questions": "tiny", "batch_questions": 4, "max_steps": 1}
    run, store = run_of(store_path, settings, {"name": "chain", **QUICK}), Store(str(store_path))
    first = train(run)
    assert latest_backbone(store, "chain") == run.encoder.backbone
    second = train(run_of(store_path, {**settings, "init_from": first.fingerprint}, {"name": "chain", **QUICK}))
    assert second.fingerprint != first.fingerprint
    assert latest_backbone(store, "chain") is None
    of_another_name = train(run_of(store_path, {**settings, "init_from": "chain"}, {"name": "other", **QUICK}))
    third = {**settings, "init_from": second.fingerprint}
    assert of_another_name.fingerprint == train(run_of(store_path, third, {"name": "chain", **QUICK})).fingerprint
    for name, value, own in [("num_views", 4, 2), ("score_scale", 1, 20.0), ("tied", False, True)]:
        other = run_of(store_path, {**settings, "init_from": "chain"}, {"name": "chain", **QUICK, name: value})
        with pytest.raises(EncoderError, match=rf"init_from chain has {name} {own}, but .* section has {name} {value}"):
            train(other)
    same_name = run_of(store_path, {**settings, "init_from": "chain"}, {"name": "chain", **QUICK})
    with pytest.raises(
        ConfigError, match=f"init_from is chain, as encoder.name, .*init_from={of_another_name.fingerprint}"
    ):
        train(same_name)


@pytest.mark.data
@pytest.mark.ray
def test_workers_start_from_an_encoder_whose_settings_the_run_file_leaves_out(store_path, ray_session):
    """What is not set is the encoder's own: a default sent to a worker would be as if it were set."""
    settings = {"questions": "tiny", "batch_questions": 4, "max_steps": 1}
    train(run_of(store_path, settings, {"name": "scaled", "score_scale": 7, **QUICK}))
    settings["init_from"] = "scaled"
    here, on_worker = (
        train(run_of(store_path, settings, {"name": f"scaled-{n}", **QUICK}, resources={"train_workers": n}))
        for n in (0, 1)
    )
    assert on_worker.fingerprint == here.fingerprint


@pytest.mark.parametrize("scheme", ["", "file://", "s3://"])
def test_files_of_ray_train_are_in_a_store_that_several_machines_share_and_go_with_the_run(tmp_path, scheme, request):
    """An object store is reached by the keys and the endpoint of its address."""
    cluster = ClusterInfo(8, 0, (Node(4, 0), Node(4, 0)))
    root = request.getfixturevalue("bucket") if scheme == "s3://" else f"{scheme}{tmp_path}/store"
    run, store = parse_run({"store": {"path": root}}, "test"), Store(root)
    with _storage(run, cluster) as storage:
        files, folder = get_fs_and_path(**storage)
        files.create_dir(folder)
        with files.open_output_stream(f"{folder}/file") as file:
            file.write(b"data")
        [name] = store.list("training/encoder")
        assert store.list(f"training/encoder/{name}") == ["file"]
    assert store.list("training/encoder") == []


@pytest.mark.slow
@pytest.mark.chaos("training worker killed", "the weights are the undisturbed ones to the bit")
@pytest.mark.data
@pytest.mark.ray
def test_neither_a_killed_worker_nor_a_corpus_that_is_published_before_the_workers_start_changes_the_result(
    store_path, tmp_path, actor_processes, record_property, monkeypatch
):
    """Two workers on Ray, one killed half way, give the result of two undisturbed processes, which stop in step 6, when
    the dev question has been right five times."""
    settings = {"questions": "tiny", "batch_questions": 4, "max_steps": 9, "epochs": 9, "checkpoint_steps": 2}
    settings |= {"dev_questions": "one", "dev_steps": 1, "patience": 5}
    killed_pids: list[int] = []
    steps: list[int] = []

    def kill_one(what: str, count: int, total: int) -> None:
        steps.append(count)
        if count >= 2 and not killed_pids:
            killed_pids.append(actor_processes("RayTrainWorker")[0])
            os.kill(killed_pids[0], signal.SIGKILL)

    calm = train_on_ranks(run_of(store_path, settings, {"name": "calm", **QUICK}), 2)
    (tmp_path / "backbone").symlink_to((store_path.parent / "backbone").resolve())
    path = Path(shutil.copytree(store_path, tmp_path / "store"))
    store, changes = Store(str(path)), tmp_path / "changes.jsonl"
    changes.write_text(json.dumps({"id": "new", "title": "T", "text": "A new passage."}) + "\n")
    corpus = only_corpus(store)

    def update_first(*args):
        update(run_of(path, {}).prepare, store, str(changes))
        return _storage(*args)

    monkeypatch.setattr("mvr_ray.distributed.train._storage", update_first)
    handler = signal.getsignal(signal.SIGINT)
    resources = {"train_workers": 2, "cpus_per_trainer": 1}
    hurt_model = train(run_of(path, settings, {"name": "hurt", **QUICK}, resources=resources), kill_one)
    assert signal.getsignal(signal.SIGINT) is handler
    assert Corpus.open(store, "corpus").digest != corpus.digest
    assert killed_pids
    assert hurt_model.fingerprint == calm.fingerprint
    assert hurt_model.epochs == calm.epochs
    assert metrics_of(hurt_model, path) == metrics_of(calm, store_path)
    assert [epoch.step for epoch in calm.epochs] == [1, 2, 3, 4, 5, 6]
    record_property("figures", f"1 of 2 workers killed in step {next(n for n in steps if n >= 2)} of {max(steps)}")


@pytest.mark.data
@pytest.mark.ray
def test_workers_refuse_a_question_set_that_was_replaced_before_they_start(store_path, ray_session, monkeypatch):
    corpus = only_corpus(Store(str(store_path)))
    questions = read_questions(corpus, "tiny")
    write_questions(corpus, "replaced", questions)

    class TrainerHere:
        """Ray Train's trainer whose one worker is this process."""

        def __init__(self, worker, train_loop_config, **_):
            self.work = lambda: worker(train_loop_config)

        def fit(self):
            write_questions(corpus, "replaced", questions[:5])
            try:
                self.work()
            except ConfigError as error:
                raise WorkerGroupError("", {0: error}) from error

    monkeypatch.setattr("mvr_ray.distributed.train.TorchTrainer", TrainerHere)
    monkeypatch.setattr("mvr_ray.distributed.train.get_device", lambda: torch.device("cpu"))
    run = run_of(store_path, {"questions": "replaced", "batch_questions": 4}, resources={"train_workers": 1})
    with pytest.raises(ConfigError, match=r"a question set of the train section.* was replaced meanwhile"):
        train(run)


@pytest.mark.slow
@pytest.mark.data
@pytest.mark.ray
def test_an_interrupted_command_says_so_and_continues_with_store_and_backbone_given_by_relative_paths(
    store_path, ray_session, monkeypatch, capsys
):
    """It is interrupted when its worker has written a checkpoint, and this process continues there."""
    settings = {"questions": "tiny", "batch_questions": 4, "max_steps": 40, "epochs": 40, "checkpoint_steps": 2}
    run = run_of(store_path, settings, {"name": "interrupted", **QUICK}, resources={"train_workers": 1})
    calm = train(run_of(store_path, settings, {"name": "calm-alone", **QUICK}))
    file = store_path.parent / "run.yaml"
    plain = run.model_dump(mode="json")
    plain |= {"store": {"path": store_path.name}, "encoder": {**plain["encoder"], "backbone": "backbone"}}
    file.write_text(yaml.safe_dump(plain))
    monkeypatch.chdir(store_path.parent)

    def command(*words: str) -> tuple[object, str, str]:
        with pytest.raises(SystemExit) as end:
            main(["train", file.name, "--json", *words])
        return end.value.code, *capsys.readouterr()

    def interrupt() -> None:
        until(lambda: [*store_path.glob("training/interrupted/*/step-*")], 300)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    status, _, err = command()
    thread.join()
    assert (status, err.splitlines()[-1]) == (
        130,
        "mvr-ray: interrupted; the same command continues where it stopped",
    )
    status, out, err = command("resources.train_workers=0")
    assert not status, err
    assert json.loads(out)["fingerprint"] == calm.fingerprint


def test_a_worker_that_lost_one_with_an_error_of_its_own_is_no_reason_to_start_again():
    network, disk = RuntimeError("[/pytorch/gloo/transport/tcp/pair.cc:553] closed"), StorageError("the disk is full")
    assert _may_help([network]) and _may_help([ray.exceptions.ActorDiedError(), IndexError()])
    assert not _may_help([network, disk]) and not _may_help([])
    failure = WorkerGroupError("", {0: network, 1: disk})
    assert _translate_failure(failure) is disk
    assert "restarts: ConnectionError; see" in str(_translate_failure(WorkerGroupError("", {0: ConnectionError()})))
