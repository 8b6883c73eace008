"""A setting that names a model finds it in the store, else as a folder or at the hub."""

from pathlib import Path

import pytest

from mvr_ray.config import RunConfig, StoreConfig
from mvr_ray.errors import MissingInputError
from mvr_ray.store.model_records import READERS, find_model


def test_a_folder_above_the_working_one_is_a_model_and_a_missing_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "work").mkdir()
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    run = RunConfig(store=StoreConfig(path=str(tmp_path / "store")))
    for address in ("../model", ".."):
        assert Path(find_model(run, READERS, address).folder).samefile(address)
    with pytest.raises(MissingInputError, match=r"reader '\.\./no-model' is neither stored in .* nor a folder"):
        find_model(run, READERS, "../no-model")
