"""Training and ranking by `Index`: as the stages do it, with losses and metrics of one's own."""

import functools
import inspect
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mvr_ray import Index
from mvr_ray.api.run_settings import with_settings
from mvr_ray.core.learning import losses
from mvr_ray.distributed.retrieve import retrieve
from mvr_ray.distributed.training.steps import OwnLoss
from mvr_ray.errors import ConfigError, EncoderError

PASSAGES = [(f"p{row}", f"Tower {row} stands in city {row}. It was built in year {1900 + row}.") for row in range(12)]
QUESTIONS = [
    {"id": f"q{row}", "question": f"When was tower {row} built?", "answers": [f"{1900 + row}"], "positive_ids": [name]}
    for row, (name, _) in enumerate(PASSAGES)
]
STEPS = {"max_steps": 2, "batch_questions": 4, "num_hard_negatives": 0, "lr": 1e-3}


@pytest.fixture(scope="module")
def index(tiny_backbone: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Index]:
    settings = {"encoder": {"num_views": 2}, "index": {"precision": "fp32", "lexical": True}}
    path = tmp_path_factory.mktemp("train") / "store"
    with Index.build(PASSAGES, model=tiny_backbone, path=path, settings=settings) as index:
        index.add_questions(QUESTIONS, "towers")
        yield index


def own_mvr_loss(*tensors, **settings):
    return losses.mvr_loss(*tensors, **settings)


def own_total(*tensors, **settings):
    return losses.mvr_loss(*tensors, **settings).total


def hinge_loss(queries_QD, views_PVD, mask_PV, positive_Q, *, scale, known_QP, **others):
    scores_QP = scale * losses.pairwise_scores(queries_QD, views_PVD, mask_PV).amax(-1)
    margins_QP = 1 + scores_QP - scores_QP.gather(1, positive_Q[:, None])
    return margins_QP.masked_fill(known_QP, 0).clamp(min=0).mean()


def test_the_loss_of_the_page_on_models_is_the_one_that_trains_here():
    page = Path(__file__).parents[2] / "docs" / "howto" / "model.md"
    assert inspect.getsource(hinge_loss) in page.read_text(encoding="utf-8")


def test_an_own_loss_trains_what_it_computes_and_is_found_again_by_its_source(index: Index):
    by_name = index.train("towers", dev=QUESTIONS[:4], loss="mvr", **STEPS)
    assert by_name.epochs[0].dev_top1 is not None
    for loss in (own_mvr_loss, own_total):
        assert index.train("towers", dev=QUESTIONS[:4], loss=loss, **STEPS).fingerprint == by_name.fingerprint
    steps: list[int] = []
    other = index.train("towers", loss=hinge_loss, progress=lambda what, count, total: steps.append(count), **STEPS)
    assert other.fingerprint != by_name.fingerprint and max(steps) == 2
    steps.clear()
    again = index.train("towers", loss=hinge_loss, progress=lambda what, count, total: steps.append(count), **STEPS)
    assert again.fingerprint == other.fingerprint and not steps


def test_rows_with_answers_train_by_the_views_of_their_answers_and_readers(index: Index):
    rows = [{**row, "answers": [f"city {number}"]} for number, row in enumerate(QUESTIONS)]  # not in the best view
    by_answer, best = (index.train(rows, loss=loss, **STEPS).metrics["loss"] for loss in ("camvr", "mvr"))
    assert by_answer > best
    assert index.train(rows, task="reader", **STEPS).num_examples == len(QUESTIONS)
    rows = [{**row, "answers": []} for row in QUESTIONS]
    with pytest.raises(
        ConfigError, match=r"camvr, and scores a positive by the view of its answer, but none of the 12 us"
    ):
        index.train(rows, loss="camvr", **STEPS)


def with_margin(margin):
    def own_loss(queries_QD, views_PVD, mask_PV, positive_Q, **others):
        scores_QP = losses.pairwise_scores(queries_QD, views_PVD, mask_PV).amax(-1)
        return (margin + scores_QP - scores_QP.gather(1, positive_Q[:, None])).square().mean()

    return own_loss


def test_an_own_loss_with_another_value_is_another_training(index: Index):
    small, large = (index.train("towers", loss=with_margin(margin), **STEPS).fingerprint for margin in (0.1, 0.9))
    assert small != large
    assert index.train("towers", loss=with_margin(0.1), **STEPS).fingerprint == small


MARGIN, OTHERS = 0.1, {"weights": [1, 2]}


def by_globals(*tensors, **settings):
    return sum(MARGIN * weight for weight in OTHERS["weights"])


def test_defaults_and_variables_outside_of_a_loss_are_in_its_source_if_they_are_plain(monkeypatch: pytest.MonkeyPatch):
    def sources() -> list[str]:
        functions = by_globals, with_margin(MARGIN), lambda *tensors, margin=MARGIN, **settings: margin
        return [OwnLoss.of(function).source for function in functions]

    before = sources()
    assert before == sources()
    monkeypatch.setitem(globals(), "OTHERS", {"weights": [1, 3]})
    assert [old == new for old, new in zip(before, sources())] == [False, True, True]
    monkeypatch.setitem(globals(), "MARGIN", 0.9)
    assert not {*before} & {*sources()}
    for without in (own_mvr_loss, with_margin(torch.ones(2))):
        assert OwnLoss.of(without).source == inspect.getsource(without)


