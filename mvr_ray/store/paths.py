"""Define every file and folder name of a store.

    <store>/corpora/<name>/publications/<n>.json   the corpora of the name in order; the highest is the last one
    <store>/corpora/<name>/versions/<digest>.json  this corpus, and the ones before it that an index version names
    <store>/corpora/<name>/part-<shard>-<digest>.arrow, and .changes.arrow beside some: shared by versions
    <store>/corpora/<name>/questions/<digest>/<set>.json   describes a question set of the corpus of this digest
    <store>/corpora/<name>/sets/<set>-<digest>.arrow       questions, named by content: shared by corpora of the name
    <store>/questions/<name>.arrow             question sets as earlier programs stored them, one for all corpora
    <store>/encoders/<name>/<fingerprint>/     and <fingerprint>.<precision>.<corpus>.json beside it (`lowered_encoder`)
    <store>/encoders/<name>/untrained-<key>.json   the snapshot that these settings and backbone give, made once
    <store>/encoders/<name>/latest.json        the snapshot that was trained last
    <store>/readers/<name>/...                 the same; and cross_encoders/ likewise
    <store>/training/<name>/<key>/             checkpoints of unfinished training, its metrics; safe to delete
    <store>/indexes/<name>/versions/<n>.json
    <store>/indexes/<name>/shards/<digest>/    embeddings.arrow, changes.arrow, changes-2.arrow, ... where few passages
                                               were changed since, index file, shard.json, measurements
    <store>/indexes/<name>/queries/<digest>.arrow
    <store>/indexes/<name>/lexical/<digest>.arrow    words of one shard, or of the corpus (`index.lexical`)
    <store>/indexes/<name>/quarantine/<digest>-<n>/   damaged shards; nothing removes them
    <store>/indexes/<name>/staging/<key>/      unfinished work, safe to delete
    <store>/studies/steps/<key>.json           reports of study steps, shared by studies
    <store>/studies/corpora/<corpus>.json      the step that prepared this corpus last
    <store>/studies/<study>-<size>/            report.md, report.json, report.html and plots
    <store>/runs/<time>-<stage>/
    <store>/run.yaml                           the run file of an index that `Index.build` made
    <store>/judgements/<index>/<number>.jsonl  judgements of `Index.add_feedback`, later <judgements before>-<number>

Earlier programs also wrote <store>/corpora/<name>/corpus.json, one description of the last corpus, and
<store>/feedback/<index>.jsonl, one file of all judgements.

Paths are strings relative to the store's root with `/` between parts; `files.Store` turns them into bytes.
"""

import itertools
from collections.abc import Collection
from typing import Literal

from mvr_ray.config.loader import INDEXES as INDEXES
from mvr_ray.config.loader import RUN_FILE as RUN_FILE

EMBEDDINGS = "embeddings.arrow"
CHANGES = "changes.arrow"
"""The first file of changes of a shard."""
SHARD_JSON = "shard.json"
PRUNED_JSON = "pruned.json"
ENCODER_JSON = "encoder.json"
RUNS = "runs"
SHARED_QUESTIONS = "questions"
"""Folder of the sets that programs before corpus versions stored, for any corpus."""


def changes_file(number: int) -> str:
    """Name the file of changes of a shard that overrides the ones before it as the `number`-th."""
    return CHANGES if number == 1 else f"changes-{number}.arrow"


def changes_files(names: Collection[str]) -> list[str]:
    """Return those of a shard's files that hold changes; later ones override earlier ones."""
    possible_names = (changes_file(number) for number in itertools.count(1))
    return list(itertools.takewhile(lambda name: name in names, possible_names))


def embedding_files(names: Collection[str]) -> list[str]:
    """Return those of a shard's files that hold its views."""
    return [EMBEDDINGS, *changes_files(names)]


def corpus_dir(name: str, kind: Literal["publications", "versions", "sets"] | None = None) -> str:
    """Return the folder of a corpus's parts, or of its publications, its descriptions by digest, or its files of
    questions."""
    return f"corpora/{name}/{kind}" if kind else f"corpora/{name}"


def corpus_json(name: str) -> str:
    """Name the description of the last corpus as programs before publications stored it."""
    return f"corpora/{name}/corpus.json"


def corpus_publication(name: str, number: int) -> str:
    """Name the description of the corpus that was published under a name as the `number`-th. The highest is the last
    one."""
    return f"corpora/{name}/publications/{number}.json"


def corpus_part(shard: int, digest: str) -> str:
    """Name a part's file by its content, so that a new corpus never overwrites a live one."""
    return f"part-{shard:05d}-{digest[:16]}.arrow"


def corpus_changes(shard: int, digest: str) -> str:
    """Name the file of changes of a part, which is in the folder of the part."""
    return f"part-{shard:05d}-{digest[:16]}.changes.arrow"


def corpus_version(name: str, digest: str) -> str:
    return f"corpora/{name}/versions/{digest}.json"


def questions_dir(corpus: str, digest: str) -> str:
    return f"corpora/{corpus}/questions/{digest}"


def question_set(corpus: str, digest: str, name: str) -> str:
    return f"corpora/{corpus}/questions/{digest}/{name}.json"


def question_file(name: str, digest: str) -> str:
    """Name the file of a question set by its content, within the folder of the corpus."""
    return f"sets/{name}-{digest[:16]}.arrow"


def judgement_folder(index: str) -> str:
    return f"judgements/{index}"


