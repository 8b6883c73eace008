"""Products of bytes against whole numbers counted out in float64, and encoders in another precision."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mvr_ray.core.encoding.encoder import DualEncoder, EncoderSpec
from mvr_ray.core.encoding.quantized import Int8Linear, Quantizer, multiplies_bytes
from mvr_ray.core.encoding.unpadded_cpu import Affine
from mvr_ray.errors import EncoderError
from mvr_ray.types import Passage

SPEC = EncoderSpec(num_views=3, max_query_tokens=24, max_passage_tokens=64)
SENTENCES = "The river rises in the hills. It runs to the sea! Where does the river end? Salt made the town rich. "
PASSAGES = [Passage(str(i), "", (SENTENCES * 4)[: 40 + 7 * i % 291]) for i in range(40)]
needs_bfloat16 = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this processor does not multiply bfloat16"
)
needs_bytes = pytest.mark.skipif(not multiplies_bytes(), reason="this processor does not multiply bytes")


@needs_bytes
@given(st.integers(0, 10_000), st.integers(1, 40), st.integers(1, 90))
@settings(max_examples=25)
def test_a_product_of_bytes_is_the_float_product_but_for_the_halves_that_rounding_takes(seed, outputs, inputs):
    rng = np.random.default_rng(seed)
    width_D = rng.lognormal(0, 2, inputs)
    x_ND = (rng.uniform(-1, 2, (7, inputs)) * width_D).astype(np.float32)
    weight_OD, bias_O = rng.normal(size=(outputs, inputs)), rng.normal(size=outputs)
    low_D, high_D = x_ND.min(0), x_ND.max(0)
    step_D = np.maximum(high_D - low_D, 1e-6) / 254
    zero_D = np.round(-low_D / step_D)
    affine = Affine(torch.tensor(weight_OD, dtype=torch.float32), torch.tensor(bias_O, dtype=torch.float32))
    steps = torch.tensor(step_D, dtype=torch.float32), torch.tensor(zero_D, dtype=torch.float32)
    bytes_ND = Quantizer.of(*steps)(torch.from_numpy(x_ND))
    product = Int8Linear(affine, *steps)
    found = product(bytes_ND).double().numpy()
    wanted = x_ND.astype(np.float64) @ weight_OD.T + bias_O
    scale_O = np.abs(weight_OD * step_D).max(1) / 127
    of_inputs_O = np.abs(weight_OD) @ (0.51 * step_D)
    of_weights_NO = np.abs(bytes_ND.double().numpy() - zero_D).sum(1)[:, None] * 0.51 * scale_O
    allowed_NO = of_inputs_O + of_weights_NO + 1e-4 * (1 + np.abs(weight_OD) @ np.abs(x_ND).max(0))
    assert (np.abs(found - wanted) <= allowed_NO).all()
    other_NO = torch.tensor(rng.normal(size=wanted.shape), dtype=torch.float32)
    np.testing.assert_allclose(product.plus(bytes_ND, other_NO), product(bytes_ND) + other_NO, rtol=1e-5, atol=1e-5)


@needs_bytes
def test_gelu_behind_a_product_gives_the_bytes_of_its_own_step():
    generator = torch.Generator().manual_seed(5)
    affine = Affine(torch.randn(30, 20, generator=generator), torch.randn(30, generator=generator))
    step, zero = torch.full((20,), 0.02), torch.full((20,), 128.0)
    bytes_ND = torch.randint(0, 256, (9, 20), generator=generator).to(torch.uint8)
    floats = Int8Linear(affine, step, zero)(bytes_ND)
    found = Int8Linear(affine, step, zero, gelu_step=0.05, gelu_zero=4)(bytes_ND)
    wanted = (torch.nn.functional.gelu(floats) / 0.05 + 4).round().clamp(0, 255)
    assert (found.float() - wanted).abs().max() <= 1
    assert (found.float() == wanted).float().mean() > 0.99


@pytest.mark.parametrize(
    "precision", [pytest.param("bf16", marks=needs_bfloat16), pytest.param("int8", marks=needs_bytes)]
)
@pytest.mark.parametrize("strategy", ["snippet_means", "viewers", "sentences"])
def test_a_lowered_encoder_is_near_has_a_name_of_its_own_and_keeps_its_questions(tiny, tmp_path, precision, strategy):
    full = DualEncoder.from_backbone(tiny("bert"), replace(SPEC, strategy=strategy))
    lowered = full.to_precision(precision, PASSAGES)
    assert lowered.fingerprint not in (full.fingerprint, full.to_precision("fp32").fingerprint)
    assert full.to_precision("fp32").fingerprint == full.fingerprint
    tokenized = full.tokenize_passages(PASSAGES)
    wanted, found = full.embed_passages(tokenized), lowered.embed_passages(tokenized)
    assert (wanted.mask_PV == found.mask_PV).all()
    cosine = (wanted.views_PVD * found.views_PVD).sum(-1)[wanted.mask_PV]
    assert cosine.min() > 0.99
    assert np.abs(wanted.views_PVD - found.views_PVD).max() > 1e-5
    assert (full.embed_queries(["where?"]) == lowered.embed_queries(["where?"])).all()

    lowered.save(tmp_path)
    for only_embeds in (False, True):
        loaded = DualEncoder.load(tmp_path, only_embeds)
        assert (loaded.fingerprint, loaded.precision.name) == (lowered.fingerprint, precision)
        assert (loaded.embed_passages(tokenized).views_PVD == found.views_PVD).all()


@needs_bytes
def test_scales_follow_from_the_passages_alone(tiny):
    full = DualEncoder.from_backbone(tiny("bert"), SPEC)
    one = full.to_precision("int8", PASSAGES).fingerprint
    assert full.to_precision("int8", PASSAGES).fingerprint == one
    assert full.to_precision("int8", PASSAGES[:20]).fingerprint != one


@needs_bytes
@pytest.mark.parametrize("fault", ["gone", "fewer", "unknown"])
def test_a_snapshot_without_its_scales_is_refused(tiny, tmp_path, fault):
    DualEncoder.from_backbone(tiny("bert"), SPEC).to_precision("int8", PASSAGES).save(tmp_path)
    if fault == "gone":
        (tmp_path / "scales.safetensors").unlink()
        with pytest.raises(EncoderError, match=r"has no scales.safetensors; copy or make it again"):
            DualEncoder.load(tmp_path)
        return
    if fault == "fewer":
        from safetensors.numpy import save_file

        save_file({"down_step_L": np.ones(2, np.float32)}, tmp_path / "scales.safetensors")
        with pytest.raises(EncoderError, match="does not hold the scales of int8"):
            DualEncoder.load(tmp_path)
        return
    described = json.loads((tmp_path / "encoder.json").read_text())
    del described["checksum"]
    (tmp_path / "encoder.json").write_text(json.dumps({**described, "precision": "int3"}))
    with pytest.raises(EncoderError, match="embeds in 'int3', which this mvr_ray does not know"):
        DualEncoder.load(tmp_path)


def test_a_backbone_that_cannot_be_lowered_is_named(tiny):
    encoder = DualEncoder.from_backbone(tiny("distilbert"), SPEC)
    with pytest.raises(
        EncoderError, match="passages in int8 need a bert or roberta backbone with gelu on a CPU, and this is a distilb"
    ):
        encoder.to_precision("int8", PASSAGES)


@needs_bytes
@pytest.mark.data
def test_real_passages_in_bytes_stay_near(minilm, data_dir):
    import gzip

    with gzip.open(data_dir / "squad" / "dev-v1.1.json.gz", "rt") as file:
        articles = json.load(file)["data"]
    texts = [paragraph["context"] for article in articles for paragraph in article["paragraphs"]]
    full = DualEncoder.from_backbone(str(minilm), EncoderSpec(num_views=4, max_passage_tokens=128))
    lowered = full.to_precision("int8", [Passage(str(i), "", text) for i, text in enumerate(texts[:960:30])])
    tokenized = full.tokenize_passages([Passage(str(i), "", text) for i, text in enumerate(texts[1000:1960:30])])
    wanted, found = full.embed_passages(tokenized), lowered.embed_passages(tokenized)
    cosine = (wanted.views_PVD * found.views_PVD).sum(-1)[wanted.mask_PV]
    assert cosine.mean() > 0.99
