"""Find the encoder snapshot that a stage works with, and open it in any process of the cluster.

A snapshot in the store never changes, so its name and fingerprint say everything. `index.encoder` chooses it: a
fingerprint, `trained` (the newest of `encoder.name`), `untrained` (made from the backbone here, and saved), or auto.
"""

import json
import logging
from contextlib import suppress
from dataclasses import fields
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mvr_ray.checksums import FORMAT_VERSION, json_with_checksum, parse_json, require_format
from mvr_ray.config import RunConfig, resolve_model
from mvr_ray.core.encoding.encoder import DualEncoder, EncoderSpec
from mvr_ray.core.encoding.precision import PrecisionName, fastest_float
from mvr_ray.core.encoding.snippets import train_punkt
from mvr_ray.distributed.models import ENCODERS, latest_fingerprint, save_model
from mvr_ray.errors import EncoderError, FingerprintError, MissingInputError, StorageError
from mvr_ray.store import manifest as manifests
from mvr_ray.store import paths
from mvr_ray.store.corpus import Corpus
from mvr_ray.store.files import Store
from mvr_ray.store.manifest import Manifest
from mvr_ray.types import Passage

log = logging.getLogger(__name__)

LOWERED_FORMAT = 1
"""The format of the record that names an encoder in another precision."""
CALIBRATION_PASSAGES = 256
"""Passages of the corpus from which int8 finds its scales."""
INT8_RECORD = "int8-openvino"
"""Apart from the records `int8` of an earlier mvr_ray, whose encoders embed no more."""


class LocalEncoder(NamedTuple):
    """A snapshot of the store, with a local folder that holds its files."""

    folder: Path
    name: str
    fingerprint: str
    num_views: int
    dimension: int
    similarity: str


def encoder_spec(run: RunConfig) -> EncoderSpec:
    """The `encoder` section as core code takes it."""
    values = run.encoder.model_dump()
    return EncoderSpec(**{field.name: values[field.name] for field in fields(EncoderSpec)})


def resolve_encoder(run: RunConfig, corpus: Corpus | None = None) -> LocalEncoder:
    """The snapshot that `index.encoder` names, in the precision of `index.precision`. An untrained one is made from the
    backbone, one of another precision from the snapshot named, and both are saved like any other.

    `corpus` is read where `encoder.sentences` or int8 asks for its texts; absent: the run's own.
    """
    found = _named_encoder(run, corpus)
    precision = _auto_precision(run, found) if run.index.precision == "auto" else run.index.precision
    return found if precision == "fp32" else _in_lower_precision(run, found, corpus, precision)


def _auto_precision(run: RunConfig, full: LocalEncoder) -> PrecisionName:
    """What the passages of the store were embedded in by this encoder; where there are none, what is fastest here."""
    store = Store(run.store.path)
    if run.resources.gpus_per_encoder > 0 or _has_embedded(store, full.fingerprint):
        return "fp32"
    if store.exists(paths.lowered_encoder(full.name, full.fingerprint, "bf16", run.prepare.corpus)):
        return "bf16"
    encoder = DualEncoder.load(full.folder)
    return fastest_float(encoder.passage_tower) if encoder.precision.name == "fp32" else "fp32"


def _has_embedded(store: Store, fingerprint: str) -> bool:
    """Whether the live version of an index has embeddings of this encoder. One that cannot be read, or is not there
    yet, is passed over."""
    for name in store.list(paths.indexes_dir()):
        with suppress(MissingInputError, StorageError):
            if manifests.read(store, name).encoder_fingerprint == fingerprint:
                return True
    return False


def _named_encoder(run: RunConfig, corpus: Corpus | None) -> LocalEncoder:
    store, name = Store(run.store.path), run.encoder.name
    wanted = run.index.encoder
    if wanted in ("trained", "auto"):
        newest = latest_fingerprint(store, ENCODERS, name)
        if newest is not None:
            return local_encoder(store, name, newest)
        if wanted == "trained":
            raise MissingInputError(
                f"no trained encoder {name!r} in {store.where(paths.encoders_dir(name))}; train one "
                f"(mvr-ray train CONFIG), or set index.encoder=untrained"
            )
    elif wanted != "untrained":
        return local_encoder(store, name, wanted)
    return _untrained_encoder(run, store, corpus)


def require_encoder(store: Store, version: Manifest) -> None:
    """Raise what `local_encoder` raises where the store lacks the encoder of an index version; nothing is fetched."""
    _description(store, version.encoder_name, version.encoder_fingerprint)


def local_encoder(store: Store, name: str, fingerprint: str) -> LocalEncoder:
    """A snapshot of the store by name and fingerprint.

    Raises MissingInputError, naming those that are there, and FingerprintError when the folder holds another encoder.
    """
    metadata = _description(store, name, fingerprint)
    similarity = "cosine" if metadata["spec"]["normalize"] else "inner_product"
    folder = store.local_path(paths.encoder_dir(name, fingerprint))
    return LocalEncoder(folder, name, fingerprint, metadata["num_views"], metadata["dimension"], similarity)


