"""Delete files that no version needs any more: old versions, shards without a version, unfinished work."""

from mvr_ray.store import manifest, paths
from mvr_ray.store.files import Store


def collect(store: Store, index: str, keep: int, grace_s: float) -> list[str]:
    """Remove all but the newest `keep` versions, and what no remaining version names, if at least `grace_s` old.

    Unfinished work older than that goes too. Returns the removed paths.
    """
    assert keep >= 1, "the live version is always kept"
    removals: list[str] = []
    for version in manifest.list_versions(store, index)[-keep:]:
        manifest.read(store, index, version)  # nothing is removed beside a version that this program cannot read
    for version in manifest.list_versions(store, index)[:-keep]:
        path = paths.manifest(index, version)
        if store.age_s(path) >= grace_s:
            store.delete(path)
            removals.append(path)
    candidates = [paths.shard_dir(index, name) for name in store.list(paths.shards_dir(index))]
    candidates += [f"{paths.refined_queries_dir(index)}/{n}" for n in store.list(paths.refined_queries_dir(index))]
    candidates += [paths.staging_dir(index, key) for key in store.list(paths.staging_root(index))]
    paths_of: dict[int, set[str]] = {}
    for path in candidates:
        # Named and young are asked at the last moment: a publisher touches the shards that it is about to name.
        if not _is_named(store, index, path, paths_of) and store.age_s(path) >= grace_s:
            store.delete(path) if path.endswith(".arrow") else store.delete_dir(path)
            removals.append(path)
    return removals


def _is_named(store: Store, index: str, path: str, paths_of: dict[int, set[str]]) -> bool:
    """Whether a version that is there now names the path; `paths_of` caches the paths that versions name."""
    versions = manifest.list_versions(store, index)
    for version in versions:
        if version not in paths_of:
            one = manifest.read(store, index, version)
            paths_of[version] = {paths.shard_dir(index, shard.digest) for shard in one.shards}
            paths_of[version] |= {paths.refined_queries(index, digest) for digest in one.refined_queries.values()}
    return any(path in paths_of[version] for version in versions)
