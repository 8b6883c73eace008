"""Estimate the bytes of disk, memory and GPU memory that a run needs, per shard and in all, before it starts.

    vectors  = passages x V                                        (an upper bound: an empty snippet has no view)
    at rest  = vectors x D x (2 fp16 | 4 fp32)  +  row overhead     embeddings.arrow
    hnsw     = vectors x (4 D + 8 M + 12)                           hnswlib keeps fp32 vectors and 2 M links of 4 bytes
    faiss    = vectors x (code + 8)  +  4 x lists x D               code from the factory string; fast scan (`fs`): at
                                                                   most 31 codes more a list
    train    = 16 x parameters + activations                        fp32 weights, gradient and two AdamW moments; on a
                                                                   CPU activations by `CPU_STEP`
    refine   = at rest + M x D x 4 + (vectors + F) x D x (2 | 4)   the M moved or new views in fp32, and a second
                                                                   copy of their blocks as stored
    words    = text x 0.85 a shard  +  216 x sqrt(text of all)      index.lexical: postings, statistics of the corpus;
                                                                   a task that writes them takes 3 x text
    searcher = its shards' files + (C x V + F) x D x (2 | 4)        kind flat, refined: a second copy of the C changed
                                                                   passages, if these are a quarter or less
    layer    = tokens x hidden x (34 + 5 x heads x length / hidden) bytes in half precision (Korthikanti et al. 2022)

Letters: V views a passage, F feedback views, D dimension, M links a node. Sizes are plain bytes; a GB is 10^9 of them.
"""

import logging
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from mvr_ray.checksums import parse_json
from mvr_ray.config import IndexConfig, RunConfig, resolve_path
from mvr_ray.config.loader import PACKAGED_FOLDER, PACKAGED_MODEL
from mvr_ray.core.searching.native import library
from mvr_ray.errors import ConfigError, MissingInputError, StorageError
from mvr_ray.index.base import IndexParams, default_factory, num_trained_on
from mvr_ray.store.changes import MAX_CHANGED_SHARE
from mvr_ray.store.corpus import Corpus
from mvr_ray.store.embeddings import BATCH_PASSAGES
from mvr_ray.store.files import Store, local_copy
from mvr_ray.store.formats.view_vectors import vector_dimension
from mvr_ray.store.questions import read_questions

log = logging.getLogger(__name__)

MAX_PASSAGES = 10**12
TEXT_BYTES = 700
"""A 100-word passage with id and title, where no corpus exists yet."""
ROW_BYTES = 32
"""Id, offsets and list bounds of one passage in embeddings.arrow."""
LOADED_ROW_BYTES = 82
"""Memory of one loaded passage beside its views: the id as a Python string, and its offsets."""
PROCESS_BYTES = 600_000_000
"""A Python process that has imported torch, transformers, pyarrow and Ray."""
SEARCHER_BYTES = 330_000_000
"""The same without transformers."""
COMPILED_BYTES = 236_000_000
"""A searcher that scans in compiled loops imports no torch and needs no fp32 vectors of a step: over 8,000 synthetic
passages of 8 views one took 261 MB, of which 25 are its half of these."""

HNSW_NODE_BYTES = 128
"""A vector of an HNSW graph in memory, beside what its file has: a lock, and an entry in the table of labels."""

MAX_TOKENS = 8192
"""Maximum tokens of a text for any encoder."""
POSTINGS_SHARE = 0.85
"""Bytes of postings for one of text: SQuAD's 1,530 development paragraphs with titles take 1.02 MB for 1.20 MB."""
STATISTICS_BYTES = 216
"""Statistics of a corpus, times the root of its bytes (Heaps' law with an exponent of a half): 0.24 MB for the same."""
WORDS_BUILDER_SHARE = 3.0
"""Memory of what indexes the words of a shard, for a byte of its text: 2.6 over 15,300 paragraphs of SQuAD."""
LOWERED_BYTES = {"fp32": 0, "bf16": 0, "int8": 1, "openvino-bf16": 2, "openvino": 4, "auto": 4}
"""Bytes of a parameter in the model of `index.precision`, beside fp32 weights, in a second snapshot; auto: at most."""
FAISS_BLOCK = 32
"""Codes in a block of Faiss's fast scan (`fs`), of which each list fills the last one up."""

