"""Defines the sections of the run file: one YAML file describes one whole experiment.

    run = load_run("configs/squad.yaml", ["index.kind=hnsw", "train.epochs=2"])

Every section is a frozen pydantic model; an unknown key is an error that names the nearest known key. Paths are
relative to the working directory, or `package:NAME/path` for a file inside an installed Python package.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args
from unicodedata import category

from pydantic import ConfigDict, Field, ValidationError, field_validator, model_validator

from mvr_ray.config import loader
from mvr_ray.config.base import ALLOWED, Count, Fraction, Name, Section, explain
from mvr_ray.config.train import MineConfig, TrainConfig
from mvr_ray.errors import ConfigError

Weight = Annotated[float, Field(gt=0, le=1)]
Cpus = Annotated[float, Field(ge=0.0001)]
"""Ray counts in steps of 0.0001."""
_GPUS = "0, a share between 0.0001 and 1, or a whole number of GPUs"
Gpus = Annotated[float, Field(ge=0, json_schema_extra={ALLOWED: _GPUS})]
DenseWeight = Annotated[float, Field(ge=0, le=1e20, allow_inf_nan=False)]
"""Of the dense score beside BM25; with a larger one the sum could be infinite in float32."""


class StoreConfig(Section):
    path: Annotated[str, Field(pattern=r"\S", json_schema_extra={ALLOWED: "a path or an address"})] = "store"
    """Where everything at rest lives: a folder, `s3://bucket/prefix` or `gs://bucket/prefix`."""


class SourceFields(Section):
    """Names of the parts of a passage or question in the rows of a source.

    A name with dots reaches into objects: `answers.text`. A part that is not set has the name of its key.
    """

    id: str | None = "id"
    """null: rows have no id; they are numbered, after the file's name."""
    title: str = "title"
    text: str = "text"
    question: str = "question"
    """A row with this one is a question."""
    answers: str = "answers"
    positive_ids: str = "positive_ids"
    hard_negative_ids: Annotated[str, Field(exclude_if=lambda name: name == "hard_negative_ids")] = "hard_negative_ids"


class SourceConfig(Section):
    """A file or folder of passages and questions. A bare path stands for a source with nothing else set."""

    model_config = ConfigDict(
        json_schema_extra={ALLOWED: "a path, or a mapping with path and, as needed, format and others"}
    )

    path: str
    """File or folder; `package:NAME/path` names a file inside an installed Python package, `hf:OWNER/NAME` a data set
    of the Hugging Face hub, `hf:OWNER/NAME/SUBSET` a part of one, `s3://` or `gs://` an object or a prefix, which is
    copied to the cache."""
    format: Literal[
        "auto",
        "squad",
        "dpr_tsv",
        "dpr_json",
        "dpr_jsonl",
        "triples",
        "qas_csv",
        "csv",
        "tsv",
        "beir",
        "msmarco",
        "jsonl",
        "parquet",
        "nq_open",
        "summaries",
        "mediawiki",
        "text",
        "huggingface",
    ] = "auto"
    """`text` is a folder of text or Markdown files, `huggingface` a data set of that library (`hf:NAME`), the others as
    docs/formats.md has them. `summaries` is a JSON object of {title, extract, description}: the descriptions become
    the questions. `mediawiki` is an XML dump of a wiki; its articles are long: set `chunk_words`."""
    passages: bool = True
    """Take this source's passages into the corpus."""
    questions: Name | None = None
    """Store this source's questions under this name; absent: they are left out."""
    id_prefix: str = ""
    """Prefix of every passage id of this source (DPR uses `wiki:`). `update` puts the one that all sources of passages
    have before an id that lacks it."""
    fields: SourceFields = Field(default_factory=SourceFields)
    """Names of the source's own fields, for jsonl, csv, tsv, parquet and huggingface: `{id: _id, text: body}`."""
    split: str = "test"
    """The split of a BEIR or MS MARCO folder's judgements, or of a Hugging Face data set; for `hf:` the default is
    `train`."""
    share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Take this share of the source's articles (passages of one title), drawn by a stable hash, and of its questions
    those whose first positive is among them, without other positives that are not. A question of another source goes
    with its first positive if no source gives that."""

    @model_validator(mode="before")
    @classmethod
    def _take_path(cls, value: Any) -> Any:
        source = {"path": value} if isinstance(value, str) else value
        is_of_hub = isinstance(source, Mapping) and str(source.get("path")).startswith("hf:")
        return {"split": "train", **source} if is_of_hub else source


class SplitConfig(Section):
    """Divide one question set for refinement: known, gate, other, unseen.

    Articles (passages of one title, or one without) are drawn first: `unseen_share` of them give all their questions to
    `unseen`. Of the other articles, each question goes to known, gate or other. Sets are stored as `<source>_known` and
    so on.
    `gate` also takes `gate_share` of the unseen questions' articles: it decides when to stop, and is never reported.
    """

    source: Name
    unseen_share: Fraction = 0.33
    known_share: Fraction = 0.6
    gate_share: Fraction = 0.1
    seed: int = 0


FieldType = Literal["string", "int", "float", "bool", "date", "timestamp", "strings"]
NOT_FIELDS = ("id", "_id", "title", "text", "contents", "question", "delete", "and", "or", "not")
"""Reserved names: of a passage's own parts, and of filters and updates."""


