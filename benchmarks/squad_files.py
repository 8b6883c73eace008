"""Find the real data of the benchmarks, and read SQuAD's paragraphs."""

import gzip
import json
import os
import sys
from pathlib import Path
from typing import Any

from machine import ROOT

DATA = Path(os.environ.get("MVR_RAY_DATA", ROOT.parent / "shared" / "data"))
TRAIN, DEV = (DATA / "squad" / f"{name}-v1.1.json.gz" for name in ("train", "dev"))


def read_paragraphs(path: Path) -> list[dict[str, Any]]:
    """Return the paragraphs of all articles of TRAIN or DEV, in order."""
    if not path.is_file():
        sys.exit(f"{path} does not exist; set MVR_RAY_DATA to the folder that holds squad/{path.name}")
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [paragraph for article in json.load(file)["data"] for paragraph in article["paragraphs"]]