CPU_STEP = 1.6
"""What a step on a CPU takes at most against its layers in fp32 and the gradients of one: dropout masks are as wide as
what they mask, and the allocator keeps freed blocks. Trainers of MiniLM on 4 and 16 questions with a negative each, all
of 128 tokens, had 1.65 and 3.37 GB resident; on 16 with checkpointing 1.77, and in passes of 4 texts 1.41."""

Kind = Literal["disk", "memory", "gpu"]


class Backbone(NamedTuple):
    """The sizes of a BERT-like model that determine its memory."""

    hidden_size: int
    layers: int
    heads: int
    inner: int
    vocabulary: int
    positions: int
    is_known: bool
    max_tokens: int = 512
    """Truncation length where the run sets none."""
    joined_poolings: int = 1
    """States that the model's own pooling joins in a vector."""
    out_size: int = 0
    """Dimension after the model's last linear layer; 0 without one."""
    truncate_dim: int = 0
    """Dimensions that the model keeps; 0: all."""

    def dimension(self, pools: bool) -> int:
        """Return the dimension of a vector; `pools`: of the model's own pooling."""
        size = self.out_size or self.hidden_size * (self.joined_poolings if pools else 1)
        return min(size, self.truncate_dim or size)

    @property
    def parameters(self) -> int:
        embeddings = (self.vocabulary + self.positions + 2) * self.hidden_size
        layer = (
            4 * self.hidden_size * self.hidden_size
            + 2 * self.hidden_size * self.inner
            + 9 * self.hidden_size
            + self.inner
        )
        return embeddings + 2 * self.hidden_size + self.layers * layer


class PlanLine(NamedTuple):
    """One item of the plan: `count` of them, `bytes_each` bytes each."""

    kind: Kind
    what: str
    bytes_each: int
    count: int
    note: str

    @property
    def bytes_all(self) -> int:
        return self.bytes_each * self.count


class Plan(NamedTuple):
    passages: int
    vectors: int
    dimension: int
    num_views: int
    shards: int
    lines: list[PlanLine]

    def total(self, kind: Kind) -> int:
        return sum(line.bytes_all for line in self.lines if line.kind == kind)


class ShardSizes(NamedTuple):
    """Numbers and bytes of one shard; `statistics_bytes` are those of the whole corpus."""

    passages: int
    views: int
    """Of a passage (V)."""
    vectors: int
    dimension: int
    vector_bytes: int
    """Of one vector as stored."""
    feedback_views: int
    """How many views more a refined version has."""
    at_rest_bytes: int
    index_file_bytes: int
    refined_bytes: int
    """Of embeddings and index file of a refined version."""
    copied_bytes: int
    """Of the changed passages of a refined version, which a searcher holds once more."""
    words_bytes: int
    words_builder_bytes: int
    """Of the task that writes them, beside its process."""
    statistics_bytes: int


def plan(run: RunConfig, passages: int, feedback_views: int = 0, passage_bytes: float = TEXT_BYTES) -> Plan:
    """Estimate sizes for `passages` passages of `passage_bytes` each on disk, id and title included. A refined version
    and its searchers have `feedback_views` more views."""
    if not 1 <= passages <= MAX_PASSAGES:
        raise ConfigError(
            f"plan needs 1 to {MAX_PASSAGES:,} passages, not {str(passages)[:20]}; say how many with --passages N"
        )
    model = backbone_sizes(run.encoder.backbone)
    shard = _shard_sizes(run, model, passages, feedback_views, passage_bytes)
    lines = [*_disk_lines(run, model, shard, passage_bytes), *_process_lines(run, model, shard)]
    if run.index.vectors is not None:  # no model runs
        lines = [line for line in lines if not line.what.startswith("encoder")]
    return Plan(passages, passages * shard.views, shard.dimension, shard.views, run.prepare.num_shards, lines)


