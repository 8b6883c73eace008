"""Encoding: the bytes depend only on the corpus and the settings, not on workers or their failures."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from threading import Event
from typing import Any
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pytest
from random_index import publish_random_index, random_views
from safetensors.torch import load_file, save_file

from mvr_ray.checksums import json_with_checksum
from mvr_ray.config import RunConfig, parse_run
from mvr_ray.core.encoding import encoder as encoder_module
from mvr_ray.core.encoding import precision
from mvr_ray.core.encoding.encoder import DualEncoder, EncoderSpec
from mvr_ray.distributed import encoders
from mvr_ray.distributed.cluster import session
from mvr_ray.distributed.encoders import LocalEncoder, local_encoder, resolve_encoder, sample_evenly
from mvr_ray.distributed.indexing import build_index, encode, staging
from mvr_ray.distributed.indexing.carry_over import digest_contents
from mvr_ray.errors import (
    ConfigError,
    EncoderError,
    FingerprintError,
    FormatError,
    MissingInputError,
    ResourceError,
    StorageError,
)
from mvr_ray.store import manifest, paths
from mvr_ray.store.corpus import Corpus, CorpusInfo, PartInfo, corpus_digest
from mvr_ray.store.files import Store
from mvr_ray.store.local_files import sha256_of
from mvr_ray.store.model_records import ENCODERS, record_latest
from mvr_ray.store.parts import PASSAGE_SCHEMA, CorpusPart, difference, write_passages
from mvr_ray.types import Passage


@pytest.fixture(scope="module")
def encoder(minilm) -> DualEncoder:
    return DualEncoder.from_backbone(str(minilm), EncoderSpec(num_views=3, max_passage_tokens=64))


def test_a_chunk_embeds_to_what_its_passages_embed_to_alone(encoder):
    texts = ["A hill.", "The Nile is long. The Rhine is shorter. Both flow north.", "Seas are deep. They are salt."]
    passages = [Passage(f"p{i}", "", text * (1 + i)) for i, text in enumerate(texts)]
    tokens = encoder.tokenize_passages(passages)
    block = encode.embed_chunk(encoder, [p.id for p in passages], tokens, 64, "fp32")
    assert block.ids == ["p0", "p1", "p2"]
    for row, alone in enumerate(tokens):
        views_PVD, mask_PV = encoder.embed_passages([alone])
        start, stop = block.row_ptr[row], block.row_ptr[row + 1]
        assert block.view_numbers_N[start:stop].tolist() == np.flatnonzero(mask_PV[0]).tolist()
        np.testing.assert_allclose(block.vectors_ND[start:stop], views_PVD[0][mask_PV[0]], atol=2e-5)


@pytest.mark.data
def test_chunks_cover_every_row_of_a_part_once(corpus_store, run_over):
    run = run_over(corpus_store)
    corpus = Corpus.open(Store(str(corpus_store)), run.prepare.corpus)
    task = staging.encode_task(run, corpus, LocalEncoder(Path(), "encoder", "f" * 16, 4, 384, "cosine", "fp32"))
    for shard in range(corpus.num_shards):
        chunks = staging.chunks_of(task, corpus, shard)
        assert [row for c in chunks for row in range(c.start, c.stop)] == list(range(len(corpus.part(shard))))


@pytest.mark.data
def test_a_trained_encoder_with_other_settings_than_the_section_sets_is_refused(empty_store, run_over):
    """What a run file leaves out is as in training; a folder of the same model may be another one by now."""
    store, index = Store(str(empty_store)), {"encoder": "auto"}
    run = run_over(empty_store, encoder={"query_prompt": "q: "})
    snapshot, backbone = resolve_encoder(run), run.encoder.backbone
    record = {"fingerprint": snapshot.fingerprint, "backbone": f"/elsewhere/{Path(backbone).name}/"}
    record_latest(store, ENCODERS, "encoder", record)

    def choose(index: dict[str, str], **settings: object) -> LocalEncoder:
        plain = {**run.model_dump(mode="json"), "index": {"precision": "fp32", **index}, "encoder": settings}
        return resolve_encoder(RunConfig.model_validate(plain))

    assert choose(index) == choose(index, backbone=backbone, num_views=4, query_prompt="q: ") == snapshot
    assert choose(index, max_passage_tokens=None, viewer_position="own", seed=5, score_scale=1) == snapshot
    assert choose({"encoder": snapshot.fingerprint}, num_views=2) == snapshot
    for settings, old_values, new_values in [
        ({"num_views": 2}, "num_views 4", "num_views 2"),
        ({"strategy": "mean"}, "strategy 'snippet_means'", "strategy 'mean'"),
        ({"overlap_tokens": 8, "query_prompt": ""}, "overlap_tokens 0, query_prompt 'q: '", "overlap_tokens 8, query_"),
        ({"backbone": "other/model"}, "backbone '/elsewhere", "backbone 'other/model'"),
        ({"tied": False, "sentences": "corpus"}, "sentences 'packaged', tied True", "sentences 'corpus', tied False"),
    ]:
        for choice in ("auto", "trained"):
            message = f"was trained with {old_values}.*has {new_values}.*index.encoder=untrained"
            with pytest.raises(EncoderError, match=message):
                choose({"encoder": choice}, **settings)
    assert choose({"encoder": "untrained"}, backbone=backbone, num_views=2).num_views == 2


@pytest.mark.data
def test_encoder_choices_name_what_is_missing(empty_store, run_over):
    with pytest.raises(MissingInputError, match=r"no trained encoder 'encoder'.*mvr-ray train CONFIG"):
        resolve_encoder(run_over(empty_store, index={"encoder": "trained"}))
    encoder = resolve_encoder(run_over(empty_store))
    assert resolve_encoder(run_over(empty_store, index={"encoder": encoder.fingerprint})) == encoder
    assert resolve_encoder(run_over(empty_store, index={"encoder": "auto"})) == encoder
    with pytest.raises(MissingInputError, match=f"'abcd' not found.*there are: .*{encoder.fingerprint}"):
        resolve_encoder(run_over(empty_store, index={"encoder": "abcd"}))
    store = Store(str(empty_store))
    os.rename(encoder.folder, encoder.folder.with_name("0" * 16))  # noqa: PTH104
    with pytest.raises(FingerprintError, match=f"{encoder.fingerprint}, but {'0' * 16} was asked for"):
        local_encoder(store, encoder.name, "0" * 16)


def test_an_untrained_encoder_is_made_once_for_a_backbone_and_its_settings(tiny_backbone, tmp_path, monkeypatch):
    backbone = shutil.copytree(tiny_backbone, tmp_path / "backbone")
    makers = Mock(wraps=encoders.make_encoder)
    monkeypatch.setattr(encoders, "make_encoder", makers)

    def resolve(**encoder: Any) -> LocalEncoder:
        settings = {"backbone": str(backbone), "strategy": "mean", **encoder}
        store = {"path": str(tmp_path / "store")}
        return resolve_encoder(parse_run({"store": store, "encoder": settings, "index": {"precision": "fp32"}}, ""))

    first = resolve()
    assert resolve() == first and makers.call_count == 1
    assert resolve(max_passage_tokens=16).fingerprint != first.fingerprint and makers.call_count == 2
    shutil.rmtree(first.folder)
    assert resolve() == first and makers.call_count == 3
    weights = load_file(backbone / "model.safetensors")
    save_file({name: weight + 1 for name, weight in weights.items()}, backbone / "model.safetensors")
    other = resolve()
    assert other.fingerprint != first.fingerprint and makers.call_count == 4
    assert other.fingerprint == DualEncoder.from_backbone(str(backbone), EncoderSpec(strategy="mean")).fingerprint


@pytest.mark.data
def test_another_precision_is_another_encoder_that_the_corpus_keeps(empty_store, run_over):
    store = Store(str(empty_store))
    corpus = Corpus.open(store, run_over(empty_store).prepare.corpus)
    full = resolve_encoder(run_over(empty_store, index={"precision": "fp32"}))
    int8_encoder = resolve_encoder(run_over(empty_store, index={"precision": "int8"}), corpus)
    assert int8_encoder.fingerprint != full.fingerprint
    assert DualEncoder.load(int8_encoder.folder).precision.name == "int8"
    for index in ({"precision": "int8"}, {"precision": "int8", "encoder": int8_encoder.fingerprint}):
        assert resolve_encoder(run_over(empty_store, index=index)) == int8_encoder
    choice = {"encoder": int8_encoder.fingerprint}
    assert resolve_encoder(run_over(empty_store, index={**choice, "precision": "auto"})) == int8_encoder
    for other in ("fp32", "openvino"):
        with pytest.raises(ConfigError, match=f"{int8_encoder.fingerprint} embeds in int8, .*precision is {other};"):
            resolve_encoder(run_over(empty_store, index={**choice, "precision": other}))
    assert resolve_encoder(run_over(empty_store, index={"precision": "fp32"})) == full
    tasks = [staging.encode_task(run_over(empty_store), corpus, encoder) for encoder in (full, int8_encoder)]
    assert tasks[0].key != tasks[1].key


@pytest.mark.data
@pytest.mark.parametrize("first", ["fp32", "bf16", "openvino-bf16"])
def test_a_store_keeps_the_precision_that_its_passages_were_embedded_in(
    empty_store, run_over, monkeypatch, caplog, first
):
    """The encoder in use on either kind of processor, and on a GPU; the numbers are those of fp32, which every one
    supports."""
    build = precision.inference_pass
    monkeypatch.setattr(session, "in_ray", lambda: False)  # the patches below do not reach workers
    monkeypatch.setattr(precision, "_missing_on_cpu", lambda tower, name: "")
    monkeypatch.setattr(encoder_module, "inference_pass", lambda tower, own: build(tower, own._replace(name="fp32")))
    choice, here = [first], {"local_passages": 1000}
    on_gpus = run_over(empty_store, index={"name": "three", "precision": "auto"}, resources={"gpus_per_encoder": 1})
    monkeypatch.setattr(encoders, "fastest_float", lambda tower: choice[0])
    live = build_index.index(run_over(empty_store, index={"name": "one", "precision": "auto"}, resources=here))
    full = resolve_encoder(run_over(empty_store, index={"precision": "fp32"}))
    assert (live.encoder_fingerprint == full.fingerprint) == (first == "fp32")
    choice[0] = "bf16" if first == "fp32" else "fp32"
    for name in ("one", "two"):
        again = build_index.index(run_over(empty_store, index={"name": name, "precision": "auto"}, resources=here))
        assert again.encoder_fingerprint == live.encoder_fingerprint
        assert again.metrics["encoded"] == 0 and (again.shards == live.shards or name == "two")
    for has_bf16 in (True, False):
        monkeypatch.setattr("torch.cuda.is_available", lambda: True)
        monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda including_emulation, has_bf16=has_bf16: has_bf16)
        is_kept = first == "fp32" or (first == "bf16" and has_bf16)
        caplog.clear()
        assert resolve_encoder(on_gpus).fingerprint == (live.encoder_fingerprint if is_kept else full.fingerprint)
        assert (f"embedded anew, in fp32: those of index 'one' are in {first}, which needs" in caplog.text) != is_kept
    shutil.rmtree(empty_store / "indexes")
    assert resolve_encoder(on_gpus) == full


@pytest.mark.data
@pytest.mark.parametrize(("setting", "num"), [(None, 7), (3, 3)])
def test_an_encoder_in_this_process_has_the_threads_of_the_run_file_else_one_a_core(
    empty_store, run_over, without_ray, monkeypatch, setting, num
):
    threads = Mock(wraps=encode.torch_threads)
    monkeypatch.setattr(encode, "torch_threads", threads)
    monkeypatch.setattr(encode, "num_cores", lambda: 7)
    build_index.index(run_over(empty_store, resources={"torch_threads": setting}))
    assert {call.args for call in threads.call_args_list} == {(num,)}


@pytest.mark.data
@pytest.mark.parametrize("has_gpu", [True, False])
def test_a_gpu_that_no_encoder_uses_is_reported(empty_store, run_over, without_ray, monkeypatch, caplog, has_gpu):
    monkeypatch.setattr("torch.cuda.is_available", lambda: has_gpu)
    build_index.index(run_over(empty_store))
    assert ("CPU beside a GPU; resources.gpus_per_encoder: 1 uses it" in caplog.text) == has_gpu


@pytest.mark.data
def test_the_record_of_an_encoder_in_another_precision_is_refused_where_it_is_newer_or_damaged(empty_store, run_over):
    store, run = Store(str(empty_store)), run_over(empty_store, index={"precision": "int8"})
    full = resolve_encoder(run_over(empty_store, index={"precision": "fp32"}))
    path = paths.lowered_encoder(full.name, full.fingerprint, encoders.INT8_RECORD, run.prepare.corpus)
    fields = {"fingerprint": full.fingerprint}
    for record in (fields, json_with_checksum({**fields, "format_version": 1})):  # the first versions wrote no format
        store.write_bytes(path, json.dumps(record).encode())
        assert resolve_encoder(run) == full
    cure = "delete it: the same command then makes the encoder again"
    newer_record, damaged_record = (
        json_with_checksum({**fields, "format_version": 2}),
        {**record, "fingerprint": "0" * 16},
    )
    for data, error, text in (
        (
            json.dumps(newer_record),
            FormatError,
            "has format version 2, this program reads 1; use the program that wrote it, or",
        ),
        (json.dumps(damaged_record), StorageError, "is damaged .*;"),
        (json.dumps(record)[:20], StorageError, "is damaged .*;"),
        ("{}", StorageError, "is damaged .it has no fingerprint.;"),
    ):
        store.write_bytes(path, data.encode())
        with pytest.raises(error, match=f"{path} {text} {cure}"):
            resolve_encoder(run)
        assert store.read_bytes(path) == data.encode()


@pytest.mark.data
@pytest.mark.parametrize("num", [1, 7, 40, 10_000])
def test_passages_for_scales_stand_at_even_distances(corpus_store, run_over, num):
    """The whole corpus is sampled: after the first passage, the distances, to its end too, differ by one at most."""
    corpus = Corpus.open(Store(str(corpus_store)), run_over(corpus_store).prepare.corpus)
    everything = list(corpus)
    sample = sample_evenly(corpus, num)
    rows = [everything.index(passage) for passage in sample]
    distances = [after - row for row, after in zip(rows, [*rows[1:], len(everything)])]
    assert len(rows) == min(num, len(everything)) and rows[0] == 0
    assert min(distances) > 0 and max(distances) - min(distances) <= 1


@pytest.mark.data
def test_sentences_of_a_large_corpus_are_learned_from_a_sample_of_its_passages(corpus_store, run_over, monkeypatch):
    run = run_over(corpus_store, encoder={"strategy": "snippet_means", "sentences": "corpus"})
    texts = [passage.text for passage in sample_evenly(Corpus.open(Store(run.store.path), "corpus"), 60)]
    learn, samples = encoders.train_punkt, list[list[str]]()
    monkeypatch.setattr(encoders, "train_punkt", lambda own: learn(samples.append(list(own)) or samples[-1]))
    for num in (60, 7):
        monkeypatch.setattr(encoders, "SENTENCE_PASSAGES", num)
        encoders.make_encoder(run, Store(run.store.path))
    assert samples[0] == texts
    assert len(samples[1]) == 7 and {*samples[1]} <= {*texts}


@pytest.mark.data
@pytest.mark.ray
def test_encoders_that_do_not_fit_are_refused_before_any_work(empty_store, run_over, ray_session):
    run = run_over(empty_store, resources={"encoders_min": 40, "encoders_max": 40})
    with pytest.raises(ResourceError, match="40 encoders"):
        build_index.index(run)


@pytest.mark.data
@pytest.mark.ray
def test_an_error_of_ours_in_a_worker_reaches_the_caller_as_itself(empty_store, run_over, ray_session):
    encoder = resolve_encoder(run_over(empty_store))
    weights = encoder.folder / "shared" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.chmod(0o644)
    weights.write_bytes(data)
    with pytest.raises(FingerprintError, match=f"saved as {encoder.fingerprint} but loads as .* again$"):
        build_index.index(run_over(empty_store, index={"encoder": encoder.fingerprint}))


def digests(store: Path) -> list[str]:
    return [entry.digest for entry in manifest.read(Store(str(store)), "index").shards]


@pytest.mark.data
@pytest.mark.ray
def test_two_chunks_at_once_in_an_encoder_give_the_bytes_of_one(
    empty_store, small_index, run_over, ray_session, monkeypatch
):
    monkeypatch.setattr(encode, "chunks_at_once", lambda gpu: 2)
    build_index.index(run_over(empty_store))
    assert digests(empty_store) == digests(small_index)


@pytest.mark.data
def test_a_chunk_is_embedded_while_the_one_before_is_written(empty_store, run_over, monkeypatch):
    run = run_over(empty_store)
    corpus = Corpus.open(Store(str(empty_store)), run.prepare.corpus)
    task = staging.encode_task(run, corpus, resolve_encoder(run))
    chunks = [staging.chunks_of(task, corpus, shard)[0] for shard in (0, 1)]
    encoder, embedding, written_paths = encode.ChunkEncoder(task), Event(), []
    embed, write = encode.embed_chunk, staging.EncodeTask.write_staged

    def record(*arguments):
        if written_paths:
            embedding.set()
        return embed(*arguments)

    def slow(self, store, path, blocks, unread_counts):
        written_paths.append(path)
        if len(written_paths) == 1:
            assert embedding.wait(60), "nothing was embedded while a chunk was written"
        write(self, store, path, blocks, unread_counts)

    monkeypatch.setattr(encode, "embed_chunk", record)
    monkeypatch.setattr(staging.EncodeTask, "write_staged", slow)
    rows = [encode.tokenize_chunk(pa.Table.from_pylist([chunk._asdict()]), task) for chunk in chunks]
    with ThreadPoolExecutor(2) as pool:
        assert [one.column("passages").to_pylist() for one in pool.map(encoder, rows)] == [
            [chunk.stop - chunk.start] for chunk in chunks
        ]
    assert staging.staged_chunks(task, chunks) == set(chunks)


@pytest.mark.slow
@pytest.mark.chaos("encoder killed", "the index is the undisturbed one to the byte")
@pytest.mark.data
@pytest.mark.ray
def test_two_encoders_one_of_them_killed_give_the_bytes_of_one(
    empty_store, small_index, run_over, actor_processes, record_property
):
    killed_pids: list[int] = []
    record: list[tuple[int, int]] = []

    def kill_one(what: str, count: int, total: int) -> None:
        if what == "encode":
            record.append((count, total))
        if what == "encode" and count < total and not killed_pids:
            killed_pids.append(actor_processes("ChunkEncoder")[0])
            os.kill(killed_pids[0], signal.SIGKILL)

    build_index.index(run_over(empty_store, resources={"encoders_min": 2, "encoders_max": 2}), kill_one)
    assert killed_pids
    assert digests(empty_store) == digests(small_index)
    record_property("figures", f"1 of 2 encoders killed after {record[0][0]} of {record[0][1]} passages")


DRIVER = """
import os, signal, sys
from mvr_ray.config import RunConfig
from mvr_ray.distributed.indexing import build_index