class PrepareConfig(Section):
    corpus: Name = "corpus"
    sources: list[SourceConfig] = Field(default_factory=list)
    splits: list[SplitConfig] = Field(default_factory=list)
    num_shards: Annotated[int, Field(ge=1, le=65536)] = 4
    """Parts of the corpus and shards of its index; a passage's shard is a stable hash of its id."""
    chunk_words: Annotated[int, Field(ge=0)] = 0
    """Cut passages into non-overlapping chunks of this many words (DPR: 100), in scripts without spaces of twice as
    many characters; 0 keeps them as they are."""
    max_passages: Annotated[int, Field(ge=0)] = 0
    """Keep only this many passages, drawn by a stable hash, gold passages of the questions first; 0 keeps all."""
    max_questions: Annotated[int, Field(ge=0)] = 0
    """Keep at most this many questions a set, drawn by a stable hash; 0 keeps all."""
    max_bad_rows: Annotated[int, Field(ge=0)] = 0
    """Rows that may be malformed, empty or duplicate before the stage fails; each is counted and named."""
    fields: dict[str, FieldType] | Literal["infer"] = Field(default_factory=dict)
    """Fields of a passage besides id, title and text, for filters: names with types (`{year: int}`), or `infer`: all
    fields of the sources whose values one type holds. `strings` is a list of strings."""

    @field_validator("fields", mode="before")
    @classmethod
    def _check_fields(cls, fields: Any) -> Any:
        if fields == "infer":
            return fields
        if not isinstance(fields, dict):
            raise ValueError("give names with types, such as {year: int, source: string}, or infer")
        for name, kind in fields.items():
            check_field_name(name)
            if kind not in get_args(FieldType):
                raise ValueError(f"{name}: {kind!r} is no type; a field is one of {', '.join(get_args(FieldType))}")
        return fields


def check_field_name(name: Any) -> None:
    """Raise ValueError for a name that no field of a passage can have."""
    letters = [char for char in str(name) if category(char) not in ("Mn", "Mc")]  # marks belong to letters, as in Thai
    if not isinstance(name, str) or len(name) > 100 or not re.fullmatch(r"\w[\w.-]*", "".join(letters)):
        raise ValueError(f"{name!r:.120} cannot name a field: use letters, digits and . _ -, 100 at most")
    if name in NOT_FIELDS:
        raise ValueError(f"{name!r} cannot name a field; these names have a meaning: {', '.join(NOT_FIELDS)}")


Language = Literal[
    "none", "arabic", "armenian", "basque", "catalan", "danish", "dutch", "english", "finnish", "french", "german",
    "greek", "hindi", "hungarian", "indonesian", "irish", "italian", "lithuanian", "nepali", "norwegian", "portuguese",
    "romanian", "russian", "serbian", "spanish", "swedish", "tamil", "turkish", "yiddish",
]  # fmt: skip
Strategy = Literal["pooling", "cls", "mean", "first_k", "viewers", "snippets", "snippet_means", "sentences", "splits"]