def _description(store: Store, name: str, fingerprint: str) -> dict[str, Any]:
    """What `encoder.json` of a snapshot says."""
    path = paths.encoder_dir(name, fingerprint)
    if not store.exists(f"{path}/{paths.ENCODER_JSON}"):
        known = [entry for entry in store.list(paths.encoders_dir(name)) if not entry.endswith(".json")]
        raise MissingInputError(
            f"encoder snapshot {fingerprint!r} not found ({store.where(path)}); of {name!r} there are: "
            f"{', '.join(known) or 'none'}. Train it (mvr-ray train CONFIG), copy it there, or name another in "
            f"index.encoder"
        )
    try:
        metadata = parse_json(store.read_bytes(f"{path}/{paths.ENCODER_JSON}"), paths.ENCODER_JSON)
        DualEncoder.require_format(metadata, f"{store.where(path)}/{paths.ENCODER_JSON}")
        _ = metadata["fingerprint"], metadata["spec"]["normalize"], metadata["num_views"], metadata["dimension"]
    except (StorageError, KeyError, TypeError) as error:
        raise EncoderError(
            f"{store.where(path)} holds no encoder snapshot: {paths.ENCODER_JSON} cannot be read ({error}); copy or "
            f"make it again"
        ) from None
    if metadata["fingerprint"] != fingerprint:
        raise FingerprintError(
            f"{store.where(path)} holds encoder {metadata['fingerprint']}, but {fingerprint} was asked for, which "
            f"made the embeddings; restore that snapshot, or index again"
        )
    return metadata


def save_encoder(store: Store, name: str, encoder: DualEncoder) -> LocalEncoder:
    """Put a snapshot in the store under its fingerprint; an equal one that is there stays."""
    return local_encoder(store, name, save_model(store, ENCODERS, name, encoder))


def open_encoder(
    store: Store, name: str, fingerprint: str, *, threads: int = 1, gpu: bool = False, only_embeds: bool = True
) -> DualEncoder:
    """Load a snapshot and find it whole; on the GPU that this process was given if `gpu`. `only_embeds` as in
    `DualEncoder.load`."""
    torch.set_num_threads(threads)
    encoder = DualEncoder.load(local_encoder(store, name, fingerprint).folder, only_embeds and not gpu)
    return encoder.to("cuda") if gpu else encoder


@lru_cache(maxsize=1)
def kept_encoder(root: str, name: str, fingerprint: str) -> DualEncoder:
    """The snapshot that this process opened last: the tasks of one worker process load it once."""
    return open_encoder(Store(root), name, fingerprint)


def make_encoder(run: RunConfig, store: Store, corpus: Corpus | None = None) -> DualEncoder:
    """The backbone with the strategy of the `encoder` section, untrained."""
    spec = encoder_spec(run)
    punkt = None
    if spec.needs_sentences and spec.sentences == "corpus":
        corpus = corpus or Corpus.open(store, run.prepare.corpus)
        punkt = train_punkt(passage.text for passage in corpus)
    return DualEncoder.from_backbone(resolve_model(run.encoder.backbone), spec, punkt)


def _untrained_encoder(run: RunConfig, store: Store, corpus: Corpus | None) -> LocalEncoder:
    encoder = make_encoder(run, store, corpus)
    held = save_encoder(store, run.encoder.name, encoder)
    strategy = encoder.spec.strategy
    log.info("untrained encoder: name=%s fingerprint=%s strategy=%s", held.name, held.fingerprint, strategy)
    return held


def _in_lower_precision(
    run: RunConfig, full: LocalEncoder, corpus: Corpus | None, precision: PrecisionName
) -> LocalEncoder:
    """The encoder that was lowered for a corpus of this name stays its encoder when the corpus grows."""
    store, name = Store(run.store.path), full.name
    encoder = DualEncoder.load(full.folder)
    if encoder.precision.name == precision:
        return full
    label = INT8_RECORD if precision == "int8" else precision
    path = paths.lowered_encoder(name, full.fingerprint, label, run.prepare.corpus)
    if not store.exists(path):
        texts: list[Passage] = []
        if precision == "int8":
            texts = spread(corpus or Corpus.open(store, run.prepare.corpus), CALIBRATION_PASSAGES)
        gpu = run.resources.gpus_per_encoder > 0
        held = save_encoder(store, name, encoder.to_precision(precision, texts, gpu))
        log.info("encoder lowered: from=%s to=%s precision=%s", full.fingerprint, held.fingerprint, precision)
        record = json_with_checksum({"fingerprint": held.fingerprint, FORMAT_VERSION: LOWERED_FORMAT})
        with suppress(FileExistsError):
            store.create_once(path, json.dumps(record).encode())
    where, cure = store.where(path), "delete it: the same command then lowers the encoder again"
    fields = parse_json(store.read_bytes(path), where, cure)
    require_format(fields, LOWERED_FORMAT, where, cure)
    if "fingerprint" not in fields:
        raise StorageError(f"{where} is damaged (it has no fingerprint); {cure}")
    return local_encoder(store, name, fields["fingerprint"])


def spread(corpus: Corpus, num: int) -> list[Passage]:
    """`num` passages of the corpus, or all, at even distances."""
    step = max(1, corpus.num_passages // num)
    found: list[Passage] = []
    first = 0
    for shard in range(corpus.num_shards):
        part = corpus.part(shard)
        found += [part.passages(row, row + 1)[0] for row in range(-first % step, len(part), step)]
        first += len(part)
    return found[:num]