def kill(what, count, total):
    if what == "encode":
        os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    build_index.index(RunConfig.model_validate_json(sys.argv[1]), kill)
"""


@pytest.mark.slow
@pytest.mark.chaos("encoding driver killed", "only the chunks under way are encoded again")
@pytest.mark.data
@pytest.mark.ray
def test_a_killed_driver_loses_only_the_chunks_under_way(
    empty_store, small_index, run_over, without_ray, record_property
):
    """Without Ray: `test_kill.py` kills a command whose chunks the workers of a cluster wrote."""
    run = run_over(empty_store)
    command = [sys.executable, "-c", DRIVER, run.model_dump_json()]
    driver = subprocess.run(command, timeout=1200)
    assert driver.returncode == -signal.SIGKILL
    store = Store(str(empty_store))
    assert manifest.list_versions(store, "index") == []
    key = store.list(paths.index_dir("index", "staging"))[0]
    assert store.list(paths.staging_dir("index", key))

    reports: list[tuple[str, int, int]] = []
    build_index.index(run, lambda *record: reports.append(record))
    first = next(record for record in reports if record[0] == "encode")
    assert 0 < first[1] < first[2]
    assert digests(empty_store) == digests(small_index)
    assert store.list(paths.index_dir("index", "staging")) == []
    record_property("figures", f"{first[1]} of {first[2]} passages found encoded, {first[2] - first[1]} encoded again")


WORKER = """
import gzip, json, sys
sys.path.insert(0, sys.argv[3])
from peak_memory import peak_kb
from itertools import islice
from mvr_ray.core.encoding.encoder import DualEncoder, EncoderSpec
from mvr_ray.distributed.indexing.encode import embed_chunk
from mvr_ray.types import Passage
encoder = DualEncoder.from_backbone(sys.argv[1], EncoderSpec(max_passage_tokens=128))
articles = json.load(gzip.open(sys.argv[2], "rt"))["data"]
texts = (p["context"] for article in articles for p in article["paragraphs"])
for number in range(9):
    passages = [Passage(f"{number}-{i:03d}", "", text) for i, text in enumerate(islice(texts, 48))]
    tokenized = encoder.tokenize_passages(passages)
    embed_chunk(encoder, [passage.id for passage in passages], tokenized, 2048, "fp16")
    print(peak_kb(), flush=True)
