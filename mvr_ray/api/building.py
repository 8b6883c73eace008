"""Builds an index: prepares passages, publishes a version over them, and writes the run file of the store."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mvr_ray.api import rows
from mvr_ray.api.progress import progress_callback
from mvr_ray.api.run_settings import absolute, sections, with_settings
from mvr_ray.config import RunConfig, parse_run
from mvr_ray.config.loader import PACKAGED_MODEL, write_yaml
from mvr_ray.errors import ConfigError, DataError, MissingInputError, NoTokensError, StorageError
from mvr_ray.store import manifest as manifests
from mvr_ray.store import paths
from mvr_ray.store.corpus import Corpus
from mvr_ray.store.files import Store, without_keys
from mvr_ray.store.formats.view_vectors import write_pairs
from mvr_ray.store.manifest import Manifest
from mvr_ray.store.prepare import prepare
from mvr_ray.store.update import parent_corpus
from mvr_ray.types import Progress

log = logging.getLogger(__name__)
GIVEN_BY_ARGUMENTS = (
    ("store", "path", "path"),
    ("encoder", "backbone", "model"),
    ("prepare", "sources", "passages"),
    ("index", "vectors", "vectors"),
)
"""Section and key of a setting that `Index.build` refuses, and the argument in its place."""


def build(
    passages: Any,
    model: str | Path | None,
    path: str | Path,
    vectors: Any,
    settings: Mapping[str, Mapping[str, Any]] | None,
    progress: Progress | bool | None,
) -> RunConfig:
    """Build an index as `Index.build` says; returns its run."""
    sources = rows.sources_of(passages)
    own = sections(settings)
    for section, key, argument in GIVEN_BY_ARGUMENTS:
        if key in own.get(section, {}):
            raise ConfigError(f"Index.build: settings has {section}.{key}; give {argument}= instead")
    own["store"] = {**own.get("store", {}), "path": absolute(path)}
    backbone = absolute(model) if isinstance(model, Path) else model or PACKAGED_MODEL
    own["encoder"] = {**own.get("encoder", {}), "backbone": backbone}
    own["prepare"] = {"fields": "infer", **own.get("prepare", {}), "sources": sources or []}
    run = parse_run(own, "Index.build")
    store = Store(run.store.path)
    if model is None and vectors is None:
        from mvr_ray.distributed.encoders import trained_backbone

        own["encoder"]["backbone"] = trained_backbone(run) or backbone
        run = parse_run(own, "Index.build")
    records = None if sources else rows.passage_records(passages)
    from mvr_ray.distributed.indexing.build_index import index  # imports torch

    with progress_callback(progress) as callback, vectors_file(store, vectors) as file:
        # before the last corpus, which updates start from, is replaced
        own_run = _buildable(with_settings(run, index={"vectors": file}))
        before = None
        with suppress(MissingInputError):
            before = parent_corpus(store, run.prepare.corpus, run.index.name)
        report = prepare(run.prepare, store, callback, records, run.evaluate.match)
        try:
            manifest = index(own_run, callback)
        except (DataError, NoTokensError):  # vectors that do not fit the passages, a text that the encoder refuses
            last = Corpus.open(store, run.prepare.corpus)
            if before and last.digest == report.digest:
                before.publish(after=last.number)  # from which the live version's changes go on
            raise
    _warn_of_others(run, store, report.digest)
    if vectors is not None:
        run = with_settings(run, index={"encoder": manifest.encoder_fingerprint})
    own_settings = run.model_dump(mode="json", exclude_unset=True)
    run_file = without_keys(write_yaml(own_settings))
    store.write_bytes(paths.RUN_FILE, run_file.encode())
    return run


def _warn_of_others(run: RunConfig, store: Store, digest: str) -> None:
    """Log a warning of each other index of the corpus that this one, of a digest, has replaced."""
    for name in store.list(paths.INDEXES):
        with suppress(MissingInputError, StorageError):
            live = manifests.read(store, name)
            if name != run.index.name and live.corpus == run.prepare.corpus and live.corpus_digest != digest:
                log.warning(
                    "index %r is of corpus %r, too, and its next change applies to the passages of this build; for "
                    'passages of its own give this one another corpus: settings={"prepare": {"corpus": NAME}}',
                    *(name, live.corpus),
                )


def reindex(run: RunConfig, progress: Progress) -> Manifest:
    """Publish a version of the stored passages, as `Index.reindex` says: of those of the live version, if a roll back
    replaced the last corpus."""
    from mvr_ray.distributed.encoders import keep_external_encoder
    from mvr_ray.distributed.indexing.build_index import index  # imports torch

    store = Store(run.store.path)
    last = Corpus.open(store, run.prepare.corpus)
    before = parent_corpus(store, run.prepare.corpus, run.index.name)
    if before.digest != last.digest:
        before.publish(after=last.number)
    return index(keep_external_encoder(run), progress)


@contextmanager
def vectors_file(store: Store, vectors: Any) -> Iterator[str | None]:
    """Yield the file of vectors, which is made of others than a path; None without any."""
    if vectors is None or isinstance(vectors, str | Path):
        yield None if vectors is None else absolute(vectors)
        return
    with store.scratch() as folder:
        write_pairs(folder / "vectors.parquet", vectors)
        yield str(folder / "vectors.parquet")


def _buildable(run: RunConfig) -> RunConfig:
    """Return the run with the fingerprint of its encoder, where it has one before the corpus. Raises what `index` would
    raise of the encoder, of the index parameters and of vectors without their passages."""
    from mvr_ray.distributed.encoders import encoder_before_corpus
    from mvr_ray.distributed.indexing.external_vectors import read_external
    from mvr_ray.distributed.indexing.staging import checked_params

    if file := run.index.vectors:
        checked_params(run, read_external(run, file).encoder.dimension)
        return run
    encoder, dimension = encoder_before_corpus(run)
    checked_params(run, dimension)
    return with_settings(run, index={"encoder": encoder})
