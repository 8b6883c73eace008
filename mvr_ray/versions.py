"""List, verify, repair, roll back and collect the versions of an index for the command line."""

from typing import Any, NamedTuple

from pydantic import BaseModel

from mvr_ray.config import RunConfig
from mvr_ray.errors import AccessError, ConfigError, EncoderError, MissingInputError, StorageError
from mvr_ray.store import manifest, paths
from mvr_ray.store.corpus import Corpus
from mvr_ray.store.files import Store
from mvr_ray.store.gc import collect
from mvr_ray.store.manifest import Manifest, Problem, VerifyReport
from mvr_ray.store.parts import UPDATED_CURE

ACTIONS = ("list", "show", "verify", "repair", "rollback", "collect")
NO_SHARD = -1
CORPUS_CURE = "mvr-ray prepare CONFIG"
_MANIFEST_CURE = "copy the file back, use the program that wrote it or, if a later version is live, delete it"


class VersionInfo(BaseModel):
    """One version of an index. `live` is the newest one; a server reports separately which one it searches."""

    version: int
    parent: int
    operation: str
    created: str
    passages: int
    vectors: int
    shards: int
    encoder: str
    content: str
    live: bool
    problem: str = ""
    """Why its manifest cannot be read; its operation is then `unreadable`, and the other fields are empty."""


class CollectReport(NamedTuple):
    """The paths that collection removed, the versions that stay, and those of them that cannot be read, with the
    reason: what they may name stays, too."""

    removed: list[str]
    versions: list[int]
    unreadable: list[str]


class RollbackReport(NamedTuple):
    """The new version with the content of version `to`, and the checks that preceded its publication."""

    version: int
    to: int
    content: str
    passages: int
    files: int
    bytes: int
    checked: str


def act(run: RunConfig, action: str, version: int | None, sizes_only: bool = False) -> Any:
    """Run one action on the index of the run file; `store.runs.to_plain` converts the result."""
    if action not in ACTIONS:
        raise ConfigError(f"versions: {action!r} is not one of {', '.join(ACTIONS)}")
    if version is not None and action in ("list", "collect"):
        advice = "; index.keep_versions=N says how many stay" * (action == "collect")
        raise ConfigError(f"versions: {action} is of all versions, but {version} is given; leave it out{advice}")
    if sizes_only and action != "rollback":
        raise ConfigError(f"versions: --unchecked has no effect on {action}; leave it out")
    store, index = Store(run.store.path), run.index.name
    numbers = manifest.list_versions(store, index)
    if not numbers:
        raise MissingInputError(f"index {index!r} in {store.full_name} has no version; run `mvr-ray index CONFIG`")
    known_numbers = ", ".join(map(str, numbers))
    if version is not None and version not in numbers:
        raise MissingInputError(f"versions: index {index!r} has no version {version!r}; there are {known_numbers}")
    match action:
        case "list":
            return list_versions(store, index)
        case "show":
            return manifest.read(store, index, version)
        case "verify":
            return verify(store, manifest.read(store, index, version)) if version else _verify_newest(store, index)
        case "repair":
            from mvr_ray.distributed.indexing.repair import repair  # imports the modules that build an index

            return repair(store, manifest.read(store, index, version))
        case "rollback":
            if version is None:
                raise ConfigError(f"versions: rollback to which version? There are {known_numbers}")
            return rollback(store, index, version, sizes_only)
        case _:
            garbage = collect(store, index, keep=run.index.keep_versions, grace_s=run.index.grace_s)
            versions = list_versions(store, index)
            unreadable = [f"{one.problem}; {_MANIFEST_CURE}" for one in versions if one.problem]
            return CollectReport(garbage, [one.version for one in versions], unreadable)


def list_versions(store: Store, index: str) -> list[VersionInfo]:
    """Describe every version, ascending; the last is live."""
    numbers = manifest.list_versions(store, index)
    versions, problems = manifest.read_versions(store, index, numbers)
    infos = [version_info(version, number == numbers[-1]) for number, version in versions.items()]
    for number, problem in problems.items():
        empty = {"created": "", "passages": 0, "vectors": 0, "shards": 0, "encoder": "", "content": ""}
        own = {"version": number, "parent": 0, "operation": "unreadable", "live": number == numbers[-1]}
        infos.append(VersionInfo.model_validate({**own, **empty, "problem": problem}))
    return sorted(infos, key=lambda info: info.version)


