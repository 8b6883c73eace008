"""`mvr-ray export` writes a folder that sentence-transformers loads to equal vectors."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from file_size_limit import file_size_limit

from mvr_ray.cli import main
from mvr_ray.distributed.encoders import open_encoder
from mvr_ray.store import manifest
from mvr_ray.store.files import Store

TEXTS = ["The Nile is long.", "Which river is it that flows through Egypt and Sudan?"]


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(words)
    return int(end.value.code or 0)


@pytest.mark.parametrize("strategy", ["mean", "snippet_means"])
def test_an_exported_folder_gives_the_encoder_s_question_vectors(
    tmp_path: Path, tiny_backbone: Path, capsys, strategy: str
) -> None:
    from sentence_transformers import SentenceTransformer

    (tmp_path / "rows.jsonl").write_text(
        "".join(f"{json.dumps({'id': str(i), 'text': text})}\n" for i, text in enumerate(TEXTS))
    )
    settings = {
        "store": {"path": str(tmp_path / "store")},
        "prepare": {"sources": [str(tmp_path / "rows.jsonl")], "num_shards": 1},
        "encoder": {"backbone": str(tiny_backbone), "strategy": strategy, "num_views": 3},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    config, folder = str(tmp_path / "run.yaml"), tmp_path / "exported"
    assert [run("prepare", config), run("index", config)] == [0, 0]
    capsys.readouterr()
    with file_size_limit(1000):
        assert run("export", config, str(folder)) == 1
    assert capsys.readouterr().err.startswith(f"mvr-ray: cannot write {folder}: ")
    assert run("export", config, str(folder)) == 0
    out = capsys.readouterr().out
    assert ("not carried: views: here a passage has up to 3" in out) == (strategy == "snippet_means")
    assert f"written: {folder}" in out
    assert len({file.stat().st_mode for file in folder.rglob("*") if file.is_file()}) == 1  # the weights', too
    store = Store(str(tmp_path / "store"))
    live = manifest.read(store, "index")
    expected_QD = open_encoder(store, live.encoder_name, live.encoder_fingerprint).embed_queries(TEXTS)
    vectors_QD = SentenceTransformer(str(folder), device="cpu").encode(TEXTS)
    np.testing.assert_allclose(vectors_QD, expected_QD, atol=1e-5)
    assert run("export", config, str(folder)) == 2
    assert f"export: {folder} exists already" in capsys.readouterr().err
