"""A model in the store: written once, whole, or not at all."""

import os
import shutil
from pathlib import Path

import pytest

from mvr_ray.core.encoding.encoder import DualEncoder, EncoderSpec
from mvr_ray.distributed.encoders import open_encoder, save_encoder
from mvr_ray.errors import StorageError
from mvr_ray.store import paths
from mvr_ray.store.files import SCRATCH, Store


@pytest.fixture(scope="module")
def encoder(tiny_backbone: Path) -> DualEncoder:
    return DualEncoder.from_backbone(str(tiny_backbone), EncoderSpec(strategy="mean", num_views=1))


def test_a_full_disk_is_an_error_that_says_so_and_leaves_nothing(tiny_disk, encoder) -> None:
    if tiny_disk is None:
        pytest.skip("no file system can be mounted here")
    store = Store(str(tiny_disk))
    with pytest.raises(
        StorageError, match=r"cannot write in .*No space left.*bytes free\); free space and run the same"
    ):
        save_encoder(store, "e", encoder)
    assert store.list(paths.models_dir("encoders", "e")) == [] and list((tiny_disk / SCRATCH).iterdir()) == []


def test_a_model_that_is_there_is_not_written_again(tmp_path, encoder) -> None:
    store = Store(str(tmp_path))
    snapshot = save_encoder(store, "e", encoder)
    shutil.rmtree(tmp_path / SCRATCH)
    (tmp_path / SCRATCH).touch()  # blocks the scratch folder
    assert save_encoder(store, "e", encoder) == snapshot


@pytest.mark.parametrize("file", ["encoder.json", "shared/model.safetensors"])
def test_an_encoder_whose_copy_in_the_cache_is_damaged_is_fetched_again(bucket, encoder, tmp_path, monkeypatch, file):
    monkeypatch.setenv("MVR_RAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("mvr_ray.store.objects.SETTLED_S", 0.0)
    store = Store(bucket)
    snapshot = save_encoder(store, "e", encoder)
    copy = snapshot.folder / file
    whole, stat = copy.read_bytes(), copy.stat()
    copy.write_bytes(whole[:-40] + bytes(40))
    os.utime(copy, (stat.st_atime, stat.st_mtime))
    assert open_encoder(store, "e", snapshot.fingerprint).fingerprint == snapshot.fingerprint
    assert copy.read_bytes() == whole