def _shard_sizes(
    run: RunConfig, model: Backbone, passages: int, feedback_views: int, passage_bytes: float
) -> ShardSizes:
    shards, dimension, views = (
        run.prepare.num_shards,
        _dimension(run, model),
        _num_views(run),
    )
    on_shard, num_added = math.ceil(passages / shards), math.ceil(feedback_views / shards)
    vectors = on_shard * views
    vector_bytes = dimension * (2 if run.index.dtype == "fp16" else 4)
    at_rest_bytes = vectors * (vector_bytes + 2) + on_shard * ROW_BYTES
    on_gpu = run.resources.gpus_per_searcher > 0
    refined_bytes = at_rest_bytes + num_added * (vector_bytes + 2)
    refined_bytes += index_bytes(run.index, vectors + num_added, dimension, on_gpu)
    num_changed = min(num_added, math.floor(MAX_CHANGED_SHARE * on_shard)) if run.index.kind == "flat" else 0
    return ShardSizes(
        on_shard,
        views,
        vectors,
        dimension,
        vector_bytes,
        num_added,
        at_rest_bytes,
        index_bytes(run.index, vectors, dimension, on_gpu),
        refined_bytes,
        copied_bytes=num_changed and (num_changed * views + num_added) * vector_bytes,
        words_bytes=math.ceil(POSTINGS_SHARE * on_shard * passage_bytes) * run.index.lexical,
        words_builder_bytes=math.ceil(WORDS_BUILDER_SHARE * on_shard * passage_bytes) * run.index.lexical,
        statistics_bytes=math.ceil(STATISTICS_BYTES * math.sqrt(passages * passage_bytes)) * run.index.lexical,
    )


def _disk_lines(run: RunConfig, model: Backbone, shard: ShardSizes, passage_bytes: float) -> Iterator[PlanLine]:
    shards, precision, weights = run.prepare.num_shards, run.index.precision, _weight_bytes(run, model)
    guess = "" if model.is_known else "; backbone not on this machine, bert-base sizes assumed"
    corpus_bytes = math.ceil(shard.passages * passage_bytes)
    yield PlanLine("disk", "corpus", corpus_bytes, shards, f"{passage_bytes:.0f} bytes a passage")
    yield PlanLine("disk", "encoder snapshot", weights, 1, f"fp32 weights{guess}")
    if precision != "fp32" and not (precision == "auto" and run.resources.gpus_per_encoder > 0):
        lowered_bytes = weights + LOWERED_BYTES[precision] * model.parameters
        note = f"{'at most: ' * (precision == 'auto')}fp32 weights again, and the model of this precision"
        yield PlanLine("disk", f"encoder snapshot, {precision}", lowered_bytes, 1, note)
    note = f"{shard.vectors:,} x {shard.dimension} x {shard.vector_bytes // shard.dimension} bytes a shard"
    yield PlanLine("disk", "embeddings", shard.at_rest_bytes, shards, note)
    yield PlanLine("disk", f"index files ({run.index.kind})", shard.index_file_bytes, shards, "beside the embeddings")
    if run.index.lexical:
        note = "beside the embeddings, for a hybrid search"
        yield PlanLine("disk", "words, postings", shard.words_bytes, shards, note)
        yield PlanLine("disk", "words, statistics", shard.statistics_bytes, 1, "of the whole corpus")
    note = "encoded chunks until the version is published"
    yield PlanLine("disk", "staging", shard.at_rest_bytes, shards, note)
    note = "at most: unchanged shards are shared"
    yield PlanLine("disk", "one more version", shard.refined_bytes + shard.words_bytes, shards, note)


