"""Training a cross-encoder on real questions, and mining with it: its scores determine the negatives."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from prepared_corpus import only_corpus

from mvr_ray.cli import main
from mvr_ray.config import RunConfig, parse_run
from mvr_ray.core.reading.cross_encoder import CrossEncoder, Pair
from mvr_ray.distributed.cluster import session
from mvr_ray.distributed.mine import mine
from mvr_ray.distributed.models import pair_spec
from mvr_ray.distributed.train import train
from mvr_ray.distributed.training.retriever import RetrieverLoop
from mvr_ray.errors import ConfigError, CrossEncoderError, DataError, MissingInputError
from mvr_ray.store.corpus import Corpus
from mvr_ray.store.files import Store
from mvr_ray.store.prepare import prepare
from mvr_ray.store.questions import read_questions, write_questions

pytestmark = pytest.mark.data

MINING = {"questions": "all", "num_negatives": 3, "rank_to": 30, "max_pair_tokens": 96, "denoise_depth": 6}


@pytest.fixture(scope="module")
def store_path(squad_dev, tiny_backbone, tmp_path_factory) -> Path:
    """The shortest paragraphs of three articles, with one question each; hard negatives are mined by BM25."""
    folder = tmp_path_factory.mktemp("pairs")
    (folder / "backbone").symlink_to(tiny_backbone)
    data = []
    for article in squad_dev["data"][:3]:
        short = sorted(article["paragraphs"], key=lambda paragraph: len(paragraph["context"]))[:8]
        paragraphs = [{"context": p["context"], "qas": p["qas"][:1]} for p in short]
        data.append({"title": article["title"], "paragraphs": paragraphs})
    (folder / "squad.json").write_text(json.dumps({"version": "1.1", "data": data}))
    run = run_of(folder / "store", prepare={"sources": [{"path": str(folder / "squad.json"), "questions": "all"}]})
    prepare(run.prepare, Store(run.store.path))
    mine(run_of(folder / "store", mine={**MINING, "output": "mined"}))
    return folder / "store"


def run_of(path: Path, train: dict | None = None, **sections) -> RunConfig:
    sections = {"resources": {"train_workers": 0, "encoders_min": 1, "encoders_max": 1}, "mine": MINING, **sections}
    settings = {"task": "cross_encoder", "questions": "all", "hard_negatives": "mined", "dropout": 0.0, **(train or {})}
    encoder = {"backbone": str(path.parent / "backbone"), **sections.pop("encoder", {})}
    settings = {"batch_questions": 8, **settings}
    return parse_run({"store": {"path": str(path)}, "train": settings, "encoder": encoder, **sections}, "test")


class CrossEncoderStop(Exception):
    pass


@pytest.mark.slow
@pytest.mark.ray
def test_a_cross_encoder_learns_and_what_it_takes_for_an_answer_is_no_negative(
    store_path, minilm, ray_session, monkeypatch
):
    """Pairs are short, and few questions are evaluated: each epoch scores these with all of their passages."""
    corpus = only_corpus(Store(str(store_path)))
    write_questions(corpus, "few", read_questions(corpus, "all")[::5])
    short = {"read": {"max_question_tokens": 24}, "encoder": {"backbone": str(minilm)}}
    mining = {**MINING, "max_pair_tokens": 56, "cross_encoder": "judge"}
    settings = {"dev_questions": "few", "num_hard_negatives": 2, "lr": 5e-4, "epochs": 4, "cross_encoder": "judge"}
    model = train(run_of(store_path, settings, mine=mining, **short))
    assert model.metrics["dev_top1"] > max(0.7, model.metrics["dev_top1_before"])
    assert model.epochs[-1].loss < model.epochs[0].loss / 2

    store = Store(str(store_path))
    before = {question.id: question for question in read_questions(only_corpus(store), "mined")}
    run = run_of(store_path, mine={**mining, "output": "clean", "denoise_share": 0.02}, **short)
    report = mine(run)
    corpus = Corpus.open(store, "corpus")
    judge = CrossEncoder.load(store_path / model.folder, pair_spec(run))
    num_dropped = 0
    for question in read_questions(only_corpus(store), "clean"):
        ids = (question.positive_ids[0], *question.hard_negative_ids)
        texts = corpus.get({*ids, *before[question.id].hard_negative_ids})
        alone = np.array([float(judge.score([Pair(question.text, texts[one])])[0]) for one in ids])
        np.testing.assert_allclose(question.teacher_scores, alone, atol=1e-4)
        shares = np.exp(alone[1:]) / (np.exp(alone[1:]) + np.exp(alone[0]))
        assert (shares < 0.0201).all()
        for other in set(before[question.id].hard_negative_ids) - set(ids):
            num_dropped += 1
            score = float(judge.score([Pair(question.text, texts[other])])[0])
            assert np.exp(score) / (np.exp(score) + np.exp(alone[0])) > 0.0199
    assert report.dropped_by_cross_encoder >= num_dropped > 0
    assert report.hits == report.negatives + report.beyond_count + sum(
        getattr(report, f"dropped_{why}") for why in ("gold", "answer_bearing", "by_cross_encoder")
    )

    monkeypatch.setattr(session, "in_ray", lambda: False)  # scores in this process, without another pool
    strict = {**mining, "output": "nothing", "denoise_share": 0, "denoise_depth": 1}
    with pytest.raises(DataError, match=r"cross-encoder 'judge' scored all \d+ candidate passages .*train it longer"):
        mine(run_of(store_path, mine=strict, **short))
    with pytest.raises(MissingInputError):
        read_questions(only_corpus(store), "nothing")

    settings_of_retriever = {"task": "retriever", "hard_negatives": "clean", "num_hard_negatives": 1, "max_steps": 2}
    plain_model, distilled_model = (
        train(run_of(store_path, {**settings_of_retriever, "distil_weight": weight}, encoder={"name": f"w{weight}"}))
        for weight in (0, 1)
    )
    assert plain_model.fingerprint != distilled_model.fingerprint
    [example] = RetrieverLoop.open_job(run_of(store_path, settings_of_retriever)).examples.get([0], 0)
    question = next(one for one in read_questions(only_corpus(store), "clean") if one.text == example.text)
    score_of = dict(zip((question.positive_ids[0], *question.hard_negative_ids), question.teacher_scores))
    assert list(example.teacher) == [score_of[one.id] for one in (example.passage, *example.negatives)]


def test_a_training_killed_anywhere_ends_with_the_same_cross_encoder_to_the_bit(store_path):
    """Negatives of the batch, dropout, several passes a step."""
    settings = {"hard_negatives": None, "batch_questions": 4, "cache_chunk": 3, "dropout": 0.1, "dev_questions": "all"}
    settings |= {"epochs": 2, "max_steps": 4, "checkpoint_steps": 2}
    whole = train(run_of(store_path, {**settings, "cross_encoder": "whole"}))

    def progress(what: str, count: int, total: int) -> None:
        if count == 3:
            raise CrossEncoderStop

    run = run_of(store_path, {**settings, "cross_encoder": "broken"})
    with pytest.raises(CrossEncoderStop):
        train(run, progress)
    counts: list[int] = []
    again = train(run, lambda what, count, total: counts.append(count))
    assert counts[0] == 3, "the training continues from the checkpoint of step 2"
    assert (again.fingerprint, again.metrics, again.epochs) == (whole.fingerprint, whole.metrics, whole.epochs)


def test_what_cannot_be_trained_or_mined_is_refused_by_name(store_path, tmp_path, capsys):
    with pytest.raises(ConfigError, match=r"train\.task is cross_encoder, which learns from questions"):
        train(run_of(store_path, {"questions": None}))
    with pytest.raises(ConfigError, match=r"init_from is earlier, .*cross_encoder starts from encoder\.backbone"):
        train(run_of(store_path, {"init_from": "earlier"}))
    with pytest.raises(ConfigError, match=r"max_passage_tokens is 96, .*=0, and lower mine\.max_pair_tokens instead"):
        train(run_of(store_path, {"max_passage_tokens": 96}))
    with pytest.raises(ConfigError, match=r"num_hard_negatives is 0, but train\.task=cross_encoder .*=1 or more"):
        train(run_of(store_path, {"num_hard_negatives": 0}))
    with pytest.raises(CrossEncoderError, match=r"max_tokens is 600, .* lower mine\.max_pair_tokens to 512"):
        train(run_of(store_path, mine={**MINING, "max_pair_tokens": 600}))
    with pytest.raises(MissingInputError, match=r"cross-encoder 'nobody' is neither stored in .*mine\.cross_encoder"):
        mine(run_of(store_path, mine={**MINING, "cross_encoder": "nobody"}))
    with pytest.raises(ConfigError, match=r"no question of 'mined' has a teacher's scores; mine with a cross-encoder"):
        train(run_of(store_path, {"task": "retriever", "distil_weight": 1.0}))
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(run_of(store_path).model_dump(mode="json")))
    with pytest.raises(SystemExit) as error:
        main(["train", str(path), "train.questions=nothing"])
    assert error.value.code == 1
    assert "question set 'nothing' not found" in capsys.readouterr().err


def test_scores_of_another_length_than_the_negatives_are_refused(store_path):
    store = Store(str(store_path))
    question = read_questions(only_corpus(store), "mined")[0]
    with pytest.raises(DataError, match="teacher scores; give one for the positive and one for each negative"):
        write_questions(only_corpus(store), "bad", [question._replace(teacher_scores=(1.0,) * 9)])
