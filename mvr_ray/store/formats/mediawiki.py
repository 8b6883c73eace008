"""Read MediaWiki XML dumps (`pages-articles`): an article is a passage of plain text under its page id.

The ids of page and revision are fields, `page_id` and `revision_id`.

The XML is read as a stream, a page at a time, and mwparserfromhell parses the wikitext. The result is what
a reader sees as running text: paragraphs, headings, and list items, each on a line of its own. Templates, tables,
references, files, categories, galleries, formulas and comments are removed, and headings with nothing under them.

They are removed between mwparserfromhell's two steps, tokens and nodes: nodes take most of its time, and most are
those of templates, tables and references. Markup of bold and italics is left to `plain_line`: parsed as nodes, a pair
that is not closed would hide the references around it from the parser.
"""

import copy
import itertools
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unicodedata import category

from mwparserfromhell.nodes import ExternalLink, Heading, HTMLEntity, Tag, Text, Wikilink
from mwparserfromhell.parser import CTokenizer, ParserError, tokens
from mwparserfromhell.parser.builder import Builder
from mwparserfromhell.parser.tokenizer import Tokenizer
from mwparserfromhell.wikicode import Wikicode

from mvr_ray.errors import DataError
from mvr_ray.store.formats.records import BadRow, DroppedRow, Record, passage_record
from mvr_ray.store.formats.text_files import open_bytes


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


ARTICLES = "0"
FILES_AND_CATEGORIES = ("6", "14")
HIDDEN_NAMES = _names("file image category")
"""Namespaces whose links show no text, as every wiki knows them; a dump adds the names in its own language."""
HIDDEN_TAGS = _names(
    "ref references table tr td th gallery math imagemap timeline score graph mapframe maplink categorytree inputbox "
    "indicator templatedata templatestyles section style includeonly"
)
BLOCK_TAGS = _names("blockquote br center dd div dl dt hr li ol p poem pre source syntaxhighlight ul")
SWITCHES = _names(
    "__NOTOC__ __FORCETOC__ __TOC__ __NOEDITSECTION__ __NEWSECTIONLINK__ __NONEWSECTIONLINK__ __NOGALLERY__ "
    "__HIDDENCAT__ __NOCONTENTCONVERT__ __NOCC__ __NOTITLECONVERT__ __NOTC__ __INDEX__ __NOINDEX__ __STATICREDIRECT__ "
    "__DISAMBIG__ __NOGLOBAL__ __EXPECTUNUSEDCATEGORY__ __EXPECTUNUSEDTEMPLATE__"
)
HIDDEN_OPENINGS = (tokens.TemplateOpen, tokens.ArgumentOpen, tokens.CommentStart)
OPENINGS = (*HIDDEN_OPENINGS, tokens.TagOpenOpen)
CLOSINGS = (
    tokens.TemplateClose,
    tokens.ArgumentClose,
    tokens.CommentEnd,
    tokens.TagCloseSelfclose,
    tokens.TagCloseClose,
)
_CONVERSION = re.compile(r"-\{([^{}]*)\}-")
"""Text in several variants of a language, as of Chinese: -{zh-hans:..;zh-hant:..}-, -{FLAGS|RULES}- or -{text}-."""
_VARIANT = re.compile(r"\s*[a-z]{2,3}(?:-[a-z]+)*\s*:")
_SILENT_FLAGS = {"H", "T", "-"}
REVISION_FIELD = "revision_id"
MAX_ID_DIGITS = 18
"""What every number of so many digits fits: 64 bits."""
HEADING = "\x01"
"""Marks the line of a heading, once for each of its levels; XML has no such character."""


class Page(NamedTuple):
    """A page with its last revision in the file; a text but `model` is empty where the XML has no such element."""

    id: str
    title: str
    namespace: str
    is_redirect: bool
    revision: str
    model: str
    text: str
    num_bytes: int
    is_deleted: bool
    hidden_names: frozenset[str]


def read_mediawiki(path: Path) -> Iterator[Record]:
    """Read the articles of a dump; redirects and pages of other namespaces or without text are dropped rows.

    Raises DataError for a file that is no dump, or breaks off.
    """
    for page in read_pages(path):
        yield page_record(page, str(path))


