"""Read JSON piece by piece: memory holds the largest item, not the file.

    reader = JsonReader(file, "train.json")
    for row in reader.items():          an array, item by item
    for key in reader.members():        an object, key by key; read each value before the next key

A broken file is a DataError with the line at which it breaks. So is a key that an object has twice, of whose values
Python keeps the last one.
"""

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any, TextIO

from mvr_ray.errors import DataError

READ_CHARS = 1 << 20
"""An item that a piece cuts off is decoded again from its start: a row of DPR's files has 125,000 characters."""
MAX_ITEM_CHARS = 1 << 28
NEAR_END_CHARS = 16
NUMBER_TAIL_CHARS = 2
_SPACE = " \t\n\r"


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        key = next(key for key in counts if counts[key] > 1)
        raise ValueError(f"an object has the key {key!r:.40} twice; remove or rename one")
    return values


DECODER = json.JSONDecoder(object_pairs_hook=_unique_keys)
"""Raises ValueError for JSON that is broken, or has a key twice."""


class JsonReader:
    """Reads one JSON text. `line` is the number of the line to be read next."""

    def __init__(self, file: TextIO, name: str) -> None:
        self.name = name
        self.line = 1
        self._file = file
        self._buffer = ""
        self._at = 0
        self._at_end = False

    def peek(self) -> str:
        """Return the next character that is not white space; empty at the end of the file."""
        while True:
            stop = self._at
            while stop < len(self._buffer) and self._buffer[stop] in _SPACE:
                stop += 1
            self._advance(stop)
            if stop < len(self._buffer):
                return self._buffer[stop]
            if not self._more(READ_CHARS):
                return ""

    def value(self) -> Any:
        """Read the next value, whole."""
        self.peek()
        num_chars = READ_CHARS
        while True:
            try:
                value, stop = DECODER.raw_decode(self._buffer, self._at)
            except json.JSONDecodeError as error:
                offset = error.pos - self._at
                is_cut = error.pos >= len(self._buffer) - NEAR_END_CHARS or error.msg.startswith("Unterminated string")
                if not is_cut or not self._more(num_chars):
                    raise self._format_error(error.msg, self._at + offset) from None
            except ValueError as error:
                raise self._format_error(str(error), self._at) from None
            except RecursionError:
                raise self._format_error("nested too deeply", self._at) from None
            else:
                # A number close to the end of the buffer may go on, as `1` does in `1.5` and `1e+5`.
                if stop + NUMBER_TAIL_CHARS < len(self._buffer) or not self._more(num_chars):
                    self._advance(stop)
                    return value
            num_chars *= 2
            if len(self._buffer) - self._at > MAX_ITEM_CHARS:
                raise self._format_error(f"one item is longer than {MAX_ITEM_CHARS} characters", self._at)

    def items(self) -> Iterator[Any]:
        """Yield the items of an array; `line` is the line where the last one ends."""
        for _ in self._entries("[", "]"):
            yield self.value()

    def members(self) -> Iterator[str]:
        """Yield the keys of an object; the caller reads each key's value before asking for the next."""
        keys: set[str] = set()
        for _ in self._entries("{", "}"):
            key = self.value()
            if not isinstance(key, str):
                raise self._format_error(f"a key is {key!r:.40}, not a text", self._at)
            if key in keys:
                raise self._format_error(f"an object has the key {key!r:.40} twice; remove or rename one", self._at)
            keys.add(key)
            self._take(":")
            yield key

    def _entries(self, opening: str, closing: str) -> Iterator[None]:
        """Read what stands around and between entries; the caller reads each entry before asking for the next."""
        self._take(opening)
        if self.peek() != closing:
            yield
            while self.peek() != closing:
                self._take(",")
                yield
        self._take(closing)

    def finish(self) -> None:
        """Raise DataError if anything follows."""
        if rest := self.peek():
            raise self._format_error(f"the JSON text ends, but {rest!r} follows", self._at)

    def _take(self, char: str) -> None:
        next_char = self.peek()
        if next_char != char:
            reason = f"{char!r} expected, {next_char!r} found" if next_char else f"{char!r} expected"
            raise self._format_error(reason, self._at)
        self._advance(self._at + 1)

    def _advance(self, to: int) -> None:
        self.line += self._buffer.count("\n", self._at, to)
        self._at = to

    def _more(self, num_chars: int) -> bool:
        """Drop the characters already read and read more; False at the end of the file."""
        if self._at_end:
            return False
        piece = self._file.read(num_chars)
        if not piece:
            self._at_end = True
            return False
        self._buffer = self._buffer[self._at :] + piece
        self._at = 0
        return True

    def _format_error(self, reason: str, position: int) -> DataError:
        line = self.line + self._buffer.count("\n", self._at, position)
        end = " (the file ends here)" if self._at_end and position >= len(self._buffer) - 1 else ""
        return DataError(f"{self.name}:{line}: not valid JSON: {reason}{end}")
