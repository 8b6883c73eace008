"""Add a checksum to what is written, and find damage by it before anything is parsed; refuse newer formats.

JSON              its last field `checksum`: the sha256 of all other fields as canonical JSON; `format_version`, which
                  the first programs did not write into every file: a file without it has format 1
unfinished work   its last 72 bytes: `sha256: `, and the hex digits of the sha256 of all bytes before them
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mvr_ray.errors import DigestError, FormatError, StorageError

CHECKSUM = "checksum"
FORMAT_VERSION = "format_version"
_MARK = b"sha256: "
_TRAILER_BYTES = len(_MARK) + 64


def json_with_checksum(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a JSON object with its checksum as the last one."""
    return {**fields, CHECKSUM: _canonical_digest(fields)}


def parse_json(data: bytes, where: str, cure: str = "") -> dict[str, Any]:
    """Parse a JSON object, and return its fields without the checksum, which older programs did not write.

    Raises StorageError for what is no JSON object, DigestError where the checksum is another one; both say the `cure`.
    """
    advice = cure and f"; {cure}"
    try:
        fields = json.loads(data)
        if not isinstance(fields, dict):
            raise ValueError(f"it is no object but {type(fields).__name__}")
    except (ValueError, RecursionError) as error:
        raise StorageError(f"{where} is damaged ({error}){advice}") from error
    checksum = fields.pop(CHECKSUM, None)
    if checksum is not None and checksum != _canonical_digest(fields):
        raise DigestError(f"{where} is damaged (its checksum is not {checksum!r}){advice}")
    return fields


def require_format(fields: Mapping[str, Any], own: int, where: str, cure: str) -> None:
    """Raise FormatError for a file of another format than this program's own, as a newer program writes."""
    version = fields.get(FORMAT_VERSION, 1)
    if version != own:
        raise FormatError(
            f"{where} has format version {version}, this program reads {own}; use the program that wrote it, or {cure}"
        )


def with_trailer(data: bytes) -> bytes:
    """Return the bytes of a file of unfinished work, with the digest of `data` behind it."""
    return data + _MARK + hashlib.sha256(data).hexdigest().encode()


def add_trailer(file: Path) -> None:
    """Write the digest of a finished local file behind its bytes."""
    with file.open("r+b") as handle:
        handle.write(_MARK + hashlib.file_digest(handle, "sha256").hexdigest().encode())


def without_trailer(data: Any, where: str) -> memoryview:
    """Return what a file of unfinished work holds, a view of `data` (bytes, or a mapped buffer).

    Raises DigestError where the digest behind it is missing or another one.
    """
    view = memoryview(data)
    content, trailer = view[:-_TRAILER_BYTES], bytes(view[-_TRAILER_BYTES:])
    if trailer != _MARK + hashlib.sha256(content).hexdigest().encode():
        raise DigestError(f"{where} is cut short or damaged: its last bytes are not the sha256 of the others")
    return content


def _canonical_digest(fields: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
