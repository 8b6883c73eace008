"""Find the encoder snapshot of a stage, and open it in any process of the cluster.

A snapshot in the store never changes, so its name and fingerprint identify it. `index.encoder` selects it: a
fingerprint, `trained` (the newest of `encoder.name`), `untrained` (made from the backbone here, and saved), or auto.
"""

import hashlib
import importlib.metadata
import json
import logging
from bisect import bisect_left
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, fields
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch

from mvr_ray import __version__
from mvr_ray.checksums import FORMAT_VERSION, json_with_checksum, parse_json
from mvr_ray.config import RunConfig, model_name, resolve_model
from mvr_ray.core.encoding.encoder import DualEncoder, EncoderSpec
from mvr_ray.core.encoding.precision import PrecisionName, fastest_float, missing_on_gpu
from mvr_ray.core.encoding.snapshot import read_punkt
from mvr_ray.core.encoding.snippets import PunktParams, train_punkt
from mvr_ray.distributed import models
from mvr_ray.errors import (
    ConfigError,
    EncoderError,
    ExternalEncoderError,
    FingerprintError,
    MissingInputError,
    StorageError,
)
from mvr_ray.store import manifest as manifests
from mvr_ray.store import paths
from mvr_ray.store.corpus import Corpus
from mvr_ray.store.files import Store
from mvr_ray.store.local_files import sha256_of
from mvr_ray.store.manifest import Manifest
from mvr_ray.store.model_records import (
    ENCODERS,
    RECORD_FORMAT,
    latest_backbone,
    latest_fingerprint,
    read_fingerprint,
    require_snapshot,
    starting_name,
)
from mvr_ray.types import Passage

log = logging.getLogger(__name__)

CALIBRATION_PASSAGES = 256
"""Passages of the corpus that calibrate the scales of int8."""
SENTENCE_PASSAGES = 200_000
"""Passages, at most, from which sentences are learned (`encoder.sentences: corpus`): 20 million words take minutes, all
of Wikipedia hours."""
PRECISIONS: tuple[PrecisionName, ...] = get_args(PrecisionName)
RECORD_CURE = "delete it: the same command then makes the encoder again"
EXTERNAL = "external"
"""In the place of a strategy, for vectors that another program made."""
INT8_RECORD = "int8-openvino"
"""Distinct from `int8` records of earlier versions of mvr_ray, whose encoders can no longer embed."""


class LocalEncoder(NamedTuple):
    """A snapshot of the store, with a local folder of its files."""

    folder: Path
    name: str
    fingerprint: str
    num_views: int
    dimension: int
    similarity: str
    precision: PrecisionName
    is_external: bool = False
    """Whether another program made the vectors: the snapshot then has only `encoder.json`."""


def encoder_spec(run: RunConfig) -> EncoderSpec:
    """Return the `encoder` section as an EncoderSpec."""
    return EncoderSpec(**run.encoder.model_dump(include={field.name for field in fields(EncoderSpec)}))


def resolve_encoder(run: RunConfig, corpus: Corpus | None = None) -> LocalEncoder:
    """Find the snapshot of `index.encoder`, in the precision of `index.precision`. An untrained one is made from the
    backbone, one of another precision from the selected snapshot; both are saved like any other.

    `corpus` is read if `encoder.sentences` or int8 needs its texts; default: the run's own. Raises ConfigError for a
    named encoder in another lower precision than that of `index.precision`.
    """
    full = _named_encoder(run, corpus)
    if full.is_external:
        return full
    # Loaded once, and only if a conversion needs it.
    load = cache(partial(open_encoder, Store(run.store.path), full.name, full.fingerprint, only_embeds=False))
    precision = _auto_precision(run, full, load) if run.index.precision == "auto" else run.index.precision
    return full if precision in ("fp32", full.precision) else _in_lower_precision(run, full, load, corpus, precision)


