"""Reading without padding gives what the padded pass gives; gradients do not depend on what is read together."""

import copy
import json
import multiprocessing
import pickle
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mvr_ray.core.encoding import unpadded_cpu
from mvr_ray.core.encoding.encoder import DualEncoder, EncoderSpec
from mvr_ray.core.encoding.unpadded_cpu import (
    MANY_BLOCKS,
    UnpaddedCpuTower,
    blocks,
    over_blocks,
    padding_tokens,
    supports_unpadded_cpu,
    view_means,
)
from mvr_ray.core.encoding.views import TokenizedPassage
from mvr_ray.types import Passage

SPEC = EncoderSpec(num_views=3, max_query_tokens=24, max_passage_tokens=64)
STRATEGIES = {
    "cls": replace(SPEC, strategy="cls"),
    "mean": replace(SPEC, strategy="mean"),
    "first_k": replace(SPEC, strategy="first_k"),
    "snippet_means": SPEC,
    "viewers": replace(SPEC, strategy="viewers"),
    "snippets": replace(SPEC, strategy="snippets"),
    "sentences": replace(SPEC, strategy="sentences"),
    "raw": replace(SPEC, normalize=False),
    "two towers": replace(SPEC, tied=False),
}
SENTENCES = "The river rises in the hills. It runs to the sea! Where does the river end? Salt made the town rich. "
PASSAGES = [Passage(str(i), "The town" * (i % 2), (SENTENCES * 4)[: 7 * i % 331]) for i in range(70)]
QUERIES = ["where does the river rise", "salt " * 50, "who?"]


