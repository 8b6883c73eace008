"""Defines every error that a user of mvr_ray can meet.

MvrRayError
├── ConfigError          a run file or an override is wrong
├── DataError            a corpus, question or ranking file is wrong (file and line are in the message)
├── MissingInputError    a stage needs what an earlier stage makes (the message names the command)
├── EncoderError         a backbone or encoder snapshot cannot be used
│   ├── NoTokensError        a tokenizer leaves nothing of a passage
│   ├── FingerprintError     index and encoder do not belong together
│   └── ExternalEncoderError  another program has the model of an index, so no text can be embedded
├── ReaderError          a reading model cannot be used
├── CrossEncoderError    a model that scores pairs cannot be used
├── ShardIndexError      an index cannot be built, opened or searched
│   └── UnknownPassageError  an index version holds no passage of this id
├── FilterError          a filter names a field that the corpus lacks, or compares it wrongly
├── StorageError         bytes at rest are damaged or cannot be written
│   ├── AccessError          this process lacks the permission, or the file system is read-only
│   ├── NoAnswerError        an object store does not answer, or not as it should: what it holds is not known
│   ├── ManifestError        an index version cannot be described, read or published
│   │   └── PublishConflictError   another publisher took the version number
│   ├── DigestError          a file's content is not what its manifest says
│   ├── FormatError          a file has a format that this program does not read, as of a newer program
│   └── StagingError         unfinished work was damaged; the same command makes it again
├── ResourceError        the machine or cluster cannot place what was asked for
│   └── InsufficientMemoryError            a version's shards do not fit beside those that are open
├── CoverageError        some shards did not answer
│   └── DamagedShardsError   some could not, because a file of theirs is damaged (also a DigestError)
├── OverloadedError      too many calls wait already (ask again after `retry_after_s`)
├── StudyError           a step of a study failed (the message names its command)
└── RowsLostError        passages read, embedded and indexed differ in number

Each message says what failed, where, with which value, and what to do.
"""

import errno

FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of writing for lack of space: of the disk, of a quota, or within a limit on the size of files."""


class MvrRayError(Exception):
    """Base of every error raised on purpose by this package."""


class ConfigError(MvrRayError, ValueError):
    """A run file or an override is wrong."""


class DataError(MvrRayError, ValueError):
    """A corpus, question or ranking file is wrong."""


class MissingInputError(MvrRayError, FileNotFoundError):
    """A stage needs what an earlier stage makes."""


class EncoderError(MvrRayError, ValueError):
    """A backbone or an encoder snapshot cannot be used."""


class NoTokensError(EncoderError):
    """An encoder's tokenizer leaves nothing of the passage of this id."""

    def __init__(self, message: str, passage_id: str = "") -> None:
        super().__init__(message)
        self.passage_id = passage_id


class FingerprintError(EncoderError):
    """An index and an encoder do not belong together."""


class ExternalEncoderError(EncoderError):
    """Another program has the model of an index, so no text can be embedded."""


class ReaderError(MvrRayError, ValueError):
    """A reading model cannot be used."""


class CrossEncoderError(MvrRayError, ValueError):
    """A model that scores pairs of question and passage cannot be used."""


class ShardIndexError(MvrRayError, ValueError):
    """An index cannot be built, opened or searched as asked."""


class UnknownPassageError(ShardIndexError):
    """An index version holds no passage of this id."""

    def __init__(self, message: str, passage_id: str = "") -> None:
        super().__init__(message)
        self.passage_id = passage_id


class FilterError(MvrRayError, ValueError):
    """A filter does not fit the corpus: an unknown field or operator, or a value of another type."""


class StorageError(MvrRayError, OSError):
    """Bytes at rest are damaged or cannot be written."""


class AccessError(StorageError):
    """This process lacks the permission to read or write there, or the file system is read-only."""


class NoAnswerError(StorageError):
    """An object store does not answer, or not as it should: what it holds is not known."""


class ManifestError(StorageError):
    """An index version cannot be described, read or published."""


class PublishConflictError(ManifestError):
    """Another publisher created this version number first."""


class DigestError(StorageError):
    """A file's content is not what its manifest says."""


class FormatError(StorageError):
    """A file has a format that this program does not read, as a newer program writes."""


class StagingError(StorageError):
    """Unfinished work in the staging folder was damaged. The same command makes it again."""


class ResourceError(MvrRayError, RuntimeError):
    """The machine or cluster cannot place what was asked for."""


class InsufficientMemoryError(ResourceError):
    """A version's shards do not fit beside those that are open; no file of it was read."""


class CoverageError(MvrRayError, RuntimeError):
    """More passages were not searched than the asker allows. `shards` is the state of each (types.ShardState)."""

    def __init__(self, message: str, shards: tuple[object, ...] = ()) -> None:
        super().__init__(message)
        self.shards = shards


class DamagedShardsError(CoverageError, DigestError):
    """Files of shards that were to be searched are damaged; the others could be searched."""


class OverloadedError(MvrRayError, RuntimeError):
    """Too many calls wait already. Nothing was done; ask again after `retry_after_s` seconds."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class StudyError(MvrRayError, RuntimeError):
    """A step of a study failed; the finished ones are kept."""


class RowsLostError(MvrRayError, RuntimeError):
    """Passages read, embedded and indexed differ in number; the message names missing ids."""


def first_line(error: BaseException | None) -> str:
    """Return the first line of an error's message, or its class without one: others may dump their source."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def is_full_disk(error: BaseException) -> bool:
    """Return whether a write failed for lack of space; libraries in Rust name the system's error only in their
    message."""
    texts = [f"(os error {number})" for number in FULL_DISK]
    return getattr(error, "errno", None) in FULL_DISK or any(text in str(error) for text in texts)


def count_noun(number: int, noun: str) -> str:
    """Format a count with its noun: `1 passage`, `2,000 passages`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


UNREAD = {
    "encoded_cut": "longer than encoder.max_passage_tokens, and the end is not searched; set prepare.chunk_words, or "
    "encoder.overlap_tokens, and build again",
    "encoded_unknown": "a quarter or more of the text is outside the vocabulary of encoder.backbone; choose a model of "
    "its language, and build again",
}
"""What is wrong with passages that are not read whole, by the name of their count in a manifest's metrics."""
