"""Encoders in another precision are near, have a name of their own, and keep it; int8's parts are checked."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from random_backbones import enlarge_weights, relative_error
from safetensors.numpy import save_file

from mvr_ray.core.encoding import openvino_cpu
from mvr_ray.core.encoding.encoder import DualEncoder, EncoderSpec
from mvr_ray.core.encoding.precision import Precision
from mvr_ray.core.encoding.views import Strategy
from mvr_ray.errors import EncoderError
from mvr_ray.types import Passage

SPEC = EncoderSpec(num_views=3, max_query_tokens=24, max_passage_tokens=64)
SENTENCES = "The river rises in the hills. It runs to the sea! Where does the river end? Salt made the town rich. "
PASSAGES = [Passage(str(i), "", (SENTENCES * 4)[: 40 + 7 * i % 291]) for i in range(40)]
CALIBRATION = PASSAGES[::5]
needs_bfloat16 = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this processor does not multiply bfloat16"
)


def encoder_of(backbone: str, strategy: Strategy = SPEC.strategy) -> DualEncoder:
    encoder = DualEncoder.from_backbone(backbone, replace(SPEC, strategy=strategy))
    enlarge_weights(encoder.passage_tower)
    return encoder


@pytest.fixture(scope="module")
def int8(tiny) -> Callable[..., DualEncoder]:
    """int8(kind, strategy) is an encoder that is quantized once for the tests of this file."""

    @cache
    def quantize(kind: str = "bert", strategy: str = SPEC.strategy) -> DualEncoder:
        return encoder_of(tiny(kind), strategy).to_precision("int8", CALIBRATION)

    return quantize


@pytest.mark.parametrize(
    ("precision", "kind", "strategy"),
    [
        *(
            pytest.param("bf16", "bert", strategy, marks=needs_bfloat16)
            for strategy in ("snippet_means", "viewers", "sentences")
        ),
        ("int8", "bert", "snippet_means"),
        ("int8", "bert", "viewers"),
        ("int8", "distilbert", "sentences"),
        ("int8", "mpnet", "snippet_means"),
        ("int8", "qwen3", "snippet_means"),
    ],
)
def test_a_lowered_encoder_is_near_has_a_name_of_its_own_and_keeps_its_questions(
    tiny, int8, tmp_path, precision, kind, strategy
):
    full = encoder_of(tiny(kind), strategy)
    encoder = int8(kind, strategy) if precision == "int8" else full.to_precision(precision)
    assert encoder.fingerprint not in (full.fingerprint, full.to_precision("fp32").fingerprint)
    assert full.to_precision("fp32").fingerprint == full.fingerprint
    passages = full.tokenize_passages(PASSAGES)
    expected, actual = full.embed_passages(passages), encoder.embed_passages(passages)
    assert (expected.mask_PV == actual.mask_PV).all()
    assert relative_error(actual.views_PVD, *expected) < (0.5 if precision == "int8" else 0.2)
    assert np.abs(expected.views_PVD - actual.views_PVD).max() > 1e-5
    assert (full.embed_queries(["where?"]) == encoder.embed_queries(["where?"])).all()

    encoder.save(tmp_path)
    for only_embeds in (False, True):
        copy = DualEncoder.load(tmp_path, only_embeds)
        assert (copy.fingerprint, copy.precision.name) == (encoder.fingerprint, precision)
        assert (copy.embed_passages(passages).views_PVD == actual.views_PVD).all()


def test_scales_follow_from_the_passages_alone(tiny, int8):
    full = encoder_of(tiny("bert"))
    one = int8().fingerprint
    assert full.to_precision("int8", CALIBRATION).fingerprint == one
    assert full.to_precision("int8", CALIBRATION[:4]).fingerprint != one


@pytest.mark.parametrize("fault", ["gone", "fewer", "unknown"])
def test_a_snapshot_without_its_parts_is_refused(int8, tmp_path, fault):
    int8().save(tmp_path)
    if fault == "gone":
        (tmp_path / "int8.safetensors").unlink()
        with pytest.raises(EncoderError, match=r"has no int8.safetensors; copy or make it again"):
            DualEncoder.load(tmp_path)
        return
    if fault == "fewer":
        save_file({"weights": np.ones(2, np.uint8)}, tmp_path / "int8.safetensors")
        with pytest.raises(EncoderError, match="does not hold the parts of int8"):
            DualEncoder.load(tmp_path)
        return
    data = json.loads((tmp_path / "encoder.json").read_text())
    del data["checksum"]
    (tmp_path / "encoder.json").write_text(json.dumps({**data, "precision": "int3"}))
    with pytest.raises(EncoderError, match="embeds in 'int3', which this mvr_ray does not know"):
        DualEncoder.load(tmp_path)


def test_int8_of_an_earlier_release_answers_questions_and_says_why_it_embeds_no_passage(tiny, tmp_path):
    scales = {
        "qkv_step_LD": np.full((2, 8), 0.5, np.float32),
        "qkv_zero_LD": np.full((2, 8), 3, np.float32),
        "out_step_LD": np.full((2, 8), 0.25, np.float32),
        "up_step_LD": np.full((2, 8), 0.125, np.float32),
        "up_zero_LD": np.full((2, 8), 7, np.float32),
        "down_step_L": np.full(2, 0.0625, np.float32),
        "down_zero_L": np.full(2, 9, np.float32),
    }
    hasher = hashlib.blake2b(b"int8", digest_size=32)
    for name, values in scales.items():
        hasher.update(f"{name} {values.shape}".encode() + values.tobytes())
    full = DualEncoder.from_backbone(tiny("bert"), SPEC)
    old = DualEncoder(full.spec, [full.passage_tower], full.splitter.params, Precision("int8", scales))
    assert old.precision.digest() == hasher.digest()
    old.save(tmp_path)
    assert sorted(path.name for path in tmp_path.glob("*.safetensors")) == ["scales.safetensors"]
    copy = DualEncoder.load(tmp_path)
    assert copy.fingerprint == old.fingerprint
    assert (copy.embed_queries(["where?"]) == full.embed_queries(["where?"])).all()
    with pytest.raises(EncoderError, match=r"int8 is that of an earlier mvr_ray.*run mvr-ray index, which embeds all"):
        copy.embed_passages(full.tokenize_passages(PASSAGES[:2]))


@pytest.mark.parametrize("capability", ["avx512_vnni", "avx_vnni", None])
def test_weights_have_seven_bits_where_the_processor_would_saturate_sums(tiny, monkeypatch, capability):
    """Without VNNI two products of bytes are added in sixteen bits: 255 * 127 * 2 is too large, 255 * 64 * 2 is not."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, capability: True})
    encoder = DualEncoder.from_backbone(tiny("qwen3"), SPEC).to_precision("int8", PASSAGES[:2])
    model = (
        openvino_cpu.import_openvino()
        .Core()
        .read_model(*(encoder.precision.parts[name].tobytes() for name in openvino_cpu.FILES))
    )
    constants = [node.data for node in model.get_ops() if node.get_type_name() == "Constant"]
    weights = [values for values in constants if values.dtype == np.int8 and values.ndim == 2]
    num_words = encoder.passage_tower.backbone.config.vocab_size  # embeddings are looked up, not multiplied
    largest = [int(np.abs(values.astype(int)).max()) for values in weights if len(values) != num_words]
    assert largest and max(largest) == (64 if capability is None else 127)


