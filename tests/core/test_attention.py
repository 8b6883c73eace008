"""Checks what views read, against plain transformers calls and slow loops."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import AutoModel

from mvr_ray.core.encoding.encoder import DualEncoder, EncoderSpec
from mvr_ray.core.judging.attention import (
    ViewAttention,
    attention_kl,
    attention_kl_table,
    mean_attention_kl,
    view_attention,
)
from mvr_ray.errors import EncoderError
from mvr_ray.types import Passage

SPEC = EncoderSpec(num_views=3, max_query_tokens=24, max_passage_tokens=64)
PASSAGES = [
    Passage("1", "The river", "The river rises in the hills. It runs to the sea! Where does the river end?"),
    Passage("2", "", "Salt made the town rich. Boats came every day."),
]


@pytest.mark.parametrize("kind", ["bert", "roberta", "xlm-roberta", "distilbert", "mpnet"])
@pytest.mark.parametrize("strategy", ["mean", "snippet_means", "first_k", "snippets"])
def test_a_view_attends_as_the_mean_of_its_tokens_does_whatever_it_is_padded_with(tiny, kind, strategy):
    encoder = DualEncoder.from_backbone(tiny(kind), replace(SPEC, strategy=strategy))
    before = encoder.passage_tower.backbone.config._attn_implementation
    passages = encoder.tokenize_passages(PASSAGES)
    together = view_attention(encoder, passages)
    assert encoder.passage_tower.backbone.config._attn_implementation == before
    plain = AutoModel.from_pretrained(tiny(kind), attn_implementation="eager").eval()
    words = plain.get_input_embeddings().weight.detach()
    if encoder.passage_tower.viewers is not None:
        words = torch.cat([words, encoder.passage_tower.viewers.weight.detach()])
    for passage, (attention_VT, mask_V) in zip(passages, together):
        with torch.no_grad():
            last_HTT = plain(
                inputs_embeds=words[torch.from_numpy(passage.input_ids).long()][None],
                position_ids=torch.from_numpy(passage.position_ids).long()[None],
                output_attentions=True,
            ).attentions[-1][0]
        for view in range(encoder.num_views):
            rows = np.flatnonzero(passage.view_T == view)
            assert mask_V[view] == bool(len(rows))
            if len(rows):
                expected_T = last_HTT[:, rows].mean((0, 1)).numpy()
                np.testing.assert_allclose(attention_VT[view], expected_T, atol=1e-5)
                assert attention_VT[view].sum() == pytest.approx(1, abs=1e-5)


def kl_table(passages: Sequence[ViewAttention]) -> np.ndarray:
    return attention_kl_table([attention_kl(passage) for passage in passages])


def test_divergence_equals_a_loop_over_pairs_of_views_and_is_zero_for_equal_ones():
    rng = np.random.default_rng(3)
    masks = np.array([[True, True, True], [True, False, True], [True, False, False], [True, True, True]])
    passages = [ViewAttention(rng.random((3, 4 + n)) * mask[:, None], mask) for n, mask in enumerate(masks)]
    table_VV = kl_table(passages)
    for i, j in itertools.product(range(3), repeat=2):
        pairs = [(a[i], a[j]) for a, mask in passages if mask[i] and mask[j]]
        assert table_VV[i, j] == pytest.approx(np.mean([stats.entropy(y, x) for x, y in pairs]), abs=1e-12)
    alike = [ViewAttention(np.repeat(rng.random((1, 5)), 3, axis=0), np.ones(3, bool))]
    np.testing.assert_allclose(kl_table(alike), 0, atol=1e-12)
    apart = [ViewAttention(np.eye(2), np.ones(2, bool))]
    assert kl_table(apart)[0, 1] == pytest.approx(math.log(1e12), rel=1e-6)
    never = [ViewAttention(np.ones((2, 4)), np.array([True, False]))]
    assert np.isnan(kl_table(never)).tolist() == [[False, True], [True, True]]


def test_row_i_column_j_is_the_divergence_of_view_j_from_view_i_and_the_mean_is_of_the_upper_triangle():
    """CAMVR eq. 14, D(i, j) = sum_l a_jl log(a_jl / a_il), by hand."""
    a = np.array([[1 / 2, 1 / 4, 1 / 4], [1 / 4, 1 / 4, 1 / 2], [1 / 8, 3 / 4, 1 / 8]])
    d_01 = 1 / 4 * math.log(1 / 2) + 1 / 4 * math.log(1) + 1 / 2 * math.log(2)
    d_02 = 1 / 8 * math.log(1 / 4) + 3 / 4 * math.log(3) + 1 / 8 * math.log(1 / 2)
    d_12 = 1 / 8 * math.log(1 / 2) + 3 / 4 * math.log(3) + 1 / 8 * math.log(1 / 4)
    d_20 = 1 / 2 * math.log(4) + 1 / 4 * math.log(1 / 3) + 1 / 4 * math.log(2)
    table_VV = kl_table([ViewAttention(a, np.ones(3, bool))])
    expected = [[0, d_01, d_02], [d_01, 0, d_12], [d_20, d_20, 0]]
    np.testing.assert_allclose(table_VV, expected, atol=1e-12)
    assert abs(d_02 - d_20) > 0.02, "the two directions differ"
    assert mean_attention_kl(table_VV) == pytest.approx((d_01 + d_02 + d_12) / 3)
    half = np.array([[0, np.nan, 0.5], [9, 0, 0.25], [9, 9, 0]])
    assert mean_attention_kl(half) == pytest.approx(0.375)
    assert mean_attention_kl(np.empty((0, 0))) is None


def test_viewers_at_one_position_of_minilm_read_alike_and_viewers_at_their_own_do_not(minilm):
    def divergence(position: str) -> np.ndarray:
        spec = replace(SPEC, strategy="viewers", viewer_position=position)
        encoder = DualEncoder.from_backbone(str(minilm), spec)
        return kl_table(view_attention(encoder, encoder.tokenize_passages(PASSAGES)))

    apart = ~np.eye(3, dtype=bool)
    assert divergence("zero")[apart].max() < 1e-5
    assert divergence("own")[apart].min() > 1e-3


def test_pieces_that_are_read_alone_have_no_common_attention(tiny):
    encoder = DualEncoder.from_backbone(tiny("bert"), replace(SPEC, strategy="splits"))
    with pytest.raises(EncoderError, match="strategy 'splits' reads a passage in several sequences"):
        view_attention(encoder, encoder.tokenize_passages(PASSAGES))


def test_the_whole_view_attends_as_the_one_view_of_mean_does(tiny):
    whole, mean = (
        DualEncoder.from_backbone(tiny("bert"), replace(SPEC, **settings))
        for settings in ({"whole_view": True}, {"strategy": "mean"})
    )
    passages = [*PASSAGES, Passage("3", "The sea", "")]
    pairs = zip(*(view_attention(encoder, encoder.tokenize_passages(passages)) for encoder in (whole, mean)))
    for own, one in pairs:
        np.testing.assert_allclose(own.attention_VT[0], one.attention_VT[0], atol=1e-6)
        assert own.mask_V[0]


def test_the_windows_of_a_long_passage_have_no_common_attention(tiny):
    plain, encoder = (
        DualEncoder.from_backbone(tiny("bert"), replace(SPEC, max_passage_tokens=40, overlap_tokens=overlap))
        for overlap in (0, 8)
    )
    short, long = encoder.tokenize_passages([PASSAGES[1], Passage("3", "", "Salt and trade. " * 40)])
    [own], [expected] = (view_attention(one, [short]) for one in (encoder, plain))
    np.testing.assert_array_equal(own.attention_VT, expected.attention_VT)
    with pytest.raises(EncoderError, match="a passage in several sequences"):
        view_attention(encoder, [short, long])
