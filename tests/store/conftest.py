"""Stores of every kind: a folder, a file system reached as object stores are, and S3 servers, ours and another's."""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from mvr_ray.store.files import Store

sys.path.insert(0, str(Path(__file__).parent))  # so that tests here can import the modules beside them


@pytest.fixture(scope="session")
def s3_server() -> ModuleType:
    """The module beside this file."""
    return importlib.import_module("s3_server")


@pytest.fixture(params=["folder", "s3", "s3 of others"])
def store(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, s3_server: ModuleType
) -> Iterator[Store]:
    monkeypatch.setenv("MVR_RAY_CACHE", str(tmp_path / "cache"))
    if request.param == "folder":
        yield Store(tmp_path / "store")
    elif request.param == "s3 of others":
        yield Store(request.getfixturevalue("bucket"))
    else:
        with s3_server.serve() as root:
            yield Store(root)


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str | bytes], Path]:
    """Write a source file and give its path."""

    def write(name: str, content: str | bytes) -> Path:
        path = tmp_path / "sources" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write