class EncoderConfig(Section):
    name: Name = "encoder"
    backbone: str = loader.PACKAGED_FOLDER
    """A local folder, `package:NAME/path`, or a Hugging Face hub name: a model of sentence-transformers, with its
    prompts, pooling and linear layers, or any text encoder of transformers."""
    strategy: Strategy = "snippet_means"
    """pooling (the model's own), cls (DPR), mean, first_k (ME-BERT), viewers (MVR), snippets (CAMVR), snippet_means
    (late chunking, Günther et al. 2024); and two baselines that read every piece alone: sentences (merged to num_views
    by CAMVR's Algorithm 1) and splits (num_views equal ones)."""
    num_views: Annotated[int, Field(ge=1, le=64)] = 8
    """Views per passage (V). Index size grows linearly with it. pooling, cls and mean always have one."""
    tied: bool = True
    """One tower for questions and passages, or two."""
    readout: Literal["viewer", "snippet_mean"] = "viewer"
    """For `snippets`: a view is its viewer's state, or the mean of its snippet's token states. For `sentences` and
    `splits`: the state of the piece's [CLS], or the mean of its states."""
    viewer_position: Literal["zero", "own"] = "zero"
    """For `viewers`: all at position 0 as in MVR, or each at a position of its own from the end of the table."""
    viewer_init: Literal["random", "cls"] = "random"
    """Of untrained viewers: random embeddings, or noisy copies of that of [CLS]."""
    empty_snippets: Literal["masked", "kept"] = "masked"
    """For `snippets`, if a passage has fewer sentences than views: no view, or one of an empty snippet, as CAMVR."""
    title_view: bool = False
    """For `snippets`: the title is the first view's snippet and the text is cut into num_views - 1, as CAMVR. A passage
    without a title has no such view, or that of an empty snippet (`empty_snippets`)."""
    whole_view: bool = False
    """For `snippet_means`: the first view is the mean of the whole passage, as `mean` reads it, and the text is cut
    into num_views - 1 snippets."""
    use_title: bool = True
    """Encode `title [SEP] text`, where the title is context and no view; with `title_view` it is one."""
    query_prompt: str | None = None
    """Text before every question, such as `query: `; null: the model's own; empty: none."""
    passage_prompt: str | None = None
    """Text before every passage, or before its title; null and empty as for `query_prompt`."""
    max_query_tokens: Annotated[int, Field(ge=4, le=8192)] | None = None
    """Special tokens and prompt included; null: the limit in the model's folder, 8192 at most."""
    max_passage_tokens: Annotated[int, Field(ge=16, le=8192)] | None = None
    """The same limit for a passage. A longer passage is cut, or read in windows (`overlap_tokens`)."""
    overlap_tokens: Annotated[int, Field(ge=0, le=4096)] = 0
    """For `snippet_means`: read a passage of more than max_passage_tokens in windows that share so many; 0: cut it."""
    truncate_dim: Annotated[int, Field(ge=1)] | None = None
    """Keep only the first dimensions of a vector, for a model trained for that (Matryoshka); null: as many as the
    model's folder says, else all."""
    normalize: bool = True
    """Unit vectors, so that the score is the cosine; false: the papers' raw inner product, and with `pooling` the
    model's own vectors."""
    score_scale: Annotated[float, Field(gt=0)] = 20.0
    """Scores are multiplied by this in the loss (20 x cosine); 1 for raw inner products."""
    sentences: Literal["packaged", "corpus"] = "packaged"
    """Punkt parameters that come with mvr_ray, or Punkt trained on the corpus, once an index. With both, the sentence
    marks of other scripts and blank lines end a sentence, too; Thai and Lao have no such mark."""
    seed: int = 0
    """Seed of the initial viewer embeddings."""