def test_a_backbone_that_cannot_be_lowered_is_named(tiny):
    encoder = DualEncoder.from_backbone(tiny("modernbert"), SPEC)
    with pytest.raises(
        EncoderError,
        match="passages in int8 need a backbone whose attention reaches all of a text, and this is a modernb",
    ):
        encoder.to_precision("int8", PASSAGES)


def test_int8_without_nncf_says_what_to_install(tiny, monkeypatch):
    encoder = DualEncoder.from_backbone(tiny("bert"), SPEC)
    monkeypatch.setattr(openvino_cpu, "find_spec", lambda name: None)
    with pytest.raises(EncoderError, match=r"int8 needs the library nncf.*run pip install 'mvr-ray\[openvino\]'"):
        encoder.to_precision("int8", PASSAGES)


@pytest.mark.data
def test_real_passages_in_bytes_stay_near(minilm, data_dir):
    import gzip

    with gzip.open(data_dir / "squad" / "dev-v1.1.json.gz", "rt") as file:
        articles = json.load(file)["data"]
    texts = [paragraph["context"] for article in articles for paragraph in article["paragraphs"]]
    full = DualEncoder.from_backbone(str(minilm), EncoderSpec(num_views=4, max_passage_tokens=128))
    encoder = full.to_precision("int8", [Passage(str(i), "", text) for i, text in enumerate(texts[:960:30])])
    passages = full.tokenize_passages([Passage(str(i), "", text) for i, text in enumerate(texts[1000:1960:30])])
    expected, actual = full.embed_passages(passages), encoder.embed_passages(passages)
    cosine = (expected.views_PVD * actual.views_PVD).sum(-1)[expected.mask_PV]
    assert cosine.mean() > 0.99