"""


@pytest.mark.data
def test_the_peak_memory_of_a_worker_does_not_grow_with_the_chunks_that_it_encodes(tiny_backbone, data_dir):
    squad = data_dir / "squad" / "dev-v1.1.json.gz"
    tests = Path(__file__).resolve().parent.parent
    command = [sys.executable, "-c", WORKER, str(tiny_backbone), str(squad), str(tests)]
    record = subprocess.run(command, capture_output=True, text=True, check=True)
    peaks_kb = [int(line) for line in record.stdout.split()]
    assert len(peaks_kb) == 9
    assert peaks_kb[-1] - peaks_kb[2] < 0.03 * peaks_kb[2], peaks_kb


class SparseFile(io.FileIO):
    """Leaves holes where large buffers, of zeros, are written."""

    def write(self, data) -> int:
        is_large = len(data) > 1 << 20
        return self.seek(len(data), io.SEEK_CUR) and len(data) if is_large else super().write(data)


@pytest.mark.slow
def test_a_part_with_more_text_than_32_bits_count_is_digested_and_compared(tmp_path):
    """Every second passage has 0.75 GiB of text."""
    large_text = pa.py_buffer(np.zeros(num_bytes := 3 << 28, np.uint8))
    offsets = pa.py_buffer(np.array([0, 1, num_bytes], np.int32))
    store, version = Store(str(tmp_path)), publish_random_index(tmp_path, random_views(6, 1), 1)
    large, small = tmp_path / "large.arrow", tmp_path / "small.arrow"
    with SparseFile(large, "w") as file, pa.ipc.new_file(pa.PythonFile(file, "w"), PASSAGE_SCHEMA) as sink:
        for number in range(0, 6, 2):
            texts = pa.StringArray.from_buffers(2, offsets, large_text)
            columns = [pa.array([f"{number}", f"{number + 1}"]), pa.array(["T", "T"]), texts]
            sink.write_batch(pa.record_batch(columns, schema=PASSAGE_SCHEMA))
    write_passages(small, [Passage("0", "T", "\0"), Passage("2", "T", "new"), Passage("4", "T", "\0")])
    assert difference(CorpusPart(large), CorpusPart(small)) == ([1], ["1", "3", "5"])
    part = PartInfo("large.arrow", 6, large.stat().st_size, sha256_of(large))
    corpus = Corpus(store, CorpusInfo("corpus", corpus_digest([part]), 6, (part,), (), {}, {}))
    store.put_file(large, f"{paths.corpus_dir('corpus')}/{part.file}")
    corpus.publish(after=0)
    task = staging.EncodeTask(
        str(tmp_path), replace(version, corpus_digest=corpus.digest, corpus="corpus"), "key", 1, 1
    )
    task.write_plan(store, 0, staging.EncodePlan(rows=[0, 2, 4]))
    assert digest_contents(task, 0) == 3 * blake2b(b"1 T\0", digest_size=16).digest()
