"""Encoders at rest: equal embeddings and fingerprints after loading, and damage is reported."""

import itertools
import json
import os
import random
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from mvr_ray.core.encoding.encoder import DualEncoder, EncoderSpec
from mvr_ray.core.encoding.stored_backbone import StoredBackbone
from mvr_ray.core.encoding.unpadded_cpu import UNPADDED_KINDS
from mvr_ray.errors import AccessError, EncoderError, FingerprintError
from mvr_ray.types import Passage

SPEC = EncoderSpec(num_views=3, max_query_tokens=24, max_passage_tokens=64)
PASSAGES = [Passage("1", "The river", "The river rises in the hills. It runs to the sea!")]
KINDS = ["bert", "roberta", "xlm-roberta", "distilbert", "mpnet"]
STRATEGIES = ["cls", "mean", "first_k", "viewers", "snippets", "snippet_means", "sentences", "splits"]


@pytest.fixture
def snapshot(tiny, tmp_path) -> Path:
    DualEncoder.from_backbone(tiny("bert"), SPEC).save(tmp_path / "encoder")
    return tmp_path / "encoder"


def edit(folder: Path, change) -> None:
    file = folder / "encoder.json"
    data = json.loads(file.read_text())
    data.pop("checksum", None)
    change(data)
    file.write_text(json.dumps(data))


def test_a_file_that_may_not_be_read_is_not_a_missing_one(snapshot: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).suffix != ".safetensors")
    with pytest.raises(AccessError, match=r"model\.safetensors: Permission denied; let its owner run chmod"):
        DualEncoder.load(snapshot, only_embeds=True)


@pytest.mark.parametrize(
    ("kind", "strategy", "one_tower"),
    [
        *itertools.product(KINDS, STRATEGIES, [True]),
        *itertools.product(["bert"], STRATEGIES, [False]),
        *itertools.product(KINDS[1:], ["viewers"], [False]),
    ],
)
def test_a_loaded_encoder_embeds_and_is_named_as_the_saved_one(tiny, tmp_path, kind, strategy, one_tower):
    encoder = DualEncoder.from_backbone(tiny(kind), replace(SPEC, strategy=strategy, tied=one_tower))
    with torch.no_grad():  # as training would: every tower becomes its own
        for parameter in encoder.parameters():
            parameter += 0.01 * torch.randn(parameter.shape)
    encoder.save(tmp_path)
    passages = encoder.tokenize_passages(PASSAGES)
    whole = DualEncoder.load(tmp_path)
    for only_embeds in (False, True):
        other = DualEncoder.load(tmp_path, only_embeds) if only_embeds else whole
        is_stored = isinstance(other.passage_tower.backbone, StoredBackbone)
        assert is_stored == (only_embeds and kind in UNPADDED_KINDS)  # else it was opened by transformers
        assert (other.spec, other.fingerprint) == (encoder.spec, encoder.fingerprint)
        assert other.layout == whole.layout
        assert all((a == b).all() for a, b in zip(passages[0], other.tokenize_passages(PASSAGES)[0]))
        assert (encoder.embed_passages(passages).views_PVD == other.embed_passages(passages).views_PVD).all()
        assert (encoder.embed_queries(["the river"]) == other.embed_queries(["the river"])).all()


def test_saving_twice_writes_the_same_bytes_and_no_path_of_this_machine(tiny, tmp_path):
    encoder = DualEncoder.from_backbone(tiny("bert"), replace(SPEC, strategy="viewers"))
    encoder.save(tmp_path / "a")
    DualEncoder.load(tmp_path / "a").save(tmp_path / "b")
    files = sorted(file.relative_to(tmp_path / "a") for file in (tmp_path / "a").rglob("*") if file.is_file())
    assert Path("shared/viewers.safetensors") in files
    assert {file.suffix for file in files} == {".json", ".safetensors"}
    for file in files:
        content = (tmp_path / "a" / file).read_bytes()
        assert content == (tmp_path / "b" / file).read_bytes()
        assert tiny("bert").encode() not in content


@pytest.mark.parametrize(
    ("strategy", "one_tower", "normalize"), [("cls", True, True), ("mean", True, False), ("cls", False, False)]
)
def test_sentence_transformers_loads_an_encoder_of_one_vector_to_the_same_vectors(
    minilm, tmp_path, strategy, one_tower, normalize
):
    from sentence_transformers import SentenceTransformer

    spec = replace(SPEC, strategy=strategy, tied=one_tower, normalize=normalize)
    encoder = DualEncoder.from_backbone(str(minilm), spec)
    encoder.save(tmp_path)
    texts = [PASSAGES[0].text, "sea", PASSAGES[0].text * 20]
    views_PVD = encoder.embed_passages(encoder.tokenize_passages([Passage("", "", text) for text in texts])).views_PVD
    passages = SentenceTransformer(str(tmp_path / ("shared" if one_tower else "passage")), device="cpu")
    np.testing.assert_allclose(passages.encode(texts), views_PVD[:, 0], atol=1e-5)
    questions = SentenceTransformer(str(tmp_path / ("shared" if one_tower else "question")), device="cpu")
    texts = texts[: 2 if one_tower else 3]  # a tied tower has one length for both, that of passages
    np.testing.assert_allclose(questions.encode(texts), encoder.embed_queries(texts), atol=1e-5)