class IndexConfig(Section):
    name: Name = "index"
    encoder: Name = "auto"
    """`untrained`: the backbone with the encoder section's strategy; `trained`: the newest snapshot of
    `encoder.name`; a fingerprint; auto: trained if there is one, else that of the live version where another program
    made its vectors, else untrained. A trained one has the settings of its training: the encoder section may leave them
    out, and auto and trained accept none that differs and changes vectors. With a fingerprint, none is compared."""
    vectors: str | None = Field(default=None, exclude_if=lambda path: path is None)
    """A Parquet file, or an `s3://` or `gs://` address of one, with vectors of passages that another program made:
    passage_id, view (from 0) and vector. They are indexed as they are, and no text is encoded. `encoder.name` stands
    for that program's model, `encoder.num_views` is the maximum of views of a passage."""
    precision: Literal["auto", "fp32", "bf16", "int8", "openvino", "openvino-bf16"] = "auto"
    """Precision of embedding passages; questions always use fp32. Another precision is another encoder, with a
    fingerprint of its own. auto: on CPUs the fastest float of this machine: bf16 where the processor has instructions
    for it, by mvr_ray's own layers with AMX, else by OpenVINO if it is installed and known to run the model; on GPUs
    fp32. A corpus embedded before keeps its precision, but on GPUs any other than fp32 and bf16 becomes fp32. bf16: by
    mvr_ray's layers or torch; a GPU runs it without padding. openvino, openvino-bf16: fp32 and bf16 by OpenVINO on
    CPUs, for models without local attention; int8: as these, in bytes with scales that are calibrated once, on passages
    of the corpus (pip install 'mvr-ray[openvino]')."""
    kind: Literal["flat", "faiss", "hnsw"] = "flat"
    """flat: exact; faiss, hnsw: approximate, for many millions of views."""
    scan: Literal["vectors", "int8"] = "vectors"
    """Kind flat: the data that a search scans. int8: codes of one byte a component, stored beside the vectors; passages
    that the codes cannot exclude are scored with the vectors, so answers stay exact."""
    lexical: bool = False
    """Index the words of the passages, too: `search.hybrid` needs them. For a version without, only they are built.
    Scripts without spaces between words, and Korean, are indexed by pairs of characters."""
    language: Language = "english"
    """The language whose stems are the words of BM25 (`lexical`, `evaluate.bm25`, `mine.method: bm25`), by Snowball;
    none: words as they are, for texts in several languages. English alone has stop words. A version is searched by the
    stems it was indexed with."""
    prune_views: Annotated[float, Field(ge=0, le=2)] | None = None
    """Leave out views at most this far from the hull of their passage's other views, in shares of their norm: no score
    falls by more than this times the query's and the view's norm. 0: only copies; absent: every view stays."""
    factory: str | None = None
    """Faiss factory string, for kind faiss; absent: 256 lists of 4-bit codes for pairs of components (IVF256,PQ192x4fs
    for 384), or IVF256,SQ8 where the dimension is odd or `resources.gpus_per_searcher` is above 0. With another one
    `index` builds the index of every shard anew."""
    nprobe: Count = 64
    """Lists of a Faiss index that a search reads. A version with another number, or another `hnsw_ef_search`, is made
    without building the index again."""
    hnsw_m: Annotated[int, Field(ge=2, le=512)] = 32
    hnsw_ef_construction: Count = 200
    hnsw_ef_search: Count = 128
    dtype: Literal["fp16", "fp32"] = "fp16"
    tokens_per_batch: Annotated[int, Field(ge=64)] = 8192
    """Tokens of an encoding batch, padding included, on GPUs and for models that neither mvr_ray's layers (bert,
    roberta, xlm-roberta) nor OpenVINO run: on a CPU these read blocks of a size of their own."""
    sort_window: Count = 2048
    """Passages of a chunk, the unit of batching and of resuming after a crash."""
    recall_sample: Annotated[int, Field(ge=0)] = 100
    """Passage views used as queries to measure recall against exact search."""
    keep_refinement: bool = True
    """Whether the version that follows a refined one keeps the refined views of unchanged passages, such as feedback
    views. false: every view is that of the encoder."""
    compact_share: Annotated[float, Field(ge=0, le=1)] = 0.25
    """A shard whose changes since its first file exceed this share of it is written whole; else they are stored beside
    that file."""
    keep_versions: Count = 5
    """The newest versions, which `versions collect` and `follow` leave."""
    grace_s: Annotated[float, Field(ge=0)] = 3600
    """Time for which they leave a version after another one has replaced it, and files that no version names. Below a
    minute only while no other process publishes: a collection may then delete what that one is about to name."""