def judgements(index: str, number: int, group: int = 0) -> str:
    """Name the file of an index's judgements after the first `group` ones; number 0 is the file that earlier commits
    wrote."""
    name = f"{group:08d}-" * bool(group) + f"{number:08d}.jsonl"
    return f"{judgement_folder(index)}/{name}" if number else f"feedback/{index}.jsonl"


def lowered_encoder(name: str, fingerprint: str, precision: str, corpus: str) -> str:
    """Name the record of the encoder that embeds this corpus in another precision than the one of `fingerprint`."""
    return f"encoders/{name}/{fingerprint}.{precision}.{corpus}.json"


def untrained_encoder(name: str, key: str) -> str:
    """Name the record of the encoder that was made from the backbone and settings of `key`."""
    return f"encoders/{name}/untrained-{key}.json"


def encoder_dir(name: str, fingerprint: str) -> str:
    return f"encoders/{name}/{fingerprint}"


def models_dir(kind: str, name: str) -> str:
    """Return the folder of all models of one name; `kind` is `encoders`, `readers` or `cross_encoders`."""
    return f"{kind}/{name}"


def latest_model(kind: str, name: str) -> str:
    """Name the record of the model of this name that was trained last."""
    return f"{kind}/{name}/latest.json"


def model_dir(kind: str, name: str, fingerprint: str) -> str:
    return f"{kind}/{name}/{fingerprint}"


def training_dir(name: str, key: str) -> str:
    """Return the folder of a training's checkpoints; `key` is a digest of all inputs of its result."""
    return f"training/{name}/{key}"


def index_dir(index: str, kind: Literal["versions", "shards", "queries", "lexical", "quarantine", "staging"]) -> str:
    """Return the folder of all versions, shards, files of refined queries or words, damaged shards or unfinished
    work."""
    return f"indexes/{index}/{kind}"


def manifest(index: str, version: int) -> str:
    return f"indexes/{index}/versions/{version}.json"


def shard_dir(index: str, digest: str) -> str:
    return f"indexes/{index}/shards/{digest}"


def shard_measurements(index: str, digest: str, config_digest: str) -> str:
    """Name the file of what was measured on a shard under the settings of this digest, so that later versions need not
    read it again."""
    return f"{shard_dir(index, digest)}/measurements-{config_digest}.json"


def quarantine_dir(index: str, digest: str, number: int) -> str:
    """Return the folder of a damaged shard of this digest; `number` tells several of them apart."""
    return f"indexes/{index}/quarantine/{digest}-{number}"


def refined_queries(index: str, digest: str) -> str:
    return f"indexes/{index}/queries/{digest}.arrow"


def lexical(index: str, digest: str) -> str:
    return f"indexes/{index}/lexical/{digest}.arrow"


def staging_dir(index: str, key: str) -> str:
    return f"indexes/{index}/staging/{key}"


def staged_chunk(index: str, key: str, shard: int, start: int) -> str:
    """Name the file of the embeddings of the passages of one part that are to be encoded, from row `start` on."""
    return f"indexes/{index}/staging/{key}/chunk-{shard:05d}-{start:09d}.arrow"


def staged_plan(index: str, key: str, shard: int) -> str:
    """Name the file of the passages of one part that are to be encoded, and the earlier shard of its other passages."""
    return f"indexes/{index}/staging/{key}/plan-{shard:05d}.json"


def staged_carried(index: str, key: str, shard: int) -> str:
    """Name the file of the embeddings of one part that earlier versions have in other shards."""
    return f"indexes/{index}/staging/{key}/carried-{shard:05d}.arrow"


def staged_originals(index: str, key: str, shard: int, digest: str) -> str:
    """Name the file of the embeddings of the passages of one part that others equal; `digest` is that of their ids."""
    return f"indexes/{index}/staging/{key}/originals-{shard:05d}-{digest}.arrow"


def staged_marker(index: str, key: str) -> str:
    """Name the empty file that is written again and again while a command makes this work."""
    return f"indexes/{index}/staging/{key}/running"


def staged_claim(folder: str, path: str) -> str:
    """Name the empty file of unfinished work in `folder`, which names a shard, or a file of queries or words, that it
    finished and that no version names yet."""
    return f"{folder}/claim-{'-'.join(path.split('/')[-2:])}"


def claimed_path(index: str, name: str) -> str | None:
    """Return the path that a file of unfinished work claims; None for one of another kind."""
    kind, _, own = name.removeprefix("claim-").partition("-")
    return f"indexes/{index}/{kind}/{own}" if name.startswith("claim-") else None


def staged_shard(index: str, key: str, params: str, shard: int) -> str:
    """Name the record of a shard that is built with index parameters of digest `params`."""
    return f"indexes/{index}/staging/{key}/built-{params}-{shard:05d}.json"


def staged_results(folder: str, first: int) -> str:
    """Name the file of results of batches of questions from the `first` on, as JSON lines."""
    return f"{folder}/results-{first:09d}.jsonl"


def study_step(key: str) -> str:
    """Name the report of one step of a study; `key` is a digest of all its inputs."""
    return f"studies/steps/{key}.json"


def study_corpus(corpus: str) -> str:
    """Name the record of the study step that prepared the corpus of this name last."""
    return f"studies/corpora/{corpus}.json"


def study_report_dir(study: str, size: str) -> str:
    return f"studies/{study}-{size}"


def run_dir(stamp: str, stage: str) -> str:
    return f"{RUNS}/{stamp}-{stage}"
