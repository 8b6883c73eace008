"""Reading without padding gives what reading with padding gives."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from random_backbones import enlarge_weights, relative_error

from mvr_ray.core.encoding import precision
from mvr_ray.core.encoding.encoder import DualEncoder, EncoderSpec
from mvr_ray.core.encoding.length_batches import filled_batches
from mvr_ray.core.encoding.padded import padded_views
from mvr_ray.core.encoding.unpadded_gpu import UnpaddedGpuTower
from mvr_ray.errors import EncoderError
from mvr_ray.types import Passage

SPEC = EncoderSpec(num_views=3, max_query_tokens=24, max_passage_tokens=64)
STRATEGIES = {
    "cls": replace(SPEC, strategy="cls"),
    "mean": replace(SPEC, strategy="mean"),
    "first_k": replace(SPEC, strategy="first_k", normalize=False),
    "snippet_means": SPEC,
    "viewers": replace(SPEC, strategy="viewers"),
    "snippets": replace(SPEC, strategy="snippets"),
    "sentences": replace(SPEC, strategy="sentences"),
    "splits mean": replace(SPEC, strategy="splits", readout="snippet_mean"),
}
PASSAGES = [
    Passage("1", "The river", "The river rises in the hills. It runs to the sea! Where does the river end?"),
    Passage("2", "", "Salt made the town rich."),
    Passage("3", "Old bridge", "The bridge was built in 1801. Boats came every day; later they did not. So?"),
    Passage("4", "The sea", ""),
    Passage("5", "Trade", "Salt and trade " * 60),
]


KINDS = ["bert", "roberta", "xlm-roberta", "distilbert"]


@pytest.fixture
def on_gpu(monkeypatch):
    """This machine's CPU is taken for a GPU: the same code, without its kernels."""
    monkeypatch.setattr(precision, "_on_gpu", lambda tower: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", STRATEGIES)
def test_views_are_those_of_the_padded_pass(tiny, kind, name):
    encoder = DualEncoder.from_backbone(tiny(kind), STRATEGIES[name])
    reader = UnpaddedGpuTower(encoder.passage_tower, torch.float32)
    texts = encoder.tokenize_passages(PASSAGES)
    if encoder.spec.has_pieces:
        texts = [row for passage in texts for row in encoder.layout.rows(passage)]
    expected = padded_views(encoder.passage_tower, texts, encoder.num_views)
    for batches in ([texts], [texts[:2], texts[2:3], texts[3:]]):
        parts = [reader.views(batch, encoder.num_views) for batch in batches]
        torch.testing.assert_close(torch.cat([part.views_PVD for part in parts]), expected.views_PVD, atol=1e-5, rtol=0)
        assert torch.equal(torch.cat([part.count_PV for part in parts]), expected.count_PV)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_gpu_embeds_passages_in_bf16_without_padding_and_questions_as_ever(tiny, on_gpu, name):
    full = DualEncoder.from_backbone(tiny("bert"), STRATEGIES[name])
    enlarge_weights(full.passage_tower)
    passages = full.tokenize_passages(PASSAGES)
    plain, questions = full.embed_passages(passages), full.embed_queries(["the river"])
    encoder = full.to_precision("bf16")
    assert encoder.fingerprint != full.fingerprint
    batches = [[0, 1], [2], [3, 4]]
    low = list(encoder.embed_batches([passages[row] for row in rows] for rows in batches))
    reader = encoder._inference_pass(encoder.passage_tower, encoder.precision).__self__
    assert isinstance(reader, UnpaddedGpuTower)
    assert {parameter.dtype for parameter in reader.tower.parameters()} == {torch.bfloat16}
    views_PVD, mask_PV = (np.concatenate(parts) for parts in zip(*low))
    assert (mask_PV == plain.mask_PV).all() and not np.array_equal(views_PVD, plain.views_PVD)
    assert relative_error(views_PVD, *plain) < 0.1
    assert (encoder.embed_queries(["the river"]) == questions).all()


def test_a_precision_that_a_gpu_lacks_is_refused(tiny, monkeypatch):
    bert, mpnet = (DualEncoder.from_backbone(tiny(kind), SPEC) for kind in ("bert", "mpnet"))
    with pytest.raises(EncoderError, match=r"need a CPU, and encoders have GPUs here .* bf16 is for GPUs"):
        bert.to_precision("int8", PASSAGES, gpu=True)
    assert mpnet.to_precision("bf16", gpu=True).fingerprint != mpnet.fingerprint
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    with pytest.raises(EncoderError, match="a processor that multiplies bfloat16"):
        bert.to_precision("bf16")
    distil = DualEncoder.from_backbone(tiny("distilbert"), SPEC)
    assert distil.to_precision("bf16", gpu=True).fingerprint != distil.fingerprint
    monkeypatch.setattr(precision, "_on_gpu", lambda tower: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    with pytest.raises(EncoderError, match="a GPU that multiplies bfloat16"):
        bert.to_precision("bf16")


@given(st.lists(st.integers(1, 30)), st.integers(1, 60))
def test_batches_are_all_rows_in_order_and_none_could_take_the_next(lengths, budget):
    batches = filled_batches(lengths, budget)
    assert [row for batch in batches for row in batch] == list(range(len(lengths)))
    for number, batch in enumerate(batches):
        tokens = sum(lengths[row] for row in batch)
        assert len(batch) >= 1 and (tokens <= budget or len(batch) == 1)
        if number + 1 < len(batches):
            assert tokens + lengths[batch[-1] + 1] > budget


def test_an_encoder_that_cuts_no_sentences_never_loads_what_cuts_them(tiny):
    script = (
        "import sys\n"
        "from mvr_ray.core.encoding.encoder import DualEncoder, EncoderSpec\n"
        "from mvr_ray.core.encoding.unpadded_gpu import UnpaddedGpuTower\n"
        "from mvr_ray.index.flat import FlatIndex\n"
        "from mvr_ray.types import Passage\n"
        f"encoder = DualEncoder.from_backbone({tiny('bert')!r}, EncoderSpec(strategy='mean', max_passage_tokens=64))\n"
        "encoder.embed_passages(encoder.tokenize_passages([Passage('1', '', 'the river')]))\n"
        "print(sorted({'ray', 'faiss', 'pydantic', 'nltk'} & set(sys.modules)))\n"
    )
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert process.stdout.strip().splitlines()[-1:] == ["[]"], process.stdout + process.stderr