def _auto_precision(run: RunConfig, full: LocalEncoder, load: Callable[[], DualEncoder]) -> PrecisionName:
    """Return the precision of this encoder's embeddings in the store; without any, the fastest on this machine. For
    encoders on GPUs fp32, unless the store has embeddings in a precision that they support."""
    store, on_gpus = Store(run.store.path), run.resources.gpus_per_encoder > 0
    if full.precision != "fp32":
        return full.precision
    fingerprints: dict[str, PrecisionName] = {full.fingerprint: "fp32"}
    for precision in PRECISIONS[1:]:
        path = _record_path(run, full, precision)
        if store.exists(path):
            fingerprints[read_fingerprint(store, path, RECORD_CURE, RECORD_CURE)] = precision
    for name in sorted(store.list(paths.INDEXES), key=lambda name: name != run.index.name):
        with suppress(MissingInputError, StorageError):  # such as an index without a version
            if precision := fingerprints.get(manifests.read(store, name).encoder_fingerprint):
                missing = missing_on_gpu(precision, torch.cuda.is_available()) if on_gpus else ""
                if missing:
                    log.warning(
                        "index.precision auto: passages are embedded anew, in fp32: those of index %r are in %s, which "
                        "needs %s; resources.gpus_per_encoder=0 keeps them",
                        *(name, precision, missing),
                    )
                return "fp32" if missing else precision
    if on_gpus:
        return "fp32"
    floats = (precision for precision in fingerprints.values() if precision not in ("fp32", "int8"))
    return next(floats, None) or fastest_float(load().passage_tower)


def encoder_before_corpus(run: RunConfig) -> tuple[str, int]:
    """Find the encoder that `resolve_encoder` will open, before there is a corpus: the `index.encoder` that selects it
    without another load of its backbone, and its dimension. Raises as that."""
    spec = encoder_spec(run)
    if _stored_encoder(run) is None and spec.needs_sentences and spec.sentences == "corpus":
        return run.index.encoder, make_encoder(run, Store(run.store.path), punkt=PunktParams((), (), ())).dimension
    encoder = _named_encoder(run, None)
    return encoder.fingerprint, encoder.dimension


def _named_encoder(run: RunConfig, corpus: Corpus | None) -> LocalEncoder:
    if snapshot := _stored_encoder(run):
        return snapshot
    store, name = Store(run.store.path), run.encoder.name
    record = _untrained_record(run)
    if record and store.exists(record):  # opening a backbone takes seconds
        with suppress(MissingInputError):  # else the snapshot is gone
            return local_encoder(store, name, read_fingerprint(store, record, RECORD_CURE, RECORD_CURE))
    encoder = make_encoder(run, store, corpus, _live_punkt(run, store))
    snapshot = save_encoder(store, name, encoder)
    strategy = encoder.spec.strategy
    log.info("untrained encoder: name=%s fingerprint=%s strategy=%s", name, snapshot.fingerprint, strategy)
    if record:
        _write_record(store, record, snapshot.fingerprint)
    return snapshot


def _stored_encoder(run: RunConfig) -> LocalEncoder | None:
    """Open the trained encoder or the snapshot that `index.encoder` names; None for an untrained one."""
    store, name = Store(run.store.path), run.encoder.name
    choice = run.index.encoder
    if choice in ("trained", "auto"):
        newest = latest_fingerprint(store, ENCODERS, name)
        if newest is not None:
            _require_settings(run, store, newest)
            return local_encoder(store, name, newest)
        if choice == "trained":
            raise MissingInputError(
                f"no trained encoder {name!r} in {store.where(paths.models_dir('encoders', name))}; train one "
                f"(mvr-ray train CONFIG), or set index.encoder=untrained"
            )
    elif choice != "untrained":
        encoder, precision = local_encoder(store, name, choice), run.index.precision
        if encoder.precision not in ("fp32", precision) and precision != "auto":
            raise ConfigError(
                f"index.encoder {choice} embeds in {encoder.precision}, and index.precision is {precision}; set "
                f"index.precision to auto, or, to embed anew in {precision}, index.encoder to auto or to one in fp32"
            )
        return encoder
    return None