def read_pages(path: Path) -> Iterator[Page]:
    """Stream the pages of a dump; memory holds one of them."""
    with open_bytes(path) as file:
        try:
            events = ET.iterparse(file, events=("start", "end"))
            _, root = next(events)
            space, brace, name = root.tag.rpartition("}")
            if name != "mediawiki":
                raise DataError(
                    f"{path} is no MediaWiki dump: its first element is <{name}>, not <mediawiki>; take a file named "
                    f"like enwiki-latest-pages-articles.xml.bz2, or set the source's format"
                )
            yield from _pages(root, events, space + brace)
        except DataError:
            raise
        except (ET.ParseError, LookupError, ValueError) as error:  # an encoding that expat lacks, a number too long
            raise DataError(
                f"{path} is not a whole MediaWiki dump: its XML is broken or ends too early ({error}); fetch it again"
            ) from error


def page_record(page: Page, file: str) -> Record:
    """Make the passage of a page, or a bad or dropped row with the reason."""
    where = f"{file} (page {page.id or '?'}, revision {page.revision or '?'}, {page.title!r})"
    if not _is_id(page.id) or not page.title or not page.namespace:
        return BadRow(where, "a page lacks its <id>, <title> or <ns>, which dumps have since export format 0.6")
    reasons = {
        "page of another namespace": page.namespace != ARTICLES,
        "redirect": page.is_redirect,
        "page of another content model": page.model != "wikitext",
        "page whose text is deleted": page.is_deleted,
    }
    for reason, applies in reasons.items():
        if applies:
            return DroppedRow(where, reason, is_passage=True)
    if page.num_bytes and not page.text:
        return BadRow(where, f"the dump leaves out the {page.num_bytes} bytes of this page; take one with texts")
    try:
        text = plain_text(page.text, page.hidden_names)
    except (ParserError, RecursionError) as error:
        return BadRow(where, f"the wikitext cannot be parsed: {type(error).__name__}: {error}")
    if not text:
        return DroppedRow(where, "page without running text", is_passage=True)
    extras = {"page_id": int(page.id)}
    if _is_id(page.revision):
        extras[REVISION_FIELD] = int(page.revision)
    return passage_record(page.id, page.title, text, where, extras=extras)