class FollowConfig(Section):
    """Change files that arrive one by one, in ascending order of their names."""

    source: str | None = None
    """Folder, or `s3://` or `gs://` prefix, of change files: `*.jsonl`, or `*.xml` of MediaWiki dumps, also with .gz or
    .bz2. They are applied in the order of their names; subfolders and names that begin with a dot are ignored."""
    batch_bytes: Count = 16_000_000
    """Publish a version as soon as the waiting change files have this many bytes; further files go to the next one."""
    max_age_s: Annotated[float, Field(ge=0)] = 60
    """Publish a version when a change file has waited this long."""
    poll_s: Annotated[float, Field(gt=0)] = 5
    """Time between two listings of the source. A file of a folder counts when two listings show it unchanged."""


class RefineConfig(Section):
    questions: Name | None = None
    """Labelled questions: their answers (or gold passages) give the pseudo-labels."""
    feedback: str | None = None
    """JSONL of {question, passage_id, label: 1|-1} used instead of pseudo-labels. Absent, and without `questions`: what
    `Index.add_feedback` stored."""
    gate: list[Name] = Field(default_factory=list)
    """Held-out question sets that limit the cost of a round; empty: a fifth of `questions`."""
    report: list[Name] = Field(default_factory=list)
    """Question sets measured before and after; never used to decide."""
    method: Literal["feedback_views", "passage", "query", "hybrid", "linear", "rocchio"] = "feedback_views"
    """feedback_views: an extra view a passage. AOpt: gradient steps of the passages (eq. 14), of the queries (eq. 11)
    or of both; or one linear combination of the passages (eq. 9) or of the queries (Rocchio, eq. 7)."""
    labels: Literal["answers", "gold"] = "answers"
    """Whether a hit of a labelled question is positive. answers: it holds an answer; gold: it is a gold passage, for
    questions without answers."""
    positives: Literal["all", "first"] = "first"
    """Label every answer-bearing hit (AOpt eq. 8) or only the first."""
    depth: Count = 100
    """Best hits of a labelled question that are labelled; known gold passages and `feedback` are wherever they rank."""
    rounds: Count = 30
    patience: Count = 5
    """Stop after this many rounds without a better one, acceptable or not (docs/math.md, "When to stop")."""
    step_size: Annotated[float, Field(gt=0)] = 0.01
    """Eta of AOpt eq. 14; the effect depends on eta x rounds / |p|^2, best near 0.3-0.5."""
    alpha: float = 1.0
    beta: float = 0.6
    gamma: float = -0.1
    """Linear forms, AOpt eqs. 7 and 9: alpha x + beta mean(positives) + gamma mean(negatives), x a query or a view.
    (The paper writes eq. 7 with a minus before a positive gamma.)"""
    keep_length: bool | None = None
    """Scale every moved vector to its earlier length; false: AOpt's raw form. Absent: true if the index holds unit
    vectors (`encoder.normalize`), among which a longer vector scores higher with every question."""
    feedback_clusters: Annotated[int, Field(ge=1, le=64)] = 2
    """Feedback views a passage, at most: one for each cluster of its questions. Study `refinement`: at weight 0.7 a
    second one gained 3 to 5 points on the known questions, two further ones 1 more, none lost on the others."""
    feedback_weight: Weight | Annotated[list[Weight], Field(min_length=1)] = Field(default_factory=lambda: [0.7, 0.8])
    """Norm of a feedback view over that of the passage's own views. A list is tried from the same labels in the first
    round. The weight with the highest top-1 on the labelled questions is used, of those that cost no gate set more than
    `max_heldout_loss` points; the smaller one on ties; if all cost more, the one that costs least."""
    domain_guard: Annotated[float, Field(gt=0)] = 1e-3
    """A gradient step leaves a vector where its sum of positive scores, or of all, is not above this."""
    max_heldout_loss: Annotated[float, Field(ge=0)] = 1.0
    """Points of top-1 that a published refinement may cost any gate set, or the labelled questions themselves."""
    seed: int = 0
    """Seed of the fifth that is held back where `gate` is empty."""


