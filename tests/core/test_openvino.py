"""OpenVINO gives the padded pass's states for many architectures, whatever the threads, under a name of its own."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from mvr_ray.core.encoding import openvino_cpu
from mvr_ray.core.encoding.encoder import DualEncoder, EncoderSpec
from mvr_ray.core.encoding.precision import KNOWN_ON_OPENVINO, Precision, fastest_float
from mvr_ray.errors import EncoderError, FingerprintError
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


needs_bfloat16 = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this processor does not multiply bfloat16"
)


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


def test_threads_do_not_load_numpy_for_openvino(tiny, tmp_path):
    """OpenVINO binds numpy's arrays at their first use in a process, and two threads that do wait for each other."""
    DualEncoder.from_backbone(tiny("bert"), SPEC).to_precision("openvino").save(tmp_path / "encoder")
    script = f"""
import sys
from mvr_ray.core.encoding import openvino_cpu
from mvr_ray.core.encoding.encoder import DualEncoder
from mvr_ray.types import Passage

def pad_without_numpy(*args, pad=openvino_cpu.pad):
    sys.modules["numpy._core.multiarray"] = None
    return pad(*args)

openvino_cpu.pad = pad_without_numpy
encoder = DualEncoder.load({str(tmp_path / "encoder")!r}, only_embeds=True)
print(encoder.embed_passages(encoder.tokenize_passages([Passage("1", "", "The river.")])).views_PVD.shape)
"""
    reply = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False)
    assert (reply.returncode, reply.stdout) == (0, "(1, 3, 16)\n"), reply.stderr[-2500:]


@pytest.mark.parametrize("order", ["by another thread", "before a later one"])
def test_an_interrupt_arrives_after_encoders_are_gone(tiny, tmp_path, order):
    """OpenVINO leaves the signals of a thread on a stack that it has unmapped, if its core ends there or then."""
    DualEncoder.from_backbone(tiny("bert"), SPEC).to_precision("openvino").save(tmp_path / "encoder")
    script = f"""
import gc, signal, threading
from mvr_ray.core.encoding.encoder import DualEncoder
from mvr_ray.types import Passage

encoders = [DualEncoder.load({str(tmp_path / "encoder")!r}, only_embeds=True) for _ in range(2)]
for encoder in encoders:
    encoder.embed_passages(encoder.tokenize_passages([Passage("1", "", "The river.")]))
del encoder
if {order == "by another thread"}:
    thread = threading.Thread(target=lambda: (encoders.clear(), gc.collect()))
    thread.start()
    thread.join()
while encoders:
    del encoders[0]
    gc.collect()
try:
    signal.raise_signal(signal.SIGINT)
except KeyboardInterrupt:
    print("interrupted")
"""
    reply = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False)
    assert (reply.returncode, reply.stdout) == (0, "interrupted\n"), reply.stderr[-2500:]


def test_every_model_type_that_auto_gives_to_openvino_is_tested_above():
    assert {kind for kind, _ in CASES} == set(KNOWN_ON_OPENVINO)


@needs_bfloat16
@pytest.mark.parametrize("kind", ["bert", "mpnet", "t5", "qwen3"])
def test_in_bfloat16_the_views_are_near_those_of_float32(tiny, kind):
    full = DualEncoder.from_backbone(tiny(kind), SPEC)
    encoder = full.to_precision("openvino-bf16")
    passages = full.tokenize_passages(PASSAGES)
    expected, views = full.embed_passages(passages), encoder.embed_passages(passages)
    np.testing.assert_array_equal(views.mask_PV, expected.mask_PV)
    assert (expected.views_PVD * views.views_PVD).sum(-1)[views.mask_PV].min() > 0.999
    assert np.abs(expected.views_PVD - views.views_PVD).max() > 1e-5
    fingerprints = {own.fingerprint for own in (full, encoder, full.to_precision("openvino"))}
    assert len(fingerprints) == 3


@pytest.mark.parametrize("precision", ["openvino", pytest.param("openvino-bf16", marks=needs_bfloat16)])
def test_a_stored_encoder_is_not_converted_again_and_embeds_to_the_same_bytes(tiny, tmp_path, monkeypatch, precision):
    full = DualEncoder.from_backbone(tiny("bert"), SPEC)
    encoder = full.to_precision(precision)
    passages = full.tokenize_passages(PASSAGES)
    expected = encoder.embed_passages(passages).views_PVD
    encoder.save(tmp_path)
    monkeypatch.setattr(openvino_cpu, "to_openvino", None)
    for only_embeds in (False, True):
        copy = DualEncoder.load(tmp_path, only_embeds)
        assert (copy.fingerprint, copy.precision.name) == (encoder.fingerprint, precision)
        np.testing.assert_array_equal(copy.embed_passages(passages).views_PVD, expected)

    file = tmp_path / "openvino.safetensors"
    whole = load_file(file)
    weights = whole["weights"].copy()
    weights[99] ^= 1
    save_file({**whole, "weights": weights}, file)
    with pytest.raises(FingerprintError):
        DualEncoder.load(tmp_path)
    save_file({"model": whole["model"]}, file)
    with pytest.raises(EncoderError, match=f"does not hold the parts of {precision}"):
        DualEncoder.load(tmp_path)


def test_a_snapshot_of_an_earlier_release_holds_no_model_of_openvino_and_is_converted(tiny, tmp_path):
    full = DualEncoder.from_backbone(tiny("bert"), SPEC)
    earlier = DualEncoder(full.spec, [full.passage_tower], full.splitter.params, Precision("openvino")).eval()
    earlier.save(tmp_path)
    assert not (tmp_path / "openvino.safetensors").exists()
    passages = full.tokenize_passages(PASSAGES)
    expected = full.to_precision("openvino").embed_passages(passages).views_PVD
    for only_embeds in (False, True):
        copy = DualEncoder.load(tmp_path, only_embeds)
        np.testing.assert_array_equal(copy.embed_passages(passages).views_PVD, expected)


@pytest.mark.parametrize("has_openvino", [True, False])
@pytest.mark.parametrize(
    ("capability", "kind", "on_openvino", "without"),
    [
        ("amx_bf16", "bert", "bf16", "bf16"),
        ("avx512_bf16", "bert", "openvino-bf16", "bf16"),
        ("avx512_f", "bert", "openvino", "fp32"),
        ("amx_bf16", "mpnet", "openvino-bf16", "fp32"),
        ("avx512_f", "mpnet", "openvino", "fp32"),
        ("amx_bf16", "modernbert", "fp32", "fp32"),
    ],
)
def test_auto_is_the_fastest_float_of_a_processor(
    tiny, monkeypatch, has_openvino, capability, kind, on_openvino, without
):
    """Our own layers serve where they are 15 % ahead of OpenVINO, with AMX, and where OpenVINO is missing."""
    tower = DualEncoder.from_backbone(tiny(kind), EncoderSpec()).passage_tower
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True, raising=False)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {capability: True}, raising=False)
    if not has_openvino:
        monkeypatch.setitem(sys.modules, "openvino", None)
    assert fastest_float(tower) == (on_openvino if has_openvino else without)


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
