"""Delete files that no version needs any more: old versions, shards without a version, old corpora, unfinished work.

Some object stores return outdated listings. A listing therefore decides what may be deleted, never what is needed:
needed versions, corpora and question sets are looked up by the names that numbers, manifests and descriptions give
them, and a listed version that does not exist ends the collection.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from mvr_ray.errors import ManifestError, MissingInputError, StorageError
from mvr_ray.store import manifest, paths
from mvr_ray.store.corpus import Corpus, publications, question_set, question_sets
from mvr_ray.store.files import Store
from mvr_ray.store.manifest import Manifest

log = logging.getLogger(__name__)

GRACE_S = 3600.0
KEPT_PUBLICATIONS = 100
"""Publications that stay, so that a publisher that was suspended for an hour finds no number of another one free."""
SETS = "sets/"
PATHS_A_LOOK = 100
"""Paths that are deleted after one look for the versions that are there."""


def collect(store: Store, index: str, keep: int, grace_s: float, *, skips_runs: bool = False) -> list[str]:
    """Remove all but the newest `keep` versions, if another one replaced them at least `grace_s` ago, and what no
    remaining version names, if at least so old.

    Also removes unfinished work of that age, corpora that no version names and that are not the last of `prepare`, and
    what killed processes left aside anywhere in the store. A version that this program cannot read stays, beside `keep`
    others, and may name anything: no shard, query or lexical file and no corpus is then removed. With `skips_runs`,
    what was left aside in the folders of runs stays: nothing deletes these, and there may be a hundred thousand.
    Returns the removed paths.
    """
    assert keep >= 1, "the live version is always kept"
    removals: list[str] = []
    if not (numbers := manifest.find_versions(store, index)):
        return removals
    versions = manifest.read_versions(store, index, numbers)
    for version, problem in versions.problems.items():
        log.warning("what version %d may name stays: index=%s (%s)", version, index, problem)
    readable_numbers = sorted(versions.manifests)
    for at, version in enumerate(readable_numbers[:-keep]):
        successor = readable_numbers[at + 1]  # until it came, the version was live, and processes opened it
        if store.age_s(paths.manifest(index, successor)) < grace_s:
            break  # `find_versions` relies on it that the lowest numbers go first
        path = paths.manifest(index, version)
        store.delete(path)
        removals.append(path)
    store.sync_names(paths.index_dir(index, "versions"))  # before their files are deleted
    staging = paths.index_dir(index, "staging")
    folders = [*(paths.index_dir(index, kind) for kind in ("shards", "queries", "lexical")), staging]
    listing = {f"{folder}/{name}" for folder in folders for name in store.list(folder)}
    paths_of = _paths_of(versions)
    kept_names = [
        names for number, names in paths_of.items() if names and paths.manifest(index, number) not in removals
    ]

    def delete_batch(paths: Sequence[str]) -> list[str]:
        # The versions are looked up right before the deletions. A path that none of them names is named by a later one
        # only after a publisher has renewed its age (`manifest.publish`), which is compared right before its deletion.
        names_now = _names_now(store, index, paths_of)

        def is_removable(path: str) -> bool:
            is_named = any(names is None or path in names for names in names_now)
            return (path.startswith(f"{staging}/") or not is_named) and _age_s(store, path) >= grace_s

        return _delete_each(store, paths, is_removable)

    unnamed_paths = sorted(listing.difference(*kept_names))
    for start in range(0, len(unnamed_paths), PATHS_A_LOOK):
        removals += delete_batch(unnamed_paths[start : start + PATHS_A_LOOK])
    for name in sorted({one.corpus for one in versions.manifests.values()}):
        removals += collect_corpus(store, name, grace_s=grace_s, index=index, known_versions=versions.manifests)
    return [*removals, *store.delete_leftovers(grace_s, paths.RUNS if skips_runs else "")]


def _delete_each(store: Store, paths: Sequence[str], is_removable: Callable[[str], bool]) -> list[str]:
    """Delete these files, and folders, that are removable right before the deletion, as a publisher renews the age of
    what it will name; returns their paths."""

    def delete(path: str) -> list[str]:
        if not is_removable(path):
            return []
        store.delete(path) if path.endswith((".arrow", ".json")) else store.delete_dir(path)
        return [path]

    return [path for own in store.for_each(delete, paths) for path in own]


def _age_s(store: Store, path: str) -> float:
    """Return the age of a file or folder; of a shard at most that of its description, which a publisher renews: the
    listing of its files may be outdated."""
    age_s, description = store.age_s(path), f"{path}/{paths.SHARD_JSON}"
    return min(age_s, store.age_s(description)) if store.exists(description) else age_s


def collect_corpus(
    store: Store,
    name: str,
    grace_s: float = GRACE_S,
    index: str = "",
    known_versions: Mapping[int, Manifest] = MappingProxyType({}),
) -> list[str]:
    """Remove corpora of a name, at least `grace_s` old, except the last one and those that an index version names; if a
    version cannot be read, remove nothing. `known_versions` of `index` are not read again. Returns the removed paths.

    A younger file may belong to an unfinished update or index version.
    """
    versions = paths.corpus_dir(name, "versions")

    def is_old(path: str) -> bool:
        return store.age_s(path) >= grace_s

    try:
        numbers = publications(store, name)
        needed_digests = {Corpus.open(store, name).digest, *_digests_named(store, name, index, known_versions)}
        others = (digest for digest in store.json_names(versions) if digest not in needed_digests)
        # opened, though they go: one that cannot be read, as of a newer program, ends the collection
        old_corpora = [Corpus.open(store, name, one) for one in others if is_old(paths.corpus_version(name, one))]
    except (MissingInputError, StorageError) as error:
        log.warning("old corpora not collected: corpus=%s (%s)", name, error)
        return []
    removals: list[str] = []
    for corpus in old_corpora:
        path = paths.corpus_version(name, corpus.digest)
        if is_old(path):
            store.delete(path)
            store.delete_dir(paths.questions_dir(name, corpus.digest))
            removals.append(path)
    store.sync_names(versions)
    try:
        files = _files_without_corpus(store, name, needed_digests, grace_s)
    except (MissingInputError, StorageError) as error:
        log.warning("old files not collected: corpus=%s (%s)", name, error)
        return removals
    files += (paths.corpus_publication(name, number) for number in numbers[:-KEPT_PUBLICATIONS])
    return removals + _delete_each(store, files, is_old)


def _files_without_corpus(store: Store, name: str, needed_digests: set[str], grace_s: float) -> list[str]:
    """List the files of parts and question sets that are old by the listing and that no corpus of a name has."""
    files: set[str] = set()
    for prefix, folder in (("", paths.corpus_dir(name)), (SETS, paths.corpus_dir(name, "sets"))):
        with contextlib.suppress(MissingInputError):  # a corpus without question sets
            listing, now_s = store.stored_files(folder), time.time()
            own = (file.name for file in listing if max(0.0, now_s - file.changed_s) >= grace_s)
            files |= {f"{prefix}{file}" for file in own if file.endswith(".arrow")}
    files -= _file_names(Corpus.open(store, name))
    if files:  # else the other corpora, of which each update makes one, need not be read
        digests = {*store.json_names(paths.corpus_dir(name, "versions"))}
        others = needed_digests - digests
        digests |= {digest for digest in others if store.exists(paths.corpus_version(name, digest))}

        def part_names(digest: str) -> set[str]:
            return {file.file for file in Corpus.open(store, name, digest).info.part_files}

        files = files.difference(*store.for_each(part_names, digests))
        if any(file.startswith(SETS) for file in files):
            files = files.difference(
                *store.for_each(lambda digest: _file_names(Corpus.open(store, name, digest)), digests)
            )
    return [f"{paths.corpus_dir(name)}/{file}" for file in sorted(files)]


def _file_names(corpus: Corpus) -> set[str]:
    """Return the files of parts and question sets of a corpus. Raises StorageError for a damaged description."""
    names = {file.file for file in corpus.info.part_files}
    for name in {*question_sets(corpus), *corpus.info.questions}:
        with contextlib.suppress(MissingInputError):  # a listed set may be deleted, a described one not stored yet
            if info := question_set(corpus, name):
                names.add(info.file)
    return names


def _digests_named(store: Store, corpus: str, index: str, known_versions: Mapping[int, Manifest]) -> set[str]:
    """Return the digests of the corpora of one name that the versions of all indexes were made from, `index` (if any),
    of which some are known, and those that are listed. Raises ManifestError for a version that cannot be read."""
    digests: set[str] = set()
    for one in {*store.list(paths.INDEXES), *([index] if index else [])}:
        numbers = manifest.find_versions(store, one)
        own = {number: known_versions[number] for number in numbers if one == index and number in known_versions}
        versions = manifest.read_versions(store, one, [number for number in numbers if number not in own])
        for problem in versions.problems.values():
            raise ManifestError(problem)
        for version in (*own.values(), *versions.manifests.values()):
            digests |= {version.corpus_digest} if version.corpus == corpus else set()
    return digests


def _names_now(store: Store, index: str, paths_of: dict[int, set[str] | None]) -> list[set[str] | None]:
    """Return the paths that each current version names, None for one that cannot be read and may name any; `paths_of`
    caches them."""
    numbers = manifest.find_versions(store, index)
    paths_of |= _paths_of(manifest.read_versions(store, index, [one for one in numbers if one not in paths_of]))
    return [paths_of[number] for number in numbers if number in paths_of]  # else it was deleted meanwhile


def _paths_of(versions: manifest.Versions) -> dict[int, set[str] | None]:
    names = {number: manifest.named_paths(version) for number, version in versions.manifests.items()}
    return {**names, **dict.fromkeys(versions.problems)}
