"""Repair damaged shards of a version: rebuild them from their whole files, under the same digest.

    whole files (of the shard folder, or of one quarantined earlier)  +  the index built from whole embeddings
    all equal to the manifest's digests?   damaged folder -> quarantine, new one -> its place

The manifest never changes. A folder is quarantined only once its replacement is whole, and quarantined folders are
never deleted by this program. Where embeddings are lost, the report names the command that makes them again.
"""

import itertools
import logging
import shutil
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from mvr_ray.distributed.indexing.lexical import repair_lexical
from mvr_ray.distributed.indexing.shards import shard_folder
from mvr_ray.errors import DigestError, MissingInputError, ShardIndexError, StorageError
from mvr_ray.index.base import IndexParams
from mvr_ray.index.flat import FIRST_CODES_FILE, shared_codes
from mvr_ray.index.kinds import build_index
from mvr_ray.store import manifest as manifests
from mvr_ray.store import paths
from mvr_ray.store.corpus import Corpus
from mvr_ray.store.delta import open_embeddings
from mvr_ray.store.files import Store
from mvr_ray.store.local_files import sha256_of
from mvr_ray.store.manifest import LEXICAL, QUERIES, FileEntry, Manifest, ShardEntry, ShardMeta

log = logging.getLogger(__name__)


class Repair(NamedTuple):
    """Result for one damaged shard, for moved queries (shard -1), or for the words of a version (shard -2)."""

    shard: int
    state: str
    """repaired or lost."""
    damaged: list[str]
    """Path and problem of each damaged file."""
    set_aside: str = ""
    """Quarantine folder of the damaged one; empty if that is still in its place, or was missing."""
    cure: str = ""
    """The command that makes a lost one again."""


class RepairReport(NamedTuple):
    index: str
    version: int
    num_shards: int
    repairs: list[Repair]

    def require(self) -> None:
        """Raise DigestError for the first lost shard, if any, naming the command that makes it again."""
        failures = [repair for repair in self.repairs if repair.state == "lost"]
        if failures:
            what = {QUERIES: "moved queries", LEXICAL: "the words"}.get(failures[0].shard, f"shard {failures[0].shard}")
            raise DigestError(
                f"{len(failures)} of {len(self.repairs)} not repaired; first: {what} of index {self.index!r} version "
                f"{self.version} ({failures[0].damaged[0]}); {failures[0].cure}"
            )


def repair(store: Store, manifest: Manifest) -> RepairReport:
    """Restore every file of a version to its manifest's digest, as far as possible without encoding."""
    problems = manifests.verify(store, manifest).problems
    entries = {entry.shard: entry for entry in manifest.shards}
    repairs = []
    for shard in sorted({problem.shard for problem in problems}):
        own = [problem for problem in problems if problem.shard == shard]
        damaged_files = [f"{problem.path} {problem.reason}" for problem in own]
        if shard == QUERIES:
            cure = _cure(store, manifest, [problem.path for problem in own])
            repairs.append(Repair(shard, "lost", damaged_files, cure=cure))
        elif shard == LEXICAL:
            repairs.append(_repair_words(store, manifest, damaged_files))
        else:
            repairs.append(_repair_shard(store, manifest, entries[shard], damaged_files))
    return RepairReport(manifest.index, manifest.version, len(entries), repairs)


def _repair_words(store: Store, manifest: Manifest, damaged_files: list[str]) -> Repair:
    """Rebuild the words from the corpus and earlier versions."""
    try:
        if repair_lexical(store, manifest):
            return Repair(LEXICAL, "repaired", damaged_files)
    except (MissingInputError, StorageError) as error:
        log.warning("words not indexed: index=%s error=%s", manifest.index, error)
    cure = "index again (mvr-ray index CONFIG index.lexical=true), which writes them whole"
    return Repair(LEXICAL, "lost", damaged_files, cure=cure)


def _repair_shard(store: Store, manifest: Manifest, entry: ShardEntry, damaged_files: list[str]) -> Repair:
    index, place = manifest.index, paths.shard_dir(manifest.index, entry.digest)
    with shard_folder(store) as folder:
        missing = _build_missing(manifest, entry, folder, _collect_whole(store, index, entry, folder))
        if missing:
            log.warning("shard lost: index=%s shard=%d files=%s", index, entry.shard, missing)
            return Repair(
                entry.shard,
                "lost",
                damaged_files,
                cure=_cure(store, manifest, [], [entry.files[name] for name in missing]),
            )
        quarantine = ""
        if store.exists(place):
            folders = (paths.quarantine_dir(index, entry.digest, number) for number in itertools.count(1))
            quarantine = next(folder for folder in folders if not store.exists(folder))
            store.move_dir(place, quarantine)
        copy = manifests.add_shard(store, index, folder, ShardMeta(entry.shard, entry.num_passages, entry.num_vectors))
    if copy != entry:
        raise DigestError(f"shard {entry.shard} was built as {copy.digest}, its manifest says {entry.digest}")
    log.warning("shard repaired: index=%s shard=%d set aside=%s", index, entry.shard, quarantine or "nothing")
    return Repair(entry.shard, "repaired", damaged_files, quarantine)