def test_the_fingerprint_is_the_same_in_another_process(snapshot):
    code = (
        "from mvr_ray.core.encoding.encoder import DualEncoder\n"
        f"print(DualEncoder.load({str(snapshot)!r}, only_embeds=True).fingerprint)"  # without transformers, for time
    )
    other = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()
    assert other == DualEncoder.load(snapshot).fingerprint
    assert len(other) == 16 and int(other, 16) >= 0


def test_the_fingerprint_changes_with_all_that_changes_an_embedding_and_nothing_else(tiny):
    def name(spec: EncoderSpec, kind: str = "bert") -> str:
        return DualEncoder.from_backbone(tiny(kind), spec).fingerprint

    viewers, snippets = replace(SPEC, strategy="viewers"), replace(SPEC, strategy="snippets")
    different = [
        name(SPEC),
        name(SPEC, "roberta"),
        *(name(replace(SPEC, strategy=strategy)) for strategy in ("cls", "mean", "first_k", "viewers", "snippets")),
        name(replace(SPEC, num_views=2)),
        name(replace(SPEC, use_title=False)),
        name(replace(SPEC, max_query_tokens=23)),
        name(replace(SPEC, max_passage_tokens=63)),
        name(replace(SPEC, normalize=False)),
        name(replace(viewers, viewer_position="own")),
        name(replace(viewers, seed=1)),
        name(replace(viewers, viewer_init="cls")),
        name(replace(snippets, readout="snippet_mean")),
        name(replace(snippets, title_view=True)),
        name(replace(snippets, empty_snippets="kept")),
        name(replace(SPEC, whole_view=True)),
        name(replace(SPEC, overlap_tokens=8)),
    ]
    assert len(set(different)) == len(different)
    same = [
        replace(SPEC, score_scale=1.0),
        replace(SPEC, seed=1),
        replace(SPEC, tied=False),
        replace(SPEC, viewer_position="own"),
        replace(SPEC, readout="snippet_mean"),
        replace(SPEC, viewer_init="cls"),
    ]
    assert {name(spec) for spec in same} == {name(SPEC)}
    assert name(replace(SPEC, strategy="mean", num_views=5)) == name(replace(SPEC, strategy="mean"))


def test_a_snapshot_from_before_the_title_view_has_none_and_keeps_its_fingerprint(snapshot):
    was = DualEncoder.load(snapshot)
    edit(snapshot, lambda data: data["spec"].pop("title_view"))
    encoder = DualEncoder.load(snapshot)
    assert (encoder.spec, encoder.fingerprint) == (was.spec, was.fingerprint)
    assert not encoder.spec.title_view
    edit(snapshot, lambda data: data["spec"].pop("use_title"))
    with pytest.raises(EncoderError, match="lacks or does not know these settings: use_title;"):
        DualEncoder.load(snapshot)


def test_the_fingerprint_changes_with_one_weight_of_either_tower(tiny):
    encoder = DualEncoder.from_backbone(tiny("bert"), replace(SPEC, tied=False))
    for tower in (encoder.question_tower, encoder.passage_tower):
        before = encoder.fingerprint
        with torch.no_grad():
            next(tower.parameters())[0, 0] += 1e-6
        assert encoder.fingerprint != before


@pytest.mark.parametrize("only_embeds", [False, True])
@pytest.mark.parametrize(
    ("file", "key", "value"),
    [
        ("tokenizer.json", "normalizer", {"type": "NFC"}),
        ("config.json", "num_attention_heads", 4),
        ("config.json", "layer_norm_eps", 0.1),
    ],
)
def test_the_fingerprint_changes_with_the_tokenizer_and_the_architecture(snapshot, file, key, value, only_embeds):
    path = snapshot / "shared" / file
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), key: value}), encoding="utf-8")
    with pytest.raises(FingerprintError, match="its files have changed"):
        DualEncoder.load(snapshot, only_embeds)