def _process_lines(run: RunConfig, model: Backbone, shard: ShardSizes) -> Iterator[PlanLine]:
    """Yield the memory of each kind of process, then what the run places on GPUs."""
    resources, shards = run.resources, run.prepare.num_shards
    on_gpu = resources.gpus_per_searcher > 0
    encode_bytes = _encode_bytes(run, model)
    train_bytes = 4 * _weight_bytes(run, model) + train_activations(run, model)
    gpu_encoder, gpu_trainer = resources.gpus_per_encoder > 0, resources.gpus_per_trainer > 0
    trainers, refiners = max(1, resources.train_workers), min(resources.refiners, shards)
    groups = min(resources.searchers, shards)
    searchers, own_shards = groups * resources.replicas * run.serve.replicas, math.ceil(shards / groups)
    step_bytes = 32_768 * (256 + shard.dimension) * 4  # vectors of a step in fp32, and their scores
    version_bytes = own_shards * (shard.refined_bytes + shard.copied_bytes + shard.passages * LOADED_ROW_BYTES)
    is_compiled = run.index.kind == "flat" and not on_gpu and library() is not None
    searcher_bytes = (COMPILED_BYTES if is_compiled else SEARCHER_BYTES + step_bytes) + version_bytes
    searcher_bytes += own_shards * shard.words_bytes + shard.statistics_bytes
    searcher_note = "its shards, mapped or loaded"
    searcher_note += "; at most: its changed passages once more" * bool(shard.copied_bytes)
    searcher_note += "; compiled loops, as on this machine" * is_compiled
    moving_note = "at most, while a next version opens and the live one finishes its calls: unchanged shards are shared"
    refiner_bytes = SEARCHER_BYTES + step_bytes + math.ceil(shards / refiners) * _refined_shard_bytes(run, shard)
    in_memory = PROCESS_BYTES + encode_bytes * (not gpu_encoder)
    note = "a worker" + "; at most: mvr_ray's layers and OpenVINO read smaller blocks of tokens" * (not gpu_encoder)
    yield PlanLine("memory", "encoder", in_memory, resources.encoders_max, note)
    if building := builder_bytes(run.index, shard.vectors, shard.dimension, on_gpu):
        note = "one shard's; as many run at once as the CPUs and the memory of the nodes allow"
        yield PlanLine("memory", "index builder", PROCESS_BYTES + building, 1, note)
    if shard.words_builder_bytes:
        note = "one shard's; as many run at once as the nodes have CPUs"
        yield PlanLine("memory", "words builder", PROCESS_BYTES + shard.words_builder_bytes, 1, note)
    yield PlanLine("memory", "trainer", PROCESS_BYTES + train_bytes * (not gpu_trainer), trainers, "a worker")
    yield PlanLine("memory", "searcher", searcher_bytes, searchers, searcher_note)
    yield PlanLine("memory", "searcher, one more version", version_bytes, searchers, moving_note)
    yield PlanLine("memory", "refiner", refiner_bytes, refiners, "at most: all that its labels can change")
    if gpu_encoder:
        note = "weights, again in bf16, and one batch" if _is_unpadded(run) else "weights and one batch"
        yield PlanLine("gpu", "encoder", encode_bytes, resources.encoders_max, note)
    if gpu_trainer:
        yield PlanLine("gpu", "trainer", train_bytes, trainers, "weights, AdamW, activations")
    if on_gpu and run.index.kind != "hnsw":  # a graph is searched on the CPU, and candidates of Faiss are scored there
        vectors = shard.vectors + shard.feedback_views
        file_bytes = own_shards * index_bytes(run.index, vectors, shard.dimension, on_gpu)
        if run.index.kind == "faiss":
            yield PlanLine("gpu", "searcher", file_bytes, searchers, "index files of its shards; Faiss takes more")
        else:
            scanned_bytes = file_bytes or own_shards * vectors * shard.vector_bytes
            what = "codes" if file_bytes else "vectors"
            yield PlanLine("gpu", "searcher", scanned_bytes + step_bytes, searchers, f"{what} of its shards")


def _is_unpadded(run: RunConfig) -> bool:
    """Return whether encoders run without padding, in bf16 on a GPU, where flash attention stores no table of
    scores."""
    return run.resources.gpus_per_encoder > 0 and run.index.precision == "bf16"


def _weight_bytes(run: RunConfig, model: Backbone) -> int:
    """Return the bytes of both towers in fp32."""
    return 4 * model.parameters * (1 if run.encoder.tied else 2)


def _encode_bytes(run: RunConfig, model: Backbone) -> int:
    """Return the bytes of an encoder's weights, and of one batch."""
    is_unpadded = _is_unpadded(run)
    length = 0 if is_unpadded else run.encoder.max_passage_tokens or model.max_tokens
    batch_bytes = 2 * layer_bytes(model, run.index.tokens_per_batch, length, half=is_unpadded)
    return _weight_bytes(run, model) + 2 * model.parameters * is_unpadded + batch_bytes


