"""The collapse alarm, on made vectors and on the real backbone."""

from dataclasses import replace

import numpy as np
import pytest

from mvr_ray.core.encoding.encoder import DualEncoder, EncoderSpec
from mvr_ray.core.judging.collapse import collapse_report, dominant_view
from mvr_ray.types import Passage

TEXTS = [
    "The river rises in the hills. It runs to the sea. Boats came every day in summer.",
    "Salt made the town rich. Trade with the north was older than the town itself.",
    "The bridge was built in 1801. It fell in a flood. Nobody was hurt, and it was built again.",
    "Copper is a soft metal. It conducts heat and electricity. Coins were made of it.",
]


def views(minilm, **settings) -> tuple[np.ndarray, np.ndarray]:
    encoder = DualEncoder.from_backbone(str(minilm), replace(EncoderSpec(max_passage_tokens=64), **settings))
    return encoder.embed_passages(
        encoder.tokenize_passages([Passage(str(n), "", text) for n, text in enumerate(TEXTS)])
    )


@pytest.mark.parametrize("init", ["random", "cls"])
def test_viewers_at_position_zero_collapse_on_minilm_whatever_their_start(minilm, init):
    report = collapse_report(*views(minilm, strategy="viewers", viewer_init=init))
    assert report.is_collapsed
    assert report.mean_pair_cosine == pytest.approx(1.0, abs=1e-4)
    assert report.lv == pytest.approx(0.0, abs=1e-3)
    assert report.reason == (
        "over 4 passages, two views of one have mean cosine 1.0000 and local variation is 0.0000: "
        "the views are one vector; see docs/math.md, Collapse"
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"strategy": "viewers", "viewer_position": "own"},
        {"strategy": "snippets"},
        {"strategy": "snippet_means"},
    ],
    ids=str,
)
def test_other_random_views_do_not_collapse_on_minilm(minilm, settings):
    report = collapse_report(*views(minilm, **settings))
    assert not report.is_collapsed
    assert report.mean_pair_cosine < 0.97


def test_without_two_views_there_is_nothing_to_compare():
    report = collapse_report(np.ones((3, 2, 4)), np.array([[True, False]] * 3))
    assert (report.mean_pair_cosine, report.lv, report.is_collapsed) == (None, None, False)
    assert report.reason == "none of 3 passages has two views to compare"


def test_missing_views_do_not_hide_a_collapse():
    rng = np.random.default_rng(0)
    vectors = np.repeat(rng.normal(size=(6, 1, 8)), 3, axis=1)
    mask = np.ones((6, 3), bool)
    mask[::2, 2] = False
    vectors[::2, 2] = 0
    assert collapse_report(vectors, mask).is_collapsed
    assert not collapse_report(np.where(mask[..., None], rng.normal(size=(6, 3, 8)), 0), mask).is_collapsed


def test_a_passage_alone_is_collapsed_by_its_cosine_only():
    apart = collapse_report(np.array([[[1.0, 0.0], [0.0, 1.0]]]), np.ones((1, 2), bool))
    assert (apart.lv, apart.is_collapsed) == (None, False)
    alike = collapse_report(np.array([[[1.0, 0.0], [1.0, 0.0]]]), np.ones((1, 2), bool))
    assert (alike.lv, alike.is_collapsed) == (None, True)


@pytest.mark.parametrize(("cosine", "is_collapsed"), [(0.995, False), (0.9985, False), (0.9995, True)])
def test_views_collapse_above_a_mean_pair_cosine_of_0_999(cosine, is_collapsed):
    views_VD = np.array([[1.0, 0.0], [cosine, np.sqrt(1 - cosine**2)]])
    report = collapse_report(views_VD[None], np.ones((1, 2), bool))
    assert report.mean_pair_cosine == pytest.approx(cosine)
    assert report.is_collapsed == is_collapsed


@pytest.mark.parametrize(("angle", "is_collapsed"), [(0.0, True), (6e-4, True), (8e-4, False)])
def test_views_far_apart_collapse_where_local_variation_is_below_0_001(angle, is_collapsed):
    """The views of a passage are perpendicular, and an angle away from those of the other passage."""
    cos, sin = np.cos(angle), np.sin(angle)
    report = collapse_report(np.array([[[1, 0], [0, 1]], [[cos, sin], [-sin, cos]]]), np.ones((2, 2), bool))
    assert report.mean_pair_cosine < 0.01
    assert report.lv == pytest.approx(np.sqrt(2) * sin, abs=1e-9)
    assert report.is_collapsed == is_collapsed


def test_local_variation_is_of_the_next_passages_mean_view_as_the_query():
    rng = np.random.default_rng(1)
    vectors, mask = rng.normal(size=(4, 3, 5)).astype(np.float32), np.ones((4, 3), bool)
    mask[1, 2] = mask[2, 0] = False
    values = []
    for passage in range(4):
        own, following = (vectors[at % 4][mask[at % 4]].astype(float) for at in (passage, passage + 1))
        query = following.mean(axis=0)
        scores = sorted(own @ query / np.linalg.norm(own, axis=1).max() / np.linalg.norm(query))
        values.append(scores[-1] - np.mean(scores[:-1]))
    assert collapse_report(vectors, mask).lv == pytest.approx(np.mean(values), rel=1e-5)


@pytest.mark.parametrize(
    ("wins", "view"),
    [
        ([0, 995, 5, 0], 1),
        ([0, 980, 20, 0], None),
        ([250, 250, 250, 250], None),
        ([0, 999, 0, 0], None),
        ([1000], None),
        ([0, 0], None),
    ],
)
def test_a_view_dominates_that_wins_nearly_all_of_many_questions(wins, view) -> None:
    assert dominant_view(wins) == view
