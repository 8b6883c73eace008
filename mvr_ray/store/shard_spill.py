"""Divide passages among shards in scratch files, and read them back sorted, a shard at a time.

Memory is bounded for any number of shards and passages.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from mvr_ray.store.corpus import shard_of
from mvr_ray.store.fields import read_fields, to_json
from mvr_ray.store.formats.records import BadRow, PassageRecord
from mvr_ray.types import Passage

MAX_WAITING_CHARS = 1 << 26


class SortedShard(NamedTuple):
    """One shard's passages in id order, rows whose id another passage has, and the number of repeats."""

    passages: list[Passage]
    bad: list[BadRow]
    repeats: int


class ShardSpill:
    """`add` everything, then `unique(shard)` for each shard. `types` are those of the passages' fields, in the order
    in which they are read back."""

    def __init__(self, folder: Path, num_shards: int, types: Mapping[str, str]) -> None:
        folder.mkdir()
        self.types = types
        self.num_shards = num_shards
        self.num_added = 0
        self._folder = folder
        self._waiting: dict[int, list[str]] = {}
        self._num_waiting_chars = 0

    def add(self, record: PassageRecord) -> None:
        id_, title, text, fields = record.passage
        values = {name: to_json(value) for name, value in fields}
        line = json.dumps([id_, title, text, record.where, record.repeats, values])
        shard = shard_of(record.passage.id, self.num_shards)
        self._waiting.setdefault(shard, []).append(line)
        self.num_added += 1
        self._num_waiting_chars += len(line)
        if self._num_waiting_chars > MAX_WAITING_CHARS:
            self._flush()

    def unique(self, shard: int) -> SortedShard:
        """Sort the shard's passages by id and keep the first of each; others of an id are repeats or bad rows."""
        self._flush()
        records = sorted(self._read(shard), key=lambda record: record.passage.id)
        passages: list[Passage] = []
        bad: list[BadRow] = []
        repeats = 0
        first = ""
        for record in records:
            if not passages or record.passage.id != passages[-1].id:
                passages.append(record.passage)
                first = record.where
            elif record.repeats and record.passage == passages[-1]:
                repeats += 1
            else:
                bad.append(BadRow(record.where, f"passage id {record.passage.id!r} already occurs in {first}"))
        return SortedShard(passages, bad, repeats)

    def _read(self, shard: int) -> Iterator[PassageRecord]:
        path = self._path(shard)
        if path.exists():
            with path.open(encoding="ascii") as file:
                for line in file:
                    id_, title, text, where, repeats, values = json.loads(line)
                    yield PassageRecord(Passage(id_, title, text, read_fields(values, self.types)), where, repeats)

    def _flush(self) -> None:
        for shard, lines in self._waiting.items():
            with self._path(shard).open("a", encoding="ascii") as file:
                file.writelines(f"{line}\n" for line in lines)
        self._waiting = {}
        self._num_waiting_chars = 0

    def _path(self, shard: int) -> Path:
        return self._folder / f"{shard}.jsonl"