def _refined_shard_bytes(run: RunConfig, shard: ShardSizes) -> int:
    """Return the bytes of one shard in a refiner: as stored, the moved or new views in fp32, and their blocks once
    more."""
    adds_views = run.refine.method == "feedback_views"
    num_moving = shard.feedback_views if adds_views else shard.vectors
    block_share = touched_share(shard.passages, shard.feedback_views) if adds_views else 1.0
    item = shard.vector_bytes // shard.dimension
    once_more = shard.dimension * math.ceil(item * (block_share * shard.vectors + shard.feedback_views))
    row_bytes = LOADED_ROW_BYTES + 8 * shard.views
    return shard.at_rest_bytes + 4 * shard.dimension * num_moving + once_more + shard.passages * row_bytes


def touched_share(passages: int, changes: int) -> float:
    """Return the expected share of a shard's blocks with at least one of `changes` randomly placed passages."""
    blocks = math.ceil(passages / BATCH_PASSAGES)
    return 1 - (1 - 1 / blocks) ** changes


def corpus_size(run: RunConfig, passages: int = 0) -> int:
    """Return the number of passages to plan for: `passages`, else the number that `prepare` counted."""
    if passages:
        return passages
    store = Store(run.store.path)
    try:
        return Corpus.open(store, run.prepare.corpus).num_passages
    except MissingInputError:
        raise MissingInputError(
            f"plan: no corpus {run.prepare.corpus!r} in {store.name} to count; "
            f"run `mvr-ray prepare CONFIG` first, or say how many with --passages N"
        ) from None


def passage_bytes(run: RunConfig) -> float:
    """Return the mean bytes of a passage as `prepare` wrote it; 700 where there is no corpus yet, or no store."""
    try:
        info = Corpus.open(Store(run.store.path), run.prepare.corpus).info
    except MissingInputError:
        return TEXT_BYTES
    except StorageError as error:
        log.warning("plan: %s; assuming %d bytes a passage", error, TEXT_BYTES)
        return TEXT_BYTES
    return sum(part.num_bytes for part in info.parts) / max(info.num_passages, 1)


def most_feedback_views(run: RunConfig, passages: int) -> int:
    """Return the maximum number of feedback views of a refined version: `feedback_clusters` a passage, and at most one
    for each positive label, where those are the first hit of each question or its gold passages."""
    refine = run.refine
    if refine.method != "feedback_views" or (refine.questions is None and refine.feedback is None):
        return 0
    most = passages * refine.feedback_clusters
    first = refine.labels == "answers" and refine.positives == "first"
    if refine.questions is None or refine.feedback is not None or not (first or refine.labels == "gold"):
        return most
    try:
        questions = read_questions(Corpus.open(Store(run.store.path), run.prepare.corpus), refine.questions)
    except (MissingInputError, StorageError):
        return most
    return min(most, len(questions) if first else sum(len(question.positive_ids) for question in questions))


def _num_views(run: RunConfig) -> int:
    has_one = run.index.vectors is None and run.encoder.strategy in ("pooling", "cls", "mean")
    return 1 if has_one else run.encoder.num_views


def _dimension(run: RunConfig, model: Backbone) -> int:
    if run.index.vectors is not None:
        return vector_dimension(local_copy(run.index.vectors))
    return run.encoder.truncate_dim or model.dimension(run.encoder.strategy == "pooling")


