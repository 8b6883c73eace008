"""Index the words of one shard, and score its passages with BM25 over the statistics of the whole corpus.

    BM25(q, p) = sum over words w of q of  idf(w) tf(w, p) / (tf(w, p) + k1 (1 - b + b |p| / mean length))
    idf(w)     = ln(1 + (N - n(w) + 0.5) / (n(w) + 0.5))         N passages, n(w) of them with w (Lucene's form)

k1 is 0.9 and b 0.4; words are English stems without stop words, as bm25s cuts them; a passage is its title and its
text. Postings hold counts, which depend on the shard alone, and statistics come from another file: so a shard whose
passages stay the same keeps its postings whatever changed around it. Every step is rounded as in bm25s, so a score is
that of one bm25s index over the whole corpus, to the last bit, in however many shards the corpus lies.

Both files are Arrow with one row of lists, mapped and never copied: postings {term, end, row, count, length}, the
statistics {term, frequency} and the numbers of passages and words.

Shapes: P passages of a shard, T terms in order of their characters, N postings in order of term and row.
"""

import bisect
import math
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import pyarrow as pa

from mvr_ray.errors import ShardIndexError
from mvr_ray.types import FloatArray, IntArray, Passage

K1, B = 0.9, 0.4
_FORMAT = b"mvr_ray.lexical/1 bm25s en"
_STOP_WORDS = "en"
_POSTINGS = {"term": pa.string(), "end": pa.int64(), "row": pa.int32(), "count": pa.int32(), "length": pa.int32()}
_STATISTICS = {"term": pa.string(), "frequency": pa.int64(), "size": pa.int64()}


def tokenize(texts: Sequence[str]) -> list[list[str]]:
    """Cut texts into stems without stop words, in order, each as often as it stands there."""
    import bm25s

    tokens: Any = bm25s.tokenize(
        list(texts), stopwords=_STOP_WORDS, stemmer=_stemmer(), return_ids=False, show_progress=False
    )
    return tokens


def indexed_text(passage: Passage) -> str:
    """The text of a passage that its words are taken from."""
    return f"{passage.title}\n{passage.text}"


class Postings:
    """The words of one shard's passages: which rows have a term, and how often."""

    def __init__(self, path: Path) -> None:
        """Map the file. Raises ShardIndexError where it is none of postings."""
        columns = _open(path, _POSTINGS)
        self.term_T = columns["term"]
        self.end_T, self.row_N, self.count_N = (columns[name].to_numpy() for name in ("end", "row", "count"))
        self.length_P: IntArray = columns["length"].to_numpy()

    @property
    def num_passages(self) -> int:
        return len(self.length_P)

    def slice_of(self, term: str) -> slice:
        """Where the postings of a term lie; an empty slice for one that no passage has."""
        at = _find(self.term_T, term)
        return slice(0, 0) if at < 0 else slice(int(self.end_T[at - 1]) if at else 0, int(self.end_T[at]))


def write_postings(passages: Sequence[Passage], path: Path) -> None:
    """Write the postings of a shard's passages, in order of row. Same passages, same bytes."""
    counts = [Counter(words) for words in tokenize([indexed_text(passage) for passage in passages])]
    terms = sorted(set().union(*counts))
    number_of = {term: number for number, term in enumerate(terms)}
    rows_N = np.repeat(np.arange(len(counts)), [len(own) for own in counts])
    terms_N = np.array([number_of[term] for own in counts for term in own], np.int64)
    counts_N = np.array([count for own in counts for count in own.values()], np.int64)
    order_N = np.lexsort((rows_N, terms_N))
    columns = {
        "term": terms,
        "end": np.cumsum(np.bincount(terms_N, minlength=len(terms))),
        "row": rows_N[order_N],
        "count": counts_N[order_N],
        "length": [own.total() for own in counts],
    }
    _write(path, _POSTINGS, columns)


