"""Index the words of one shard, and score its passages with BM25 over the statistics of the whole corpus.

    BM25(q, p) = sum over words w of q of  idf(w) tf(w, p) / (tf(w, p) + k1 (1 - b + b |p| / mean length))
    idf(w)     = ln(1 + (N - n(w) + 0.5) / (n(w) + 0.5))         N passages, n(w) of them with w (Lucene's form)

k1 is 0.9 and b 0.4; a passage is its title and its text. Words are the stems of a language by Snowball, or no stems;
those of English have no stop words, as in bm25s (`WordRule`). Text is in Unicode's form NFC, without characters that
are invisible within a word and with plain letters for ligatures and full-width ones; marks belong to their word, and a
run of Korean, or of a script that is written without spaces between words, gives every two neighbouring characters as a
word, as Lucene's CJKAnalyzer does. Files name their rule of words in `format`; those of an earlier rule are searched by
it, and the next `index` writes them again.
Postings hold counts, which depend on the shard alone, and statistics are in another file: so a shard with unchanged
passages keeps its postings when others change. Every step is rounded as in bm25s, so scores equal those of one bm25s
index over the whole corpus, bit for bit, for any number of shards.

Files are Arrow with one row of lists, mapped without copies: postings {term, end, row, count, length}, the statistics
{term, frequency} and the numbers of passages and words. Where few passages changed since a file was written, files of
the same form lie beside it, one for each change, in order: the postings of new and changed passages with `place`, their
rows in the shard after the change, and `hidden`, the deleted rows before it; and the differences of the statistics. So
the size of an update is proportional to its changes.

Shapes: P passages of a shard, T terms in order of their characters, N postings in order of term and row.
"""

import bisect
import math
import re
import unicodedata
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache, partial
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import regex

from mvr_ray.core.scripts import KOREAN, SPACELESS
from mvr_ray.errors import ShardIndexError
from mvr_ray.types import FloatArray, IntArray, Passage

K1, B = 0.9, 0.4
_CACHED_WORDS = 4096
_COUNTED_PASSAGES = 1000
"""Passages that are cut into words at a time."""
_WORD = re.compile(r"\b\w\w+\b")
_OTHER = re.compile(
    r"[^\x00-\xac\xae-\u012f\u0131-\u02ff\u0375-\u0482\u1e00-\u1eff\u2000-\u200c\u2010-\u2029\u202f-\u205f\u2070-\u20cf"
    r"\u2100-\u2bff]"
)
"""Text without a match, Latin, Greek or Cyrillic, has no marks, also in small letters, and nothing that `_plain`
changes: `_WORD` finds its words."""
_INVISIBLE = regex.compile(r"[[\p{Default_Ignorable_Code_Point}\u0640]--[\u200b\u200c]]", regex.VERSION1)
"""A character without a glyph, such as a soft hyphen, or the line that stretches Arabic words; without the zero-width
space and non-joiner, which stand between words and their parts."""
_FORMS = re.compile("[\ufb00-\uffef]+")
"""Ligatures, Arabic letters by their place in a word, full-width and half-width characters."""


class _Rule:
    """The patterns of words with their marks; a run of the scripts gives pairs of its characters."""

    def __init__(self, scripts: str) -> None:
        letter = rf"[[{scripts}]&&[\p{{L}}\p{{N}}]]"
        self.character = regex.compile(rf"{letter}\p{{M}}*", regex.VERSION1)
        self.run = regex.compile(
            rf"[[\p{{L}}\p{{N}}_]--{letter}][[\p{{L}}\p{{N}}\p{{M}}_]--{letter}]+"
            rf"|(?P<pairs>(?:{self.character.pattern})+)",
            regex.VERSION1,
        )

    def words(self, text: str) -> list[str]:
        """Find the words of a text in NFC and small letters."""
        words: list[str] = []
        for run in self.run.finditer(text):
            if run.lastgroup == "pairs":
                characters = self.character.findall(run[0])
                words.extend(map("".join, pairwise(characters)) if len(characters) > 1 else characters)
            else:
                words.append(run[0])
        return words