@pytest.mark.parametrize("kind", ["bert", "roberta", "xlm-roberta"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_unpadded_views_are_the_padded_views(tiny, kind, name):
    encoder = DualEncoder.from_backbone(tiny(kind), STRATEGIES[name])
    assert supports_unpadded_cpu(encoder.passage_tower.backbone)
    passages = encoder.tokenize_passages(PASSAGES)
    expected_views = encoder.encode_passages(passages)
    views = encoder.embed_passages(passages)
    assert (views.mask_PV == expected_views.mask_PV.numpy()).all()
    np.testing.assert_allclose(views.views_PVD, expected_views.views_PVD.detach().numpy(), atol=2e-6)
    expected = encoder.encode_queries(QUERIES).detach().numpy()
    np.testing.assert_allclose(encoder.embed_queries(QUERIES), expected, atol=2e-6)


@pytest.mark.parametrize("kind", ["bert", "mpnet"])
def test_the_states_of_every_token_are_the_padded_ones_and_no_more(tiny, kind):
    encoder = DualEncoder.from_backbone(tiny(kind), SPEC)
    passages = encoder.tokenize_passages(PASSAGES[5:40])
    expected_PTD, expected_PT = encoder.states(passages)
    assert expected_PTD.requires_grad
    with torch.no_grad():
        states_PTD, real_PT = encoder.states(passages)
    assert torch.equal(real_PT, expected_PT)
    torch.testing.assert_close(states_PTD[real_PT], expected_PTD[real_PT].detach(), atol=2e-6, rtol=0)
    assert (states_PTD[~real_PT] == 0).all() or not supports_unpadded_cpu(encoder.passage_tower.backbone)


@given(st.integers(1, 9000))
def test_blocks_are_filled_by_little_to_few_numbers_of_rows(num_tokens):
    num_padding = padding_tokens(num_tokens)
    assert 0 <= num_padding < (8 if num_tokens <= 128 else 64)
    assert (num_tokens + num_padding) % (8 if num_tokens <= 128 else 64) == 0
    assert len({n + padding_tokens(n) for n in range(1, 1025)}) == 30
    assert num_tokens > 1024 or num_tokens + padding_tokens(num_tokens, whole=True) == 1024


@pytest.mark.parametrize("repeats", [1, 20])
def test_blocks_of_many_have_one_number_of_rows(tiny, repeats):
    encoder = DualEncoder.from_backbone(tiny("bert"), SPEC)
    passages = encoder.tokenize_passages(PASSAGES * repeats)
    todo = blocks([text.num_tokens for text in passages])
    assert (len(todo) >= MANY_BLOCKS) == (repeats > 1)
    reader, rows = UnpaddedCpuTower(encoder.passage_tower), []
    reader.layers = [lambda x, runs, layer=layer: rows.append(len(x)) or layer(x, runs) for layer in reader.layers]
    views = reader.views(passages, encoder.num_views).views_PVD
    assert sum(rows) >= sum(text.num_tokens for text in passages) * len(reader.layers)
    assert repeats == 1 or set(rows) == {1024}
    alone = torch.cat([reader.views(passages[at : at + 1], encoder.num_views).views_PVD for at in range(9)])
    torch.testing.assert_close(views[:9], alone, atol=2e-6, rtol=0)


def test_what_fills_a_block_changes_nothing_but_the_number_of_rows(tiny, monkeypatch):
    encoder = DualEncoder.from_backbone(tiny("bert"), SPEC)
    passages = sorted(encoder.tokenize_passages(PASSAGES[:9]), key=lambda text: text.num_tokens)
    records = {}
    with torch.no_grad():
        for with_filling in (True, False):
            if not with_filling:
                monkeypatch.setattr(unpadded_cpu, "padding_tokens", lambda num_tokens, whole=False: 0)
            reader = UnpaddedCpuTower(encoder.passage_tower)
            rows, inner = records.setdefault(with_filling, []), reader.layers
            reader.layers = [
                lambda x, runs, layer=layer, rows=rows: rows.append(len(x)) or layer(x, runs) for layer in inner
            ]
            records[with_filling, "states"] = reader(passages)
    num_tokens = sum(text.num_tokens for text in passages)
    assert set(records[False]) == {num_tokens} and num_tokens % 32
    assert set(records[True]) == {num_tokens + padding_tokens(num_tokens)}
    assert len(records[True, "states"]) == num_tokens
    np.testing.assert_allclose(records[True, "states"], records[False, "states"], atol=2e-6)


def test_a_bert_that_reads_from_left_to_right_is_read_padded(tiny, tmp_path):
    shutil.copytree(tiny("bert"), tmp_path / "decoder")
    config = tmp_path / "decoder" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"is_decoder": True}))
    encoder = DualEncoder.from_backbone(str(tmp_path / "decoder"), SPEC)
    assert encoder.passage_tower.is_causal
    passages = encoder.tokenize_passages(PASSAGES)
    expected = encoder.encode_passages(passages).views_PVD.detach().numpy()
    np.testing.assert_allclose(encoder.embed_passages(passages).views_PVD, expected, atol=2e-6)


@pytest.mark.parametrize("kind", ["distilbert", "mpnet"])
def test_other_backbones_are_read_padded(tiny, kind):
    encoder = DualEncoder.from_backbone(tiny(kind), SPEC)
    assert not supports_unpadded_cpu(encoder.passage_tower.backbone)
    passages = encoder.tokenize_passages(PASSAGES)
    expected = encoder.encode_passages(passages).views_PVD.detach().numpy()
    np.testing.assert_allclose(encoder.embed_passages(passages).views_PVD, expected, atol=2e-6)


def test_a_changed_weight_is_read(tiny):
    encoder = DualEncoder.from_backbone(tiny("bert"), SPEC)
    passages = encoder.tokenize_passages(PASSAGES[:9])
    before = encoder.embed_passages(passages).views_PVD
    optimiser = torch.optim.AdamW(encoder.parameters(), lr=1e-2)
    encoder.encode_passages(passages).views_PVD[..., 0].sum().backward()
    optimiser.step()
    after = encoder.embed_passages(passages).views_PVD
    assert np.abs(after - before).max() > 1e-3
    np.testing.assert_allclose(after, encoder.encode_passages(passages).views_PVD.detach().numpy(), atol=2e-6)


