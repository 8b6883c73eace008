"""Checks a served Wikipedia while its second half arrives: every answer is brute force's over one version."""

import bz2
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import yaml
from waiting import until

from mvr_ray.cli import main
from mvr_ray.client import Client
from mvr_ray.config import RunConfig
from mvr_ray.distributed.encoders import open_encoder
from mvr_ray.serving.schemas import SearchResponse
from mvr_ray.store import manifest
from mvr_ray.store.corpus import Corpus
from mvr_ray.store.delta import open_embeddings
from mvr_ray.store.files import Store
from mvr_ray.types import FloatArray

pytestmark = [pytest.mark.data, pytest.mark.slow]

DUMP = Path("wikipedia_dump", "enwiki-pages-articles-shortened.xml.bz2")
FIRST_PAGES = 100
K, THREADS, AT_LEAST, BEFORE = 5, 4, 1000, 100
PAUSE_S = 0.05
"""Of each thread after an answer: without it they take the cores that the update needs, and it takes minutes."""
TOLERANCE = 2e-4
"""Of scores up to 20: the same text, embedded beside others, differs in the last digits."""


class EveryView(NamedTuple):
    """All views of a version: passage ids, and of each view its passage's row."""

    ids: list[str]
    rows_N: np.ndarray
    vectors_ND: FloatArray

    @classmethod
    def of(cls, store: Store, number: int) -> "EveryView":
        version = manifest.read(store, "index", number)
        ids: list[str] = []
        rows, vectors = [], []
        for entry in version.shards:
            shard = open_embeddings(manifest.open_shard(store, "index", entry), entry.files)
            for block in shard.blocks():
                rows.append(np.repeat(np.arange(len(block.ids)), np.diff(block.row_ptr)) + len(ids))
                vectors.append(block.vectors_ND.astype(np.float32))
                ids += block.ids
        return cls(ids, np.concatenate(rows), np.concatenate(vectors))

    def scores(self, query_D: FloatArray) -> dict[str, float]:
        """The score of every passage: of its best view."""
        best_P = np.full(len(self.ids), -np.inf, np.float32)
        np.maximum.at(best_P, self.rows_N, self.vectors_ND @ query_D)
        return dict(zip(self.ids, best_P.tolist()))


def require_exact(answer: SearchResponse, scores: dict[str, float]) -> None:
    """The hits are the k best passages of the version, with their scores, as far as these differ."""
    hits = answer.results[0]
    best = sorted(scores.values(), reverse=True)[:K]
    assert [hit.score for hit in hits] == pytest.approx(best, abs=TOLERANCE)
    assert [hit.score for hit in hits] == pytest.approx([scores[hit.id] for hit in hits], abs=TOLERANCE)
    assert len({hit.id for hit in hits}) == K
    assert answer.exact.certified and answer.coverage.share == 1.0


@pytest.fixture
def run(run_over, tmp_path: Path, data_dir: Path) -> RunConfig:
    pages = bz2.decompress((data_dir / DUMP).read_bytes()).decode().split("</page>")
    (tmp_path / "half.xml").write_text("</page>".join([*pages[:FIRST_PAGES], "</mediawiki>"]))
    (tmp_path / "source").mkdir()
    prepare = {
        "sources": [{"path": str(tmp_path / "half.xml"), "format": "mediawiki"}],
        "chunk_words": 100,
        "fields": {"page_id": "int", "revision_id": "int"},
    }
    index = {"sort_window": 256, "tokens_per_batch": 8192, "recall_sample": 0}
    follow = {"source": str(tmp_path / "source"), "poll_s": 0.05, "max_age_s": 0}
    sections = {"prepare": prepare, "index": index, "follow": follow, "serve": {"follow_s": 0.2}}
    return run_over(tmp_path / "store", **sections, resources={"local_passages": 100_000})


def command(run: RunConfig, folder: Path, *words: str) -> None:
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(run.model_dump(mode="json")))
    with pytest.raises(SystemExit) as end:
        main([words[0], str(file), *words[1:]])
    assert not end.value.code


@pytest.mark.chaos(
    "the second half of a Wikipedia dump arrives while a thousand questions are asked",
    "each answer is brute force's over one version, none fails, unchanged files are shared",
)
def test_no_answer_is_wrong_while_the_second_half_of_a_dump_arrives_as_an_update(
    without_ray, run: RunConfig, tmp_path: Path, data_dir: Path, record_property
):
    store = Store(run.store.path)
    command(run, tmp_path, "prepare")
    command(run, tmp_path, "index")
    passages = list(Corpus.open(store, "corpus"))
    sample = np.random.default_rng(0).choice(len(passages), 200, replace=False)
    questions = [" ".join(passages[row].text.split()[10:22]) for row in sample]
    answers: list[tuple[int, SearchResponse]] = []
    enough, is_published = threading.Event(), threading.Event()

    def ask(number: int, client: Client) -> None:
        """Until the last version has answered, and enough was asked."""
        while len(answers) < AT_LEAST or not is_published.is_set() or answers[-1][1].version < 3:
            answers.append((number % len(questions), client.search([questions[number % len(questions)]], K)))
            number += THREADS
            if len(answers) >= BEFORE:
                enough.set()
            time.sleep(PAUSE_S)

    with Client.in_process(run, timeout_s=60) as client, ThreadPoolExecutor(THREADS) as threads:
        asking = [threads.submit(ask, number, client) for number in range(THREADS)]
        try:
            assert enough.wait(60)
            (tmp_path / "source" / "1.xml.bz2").write_bytes((data_dir / DUMP).read_bytes())
            command(run, tmp_path, "follow", "--once")
            until(lambda: answers[-1][1].version == 2)
            page = passages[0].id.partition("#")[0]
            (tmp_path / "source" / "2.jsonl").write_text(json.dumps({"id": page, "delete": True}) + "\n")
            command(run, tmp_path, "follow", "--once")
        finally:
            is_published.set()
        for thread in asking:
            thread.result()
    versions = {number: manifest.read(store, "index", number) for number in (1, 2, 3)}
    views = {number: EveryView.of(store, number) for number in versions}
    encoder = open_encoder(store, versions[1].encoder_name, versions[1].encoder_fingerprint)
    queries_QD = encoder.embed_queries(questions)
    expected: dict[tuple[int, int], dict[str, float]] = {}
    for number, answer in answers:
        key = answer.version, number
        expected.setdefault(key, {}) or expected.update({key: views[answer.version].scores(queries_QD[number])})
        require_exact(answer, expected[key])
    counts = [sum(answer.version == number for _, answer in answers) for number in versions]
    assert sum(counts) == len(answers) >= AT_LEAST and all(counts)
    assert versions[2].metrics["encoded"] == versions[2].num_passages - versions[1].num_passages > 0
    assert versions[3].metrics["encoded"] == 0
    before = {file.sha256 for entry in versions[2].shards for file in entry.files.values()}
    assert {entry.files["embeddings.arrow"].sha256 for entry in versions[3].shards} <= before
    record_property("figures", f"{len(answers)} answers, {counts} by version, {versions[2].num_passages} passages")