_PAIRS_WITHOUT_KOREAN, _PAIRS = _Rule(SPACELESS), _Rule(SPACELESS + KOREAN)
_STOP_WORDS = frozenset(
    _WORD.findall(
        "an and are as at be but by for if in into is it no not of on or such that the their then there these they "
        "this to was will with"
    )
)
_POSTINGS = {"term": pa.string(), "end": pa.int64(), "row": pa.int32(), "count": pa.int32(), "length": pa.int32()}
_CHANGES = {**_POSTINGS, "hidden": pa.int32(), "place": pa.int32()}
_as_numpy: Callable[[pa.Array], Any] = np.from_dlpack
"""Converts without a copy; Arrow's own to_numpy imports pandas."""
TermFrequencies = tuple[pa.Array, IntArray]
"""Ascending terms, and the number of passages with each."""
_STATISTICS = {"term": pa.string(), "frequency": pa.int64(), "size": pa.int64()}


def find_words_as_bm25s(text: str) -> list[str]:
    """Find the words of a text as bm25s does: at least two letters, digits or underscores in a row. The rule of the
    first files."""
    return _WORD.findall(text.lower())


def find_words_as_written(text: str) -> list[str]:
    """Find the words of a text, with pairs of characters of scripts without spaces, but Korean by its spaces and with
    invisible characters and ligatures as they are. The rule of the second format."""
    if text.isascii() or not _OTHER.search(text):
        return find_words_as_bm25s(text)
    return _PAIRS_WITHOUT_KOREAN.words(unicodedata.normalize("NFC", text).lower())


def find_words(text: str) -> list[str]:
    """Find the words of a text: those of bm25s, with their marks, and pairs of characters of scripts without spaces
    and of Korean, which writes particles at its words."""
    if text.isascii() or not _OTHER.search(text):
        return find_words_as_bm25s(text)
    return _PAIRS.words(_plain(text))


def _plain(text: str) -> str:
    """Return a text in NFC and small letters, the Turkish dotted capital I as i, without invisible characters and
    presentation forms."""
    text = _FORMS.sub(lambda forms: unicodedata.normalize("NFKC", forms[0]), _INVISIBLE.sub("", text))
    return unicodedata.normalize("NFC", text).lower().replace("i\u0307", "i")


FindWords = Callable[[str], list[str]]
_FORMATS: dict[bytes, FindWords] = {
    b"mvr_ray.lexical/1 bm25s": find_words_as_bm25s,
    b"mvr_ray.lexical/2 bm25s": find_words_as_written,
    b"mvr_ray.lexical/3 bm25s": find_words,
}
"""How each format finds words; the language follows. Files are written in the last."""
_ENGLISH, _NO_STEMS = "english", "none"


class WordRule(NamedTuple):
    """How texts are cut into words: `find` finds them, and the Snowball stemmer of `language` shortens them, or nothing
    ("none"). English has stop words, too."""

    language: str = _ENGLISH
    find: FindWords = find_words

    @classmethod
    def of_format(cls, own: bytes) -> Self | None:
        """Return the rule that files of a format name, None if this program does not know it."""
        name, _, code = own.rpartition(b" ")
        if name not in _FORMATS:
            return None
        language = _ENGLISH if code == b"en" else code.decode()
        return cls(language, _FORMATS[name]) if language == _NO_STEMS or _stemmer(language) else None

    @property
    def format(self) -> bytes:
        """The format of files of this rule."""
        name = next(name for name, find in _FORMATS.items() if find is self.find)
        return name + b" " + (b"en" if self.language == _ENGLISH else self.language.encode())

    def tokenize(self, texts: Sequence[str]) -> list[list[str]]:
        """Cut texts into words, in order, with repetitions; without bm25s, which takes a second to import."""
        stop_words = _STOP_WORDS if self.language == _ENGLISH else frozenset[str]()
        words = [[word for word in self.find(text) if word not in stop_words] for text in texts]
        if self.language == _NO_STEMS:
            return words
        unique = list(dict.fromkeys(chain.from_iterable(words)))
        stem_of = dict(zip(unique, _stemmer(self.language).stemWords(unique)))
        return [[stem_of[word] for word in own] for own in words]

    def count_words(self, passages: Iterable[Passage]) -> Iterator[Counter[str]]:
        """Count the words of each passage; the words of `_COUNTED_PASSAGES` passages at a time are in memory."""
        texts = map(indexed_text, passages)
        while batch := list(islice(texts, _COUNTED_PASSAGES)):
            yield from map(Counter, self.tokenize(batch))


ENGLISH = WordRule()


def indexed_text(passage: Passage) -> str:
    """Return the text of a passage that is indexed."""
    return f"{passage.title}\n{passage.text}"