def _is_id(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= MAX_ID_DIGITS


def plain_text(wikitext: str, hidden_names: frozenset[str] = HIDDEN_NAMES) -> str:
    """Return the running text of wikitext, a line each paragraph, heading and list item; single spaces between words.

    Links to namespaces in `hidden_names` (lower case) show nothing. Unclosed markup stays as text.
    """
    lines: list[str] = []
    headings: list[str] = []
    visible = "".join(_visible(parse(wikitext), hidden_names))
    for raw in _CONVERSION.sub(_first_variant, visible).split("\n"):
        line = plain_line(raw)
        if not any(char.isalnum() for char in line):
            continue
        if level := _level(line):
            headings = [*(heading for heading in headings if _level(heading) < level), line]
        else:
            lines += (heading.lstrip(HEADING) for heading in headings)
            lines.append(line)
            headings = []
    return "\n".join(lines)


def parse(wikitext: str) -> Wikicode:
    """Parse wikitext without its templates, arguments, comments and the tags in `HIDDEN_TAGS`."""
    tokenizer: Any = (CTokenizer or Tokenizer)()
    all_tokens: list[tokens.Token] = tokenizer.tokenize(wikitext, 0, True)  # no context, and no nodes for apostrophes
    return Builder().build(list(_visible_tokens(all_tokens)))


def plain_line(line: str) -> str:
    """Remove apostrophes of bold and italics, switches such as `__NOTOC__` and white space from a line.

    Runs of apostrophes are read as MediaWiki's `doQuotes` reads them: two are italics, three bold, five both, what is
    over stays. Where bold and italics are both left open, one run of three is an apostrophe and italics.
    """
    if "''" in line:
        runs = ["".join(group) for _, group in itertools.groupby(line, key="'".__eq__)]
        marks = [_mark(run) for run in runs]
        bold = [i for i, mark in enumerate(marks) if mark == 3]
        if bold and (len(bold) + marks.count(5)) % 2 and (marks.count(2) + marks.count(5)) % 2:
            marks[min(bold, key=lambda i: _rank_as_apostrophe(runs[i - 1] if i else " "))] = 2
        line = "".join(run[mark:] for run, mark in zip(runs, marks))
    words = line.split()
    return " ".join(word for word in words if word not in SWITCHES) if "__" in line else " ".join(words)


def _pages(root: ET.Element, events: Iterator[tuple[str, ET.Element]], space: str) -> Iterator[Page]:
    hidden_names = HIDDEN_NAMES
    last = ET.Element("revision")
    for event, element in events:
        if event == "start":
            continue
        if element.tag == f"{space}namespace" and element.get("key") in FILES_AND_CATEGORIES:
            hidden_names |= {(element.text or "").lower()} - {""}
        elif element.tag == f"{space}revision":
            last = copy.copy(element)
            element.clear()  # of a full history, memory holds one revision
        elif element.tag == f"{space}page":
            text = last.find(f"{space}text")
            num_bytes = "0" if text is None else text.get("bytes", "0")
            yield Page(
                id=element.findtext(f"{space}id", ""),
                title=element.findtext(f"{space}title", ""),
                namespace=element.findtext(f"{space}ns", ""),
                is_redirect=element.find(f"{space}redirect") is not None,
                revision=last.findtext(f"{space}id", ""),
                model=last.findtext(f"{space}model", "wikitext"),
                text="" if text is None else text.text or "",
                num_bytes=int(num_bytes) if num_bytes.isdecimal() else 0,
                is_deleted=text is not None and text.get("deleted") is not None,
                hidden_names=hidden_names,
            )
            last = ET.Element("revision")
            root.clear()


def _visible_tokens(all_tokens: Sequence[tokens.Token]) -> Iterator[tokens.Token]:
    """Leave out what lies between a hidden opening and its closing; openings and closings are always paired."""
    depth = 0
    for i, token in enumerate(all_tokens):
        if depth:
            depth += isinstance(token, OPENINGS) - isinstance(token, CLOSINGS)
        elif isinstance(token, HIDDEN_OPENINGS) or (
            isinstance(token, tokens.TagOpenOpen) and (all_tokens[i + 1].text or "").strip().lower() in HIDDEN_TAGS
        ):
            depth = 1
        else:
            yield token


def _visible(code: Wikicode, hidden_names: frozenset[str]) -> Iterator[str]:
    """Yield the text that a reader sees, piece by piece."""
    for node in code.nodes:
        if isinstance(node, Text):
            yield node.value
        elif isinstance(node, HTMLEntity):
            yield _character(node)
        elif isinstance(node, Heading):
            title = " ".join("".join(_visible(node.title, hidden_names)).split())
            yield f"\n{HEADING * node.level}{title}\n"
        elif isinstance(node, Wikilink):
            yield from _link(node, hidden_names)
        elif isinstance(node, ExternalLink):
            if node.title is not None:
                yield from _visible(node.title, hidden_names)
            elif not node.brackets:
                yield str(node.url)
        elif isinstance(node, Tag):
            is_block = not node.wiki_markup and str(node.tag).strip().lower() in BLOCK_TAGS
            yield "\n" * is_block
            if node.contents is not None:
                yield from _visible(node.contents, hidden_names)
            yield "\n" * is_block


def _first_variant(conversion: re.Match[str]) -> str:
    """Return the text of a conversion in its first variant, empty where it only sets a rule or the page's title."""
    flags, bar, rules = conversion[1].partition("|")
    if bar and not _SILENT_FLAGS.isdisjoint(flags.replace(" ", "").split(";")):
        return ""
    rules = rules if bar else flags
    texts = (rule[match.end() :].strip() for rule in rules.split(";") if (match := _VARIANT.match(rule)))
    return next(texts, rules)


def _link(link: Wikilink, hidden_names: frozenset[str]) -> Iterator[str]:
    target = str(link.title).strip()
    namespace = target.partition(":")[0] if ":" in target else ""
    if namespace.replace("_", " ").strip().lower() not in hidden_names:
        text = "".join(_visible(link.title if link.text is None else link.text, hidden_names))
        yield text.lstrip(": ") if link.text is None else text


def _character(entity: HTMLEntity) -> str:
    """Return the character of an entity, nothing for a soft hyphen; one that no text can hold stays as written."""
    char = entity.normalize()
    is_text = char.isprintable() or char.isspace() or category(char) == "Cf"  # as &zwnj; and &rlm; are
    return "" if char == "\xad" else char if is_text else str(entity)


def _level(line: str) -> int:
    return len(line) - len(line.lstrip(HEADING))


def _mark(run: str) -> int:
    """Return how many apostrophes of a run are markup."""
    if run[0] != "'":
        return 0
    return {1: 0, 4: 3}.get(len(run), min(len(run), 5))


def _rank_as_apostrophe(before: str) -> int:
    """Return the rank of a run as an apostrophe and italics: first after a word of one letter, then a word, a space."""
    if before[-1].isspace():
        return 2
    return 0 if before[-2:-1].isspace() else 1