class SearchConfig(Section):
    hybrid: DenseWeight | Literal["rrf"] | None = None
    """Rank by BM25 + this weight times the dense score in `search`, `explain`, `retrieve`, `evaluate` and `serve`; rrf:
    by reciprocal ranks in both, if no questions can choose a weight; off or absent: by the dense score alone. Needs
    `index.lexical`; `mvr-ray tune` finds it."""

    @field_validator("hybrid", mode="before")
    @classmethod
    def _off_is_absent(cls, value: Any) -> Any:
        """Return None for off, which YAML reads as false."""
        return None if value is False or value == "off" else value


class RetrieveConfig(Section):
    k: Count = 100
    batch: Count = 64
    """Questions of one unit of work."""
    tag: Name = "mvr_ray"
    strict_answers: bool = False
    """Refuse empty answers, which by the field's rule match every passage, in `retrieve`, `evaluate` and `analyze`."""
    refined_queries: bool = False
    """Search with the query vectors of query-side refinement for a stored question set. They depend on its answers.
    `evaluate.hybrid` and `tune` choose a weight without them."""
    filter: dict[str, Any] | None = None
    """Rank only passages whose fields pass it, such as `{year: {gte: 1958}}` (docs/filters.md), also in `evaluate`,
    `tune` and `analyze`. `refine` learns from all passages, and decides by them."""
    extras: bool = False
    """Add view and snippet to the DPR JSON, which DPR's own reader then refuses."""


class ReadConfig(Section):
    reader: str = "reader"
    """A stored reader (`train.task: reader`) by NAME or NAME/FINGERPRINT; else a folder, `package:NAME/path` or a hub
    name (OWNER/MODEL) of any Hugging Face model for extractive question answering, reached from every worker."""
    top_passages: list[Count] = Field(default_factory=lambda: [1, 5, 20])
    """Numbers of first passages to answer from; each is reported."""
    score_weight: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the retrieval score, added to a span's score to compare passages; 0: the reader alone decides."""
    max_tokens: Annotated[int, Field(ge=16, le=8192)] = 384
    """Question, a window of the passage, and special tokens, in reading and in training a reader."""
    overlap_tokens: Annotated[int, Field(ge=0)] = 128
    """Tokens that neighbouring windows of a long passage share."""
    max_question_tokens: Annotated[int, Field(ge=4, le=8192)] = 64
    """A longer question is cut, for a reader and for a cross-encoder (`mine.max_pair_tokens`)."""
    max_answer_tokens: Count = 30
    minus_null: bool = True
    """Subtract the logits of "no answer here" ([CLS]) from a span's; false: for models trained without such texts."""
    batch: Count = 16
    """Questions of one unit of work."""
    tokens_per_batch: Annotated[int, Field(ge=64)] = 8192
    """Padded tokens that the model reads at once, on GPUs and for others than bert, roberta and xlm-roberta: on a CPU
    these are read in blocks of a fixed size, without padding."""


class EvaluateConfig(Section):
    questions: list[Name] = Field(default_factory=list)
    k: Annotated[list[Count], Field(min_length=1)] = Field(default_factory=lambda: [1, 5, 20, 100])
    """Cut-offs of top-k accuracy. The mean reciprocal rank (`mrr`) is over the first hits of the largest."""
    match: Literal["string", "regex"] = "string"
    """When a passage holds an answer, in evaluate, retrieve, analyze, refine, mine and train, and a chunk of
    `prepare.chunk_words`. string: it has the words of an answer in a row, as in DPR, where a run of letters is a word:
    answers in Chinese, Japanese, Thai or Korean need regex. regex: an answer is a pattern found in it, as in
    CuratedTREC, with no known place for `train.answer_views: first`. Readers need string: they are trained and scored
    by words."""
    bm25: bool = False
    """Also score BM25 over the same corpus."""
    hybrid: Name | None = None
    """Beside `search.hybrid`, also score BM25 + weight x dense, the weight chosen on the questions of this set that are
    not reported. Needs `index.lexical`."""
    bootstrap: Count = 1000
    """Samples of the articles from which a 95 % interval is computed."""
    seed: int = 0


class AnalyzeConfig(Section):
    questions: Name | None = None
    """Question set with gold passages; absent: the first of `evaluate.questions`."""
    max_questions: Annotated[int, Field(ge=0)] = 0
    """Analyze at most this many, those of passages at equal distances; 0: all."""
    attention_passages: Count = 64
    """Passages whose attention is compared: at equal distances among those of the questions."""