class PostingsFile:
    """The postings of some passages: rows with a term, and counts. A file of changes has the row changes, too: deleted
    rows before it, and new rows after it."""

    def __init__(self, file: "_File") -> None:
        columns, self.rule = file
        self.term_T = columns["term"]
        self._place = _finder(self.term_T)
        self.end_T, self.row_N, self.count_N = (_as_numpy(columns[name]) for name in ("end", "row", "count"))
        self.length_P: IntArray = _as_numpy(columns["length"])
        self.hidden_rows, self.places = (
            _as_numpy(columns[name]) if name in columns else np.zeros(0, np.int32) for name in ("hidden", "place")
        )
        self.num_bytes = sum(column.nbytes for column in columns.values())

    @property
    def num_changes(self) -> int:
        return len(self.hidden_rows) + len(self.places)

    def slice_of(self, term: str) -> slice:
        """Return the slice of a term's postings, empty without any."""
        at = self._place(term)
        return slice(0, 0) if at < 0 else slice(int(self.end_T[at - 1]) if at else 0, int(self.end_T[at]))

    def weights(self, word: str, statistics: "CorpusStatistics") -> "WordWeights | None":
        """Compute the contributions of a word to the scores of passages; None where none has it."""
        own = self.slice_of(word)
        if own.start == own.stop or (idf := statistics.idf(word)) is None:
            return None
        rows = self.row_N[own].astype(np.intp)  # once, as numpy converts other indexes at each use
        return WordWeights(rows, statistics.weights(idf, self.count_N[own], self.length_P[rows]))


class WordWeights(NamedTuple):
    """What a word contributes to the scores of the passages of some rows, float32."""

    row_N: IntArray
    weight_N: FloatArray


Weigh = Callable[[PostingsFile, str, "CorpusStatistics"], WordWeights | None]
"""`PostingsFile.weights`, or a cache of it."""


class Postings:
    """The postings of one shard, from a file of all passages and files of later changes."""

    def __init__(self, path: Path, *changes: Path) -> None:
        """Map the files. Raises ShardIndexError for other files than postings."""
        self.whole = PostingsFile(_open(path, _POSTINGS))
        self.changes = [PostingsFile(_open(file, _CHANGES)) for file in changes]
        self.source_P = self.sources(len(changes))
        """`sources` after all files of changes."""

    def sources(self, num_changes: int) -> IntArray:
        """Return the source row of each passage of the shard after `num_changes` files of changes. Rows are numbered
        through the first file and the files of changes."""
        num_rows = len(self.whole.length_P)
        source_P: IntArray = np.arange(num_rows)
        for file in self.changes[:num_changes]:
            remaining, places = np.delete(source_P, file.hidden_rows), file.places
            source_P = np.empty(len(remaining) + len(places), np.int64)
            is_kept_P = np.ones(len(source_P), bool)
            is_kept_P[places] = False
            source_P[is_kept_P], source_P[places] = remaining, num_rows + np.arange(len(places))
            num_rows += len(places)
        return source_P

    def num_rows(self, num_changes: int) -> int:
        """Count the rows of the first file and of `num_changes` files of changes."""
        return sum(len(file.length_P) for file in (self.whole, *self.changes[:num_changes]))

    @property
    def num_passages(self) -> int:
        return len(self.source_P)

    @property
    def num_bytes(self) -> int:
        own = sum(file.num_bytes for file in (self.whole, *self.changes))
        return own + (self.source_P.nbytes if self.changes else 0)

    def scores(
        self, words: Sequence[str], statistics: "CorpusStatistics", weigh: Weigh = PostingsFile.weights
    ) -> FloatArray:
        """Compute the float32 score of every passage of the shard [P]; 0 without any of the words. Words may repeat."""
        scores = []
        for file in (self.whole, *self.changes):
            scores.append(np.zeros(len(file.length_P), np.float32))
            for word in words:
                if weights := weigh(file, word, statistics):
                    np.add.at(scores[-1], *weights)  # half the time of +=, which reads and writes apart
        return np.concatenate(scores)[self.source_P] if self.changes else scores[0]


def write_postings(passages: Iterable[Passage], path: Path, rule: WordRule = ENGLISH) -> None:
    """Write the postings of a shard's passages, in order of row. Same passages and rule, same bytes. Memory grows
    with the postings (about 32 bytes each), not with texts and words."""
    _write(path, _POSTINGS, _postings_columns(passages, rule), rule)