def is_trained(run: RunConfig) -> bool:
    """Return whether `index` takes a trained encoder."""
    store, name = Store(run.store.path), run.encoder.name
    return run.index.encoder in ("trained", "auto") and latest_fingerprint(store, ENCODERS, name) is not None


def trained_backbone(run: RunConfig) -> str | None:
    """Return the backbone of the trained encoder that `index` takes; None for an untrained one, or where no record
    names it."""
    return latest_backbone(Store(run.store.path), run.encoder.name) if is_trained(run) else None


def _untrained_record(run: RunConfig) -> str | None:
    """Return the path of the record of the encoder that a backbone folder and the `encoder` section give; None for a
    model of the hub, and for sentences that are learned from the corpus."""
    folder, spec = Path(resolve_model(run.encoder.backbone)), encoder_spec(run)
    if not folder.is_dir() or (spec.needs_sentences and spec.sentences == "corpus"):
        return None
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    digests = {path.relative_to(folder).as_posix(): sha256_of(path) for path in files}
    made_by = [__version__, importlib.metadata.version("transformers")]
    key = hashlib.sha256(json.dumps([made_by, asdict(spec), digests]).encode()).hexdigest()[:16]
    return paths.untrained_encoder(run.encoder.name, key)


def _write_record(store: Store, path: str, fingerprint: str) -> None:
    record = json_with_checksum({"fingerprint": fingerprint, FORMAT_VERSION: RECORD_FORMAT})
    with suppress(FileExistsError):
        store.create_once(path, json.dumps(record).encode())


def _require_settings(run: RunConfig, store: Store, fingerprint: str) -> None:
    """Raise EncoderError if the `encoder` section sets something else than the trained encoder of its name has. What it
    does not set is the encoder's own."""
    name, section = run.encoder.name, run.encoder
    spec = _description(store, name, fingerprint)["spec"]
    old = EncoderSpec(**{field.name: spec[field.name] for field in fields(EncoderSpec) if field.name in spec})
    new_settings, old_settings = encoder_spec(run).stored_settings(), old.stored_settings()
    differences = {
        key: getattr(old, key)
        for key in sorted(section.model_fields_set & (new_settings.keys() | old_settings.keys()))
        if new_settings.get(key) != old_settings.get(key) and getattr(section, key) not in (None, getattr(old, key))
    }
    backbone = latest_backbone(store, name)
    if backbone and "backbone" in section.model_fields_set and model_name(backbone) != model_name(section.backbone):
        differences["backbone"] = backbone
    if differences:
        old_values = ", ".join(f"{key} {value!r}" for key, value in differences.items())
        new_values = ", ".join(f"{key} {getattr(section, key)!r}" for key in differences)
        raise EncoderError(
            f"encoder {name}/{fingerprint} was trained with {old_values}, but the encoder section has {new_values}; "
            f"train again (mvr-ray train CONFIG), leave these settings out, name another encoder.name, or set "
            f"index.encoder=untrained"
        )


def require_encoder(store: Store, version: Manifest) -> None:
    """Raise like `local_encoder` if the store lacks the encoder of an index version, without fetching it."""
    _description(store, version.encoder_name, version.encoder_fingerprint)


def local_encoder(store: Store, name: str, fingerprint: str) -> LocalEncoder:
    """Open a snapshot of the store by name and fingerprint.

    Raises MissingInputError, naming the existing ones, and FingerprintError when the folder holds another encoder.
    """
    metadata = _description(store, name, fingerprint)
    similarity = "cosine" if metadata["spec"]["normalize"] else "inner_product"
    folder = store.local_path(paths.encoder_dir(name, fingerprint))
    sizes = metadata["num_views"], metadata["dimension"]
    is_external = metadata["spec"].get("strategy") == EXTERNAL
    return LocalEncoder(folder, name, fingerprint, *sizes, similarity, metadata.get("precision", "fp32"), is_external)


