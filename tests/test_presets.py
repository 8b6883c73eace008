"""The presets of the papers hold what the papers have, and nothing of ours."""

from pathlib import Path

import pytest

from mvr_ray.config import load_run
from mvr_ray.studies.definition import load_study

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
STUDIES = [path for path in sorted(CONFIGS.glob("studies/*.yaml")) if not path.stem.startswith("common")]
OURS = {"normalize": True, "score_scale": 20.0, "empty_snippets": "masked", "title_view": False}
"""Our defaults, which no preset of CAMVR may inherit."""


def preset(name: str):
    return load_run(CONFIGS / "presets" / f"{name}.yaml")


def test_the_camvr_preset_has_the_papers_input_and_loss():
    run = preset("camvr")
    encoder, train = run.encoder, run.train
    assert (encoder.strategy, encoder.readout, encoder.num_views) == ("snippets", "viewer", 8)
    assert encoder.use_title and encoder.title_view and encoder.empty_snippets == "kept", "figures 1 and 4"
    assert not encoder.normalize and encoder.score_scale == 1.0, "raw inner products"
    assert (train.loss, train.local_weight, train.answer_share, train.answer_views) == ("camvr", 0.0, 1.0, "first")
    assert [name for name, value in OURS.items() if getattr(encoder, name) == value] == []


@pytest.mark.parametrize("name", ["dpr", "me_bert", "mvr", "camvr"])
def test_no_preset_of_a_paper_has_a_warm_start_unit_vectors_a_scale_or_siblings(name):
    run = preset(name)
    assert not run.encoder.normalize and run.encoder.score_scale == 1.0
    assert not run.train.siblings and not run.train.distil_weight
    if run.encoder.strategy in ("viewers", "snippets"):
        assert run.train.warm_start_steps == 0 and run.train.viewer_lr_factor == 1.0


@pytest.mark.parametrize("name", ["dpr", "me_bert", "mvr", "camvr", "aopt"])
def test_presets_clip_the_joined_gradient_where_dpr_clips_its_share_of_one_rank(name):
    run = preset(name)
    assert run.train.clip_norm == 2.0 * run.resources.train_workers


def test_what_we_do_with_snippets_is_a_preset_of_its_own():
    run = preset("camvr_snippet_means")
    assert (run.encoder.strategy, run.train.loss, run.train.local_weight) == ("snippet_means", "camvr", 0.01)
    assert {name: getattr(run.encoder, name) for name in OURS} == OURS
    assert run.encoder.name == run.index.name == "camvr_snippet_means"


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
@pytest.mark.parametrize("size", ["quick", "gpu", "paper"])
def test_what_a_study_calls_as_published_has_no_warm_start_no_scale_and_no_masked_empties(path, size):
    study = load_study(path, size)
    for variant in study.config.variants:
        if "as published" not in variant.name:
            continue
        for step in study.steps(variant):
            run = study.resolve(study.overrides(variant, step, study.at_size.seeds[0]))
            assert run.train.warm_start_steps == 0 and run.train.answer_share == 1.0
            assert not run.encoder.normalize and run.encoder.score_scale == 1.0
            if run.encoder.strategy == "snippets":
                assert run.encoder.title_view and run.encoder.empty_snippets == "kept"
                assert run.train.local_weight == 0
            if run.encoder.strategy == "viewers":
                assert run.encoder.viewer_position == "zero"