def _verify_newest(store: Store, index: str) -> VerifyReport:
    """Verify the newest version that can be read, the live one if it can be; each that cannot is a problem."""
    versions, problems = manifest.read_versions(store, index, manifest.list_versions(store, index))
    report = verify(store, versions[max(versions)]) if versions else VerifyReport(0, 0, [])
    unreadable = [
        Problem(NO_SHARD, paths.manifest(index, number), f"cannot be read ({problem})", _MANIFEST_CURE)
        for number, problem in problems.items()
    ]
    return report._replace(problems=[*report.problems, *unreadable])


def verify(store: Store, version: Manifest) -> VerifyReport:
    """Compare every file of a version, its corpus and its question sets with its digest, and its encoder with the
    fingerprint.

    A missing encoder or corpus is a problem of the version, which could not answer queries.
    """
    num_files, num_bytes, problems = manifest.verify(store, version)
    own_problems = [one._replace(cure=f"{one.cure} {version.version}") for one in problems]
    problems, cure = [*own_problems, *encoder_damage(store, version)], CORPUS_CURE
    try:
        corpus = Corpus.open(store, version.corpus, version.corpus_digest)
    except (MissingInputError, StorageError) as error:
        damage = [(paths.corpus_version(version.corpus, version.corpus_digest), f"cannot be read ({error})")]
    else:
        cure = UPDATED_CURE if corpus.info.parent else cure
        files, damage = corpus.verify()
        num_files, num_bytes = num_files + len(files), num_bytes + sum(file.num_bytes for file in files)
    return VerifyReport(num_files, num_bytes, [*problems, *(Problem(NO_SHARD, *own, cure) for own in damage)])


def rollback(store: Store, index: str, to: int, sizes_only: bool = False) -> RollbackReport:
    """Publish the content of version `to` as a new version, after checking that every file it names is whole.

    `sizes_only` checks the sizes alone. Raises DigestError, MissingInputError or ManifestError if the check fails.
    """
    version = manifest.read(store, index, to)
    require_sources(store, version)
    report = VerifyReport(0, 0, []) if sizes_only else verify(store, version)
    report.require()
    result = manifest.rollback(store, index, to)
    scope = "sizes alone: no file was read" if sizes_only else "every digest, and the encoder's fingerprint"
    content = version_info(result, live=True).content
    return RollbackReport(result.version, to, content, result.num_passages, report.num_files, report.num_bytes, scope)


def require_sources(store: Store, version: Manifest) -> None:
    """Raise MissingInputError if a version could not answer queries because its encoder or corpus is missing."""
    refusal = f"index {version.index!r} version {version.version} was not made live:"
    for problem in _missing_encoder(store, version):
        raise MissingInputError(f"{refusal} {store.where(problem.path)} {problem.reason}; {problem.cure}")
    corpus = Corpus.open(store, version.corpus, version.corpus_digest)
    for path, reason in corpus.find_missing():
        cure = UPDATED_CURE if corpus.info.parent else f"next: {CORPUS_CURE} with the same sources"
        raise MissingInputError(f"{refusal} {store.where(path)} {reason}; {cure}")


def encoder_damage(store: Store, version: Manifest) -> list[Problem]:
    """Load the encoder, if present, to check its fingerprint over weights, tokenizer and settings."""
    if problems := _missing_encoder(store, version):
        return problems
    from mvr_ray.distributed.encoders import embeds_texts, open_encoder  # imports torch

    name, fingerprint = version.encoder_name, version.encoder_fingerprint
    try:
        if embeds_texts(store, version):
            open_encoder(store, name, fingerprint)
    except AccessError:
        raise
    except (EncoderError, MissingInputError, StorageError) as error:
        path = paths.encoder_dir(name, fingerprint)
        return [Problem(NO_SHARD, path, f"is damaged ({error})", "copy the encoder's folder there")]
    return []


def _missing_encoder(store: Store, version: Manifest) -> list[Problem]:
    path = f"{paths.encoder_dir(version.encoder_name, version.encoder_fingerprint)}/{paths.ENCODER_JSON}"
    return [] if store.exists(path) else [Problem(NO_SHARD, path, "is missing", "copy the encoder's folder there")]


def version_info(version: Manifest, live: bool) -> VersionInfo:
    return VersionInfo(
        version=version.version,
        parent=version.parent,
        operation=version.operation,
        created=version.created,
        passages=version.num_passages,
        vectors=version.num_vectors,
        shards=len(version.shards),
        encoder=f"{version.encoder_name}/{version.encoder_fingerprint}",
        content=version.content_digest()[:16],
        live=live,
    )