def embeds_texts(store: Store, version: Manifest) -> bool:
    """Return whether mvr_ray has the model of a version's encoder. Raises like `local_encoder`."""
    spec = _description(store, version.encoder_name, version.encoder_fingerprint)["spec"]
    return spec.get("strategy") != EXTERNAL


def keep_external_encoder(run: RunConfig) -> RunConfig:
    """Return the run with the live version's encoder, if that is of another program and the run names no encoder:
    another model would embed all passages anew."""
    store, index = Store(run.store.path), run.index
    if index.vectors is not None or index.encoder != "auto" or latest_fingerprint(store, ENCODERS, run.encoder.name):
        return run
    with suppress(MissingInputError):  # as for the first version
        live = manifests.read(store, index.name)
        if not embeds_texts(store, live):
            log.info("encoder stays: index=%s name=%s (index.encoder=untrained embeds)", index.name, live.encoder_name)
            encoder = run.encoder.model_copy(update={"name": live.encoder_name})
            index = index.model_copy(update={"encoder": live.encoder_fingerprint})
            return run.model_copy(update={"encoder": encoder, "index": index})
    return run


def external_encoder(run: RunConfig, dimension: int) -> LocalEncoder:
    """Return the encoder of vectors that another program made: the one that `index.encoder` names, else that of the
    `encoder` section, which is saved. Raises ConfigError where texts are embedded by the named one."""
    store, name, section, fingerprint = Store(run.store.path), run.encoder.name, run.encoder, run.index.encoder
    if fingerprint in ("auto", "trained", "untrained"):
        settings = {"dimension": dimension, "num_views": section.num_views}
        spec = {"strategy": EXTERNAL, "normalize": section.normalize, "sentences": "packaged"}
        fingerprint = hashlib.sha256(json.dumps([name, settings, spec]).encode()).hexdigest()[:16]
        description = json_with_checksum({"fingerprint": fingerprint, "format_version": 1, **settings, "spec": spec})
        with suppress(FileExistsError):
            path = f"{paths.encoder_dir(name, fingerprint)}/{paths.ENCODER_JSON}"
            store.create_once(path, (json.dumps(description, indent=2) + "\n").encode())
    encoder = local_encoder(store, name, fingerprint)
    if not encoder.is_external:
        raise ConfigError(f"encoder {name}/{fingerprint} embeds the passages itself; leave the vectors out")
    return encoder


def starting_snapshot(run: RunConfig, start: str) -> LocalEncoder:
    """Open the snapshot that `train.init_from` names. Raises as `local_encoder`."""
    return local_encoder(Store(run.store.path), *starting_name(run, start))


def _description(store: Store, name: str, fingerprint: str) -> dict[str, Any]:
    """Read `encoder.json` of a snapshot."""
    path = paths.encoder_dir(name, fingerprint)
    require_snapshot(store, name, fingerprint)
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
    """Save a snapshot under its fingerprint, unless the store has it."""
    return local_encoder(store, name, models.save_model(store, ENCODERS, name, encoder))


def open_encoder(
    store: Store, name: str, fingerprint: str, *, gpu: bool = False, only_embeds: bool = True
) -> DualEncoder:
    """Load and check a snapshot, with `gpu` on this process's GPU. `only_embeds` as in `DualEncoder.load`."""
    encoder = local_encoder(store, name, fingerprint)
    if encoder.is_external:
        raise ExternalEncoderError(
            f"encoder {name}/{fingerprint} is of another program, so no text can be embedded here; embed it there, and "
            f"search with its vector (in Python Index.search([vector]), over HTTP a list of numbers in place of the "
            f"text), or by words alone (hybrid 0, with index.lexical). Stages that embed questions, such as evaluate "
            f"and refine, need an index that mvr_ray encoded"
        )
    load = partial(DualEncoder.load, only_embeds=only_embeds and not gpu)
    model = store.open_copy(encoder.folder, paths.encoder_dir(name, fingerprint), load)
    return model.to("cuda") if gpu else model