def backbone_sizes(backbone: str) -> Backbone:
    """Read sizes from the backbone's config.json, and those of the modules of sentence-transformers behind it, if it is
    on this machine and has them, else use those of bert-base-uncased. Raises StorageError for a damaged file."""
    folder = resolve_path(PACKAGED_FOLDER if backbone == PACKAGED_MODEL else backbone)
    modules = _module_settings(folder)
    values = modules[0][1] if modules else _read_settings(folder / "config.json")
    lengths = _read_settings(folder / (modules[0][0] if modules else "") / "sentence_bert_config.json")

    def size(*names: str) -> int:
        """Look up a setting by its names in BERT, DistilBERT and T5; 0 where the file has none of them."""
        return int(next((values[name] for name in names if values.get(name)), 0))

    if not (hidden_size := size("hidden_size", "dim", "d_model")):
        return Backbone(768, 12, 12, 3072, 30_522, 512, is_known="bert-base" in backbone)
    positions = min(size("max_position_embeddings") or 512, MAX_TOKENS)
    return Backbone(
        hidden_size,
        size("num_hidden_layers", "n_layers", "num_layers"),
        size("num_attention_heads", "n_heads", "num_heads"),
        size("intermediate_size", "hidden_dim", "d_ff") or 4 * hidden_size,
        size("vocab_size"),
        positions,
        is_known=True,
        max_tokens=min(lengths.get("max_seq_length") or positions, positions),
        joined_poolings=max([1, *(_num_poolings(settings) for _, settings in modules)]),
        out_size=next((own["out_features"] for _, own in reversed(modules) if "out_features" in own), 0),
        truncate_dim=_read_settings(folder / "config_sentence_transformers.json").get("truncate_dim") or 0,
    )


def _module_settings(folder: Path) -> list[tuple[str, dict[str, Any]]]:
    """Return the folder and the settings of each module of a model of sentence-transformers, the transformer first;
    nothing for another model."""
    file = folder / "modules.json"
    if not file.is_file():
        return []
    names = [module["path"] for module in parse_json(b'{"modules": %b}' % file.read_bytes(), str(file))["modules"]]
    return [(name, _read_settings(folder / name / "config.json")) for name in names]


def _num_poolings(settings: Mapping[str, Any]) -> int:
    """Count the modes of a pooling, named by one setting or each by its own."""
    if modes := settings.get("pooling_mode"):
        return 1 if isinstance(modes, str) else len(modes)
    return sum(value is True for name, value in settings.items() if name.startswith("pooling_mode_"))


def _read_settings(file: Path) -> dict[str, Any]:
    return parse_json(file.read_bytes(), str(file)) if file.is_file() else {}


def layer_bytes(model: Backbone, tokens: int, length: int, *, half: bool) -> int:
    """Return the bytes of the activations of one transformer layer over `tokens` padded tokens in texts of `length`
    tokens."""
    each = model.hidden_size * (34 + 5 * model.heads * length / model.hidden_size)
    return math.ceil(tokens * each * (1 if half else 2))


def train_activations(run: RunConfig, model: Backbone) -> int:
    """Return the bytes of the activations of one worker's share of a training step, all layers, or one layer with
    checkpointing; on a CPU in fp32, as autocast leaves attention in it, with the gradients of one layer and three of
    the word embeddings."""
    length = run.train.max_passage_tokens or run.encoder.max_passage_tokens or model.max_tokens
    question_length = run.encoder.max_query_tokens or model.max_tokens
    questions = math.ceil(run.train.batch_questions / max(1, run.resources.train_workers))
    passages = questions * (1 + run.train.num_hard_negatives)
    if run.train.cache_chunk:
        passages = questions = min(passages, run.train.cache_chunk)
    on_cpu = run.resources.gpus_per_trainer == 0
    half = run.train.precision in ("bf16", "fp16") and not on_cpu
    layer = layer_bytes(model, passages * length, length, half=half)
    layer += layer_bytes(model, questions * question_length, question_length, half=half)
    num_bytes = layer * model.layers
    if run.train.gradient_checkpointing:
        kept_bytes = (passages * length + questions * question_length) * model.hidden_size * (2 if half else 4)
        num_bytes = layer + kept_bytes * model.layers
    return (
        math.ceil(CPU_STEP * (num_bytes + layer)) + 12 * model.vocabulary * model.hidden_size if on_cpu else num_bytes
    )


def index_bytes(index: IndexConfig | IndexParams, vectors: int, dimension: int, on_gpu: bool = False) -> int:
    """Return the bytes of one shard's index files; flat searches the embeddings themselves, or codes of them."""
    if index.kind == "flat":
        return vectors * (dimension + 8) if index.scan == "int8" else 0
    if index.kind == "hnsw":
        return vectors * (4 * dimension + links_bytes(index.hnsw_m) + 12)
    return faiss_bytes(index.factory or default_factory(dimension, on_gpu), vectors, dimension)