class CorpusStatistics:
    """What the weight of a word depends on: the corpus's passages, their mean length, and how many have a term."""

    def __init__(self, path: Path) -> None:
        """Map the file. Raises ShardIndexError where it is none of statistics."""
        columns = _open(path, _STATISTICS)
        self.term_T, self.frequency_T = columns["term"], columns["frequency"].to_numpy()
        self.num_passages, self.num_words = columns["size"].to_pylist()

    @property
    def mean_length(self) -> float:
        return self.num_words / max(self.num_passages, 1)

    def idf(self, term: str) -> np.float32 | None:
        """The weight of a term; None for one that no passage has."""
        at = _find(self.term_T, term)
        if at < 0:
            return None
        frequency = int(self.frequency_T[at])
        return np.float32(math.log(1 + (self.num_passages - frequency + 0.5) / (frequency + 0.5)))

    def weights(self, idf: np.float32, count_N: IntArray, length_N: IntArray) -> FloatArray:
        """What a term with these counts adds to the scores of passages of these lengths, rounded to float32."""
        norm_N = K1 * ((1 - B) + B * length_N / self.mean_length)
        counts = count_N.astype(np.float64)
        return (np.float64(idf) * (counts / (norm_N + counts))).astype(np.float32)

    def score(self, words: Sequence[str], passage: Passage) -> float:
        """Score one passage as the index does, from its text."""
        counts = Counter(tokenize([indexed_text(passage)])[0])
        length_1, score = np.array([counts.total()]), np.float32(0)
        for word in words:
            if counts[word] and (idf := self.idf(word)) is not None:
                score += self.weights(idf, np.array([counts[word]]), length_1)[0]
        return float(score)


def write_statistics(shards: Sequence[Postings], path: Path) -> None:
    """Write the statistics of a corpus from the postings of all its shards."""
    frequencies = [np.diff(postings.end_T, prepend=0) for postings in shards]
    table = pa.table(
        {
            "term": pa.chunked_array([postings.term_T for postings in shards], pa.string()),
            "frequency": np.concatenate([np.empty(0, np.int64), *frequencies]),
        }
    )
    summed = table.group_by("term").aggregate([("frequency", "sum")]).sort_by("term").combine_chunks()
    num_words = sum(int(postings.length_P.sum(dtype=np.int64)) for postings in shards)
    columns = {
        "term": summed.column("term").to_pylist(),
        "frequency": summed.column("frequency_sum").to_pylist(),
        "size": [sum(postings.num_passages for postings in shards), num_words],
    }
    _write(path, _STATISTICS, columns)


class LexicalIndex(NamedTuple):
    """The postings of one shard with the statistics of its corpus."""

    postings: Postings
    statistics: CorpusStatistics

    @classmethod
    def open(cls, postings: Path, statistics: Path) -> Self:
        """Map both files. Raises ShardIndexError."""
        return cls(Postings(postings), CorpusStatistics(statistics))

    @property
    def num_bytes(self) -> int:
        """The bytes of the postings."""
        postings = self.postings
        arrays = (postings.end_T, postings.row_N, postings.count_N, postings.length_P)
        return postings.term_T.nbytes + sum(one.nbytes for one in arrays)

    def scores(self, words: Sequence[str]) -> FloatArray:
        """The float32 score of every passage [P]; 0 for one that has none of the words. Words may come twice."""
        score_P = np.zeros(self.postings.num_passages, np.float32)
        for word in words:
            own = self.postings.slice_of(word)
            if own.start < own.stop and (idf := self.statistics.idf(word)) is not None:
                rows = self.postings.row_N[own]
                lengths = self.postings.length_P[rows]
                score_P[rows] += self.statistics.weights(idf, self.postings.count_N[own], lengths)
        return score_P


@cache
def _stemmer() -> Any:
    import Stemmer  # type: ignore[missing-import]

    return Stemmer.Stemmer("english")


def _find(term_T: pa.Array, term: str) -> int:
    """The place of a term among ascending ones, -1 where it is none of them."""
    at = bisect.bisect_left(range(len(term_T)), term, key=lambda place: term_T[place].as_py())
    return at if at < len(term_T) and term_T[at].as_py() == term else -1


def _write(path: Path, types: dict[str, pa.DataType], columns: dict[str, Any]) -> None:
    """Write one row: a list for each column."""
    values = {name: pa.array(columns[name], kind) for name, kind in types.items()}
    lists = [pa.LargeListArray.from_arrays(pa.array([0, len(own)], pa.int64()), own) for own in values.values()]
    schema = pa.schema([(name, pa.large_list(kind)) for name, kind in types.items()], {b"format": _FORMAT})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as file:
        file.write_batch(pa.record_batch(lists, schema=schema))


def _open(path: Path, types: dict[str, pa.DataType]) -> dict[str, pa.Array]:
    """Map the lists of the one row."""
    try:
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
        batch = reader.get_batch(0)
        if (reader.schema.metadata or {}).get(b"format") != _FORMAT or batch.schema.names != list(types):
            raise pa.ArrowInvalid("it is of another format")
    except (pa.ArrowInvalid, OSError) as error:
        raise ShardIndexError(
            f"{path} holds no words of a shard that this program reads ({error}); index again: mvr-ray index CONFIG"
        ) from error
    return {name: batch.column(name)[0].values for name in types}