def write_postings_changes(
    passages: Sequence[Passage], places: IntArray, hidden_rows: IntArray, path: Path, rule: WordRule = ENGLISH
) -> None:
    """Write the postings of passages with their rows in the shard after a change (`places`, ascending), and the deleted
    rows before it."""
    _write(path, _CHANGES, {**_postings_columns(passages, rule), "hidden": hidden_rows, "place": places}, rule)


def _postings_columns(passages: Iterable[Passage], rule: WordRule) -> dict[str, Any]:
    number_of: dict[str, int] = {}  # in order of occurrence
    numbers, counts, sizes, lengths = (array("i") for _ in range(4))
    for own in rule.count_words(passages):
        numbers.extend(number_of.setdefault(term, len(number_of)) for term in own)
        counts.extend(own.values())
        sizes.append(len(own))
        lengths.append(own.total())
    terms = sorted(number_of)
    place_of = np.empty(len(terms), np.int32)
    place_of[[number_of[term] for term in terms]] = np.arange(len(terms))
    terms_N = place_of[np.asarray(numbers)]
    order_N = np.argsort(terms_N, kind="stable")
    return {
        "term": terms,
        "end": np.cumsum(np.bincount(terms_N, minlength=len(terms))),
        "row": np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)[order_N],
        "count": np.asarray(counts)[order_N],
        "length": np.asarray(lengths),
    }


class WordCounts(NamedTuple):
    """Numbers of passages and of words, and the number of passages with each term; or differences of these."""

    num_passages: int
    num_words: int
    frequencies: Mapping[str, int]

    @classmethod
    def difference(cls, after: Sequence[Passage], before: Sequence[Passage], rule: WordRule = ENGLISH) -> Self:
        """Subtract the counts of `before` from those of `after`."""
        frequencies: Counter[str] = Counter()
        num_words = 0
        for sign, passages in ((1, after), (-1, before)):
            for counts in rule.count_words(passages):
                num_words += sign * counts.total()
                for word in counts:
                    frequencies[word] += sign
        return cls(len(after) - len(before), num_words, frequencies)


class CorpusStatistics:
    """The statistics behind the weights of words: number and mean length of passages, and document frequencies."""

    def __init__(self, path: Path, *changes: Path) -> None:
        """Map the file, and those of changes. Raises ShardIndexError for other files than statistics."""
        files = [_open(file, _STATISTICS) for file in (path, *changes)]
        columns = [file.columns for file in files]
        self.rule = files[0].rule
        self.frequencies: list[TermFrequencies] = [(own["term"], _as_numpy(own["frequency"])) for own in columns]
        self._places = [_finder(term_T) for term_T, _ in self.frequencies]
        self.sizes: list[list[int]] = [own["size"].to_pylist() for own in columns]
        self.num_passages, self.num_words = (sum(column) for column in zip(*self.sizes))
        self.num_bytes = sum(column.nbytes for own in columns for column in own.values())

    @property
    def num_terms(self) -> int:
        """Number of terms of the first file."""
        return len(self.frequencies[0][0])

    @property
    def num_changes(self) -> list[int]:
        """Numbers of terms of each file of changes."""
        return [len(term_T) for term_T, _ in self.frequencies[1:]]

    @property
    def mean_length(self) -> float:
        return self.num_words / max(self.num_passages, 1)

    def idf(self, term: str) -> np.float32 | None:
        """Compute the weight of a term; None where no passage has it."""
        places = [(place(term), own_T) for place, (_, own_T) in zip(self._places, self.frequencies)]
        frequency = sum(int(own_T[at]) for at, own_T in places if at >= 0)
        if not frequency:
            return None
        return np.float32(math.log(1 + (self.num_passages - frequency + 0.5) / (frequency + 0.5)))

    def weights(self, idf: np.float32, count_N: IntArray, length_N: IntArray) -> FloatArray:
        """Compute a term's contributions to scores, rounded to float32, from its counts and the passages' lengths."""
        norm_N = K1 * ((1 - B) + B * length_N / self.mean_length)
        counts = count_N.astype(np.float64)
        return (np.float64(idf) * (counts / (norm_N + counts))).astype(np.float32)

    def score(self, words: Sequence[str], counts: Counter[str]) -> float:
        """Score one passage as the index does, from its word counts (`WordRule.count_words`)."""
        length_1, score = np.array([counts.total()]), np.float32(0)
        for word in words:
            if counts[word] and (idf := self.idf(word)) is not None:
                score += self.weights(idf, np.array([counts[word]]), length_1)[0]
        return float(score)