def test_a_build_without_a_model_indexes_with_the_encoder_of_the_last_training(tiny_backbone: Path, tmp_path: Path):
    settings = {"encoder": {"num_views": 2}, "index": {"precision": "fp32"}}
    index = Index.build(PASSAGES, model=tiny_backbone, path=tmp_path / "store", settings=settings)
    model = index.train(QUESTIONS, **STEPS)
    assert index.manifest.encoder_fingerprint != model.fingerprint
    again = Index.build(PASSAGES, path=tmp_path / "store", settings=settings)
    assert again.manifest.encoder_fingerprint == model.fingerprint
    assert again.run.encoder.backbone == index.run.encoder.backbone
    with pytest.raises(EncoderError, match="was trained with backbone"):
        Index.build(PASSAGES, model="all-MiniLM-L6-v2", path=tmp_path / "store", settings=settings)


def test_a_training_reads_the_passages_of_the_live_version_after_a_roll_back(index: Index):
    steps: list[int] = []
    train = functools.partial(index.train, "towers", progress=lambda what, count, total: steps.append(count), **STEPS)
    before, live = train(), index.versions()[-1].version
    index.upsert([("p0", "A bridge.")])
    assert train().fingerprint != before.fingerprint
    index.rollback(live)
    steps.clear()
    assert train().fingerprint == before.fingerprint and not steps


def no_tensor(*tensors, **settings):
    return 3.0


def loss_of_each_question(queries_QD, *tensors, **settings):
    return queries_QD.sum(1)


def loss_of_plain_terms(queries_QD, *tensors, **settings):
    return losses.LossTerms(queries_QD.sum(), 0.0, 0.0)


def loss_without_a_gradient(queries_QD, *tensors, **settings):
    return queries_QD.detach().sum()


def test_a_loss_that_is_no_tensor_of_one_number_is_refused(index: Index):
    with pytest.raises(ConfigError, match=r"the function of loss returned 3\.0; return one tensor of one number"):
        index.train("towers", loss=no_tensor, **STEPS)
    with pytest.raises(ConfigError, match=r"returned a tensor of shape \(\d+,\); return one tensor of one number"):
        index.train("towers", loss=loss_of_each_question, **STEPS)
    with pytest.raises(ConfigError, match=r"returned LossTerms\(.*; return one tensor of one number"):
        index.train("towers", loss=loss_of_plain_terms, **STEPS)
    with pytest.raises(ConfigError, match="returned a tensor without a gradient; compute it by torch from queries_QD"):
        index.train("towers", loss=loss_without_a_gradient, **STEPS)


def test_a_loss_without_a_source_and_one_for_another_task_are_refused(index: Index):
    for no_function in (functools.partial(own_mvr_loss), index.search):
        with pytest.raises(ConfigError, match=r"is not a function whose source can be read"):
            index.train("towers", loss=no_function, **STEPS)
    with pytest.raises(ConfigError, match=r"a loss of your own is for a retriever, and train\.task is reader"):
        index.train("towers", loss=own_mvr_loss, task="reader")
    with pytest.raises(ConfigError, match="learning_rate"):
        index.train("towers", learning_rate=1e-3)


@pytest.mark.parametrize("hybrid", [None, "rrf"])
def test_rankings_are_those_of_a_search_and_of_the_file_that_the_stage_writes(index: Index, hybrid, tmp_path: Path):
    ranking = index.retrieve("towers", k=5, hybrid=hybrid)
    texts = [question["question"] for question in QUESTIONS]
    for one, hits in zip(ranking, index.search(texts, k=5, hybrid=hybrid), strict=True):
        assert [(hit.id, hit.view) for hit in one.passages] == [(hit.id, hit.view) for hit in hits]
        assert [hit.score for hit in one.passages] == pytest.approx([hit.score for hit in hits], abs=1e-5)
        assert [hit.has_answer for hit in one.passages] == [one.question.answers[0] in hit.text for hit in hits]
    run = with_settings(index.run, retrieve={"k": 5}, search={"hybrid": hybrid})
    retrieve(run, "towers", tmp_path / "run.trec", "trec")
    lines = [line.split() for line in (tmp_path / "run.trec").read_text().splitlines()]
    ids = [[hit.id for hit in one.passages] for one in ranking]
    expected = [(one.question.id, name) for one, own in zip(ranking, ids) for name in own]
    assert [(line[0], line[2]) for line in lines] == expected
    assert [[hit.id for hit in one.passages] for one in index.retrieve(texts[:3], k=5, hybrid=hybrid)] == ids[:3]


def test_a_filter_restricts_a_ranking(index: Index):
    [one] = index.retrieve(["Which tower?"], k=20, filter={"id": {"in": ["p3", "p7"]}})
    assert {hit.id for hit in one.passages} == {"p3", "p7"}


def test_mined_negatives_train_an_encoder_with_which_the_stored_passages_are_indexed_again(
    index: Index, tmp_path: Path
):
    with Index.open(shutil.copytree(index.run.store.path, tmp_path / "store")) as own:
        report = own.mine("towers", num_negatives=2)
        assert report.negatives and report.output == "train_mined" and "train_mined" in own.question_sets()
        assert own.mine(QUESTIONS, output="other").questions == len(QUESTIONS) and "other" in own.question_sets()
        settings = {**STEPS, "num_hard_negatives": 1, "hard_negatives": report.output}
        model = own.train("towers", **settings, seed=7)
        hits = own.search("tower 3")
        manifest = own.reindex()
        assert (manifest.encoder_fingerprint, manifest.num_passages) == (model.fingerprint, len(PASSAGES))
        assert manifest.encoder_fingerprint == own.encoder.fingerprint != index.encoder.fingerprint
        assert own.search("tower 3").version == manifest.version == hits.version + 1
        assert own.reindex().version == manifest.version
        weights = own.tune(QUESTIONS)
        assert weights.setting.startswith("search.hybrid=") and weights.num_questions == len(QUESTIONS)
