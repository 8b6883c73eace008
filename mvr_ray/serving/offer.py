"""A manifest that comes over HTTP to be published: read strictly, and no name in it leads out of its index.

What is offered is a manifest as it lies in a store (`indexes/<name>/versions/<n>.json`), of a version whose shard
folders are in the server's store already: copied there from where it was built, or left there by a version that was
collected.
"""

import json
from dataclasses import asdict
from typing import Annotated, Literal

from pydantic import Field

from mvr_ray.errors import MvrRayError
from mvr_ray.index.base import IndexParams
from mvr_ray.index.kinds import check_params
from mvr_ray.sections import Name
from mvr_ray.serving.wire import RequestError, WireModel
from mvr_ray.store import layout
from mvr_ray.store.manifest import DIGEST_HEX, FileEntry, Manifest, ShardEntry, digest_of

Size = Annotated[int, Field(ge=0, le=2**53)]
Number = Annotated[int, Field(ge=0, le=2**31)]
Word = Annotated[str, Field(max_length=200)]
Digest = Annotated[str, Field(pattern=f"^[0-9a-f]{{{DIGEST_HEX}}}$")]
FileName = Annotated[str, Field(pattern="^[A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)*$", max_length=200)]
_KNOWN = "send a manifest as it lies in the store, indexes/<name>/versions/<n>.json"


class OfferedFile(WireModel):
    num_bytes: Size
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class OfferedShard(WireModel):
    shard: Number
    digest: Digest
    """The name of the shard's folder; it covers the other fields."""
    num_passages: Size
    num_vectors: Size
    files: dict[FileName, OfferedFile]


class OfferedManifest(WireModel):
    """`version`, `created` and `token` are those of where it was published before; here it gets others."""

    index: Name
    operation: Word
    encoder_name: Name
    encoder_fingerprint: Name
    similarity: Literal["cosine", "inner_product"]
    num_views: Annotated[int, Field(ge=1, le=1024)]
    dimension: Annotated[int, Field(ge=1, le=65_504)]
    dtype: Literal["fp16", "fp32"]
    corpus: Name
    corpus_digest: Word
    index_params: dict[str, int | str]
    shards: Annotated[list[OfferedShard], Field(min_length=1)]
    parent: Number = 0
    version: Number = 0
    created: Word = ""
    recall: int | float | None = None
    metrics: dict[str, int | float] = Field(default_factory=dict)
    config_digest: Word = ""
    dirty_share: int | float | None = None
    refinement: dict[str, int | float] = Field(default_factory=dict)
    refined_queries: dict[Name, Digest] = Field(default_factory=dict)
    token: Word = ""
    format_version: Literal[1] = 1
    digest: Word | None = None
    """Over all other fields, as the store's file has it; absent: not looked at."""


class PublishRequest(WireModel):
    manifest: OfferedManifest
    parent: Number | None = None
    """The version that must be the newest one now (0: there is none yet); absent: the manifest's own parent. Of two who
    publish on the same one, the first wins."""


def offered(request: PublishRequest, index: str) -> Manifest:
    """The manifest to publish in `index`. Raises RequestError for one that no builder has written."""
    given = request.manifest
    fields = given.model_dump(exclude={"digest", "shards"})
    made = Manifest(**fields, shards=tuple(_entry(shard) for shard in given.shards))
    if given.digest is not None and json.loads(made.to_json())["digest"] != given.digest:
        message = "the manifest's digest is not that of its fields: it is damaged, or was changed"
        raise RequestError(422, "wrong_digest", "manifest.digest", message, _KNOWN)
    if made.index != index:
        message = f"the manifest is of index {made.index!r}, this server answers from index {index!r}"
        raise RequestError(422, "wrong_index", "manifest.index", message, "send it to a server of that index")
    for place, entry in enumerate(made.shards):
        _check_entry(entry, place)
    try:
        check_params(IndexParams(**made.index_params), made.dimension)
    except (MvrRayError, TypeError) as error:
        raise RequestError(422, "wrong_value", "manifest.index_params", str(error), _KNOWN) from None
    return made


def _entry(shard: OfferedShard) -> ShardEntry:
    files = {name: FileEntry(file.num_bytes, file.sha256) for name, file in shard.files.items()}
    return ShardEntry(shard.shard, shard.digest, shard.num_passages, shard.num_vectors, files)


def _check_entry(entry: ShardEntry, place: int) -> None:
    where = f"manifest.shards.{place}"
    if entry.shard != place:
        message = f"shard {entry.shard} stands at place {place}"
        raise RequestError(422, "wrong_value", f"{where}.shard", message, "name every shard once, from 0 on, in order")
    if layout.EMBEDDINGS not in entry.files:
        raise RequestError(422, "wrong_value", f"{where}.files", f"the shard has no {layout.EMBEDDINGS}", _KNOWN)
    covered = {name: value for name, value in asdict(entry).items() if name != "digest"}
    if digest_of(covered)[:DIGEST_HEX] != entry.digest:
        message = f"{entry.digest} is not the digest of the shard's counts and files"
        raise RequestError(422, "wrong_digest", f"{where}.digest", message, _KNOWN)
