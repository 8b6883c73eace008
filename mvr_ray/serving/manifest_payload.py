"""Validates a manifest that is sent over HTTP to be published.

What is offered is a manifest as it lies in a store (`indexes/<name>/versions/<n>.json`), of a version whose shard
folders are in the server's store already: copied there from where it was built, or left there by a version that was
collected.
"""

import json
from dataclasses import asdict, fields
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from mvr_ray.errors import MvrRayError
from mvr_ray.index.base import IndexParams
from mvr_ray.index.kinds import check_params
from mvr_ray.serving.schemas import RequestError, RequestModel
from mvr_ray.store import paths
from mvr_ray.store.manifest import DIGEST_HEX, Manifest, Number, ShardEntry, Word, digest_of

_KNOWN = "send a manifest as it lies in the store, indexes/<name>/versions/<n>.json"


@dataclass(frozen=True, config=RequestModel.model_config)
class ManifestPayload(Manifest):
    """`version`, `created` and `token` are those of where it was published before; here it gets others."""

    shards: Annotated[tuple[ShardEntry, ...], Field(min_length=1)]
    digest: Word | None = None
    """Over all other fields, as the store's file has it; absent: not looked at."""


class PublishRequest(RequestModel):
    manifest: ManifestPayload
    parent: Number | None = None
    """The version that must be the newest one now (0: there is none yet); absent: the manifest's own parent. Of two who
    publish on the same one, the first wins."""


def manifest_from_payload(request: PublishRequest, index: str) -> Manifest:
    """The manifest to publish in `index`. Raises RequestError for one that no builder has written."""
    given = request.manifest
    made = Manifest(**{field.name: getattr(given, field.name) for field in fields(Manifest)})
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


def _check_entry(entry: ShardEntry, place: int) -> None:
    where = f"manifest.shards.{place}"
    if entry.shard != place:
        message = f"shard {entry.shard} stands at place {place}"
        raise RequestError(422, "wrong_value", f"{where}.shard", message, "name every shard once, from 0 on, in order")
    if paths.EMBEDDINGS not in entry.files:
        raise RequestError(422, "wrong_value", f"{where}.files", f"the shard has no {paths.EMBEDDINGS}", _KNOWN)
    covered = {name: value for name, value in asdict(entry).items() if name != "digest"}
    if digest_of(covered)[:DIGEST_HEX] != entry.digest:
        message = f"{entry.digest} is not the digest of the shard's counts and files"
        raise RequestError(422, "wrong_digest", f"{where}.digest", message, _KNOWN)