@lru_cache(maxsize=1)
def cached_encoder(root: str, name: str, fingerprint: str) -> DualEncoder:
    """Return the snapshot that this process opened last, so that the tasks of a worker process load it once."""
    return open_encoder(Store(root), name, fingerprint)


def _live_punkt(run: RunConfig, store: Store) -> PunktParams | None:
    """Return the sentences that the live index learned from this corpus: with them, a change encodes only what is
    new."""
    with suppress(MissingInputError, StorageError, EncoderError):
        live = manifests.read(store, run.index.name)
        spec = _description(store, live.encoder_name, live.encoder_fingerprint)["spec"]
        same_split = [spec[name] for name in ("sentences", "strategy")] == ["corpus", run.encoder.strategy]
        if same_split and run.encoder.sentences == "corpus" and live.corpus == run.prepare.corpus:
            return read_punkt(store.local_path(paths.encoder_dir(live.encoder_name, live.encoder_fingerprint)))
    return None


def make_encoder(
    run: RunConfig, store: Store, corpus: Corpus | None = None, punkt: PunktParams | None = None
) -> DualEncoder:
    """Make an untrained encoder: the backbone with the strategy of the `encoder` section. Without `punkt`, sentences of
    the corpus are learned from it, at most from `SENTENCE_PASSAGES` of its passages at even distances."""
    spec = encoder_spec(run)
    if spec.needs_sentences and spec.sentences == "corpus" and punkt is None:
        corpus = corpus or Corpus.open(store, run.prepare.corpus)
        punkt = train_punkt(passage.text for passage in sample_evenly(corpus, SENTENCE_PASSAGES))
    return DualEncoder.from_backbone(resolve_model(run.encoder.backbone), spec, punkt)


def _in_lower_precision(
    run: RunConfig,
    full: LocalEncoder,
    load: Callable[[], DualEncoder],
    corpus: Corpus | None,
    precision: PrecisionName,
) -> LocalEncoder:
    """Convert an encoder to a lower precision, once per corpus name: the result stays when the corpus grows."""
    store, name = Store(run.store.path), full.name
    path = _record_path(run, full, precision)
    if not store.exists(path):
        texts: list[Passage] = []
        if precision == "int8":
            texts = sample_evenly(corpus or Corpus.open(store, run.prepare.corpus), CALIBRATION_PASSAGES)
        gpu = run.resources.gpus_per_encoder > 0
        snapshot = save_encoder(store, name, load().to_precision(precision, texts, gpu))
        log.info("encoder lowered: from=%s to=%s precision=%s", full.fingerprint, snapshot.fingerprint, precision)
        _write_record(store, path, snapshot.fingerprint)
    return local_encoder(store, name, read_fingerprint(store, path, RECORD_CURE, RECORD_CURE))


def _record_path(run: RunConfig, full: LocalEncoder, precision: PrecisionName) -> str:
    """Return the path of the record of an encoder in another precision."""
    label = INT8_RECORD if precision == "int8" else precision
    return paths.lowered_encoder(full.name, full.fingerprint, label, run.prepare.corpus)


def sample_evenly(corpus: Corpus, num: int) -> list[Passage]:
    """Sample `num` passages of the corpus, or all, at even distances."""
    num = min(num, corpus.num_passages)
    rows = [place * corpus.num_passages // num for place in range(num)]
    passages: list[Passage] = []
    first = 0
    for shard in range(corpus.num_shards):
        part = corpus.part(shard)
        own = rows[bisect_left(rows, first) : bisect_left(rows, first + len(part))]
        passages += part.take([row - first for row in own])
        first += len(part)
    return passages