def _collect_whole(store: Store, index: str, entry: ShardEntry, folder: Path) -> list[str]:
    """Copy whole files of the shard or of quarantined copies into `folder`; returns the names without a whole copy."""
    places = [paths.shard_dir(index, entry.digest), *_set_aside(store, index, entry)]
    return [
        name
        for name, file in entry.files.items()
        if not any(_copy_whole_file(store, f"{place}/{name}", file, folder / name) for place in places)
    ]


def _build_missing(manifest: Manifest, entry: ShardEntry, folder: Path, missing: list[str]) -> list[str]:
    """Build the shard's index beside `folder` and move missing files from it; returns the names still missing."""
    if not missing or {*paths.embedding_files(entry.files)} & {*missing} or not entry.num_passages:
        return missing
    build_folder = folder.with_name("built")
    build_folder.mkdir()
    try:
        of_first = FIRST_CODES_FILE in entry.files
        embeddings = open_embeddings(folder, [paths.EMBEDDINGS] if of_first else entry.files)
        build_index(IndexParams(**manifest.index_params), embeddings.blocks(), build_folder)
        if of_first:
            for name, own in shared_codes([file.name for file in build_folder.iterdir()], has_changes=False).items():
                (build_folder / name).rename(build_folder / own)
    except ShardIndexError as error:  # such as a library that is not installed here
        log.warning("shard not built: index=%s shard=%d error=%s", manifest.index, entry.shard, error)
        return missing
    whole_names = [name for name in missing if _equals(build_folder / name, entry.files[name])]
    for name in whole_names:
        (build_folder / name).replace(folder / name)
    return [name for name in missing if name not in whole_names]


def _set_aside(store: Store, index: str, entry: ShardEntry) -> list[str]:
    """Return the quarantined folders of this shard."""
    root = paths.index_dir(index, "quarantine")
    return [f"{root}/{name}" for name in store.list(root) if name.rpartition("-")[0] == entry.digest]


def _copy_whole_file(store: Store, path: str, file: FileEntry, target: Path) -> bool:
    """Copy a file to `target`; returns whether it matches the manifest, else removes `target`."""
    if store.damage(path, file.num_bytes, file.sha256):
        return False
    try:
        shutil.copyfile(store.local_path(path), target)
    except MissingInputError:
        return False
    if _equals(target, file):
        return True
    target.unlink()
    return False


def _equals(path: Path, file: FileEntry) -> bool:
    return path.is_file() and path.stat().st_size == file.num_bytes and sha256_of(path) == file.sha256


def _cure(store: Store, manifest: Manifest, lost_paths: Iterable[str], lost_files: Collection[FileEntry] = ()) -> str:
    """Return the command that restores lost files: index again, which makes a version of the last corpus alone, or roll
    back to a version that does not use them and whose files have their sizes. Shards may share a file by hard links."""
    with suppress(MissingInputError, StorageError):
        is_last = Corpus.open(store, manifest.corpus).digest == manifest.corpus_digest
        if is_last and manifest.operation == "index":
            return "index it again, and no other shard: mvr-ray index CONFIG"
    step = manifest.operation.partition(":")[0]
    again = "index the last corpus: mvr-ray index CONFIG" if step == "index" else f"do the {step} again on it"
    for other in manifests.newest_first(store, manifest.index, require_live=False):
        files = (file for entry in other.shards for file in entry.files.values())
        needs_it = not manifests.named_paths(other).isdisjoint(lost_paths) or any(file in lost_files for file in files)
        if needs_it or manifests.verify(store, other, sizes_only=True).problems:
            continue
        if other.version == manifests.latest_version(store, manifest.index):
            return (
                f"the live version {other.version} does not need it; to have version {manifest.version} back, {again}"
            )
        back = f"version {other.version} does not need it: mvr-ray versions CONFIG rollback {other.version}"
        return f"{back}; or {again}"
    return again if step == "index" else f"encode again, then do the {step} again: mvr-ray index CONFIG"
