"""BM25 over a corpus without a version of its words, and over one without any word."""

import json
import tempfile
from pathlib import Path

import pytest
from bm25_index import BM25Index

from mvr_ray.config import PrepareConfig, SourceConfig
from mvr_ray.distributed.bm25 import index_words
from mvr_ray.store.corpus import Corpus
from mvr_ray.store.files import Store
from mvr_ray.store.prepare import prepare


def make_corpus(folder: Path, texts: list[str]) -> Corpus:
    """A corpus of three parts, with passages in another order than that of their ids."""
    rows = [json.dumps({"id": f"p{number * 7 % 100:02d}", "text": text}) for number, text in enumerate(texts)]
    (folder / "texts.jsonl").write_text("\n".join(rows))
    sources = [SourceConfig(path=str(folder / "texts.jsonl"), format="jsonl")]
    prepare(PrepareConfig(sources=sources, num_shards=3), store := Store(folder / "store"))
    return Corpus.open(store, "corpus")


def test_a_corpus_without_a_word_has_no_hits(tmp_path):
    """Single characters and stop words are no words of BM25."""
    assert index_words(make_corpus(tmp_path, ["I", "the 7"])).search(["seven I", ""], 3) == [[], []]


@pytest.mark.parametrize("cached_bytes", [0, 400, 1 << 29])
def test_words_of_parts_rank_as_one_index_of_all_passages_whatever_is_cached(tmp_path, monkeypatch, cached_bytes):
    """Ties are in order of id; no file stays."""
    monkeypatch.setattr("mvr_ray.distributed.bm25._CACHED_BYTES", cached_bytes)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    corpus = make_corpus(tmp_path, ["a harbour at night", "mills by a harbour", "night mills"] * 12)
    texts = ["the harbour", "harbour harbour night", "mills at night", "zzyzx", ""] * 2
    words = index_words(corpus)
    assert words.search(texts, 9) == BM25Index(corpus).search(texts, 9)
    assert words.search(texts[:1], 99) == BM25Index(corpus).search(texts[:1], 99)
    assert list((tmp_path / "temporary").iterdir()) == []