def builder_bytes(index: IndexConfig | IndexParams, vectors: int, dimension: int, on_gpu: bool = False) -> int:
    """Return the memory that the builder of one shard's approximate index takes beside its process. Faiss holds the
    vectors that train the index twice, before it adds any. A flat index is written as it is read: 0."""
    if index.kind == "flat":
        return 0
    num_bytes = index_bytes(index, vectors, dimension, on_gpu)
    if index.kind == "hnsw":
        return num_bytes + vectors * HNSW_NODE_BYTES
    lists = re.search(r"IVF(\d+)", index.factory or default_factory(dimension, on_gpu))
    return max(num_bytes, 2 * 4 * dimension * num_trained_on(vectors, int(lists[1]) if lists else 0))


def links_bytes(m: int) -> int:
    """Return the bytes of a node's 2 M links of 4 bytes in the lowest layer of an HNSW graph; upper layers add under
    1/M of it."""
    return 2 * m * 4


_CODES = [
    (r"Flat", lambda d, _: 4.0 * d),
    (r"SQ(?:fp16|bf16)", lambda d, _: 2.0 * d),
    (r"SQ(\d+)(?:bit)?", lambda d, g: d * int(g[0]) / 8),
    (r"PQ(\d+)(?:x(\d+))?(?:np|fs|fsr)?", lambda _, g: int(g[0]) * int(g[1] or 8) / 8),
    (r"(?:LSH|ITQ)\w*", lambda d, _: d / 8),
]


def faiss_bytes(factory: str, vectors: int, dimension: int) -> int:
    """Return the bytes of a Faiss index with this factory string (PCA, OPQ, IVF, HNSW, PQ, SQ, Flat, RFlat)."""
    width, each, fixed_bytes, has_storage, num_lists = dimension, 0.0, 0.0, False, 1
    for part in factory.replace("_HNSW", ",#HNSW").split(","):
        if match := re.fullmatch(r"(?:PCAW?R?|RR?|OPQ\d+_|L2norm,?|Pad)(\d+)", part):
            fixed_bytes += 4 * width * int(match[1])
            width = int(match[1])
        elif re.fullmatch(r"OPQ\d+|L2norm|#HNSW\d+(_\w+)?", part):
            fixed_bytes += 4 * width * width if part.startswith("OPQ") else 0
        elif match := re.fullmatch(r"(?:IVF|IMI\dx)(\d+)", part):
            num_lists = int(match[1])
            each, fixed_bytes = each + 8, fixed_bytes + 4 * num_lists * width
        elif match := re.fullmatch(r"HNSW(\d+)?(?:_(\w+))?", part):
            each += links_bytes(int(match[1] or 32))
            if match[2]:
                each, has_storage = each + _code(match[2], width, factory), True
            elif part == factory.split(",")[-1]:
                each, has_storage = each + 4 * width, True
        elif re.fullmatch(r"IDMap2?", part):
            each += 8
        elif match := re.fullmatch(r"R(?:efine\()?(\w+)\)?", part):
            each += _code(match[1], dimension, factory)
        else:
            each, has_storage = each + _code(part, width, factory), True
            if match := re.match(r"PQ\d+(?:x(\d+))?", part):
                fixed_bytes += 4 * width * 2 ** int(match[1] or 8)
            if re.fullmatch(r"PQ\d+x4fsr?", part):
                fixed_bytes += num_lists * (FAISS_BLOCK - 1) * _code(part, width, factory)
    if not has_storage:
        raise ConfigError(f"index.factory {factory!r} names no storage; end it with Flat, SQ8, SQfp16 or PQ96")
    return math.ceil(vectors * each + fixed_bytes)


def _code(part: str, width: int, factory: str) -> float:
    for pattern, size in _CODES:
        if match := re.fullmatch(pattern, part):
            return size(width, match.groups())
    raise ConfigError(f"index.factory {factory!r}: no size known for {part!r}; known: Flat, SQ8, SQfp16, PQ96, HNSW32")
