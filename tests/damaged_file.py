"""Damages files of a store."""

from pathlib import Path


def flip_byte(file: Path, at: int | None = None) -> None:
    """Put in the file's place one with another byte at `at`, or in its middle; what is mapped stays as it was."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2 if at is None else at] ^= 4
    file.unlink()
    file.write_bytes(data)