def test_a_fork_reads_with_threads_of_its_own():
    threads, work = torch.get_num_threads(), ([500] * 8, lambda rows, whole: None)
    torch.set_num_threads(2)
    try:
        over_blocks(*work)
        child = multiprocessing.get_context("fork").Process(target=over_blocks, args=work)
        child.start()
        child.join(timeout=60)
        assert child.exitcode == 0
    finally:
        child.kill()
        torch.set_num_threads(threads)


def test_the_number_of_threads_changes_no_byte_and_stays_as_it_was(tiny):
    encoder = DualEncoder.from_backbone(tiny("bert"), SPEC)
    passages = encoder.tokenize_passages(PASSAGES)
    assert len(blocks([passage.num_tokens for passage in passages])) > 2
    before, actual = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            actual.append(encoder.embed_passages(passages).views_PVD)
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert (actual[0] == actual[1]).all() and (actual[0] == actual[2]).all()


def test_what_is_laid_out_stays_behind_when_an_encoder_is_copied_or_shipped(tiny):
    encoder = DualEncoder.from_backbone(tiny("bert"), SPEC)
    passages = encoder.tokenize_passages(PASSAGES[:9])
    expected = encoder.embed_passages(passages).views_PVD
    for other in (copy.deepcopy(encoder), pickle.loads(pickle.dumps(encoder))):
        assert (other.embed_passages(passages).views_PVD == expected).all()


@pytest.mark.parametrize("kind", ["bert", "mpnet"])
def test_gradients_are_the_sum_of_those_of_each_passage_alone(tiny, kind):
    encoder = DualEncoder.from_backbone(tiny(kind), SPEC)
    passages = encoder.tokenize_passages(PASSAGES)
    assert sum(passage.num_tokens for passage in passages) > 2048
    weights_PVD = torch.randn(len(passages), 3, 16, generator=torch.Generator().manual_seed(3))
    (encoder.encode_passages(passages).views_PVD * weights_PVD).sum().backward()
    together = [parameter.grad.clone() for parameter in encoder.parameters() if parameter.grad is not None]
    encoder.zero_grad()
    for row, passage in enumerate(passages):
        (encoder.encode_passages([passage]).views_PVD[0] * weights_PVD[row]).sum().backward()
    alone = [parameter.grad for parameter in encoder.parameters() if parameter.grad is not None]
    assert len(alone) == len(together) > 0
    for a, b in zip(together, alone):
        torch.testing.assert_close(a, b, atol=2e-5 * float(b.abs().max()) + 1e-6, rtol=0)


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 80))
def test_blocks_hold_every_row_once_in_the_first_with_space_for_it(lengths, budget):
    actual = blocks(lengths, budget)
    assert sorted(row for rows in actual for row in rows) == list(range(len(lengths)))

    def place(row: int) -> tuple[int, int]:
        return -lengths[row], row

    for number, rows in enumerate(actual):
        assert rows == sorted(rows, key=place), "texts of one length stand together"
        assert len(rows) == 1 or sum(lengths[row] for row in rows) <= budget
        for row in rows:
            for before in actual[:number]:
                num_tokens = sum(lengths[other] for other in before if place(other) < place(row))
                assert num_tokens + lengths[row] > budget


@given(st.lists(st.lists(st.integers(-1, 3), min_size=1, max_size=6), min_size=1, max_size=5), st.integers(0, 99))
def test_a_view_is_the_mean_of_its_tokens_states(view_T, seed):
    passages = [
        TokenizedPassage(np.zeros(len(views), np.int32), np.zeros(len(views), np.int32), np.array(views, np.int16))
        for views in view_T
    ]
    states_ND = np.random.default_rng(seed).normal(size=(sum(map(len, view_T)), 5)).astype(np.float32)
    actual = view_means(torch.from_numpy(states_ND), passages, 4)
    start = 0
    for text, views in enumerate(view_T):
        own = states_ND[start : start + len(views)]
        start += len(views)
        for view in range(4):
            rows = [row for row, at in enumerate(views) if at == view]
            expected_D = own[rows].mean(0) if rows else np.zeros(5)
            assert actual.count_PV[text, view] == len(rows)
            np.testing.assert_allclose(actual.views_PVD[text, view], expected_D, atol=1e-6)