class ServeConfig(Section):
    host: str = "127.0.0.1"
    """Address to listen on. Any but the loopback needs tokens."""
    port: Annotated[int, Field(ge=1, le=65535)] = 8000
    tokens_file: str | None = None
    """File of `read TOKEN` and `admin TOKEN` lines, read where the command runs. Tokens of `MVR_RAY_READ_TOKEN` and
    `MVR_RAY_ADMIN_TOKEN` count too. On the loopback they may be absent: then all may read, and none change versions."""
    timeout_ms: Count = 10_000
    """Time from a request's arrival to its answer, at most."""
    max_waiting: Count = 64
    """Requests in a replica at the same time, waiting ones included; further ones get 503 with Retry-After at once."""
    max_running: Count = 8
    """Requests that a replica works on at the same time."""
    follow_s: Annotated[float, Field(ge=0)] = 5
    """Period of checks for a newer version to answer from; 0: stay with the first version."""
    max_batch: Count = 256
    """Queries, questions or texts of a request."""
    max_query_chars: Count = 100_000
    """Characters of each of them."""
    max_k: Count = 1000
    """Passages for a query; no less than `retrieve.k`."""
    max_body_bytes: Count = 8_000_000
    """Limit of a request by POST below /v1/; other requests may have no body."""
    max_header_bytes: Annotated[int, Field(ge=1024, le=1_000_000)] = 32_768
    """Limit of a request's headers, and of its path."""
    max_connections: Annotated[int, Field(ge=2)] = 512
    """Connections at a time; one address may have half of them. Each takes up to `max_body_bytes` for a body."""
    hosts: list[str] = Field(default_factory=list)
    """Names, beside those of the loopback, under which a server without tokens may be called (the header `Host`)."""
    replicas: Count = 1
    """Replicas that answer, each with searchers of its own: when one ends, the others continue."""


class ResourcesConfig(Section):
    address: str | None = None
    """Ray cluster to join; absent: `RAY_ADDRESS`, else, as for `local`, a private cluster on this machine."""
    local_passages: Annotated[int, Field(ge=0)] = 50_000
    """Stages over at most this many passages run in this process, without Ray, if no address is given; 0: never. For
    `index`, the passages that it encodes count (of an approximate index all of the shards that change), for `read` and
    the cross-encoder of `mine` those that they read, once a question. The bytes are the same either way. train (unless
    train_workers is 0), study and serve always use Ray."""
    local_cpus: Annotated[int, Field(ge=0)] = 0
    """Logical CPUs of a private cluster; 0: twice the cores that this process may use, at least 4."""
    autoscaling: bool = False
    """The cluster adds nodes on demand: needs above its present resources are logged, not refused."""
    encoders_min: Count = 1
    """Workers of a pool, at least: encoders of passages, rankers (which embed questions), readers or cross-encoders,
    each with the CPUs and the GPU of an encoder."""
    encoders_max: Count = 2
    """The same, at most: a pool grows with its work."""
    cpus_per_encoder: Cpus = 1
    gpus_per_encoder: Gpus = 0
    """The share of a GPU that embeds passages for an encoder (1: a whole one), and that a ranker, a reader and a
    cross-encoder use; 0: they use the CPU."""
    torch_threads: Count | None = None
    """Threads of one encoder, trainer or searcher process on CPU. null: 1, and without Ray one a core, for exact search
    and refinement by mvr_ray's compiled loops, and for passages by its layers or OpenVINO."""
    train_workers: Annotated[int, Field(ge=0)] = 1
    """0 trains in this process, without Ray workers."""
    cpus_per_trainer: Cpus = 1
    gpus_per_trainer: Gpus = 0
    searchers: Count = 1
    """Processes that the shards are divided among, at most one a shard."""
    cpus_per_searcher: Cpus = 0.5
    gpus_per_searcher: Gpus = 0
    """The share of a GPU on which a searcher on Ray scans (`Index.search` then starts Ray); 0: it scans on the CPU, as
    stages within `local_passages` and, without an address, `search` and `explain` always do. It also chooses the
    default of `index.factory`."""
    replicas: Count = 1
    """Searchers that hold each shard: this many times `searchers` run. With two, coverage survives the loss of one."""
    searcher_queue: Count = 64
    """Queued calls of one process to a searcher; beyond, a request is refused at once, to be sent again later."""
    searcher_bytes: Annotated[int, Field(ge=0)] = 0
    """Most bytes of shards in a searcher while the next version is opened beside the live one; 0: the free memory of
    its machine."""
    scrub_bytes_s: Annotated[int, Field(ge=0)] = 16_000_000
    """Bytes of open shards that a searcher reads again each second, to detect changed files; 0: none, as in stages
    without Ray."""
    tls_dir: str = ""
    """Folder on every node with `tls.crt` and `tls.key`, a certificate for the name `mvr-ray`, and its `ca.crt`:
    routers and searchers then use TLS, and start only with files that work. Ray's own calls, which serve until they are
    connected and wherever they cannot be, are encrypted only if Ray is (RAY_USE_TLS). Empty: unencrypted."""
    hung_s: Annotated[float, Field(gt=0)] = 60
    """In `serve` and in `Index` on Ray, a searcher that completes no call for this long while a probe query waits for
    it is killed and restarted. Other stages send no probes: a search of theirs waits up to 600 s."""
    refiners: Count = 1
    """As `searchers`, for `refine`."""

    @property
    def threads(self) -> int:
        return self.torch_threads or 1

    @field_validator("gpus_per_encoder", "gpus_per_trainer", "gpus_per_searcher")
    @classmethod
    def _check_gpus(cls, gpus: float) -> float:
        if gpus != int(gpus) and not 0.0001 <= gpus < 1:
            raise ValueError(f"{gpus:g} is refused by Ray; it must be {_GPUS}")
        return gpus

    @model_validator(mode="after")
    def _check_encoder_counts(self) -> "ResourcesConfig":
        if self.encoders_min > self.encoders_max:
            raise ValueError(f"encoders_min ({self.encoders_min}) is above encoders_max ({self.encoders_max})")
        return self


