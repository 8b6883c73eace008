"""Stores of both kinds: a folder, and a file system reached as object stores are."""

from collections.abc import Callable
from pathlib import Path

import pyarrow.fs
import pytest

from mvr_ray.store.files import Store


@pytest.fixture(params=["folder", "objects"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("MVR_RAY_CACHE", str(tmp_path / "cache"))
    if request.param == "folder":
        return Store(tmp_path / "store")
    return Store(str(tmp_path / "bucket"), pyarrow.fs.LocalFileSystem())


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str | bytes], Path]:
    """Write a source file and give its path."""

    def write(name: str, content: str | bytes) -> Path:
        path = tmp_path / "sources" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write
