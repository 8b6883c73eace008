"""A model in the store: written once, whole, or not at all."""

import shutil
from pathlib import Path

import pytest

from mvr_ray.core.encoding.encoder import DualEncoder, EncoderSpec
from mvr_ray.distributed.encoders import save_encoder
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
