"""BM25's library is imported without what it would start, and takes a corpus without words."""

import os
import subprocess
import sys
from pathlib import Path

from mvr_ray.distributed.bm25 import BM25Index
from mvr_ray.types import Passage

CHECK = """
import sys
import mvr_ray.distributed.bm25
assert "jax" not in sys.modules
import jax
"""


def test_an_installed_jax_is_not_started_and_can_be_imported_afterwards(tmp_path):
    """JAX takes three quarters of a GPU's memory when it starts, and bm25s starts it where it is installed."""
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax/__init__.py").touch()
    (tmp_path / "jax/lax.py").write_text("raise SystemExit('JAX was started')\n")
    search_path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    result = subprocess.run(
        [sys.executable, "-c", CHECK], env=os.environ | {"PYTHONPATH": search_path}, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr


def test_a_corpus_without_a_word_has_no_hits():
    """Single characters and stop words are no words of BM25."""
    assert BM25Index([Passage("x", "", "I"), Passage("y", "the", "7")]).search(["seven I", ""], 3) == [[], []]