def write_statistics(shards: Sequence[PostingsFile], path: Path) -> None:
    """Write the statistics of a corpus from the complete postings of all its shards."""
    frequencies = [(postings.term_T, np.diff(postings.end_T, prepend=0)) for postings in shards]
    num_words = sum(int(postings.length_P.sum(dtype=np.int64)) for postings in shards)
    size = [sum(len(postings.length_P) for postings in shards), num_words]
    _write_frequencies(path, frequencies, size, shards[0].rule)


def write_statistics_changes(before: CorpusStatistics, num_kept: int, change: WordCounts, path: Path) -> None:
    """Write the statistics after a change less those of the first `num_kept` files; with 0, the bytes of
    `write_statistics` over the changed corpus."""
    terms, counts = list(change.frequencies), list(change.frequencies.values())
    own = pa.array(terms, pa.string()), np.array(counts, np.int64)
    totals = [sum(column) for column in zip(*before.sizes[num_kept:], (change.num_passages, change.num_words))]
    _write_frequencies(path, [*before.frequencies[num_kept:], own], totals, before.rule)


def _write_frequencies(path: Path, frequencies: Sequence[TermFrequencies], size: list[int], rule: WordRule) -> None:
    """Write sums of frequencies by term, except zeros."""
    table = pa.table(
        {
            "term": pa.chunked_array([term_T for term_T, _ in frequencies], pa.string()),
            "frequency": np.concatenate([np.empty(0, np.int64), *(own_T for _, own_T in frequencies)]),
        }
    )
    sums = table.group_by("term").aggregate([("frequency", "sum")]).sort_by("term")
    sums = sums.filter(pc.not_equal(sums.column("frequency_sum"), 0))  # pyrefly: ignore
    terms, counts = (sums.column(name).combine_chunks() for name in ("term", "frequency_sum"))
    _write(path, _STATISTICS, {"term": terms, "frequency": counts, "size": size}, rule)


@cache
def _stemmer(language: str) -> Any:
    """Return the stemmer of a language, None if this version of Snowball has none."""
    import Stemmer  # type: ignore[missing-import]

    return Stemmer.Stemmer(language) if language in Stemmer.algorithms() else None


def _find(term_T: pa.Array, term: str) -> int:
    """Return the position of a term in ascending terms, -1 without it."""
    at = bisect.bisect_left(range(len(term_T)), term, key=lambda place: term_T[place].as_py())
    return at if at < len(term_T) and term_T[at].as_py() == term else -1


def _finder(term_T: pa.Array) -> Callable[[str], int]:
    """Return `_find` among these terms, which caches the last words: questions share most of theirs, and every shard
    needs the frequency of each."""
    return lru_cache(_CACHED_WORDS)(partial(_find, term_T))


def _write(path: Path, types: dict[str, pa.DataType], columns: dict[str, Any], rule: WordRule) -> None:
    """Write one row: a list for each column."""
    values = [
        own if isinstance(own := columns[name], pa.Array) else pa.array(own, kind) for name, kind in types.items()
    ]
    lists = [pa.LargeListArray.from_arrays(pa.array([0, len(own)], pa.int64()), own) for own in values]
    schema = pa.schema([(name, pa.large_list(kind)) for name, kind in types.items()], {b"format": rule.format})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as file:
        file.write_batch(pa.record_batch(lists, schema=schema))


class _File(NamedTuple):
    """The lists of a file, and the rule of its words."""

    columns: dict[str, pa.Array]
    rule: WordRule


def read_rule(path: Path) -> WordRule:
    """Read the rule of the words of a file. Raises ShardIndexError for another file."""
    return _open(path).rule


def _open(path: Path, types: Collection[str] = ()) -> _File:
    """Map the lists of the single row, of these names if any."""
    try:
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
        batch = reader.get_batch(0)
        own, names = (reader.schema.metadata or {}).get(b"format", b"no format"), batch.schema.names
        rule = WordRule.of_format(own)
        if rule is None or names != list(types or names):
            formats = f"{ENGLISH.format.decode()}, that of another language or an earlier one"
            raise pa.ArrowInvalid(f"its format is {own.decode()}, not {formats}")
    except (pa.ArrowInvalid, OSError) as error:
        raise ShardIndexError(
            f"{path} holds no words of a shard that this program reads ({error}); index again: mvr-ray index CONFIG"
        ) from error
    return _File({name: batch.column(name)[0].values for name in names}, rule)
