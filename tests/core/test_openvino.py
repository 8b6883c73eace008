"""OpenVINO gives the padded pass's states for many architectures, whatever the threads, under a name of its own."""

import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from mvr_ray.core.encoding.encoder import DualEncoder, EncoderSpec
from mvr_ray.errors import EncoderError
from mvr_ray.types import Passage

SPEC = EncoderSpec(num_views=3, max_query_tokens=24, max_passage_tokens=64)
PASSAGES = [
    Passage("1", "The river", "The river rises in the hills. It runs to the sea! Where does the river end?"),
    Passage("2", "", "Salt made the town rich."),
    Passage("3", "Trade", "Salt and trade " * 60),
]
KINDS = ["bert", "roberta", "xlm-roberta", "distilbert", "mpnet", "electra", "deberta", "deberta-v2"]
CAUSAL = ["qwen3", "mistral", "llama"]
CASES = [
    *((kind, "snippet_means") for kind in [*KINDS, "t5", *CAUSAL]),
    *((kind, "viewers") for kind in ("bert", "mpnet", "electra")),
    ("t5", "snippets"),
    ("qwen3", "pooling"),
]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("kind", "strategy"), CASES)
def test_the_views_are_those_of_the_padded_pass(tiny, kind, strategy):
    full = DualEncoder.from_backbone(tiny(kind), replace(SPEC, strategy=strategy))
    encoder = full.to_precision("openvino")
    passages = encoder.tokenize_passages(PASSAGES)
    with torch.enable_grad():  # with a gradient every backbone is read padded
        expected, mask_PV = full.encode_passages(passages)
    views = encoder.embed_passages(passages)
    np.testing.assert_array_equal(views.mask_PV, mask_PV)
    np.testing.assert_allclose(views.views_PVD, expected.detach(), atol=1e-5)
    np.testing.assert_array_equal(encoder.embed_queries(["the river"]), full.embed_queries(["the river"]))
    assert encoder.fingerprint != full.fingerprint


def test_the_bytes_do_not_depend_on_the_number_of_threads_and_a_stored_encoder_gives_them_again(tiny, tmp_path):
    encoder = DualEncoder.from_backbone(tiny("electra"), SPEC).to_precision("openvino")
    passages = encoder.tokenize_passages(PASSAGES * 40)
    torch.set_num_threads(1)
    alone = encoder.embed_passages(passages).views_PVD
    encoder.save(tmp_path)
    torch.set_num_threads(2)
    copy = DualEncoder.load(tmp_path)
    assert (copy.precision.name, copy.fingerprint) == ("openvino", encoder.fingerprint)
    np.testing.assert_array_equal(copy.embed_passages(passages).views_PVD, alone)
    with copy.inference():
        states_PTD, real_PT = copy.states(passages[:3])
    assert (states_PTD[~real_PT] == 0).all()


@pytest.mark.parametrize("kind", ["modernbert", "gemma3_text"])
def test_a_backbone_with_local_attention_is_refused(tiny, kind):
    encoder = DualEncoder.from_backbone(tiny(kind), SPEC)
    with pytest.raises(EncoderError, match=f"attention reaches all of a text, and this is a {kind}"):
        encoder.to_precision("openvino")


def test_without_the_library_or_for_a_gpu_it_is_refused(tiny, monkeypatch):
    encoder = DualEncoder.from_backbone(tiny("bert"), SPEC)
    with pytest.raises(EncoderError, match="passages in openvino need a CPU, and encoders have GPUs here"):
        encoder.to_precision("openvino", gpu=True)
    openvino_encoder = encoder.to_precision("openvino")
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(EncoderError, match=r"need the library openvino \(pip install 'mvr-ray\[openvino\]'\)"):
        encoder.to_precision("openvino")
    with pytest.raises(EncoderError, match="need the library openvino"):
        openvino_encoder.embed_passages(openvino_encoder.tokenize_passages(PASSAGES))