class RunConfig(Section):
    """One experiment."""

    store: StoreConfig = Field(default_factory=StoreConfig)
    prepare: PrepareConfig = Field(default_factory=PrepareConfig)
    encoder: EncoderConfig = Field(default_factory=EncoderConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    mine: MineConfig = Field(default_factory=MineConfig)
    index: IndexConfig = Field(default_factory=IndexConfig)
    follow: FollowConfig = Field(default_factory=FollowConfig)
    refine: RefineConfig = Field(default_factory=RefineConfig)
    search: SearchConfig = Field(default_factory=SearchConfig)
    retrieve: RetrieveConfig = Field(default_factory=RetrieveConfig)
    read: ReadConfig = Field(default_factory=ReadConfig)
    evaluate: EvaluateConfig = Field(default_factory=EvaluateConfig)
    analyze: AnalyzeConfig = Field(default_factory=AnalyzeConfig)
    serve: ServeConfig = Field(default_factory=ServeConfig)
    resources: ResourcesConfig = Field(default_factory=ResourcesConfig)

    def digest(self, *sections: str) -> str:
        """Return the hex digest of the named sections (all when none is named), and of `evaluate.match` unless it is
        string: refinement and training find answers by it, and digests are older than that."""
        plain = self.model_dump(mode="json")
        content = {name: plain[name] for name in (sections or sorted(plain))}
        if self.evaluate.match != "string":
            content["match"] = self.evaluate.match
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def load_run(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> RunConfig:
    """Read a run file and apply `section.key=value` overrides (values are YAML).

    A file may start with `base: other.yaml` (relative to itself): its sections override that file's.
    Raises ConfigError naming the file, the key, the value and what would be accepted.
    """
    data = loader.read(Path(path))
    for override in overrides:
        loader.apply(data, override)
    return parse_run(data, str(path), overrides)


def parse_run(data: dict[str, Any], where: str, overrides: Sequence[str] = ()) -> RunConfig:
    """Check the data of a run file, `where`, with overrides. Raises ConfigError, as `load_run`."""
    try:
        return RunConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError(explain(error, where, RunConfig, overrides)) from None