def test_changed_files_are_reported_by_both_fingerprints(snapshot):
    was = DualEncoder.load(snapshot).fingerprint
    edit(snapshot, lambda data: data["spec"].update(use_title=False))
    for only_embeds in (False, True):
        with pytest.raises(FingerprintError) as error:
            DualEncoder.load(snapshot, only_embeds)
        assert str(error.value).startswith(f"encoder snapshot {snapshot} was saved as {was} but loads as ")
        assert str(error.value).endswith(": its files have changed; copy or make it again")


@pytest.mark.parametrize("only_embeds", [False, True])
def test_a_dimension_that_is_not_that_of_the_weights_is_refused_with_its_folder(snapshot, only_embeds):
    config = snapshot / "shared" / "config.json"
    settings = json.loads(config.read_text(encoding="utf-8"))
    config.write_text(json.dumps({**settings, "hidden_size": settings["hidden_size"] - 2}), encoding="utf-8")
    with pytest.raises(EncoderError, match=re.escape(str(snapshot / "shared"))):
        DualEncoder.load(snapshot, only_embeds)


def test_whatever_is_cut_or_changed_in_a_file_of_a_snapshot_is_an_error_of_ours(tiny, tmp_path):
    """Every file, cut, emptied, replaced by other JSON, with bits flipped, and with keys of another type."""
    encoder = DualEncoder.from_backbone(tiny("bert"), replace(SPEC, strategy="viewers"))
    encoder.save(tmp_path / "whole")
    files = [file.relative_to(tmp_path / "whole") for file in (tmp_path / "whole").rglob("*") if file.is_file()]
    assert {"config.json", "tokenizer.json", "encoder.json", "model.safetensors"} <= {file.name for file in files}
    rng = random.Random(0)
    for file in sorted(files):
        whole = (tmp_path / "whole" / file).read_bytes()
        damages = [whole[: len(whole) // 2], whole[:-1], b"", b"[]", b"null", b"3", b"{}", b"\xff\xfe"]
        for _ in range(8):
            content = bytearray(whole)
            content[rng.randrange(min(len(whole), 2000))] ^= 1 << rng.randrange(8)
            damages.append(bytes(content))
        values = json.loads(whole) if file.suffix == ".json" else {}
        if isinstance(values, dict):
            damages += [json.dumps({**values, key: value}).encode() for key in values for value in (None, [], "x")]
        shutil.copytree(tmp_path / "whole", tmp_path / "copy", dirs_exist_ok=True)
        for at, damage in enumerate(damages):
            (tmp_path / "copy" / file).write_bytes(damage)
            with suppress(EncoderError):  # what changes no embedding is no damage
                other = DualEncoder.load(tmp_path / "copy", only_embeds=at % 2 == 1)  # a way each, for time
                assert other.fingerprint == encoder.fingerprint


BROKEN = [
    (
        lambda folder: (folder / "encoder.json").unlink(),
        "{0} holds no encoder snapshot: encoder.json cannot be read ([Errno 2] No such file or directory: "
        "'{0}/encoder.json')",
    ),
    (
        lambda folder: (folder / "encoder.json").write_text("{"),
        "{0} holds no encoder snapshot: encoder.json cannot be read ({0}/encoder.json is damaged (Expecting property "
        "name enclosed in double quotes: line 1 column 2 (char 1)))",
    ),
    (
        lambda folder: edit(folder, lambda data: data.update(format_version=9)),
        "{0}/encoder.json has format version 9, this program reads 1; use the program that wrote it, or make the "
        "encoder snapshot again",
    ),
    (
        lambda folder: edit(folder, lambda data: data["spec"].update(colour="red")),
        "encoder.json in {0} lacks or does not know these settings: colour; make the snapshot again",
    ),
    (
        lambda folder: edit(folder, lambda data: data["spec"].update(viewer_init="one")),
        "encoder.json in {0} holds a wrong setting (encoder viewer_init is 'one'; known are random, cls); make the "
        "snapshot again",
    ),
    (
        lambda folder: edit(folder, lambda data: data.pop("fingerprint")),
        "{0}/encoder.json lacks the fingerprint; make the encoder snapshot again",
    ),
    (
        lambda folder: shutil.rmtree(folder / "shared"),
        "backbone folder {0}/shared does not exist; give a folder with config.json, model.safetensors and "
        "tokenizer.json, or the name of a model on the Hugging Face hub",
    ),
    (
        lambda folder: (folder / "punkt.json").unlink(),
        "encoder snapshot {0} has no punkt.json; copy or make it again",
    ),
]


@pytest.mark.parametrize(("damage", "message"), BROKEN)
def test_a_broken_snapshot_says_what_is_broken(snapshot, damage, message):
    damage(snapshot)
    with pytest.raises(EncoderError) as error:
        DualEncoder.load(snapshot)
    assert str(error.value) == message.format(snapshot)
